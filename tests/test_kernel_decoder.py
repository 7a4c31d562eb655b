"""Whole models on the kernels' own source, on the CPU: prompts and steps against transformers."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import emulated
import pytest
import quantised
import torch
from cards import PORTABLE, SMALL, hold_to
from cases import cases
from emulated import EmulatedKernel
from tiny_models import damage, kernel_models, save_half
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
)

from dakrun.config import ModelConfig, Popularity, SamplingParams, Workload
from dakrun.engine import (
    SPLITK_ROWS,
    DecodeStep,
    KernelBackend,
    PassStaging,
    Prefill,
    Row,
    Staging,
    Step,
    decode_step,
    staged_bytes,
    tier_accesses,
)
from dakrun.engine.adjustments import History
from dakrun.engine.kv_cache import KVCache
from dakrun.engine.step import Sampling
from dakrun.engine.verify_step import VerifyStep
from dakrun.geometry import NO_TOKEN
from dakrun.hardware import Card, load_profile
from dakrun.kernels import variants
from dakrun.kernels.attention import KVShape
from dakrun.kernels.gemm import dispatch as products
from dakrun.kernels.gemm import splitk as gemm
from dakrun.kernels.runtime import CopyStream, copy
from dakrun.memory.tiers import allocate_tiers
from dakrun.models import decoder_of, read_model_config
from dakrun.plan import Plan, Policy, kv_positions, make_plan
from dakrun.weights import Checkpoint, Packing, load, tier_capacities

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
CARD = replace(PORTABLE, sms=3)
SMALL_CARD = replace(SMALL, sms=3)  # with the tiled GEMM
CPU = torch.device("cpu")
ROOM = 2**16  # of keys and values on their way to remote slots
COMMON = {
    "vocab_size": 203, "hidden_size": 128, "num_hidden_layers": 2, "max_position_embeddings": 128,
    "eos_token_id": None, "bos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
CONFIGS = kernel_models(
    COMMON, std=0.1,
    opt={"num_attention_heads": 2, "ffn_dim": 264},
    opt_350m={"num_attention_heads": 2, "ffn_dim": 200, "word_embed_proj_dim": 64},
    llama_gqa={"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 264},
    llama_tied={"num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 200},
    mqa={"num_attention_heads": 17, "intermediate_size": 200},
)  # fmt: skip
IN_TILES = ("opt", "llama-tied")  # products of prompts
IN_TORCH = ("opt-like-350m",)
MIXED = ("opt-like-350m", "llama-gqa")  # whose local CTAs read the remote tier, too


@pytest.fixture(autouse=True)
def launched(
    emulated_kernels: Callable[..., EmulatedKernel], monkeypatch: pytest.MonkeyPatch
) -> list[tuple[str, dict[str, int]]]:
    """Kernels on the CPU; those that are asked for, by file and macros."""
    asked: list[tuple[str, dict[str, int]]] = []

    def kernel(source: str, name: str, macros: dict[str, int] | None = None) -> EmulatedKernel:
        asked.append((source, macros or {}))
        found = emulated_kernels(source, name, macros)
        found.seed = len(asked)  # threads take turns in another order
        return found

    monkeypatch.setattr(gemm, "atoms_map", emulated.atoms_map)
    monkeypatch.setattr("dakrun.kernels.runtime.jit.kernel", kernel)
    monkeypatch.setattr("dakrun.kernels.gemm.tiled.atoms_map", emulated.atoms_map)
    monkeypatch.setattr("dakrun.kernels.gemm.tiled.boxes_map", emulated.boxes_map)
    monkeypatch.setattr("dakrun.kernels.experts.grouped_tiled.atoms_map", emulated.atoms_map)
    monkeypatch.setattr("dakrun.kernels.experts.grouped_tiled.boxes_map", emulated.boxes_map)
    monkeypatch.setattr("dakrun.kernels.runtime.operands.check_gpu", lambda _: None)
    hold_to(CARD, monkeypatch)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return asked


# Their kinds of layers are in other models, too.
SLOW = ("mixtral", "olmoe", "opt-like-350m", "mistral-mqa")


@pytest.fixture(
    scope="module", params=cases([(name,) for name in CONFIGS], lambda name: name not in SLOW)
)
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, PreTrainedModel]:
    """A checkpoint in float16, and the same in float32; norms and biases at random."""
    path = save_half(CONFIGS[request.param], tmp_path_factory.mktemp(request.param))
    return path, AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def config_of(path: Path) -> ModelConfig:
    """Experts are stacked in another order than that of their numbers."""
    config = read_model_config(path)
    if not config.mixture:
        return config
    counts = [tuple(range(config.mixture.routing.experts))] * config.num_layers
    found = Popularity(tuple(counts[len(config.mixture.dense_layers) :]), "counted")
    return replace(config, mixture=replace(config.mixture, popularity=found))


POLICY = Policy(
    hbm_budget=2**30, host_budget=2**30, offload_ratio=0.3, kv_offload_ratio=0.5,
    transport="direct",
)  # fmt: skip


def plan_of(path: Path, batch: int) -> Plan:
    """Parts of weights and slots are in two tiers."""
    work = Workload(batch_size=batch, prompt_len=16, new_tokens=8, max_model_len=100)
    return make_plan(config_of(path), work, load_profile("h200-pcie5"), POLICY)


def model_of(
    path: Path, batch: int, card: Card = CARD
) -> tuple[KernelBackend, KVCache, DecodeStep]:
    """Parts of weights and slots in two tiers, which in some models the same CTAs read."""
    config, plan = config_of(path), plan_of(path, batch)
    work = plan.workload
    tiers = allocate_tiers(tier_capacities(plan, packed=True), CPU)
    accesses = tier_accesses(plan, card)
    if path.name.startswith(MIXED):
        accesses = {
            op: (local, *(replace(access, mixed=True) for access in remote))
            for op, (local, *remote) in accesses.items()
        }
    shape = KVShape(config.num_kv_heads, config.head_dim, kv_positions(work))
    cache = KVCache(plan.kv_placement(), config.num_layers, shape, tiers, CPU)
    with Checkpoint(path) as source:
        packing = Packing(accesses, card)
        source.check(decoder_of(config))
        weights = load(source, plan, tiers, CPU, packing=packing)
    backend = KernelBackend(decoder_of(config), weights, accesses, shape.positions)
    step = DecodeStep(backend.with_buffers(batch), cache, shape, accesses["attention"])
    return backend, cache, step


def test_a_slot_is_read_where_the_gpu_that_computes_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values of a slot in another GPU's memory come to this one's."""
    shape = KVShape(12, 64, 128)
    tiers = allocate_tiers({"hbm": 2**23, "host": 2**23}, CPU)
    cache = KVCache((("hbm", 1, 2), ("host", 1, 2)), 2, shape, tiers, CPU)
    monkeypatch.setattr(cache, "device", torch.device("meta"))
    for slot in range(2):
        assert cache.reserve(slot, 70)
        blocks = cache.gather(0, slot, 2)
        assert blocks.is_meta and blocks.shape == (2, shape.layer_bytes)


def staging(backend: KernelBackend, *, early: bool = False) -> Staging:
    """All matrices, through a ring that holds two of them, or with `early` all."""
    names = [one.name for one in backend.order if staged_bytes(backend.matrices[one.name])]
    sizes = [staged_bytes(backend.matrices[name]) for name in names]
    room = torch.empty(sum(sizes) if early else 2 * max(sizes), dtype=torch.uint8)
    return Staging(backend.matrices, names, room, together=1, early=early)


@torch.no_grad()
def logits(reference: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    return reference(torch.tensor([ids])).logits[0, -1]


def close(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return bool((found.float() - wanted).abs().max() <= 0.008 * wanted.std())


def test_prompts_and_steps(
    model: tuple[Path, PreTrainedModel],
    launched: list[tuple[str, dict[str, int]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prompts in two passes, a step that ends the second beside a row of the first, two more steps.

    The products of prompts are SplitK_GEMM's, or, in some models, the tiled GEMM's or torch's. All
    kernels are among those that are compiled ahead.
    """
    path, reference = model
    by, card = "splitk", CARD
    if path.name.startswith(IN_TILES):
        by, card = "tiled", SMALL_CARD
        hold_to(card, monkeypatch)
    elif path.name.startswith(IN_TORCH):
        by = "torch"
        monkeypatch.setattr(products, "PIECE_BYTES", 2**14)
    monkeypatch.setattr(products.Products, "kernel_for", lambda *_: by)
    backend, cache, rows = model_of(path, 2, card)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 203, (n,), generator=generator).tolist() for n in (70, 9)]
    shape = KVShape(backend.model.config.num_kv_heads, backend.model.config.head_dim, 128)
    prefill = Prefill(
        backend.with_buffers(128 + 2, PassStaging(staging(backend)), logits=False),
        cache,
        shape,
        torch.empty(ROOM, dtype=torch.uint8),
        128,
    )
    for slot, prompt in enumerate(prompts):
        assert cache.reserve(slot, len(prompt) + 3)
    cache.flush()
    assert len(prefill.logits([Row(0, 0, length=66, tokens=prompts[0][:66], wanted=0)])[0]) == 0
    scored = Sampling(SamplingParams(prompt_logprobs=1))
    parts = [
        Row(0, 66, length=4, tokens=prompts[0][66:]),
        Row(1, 0, scored, length=5, tokens=prompts[1][:5], wanted=0, scored=prompts[1][1:6]),
    ]
    (found,), hidden = prefill.logits(parts)
    if (use := backend.expert_use) is not None:
        top_k = backend.model.config.mixture.routing.top_k
        assert [sum(of) for of in use.counts()] == [(66 + 4 + 5) * top_k] * len(use.counts())
        use.clear()
    assert close(found, logits(reference, prompts[0]))
    none, scores = prefill.scores(Step([], parts), hidden).collect()
    assert not none and len(scores) == 5
    for end, ((token, logprob), likeliest) in enumerate(scores, 1):
        wanted = logits(reference, prompts[1][:end])
        assert token == prompts[1][end]
        assert abs(logprob - wanted.log_softmax(-1)[token]) <= 0.016 * wanted.std()
        assert abs(likeliest[1] - wanted.log_softmax(-1).max()) <= 0.016 * wanted.std()

    bucket = cache.counts
    rows.prepare([bucket])
    rows.slots.copy_(torch.arange(2))
    rows.lengths.copy_(torch.tensor([70, decode_step.IDLE]))
    rows.tokens.copy_(torch.tensor([int(found.argmax()), 0]))
    prompts[0].append(int(found.argmax()))
    found, _ = prefill.logits([Row(1, 5, length=4, tokens=prompts[1][5:])], rows.rows(bucket))
    assert close(found[0], logits(reference, prompts[0]))
    assert close(found[2], logits(reference, prompts[1]))
    rows.select(2, found[:2])
    assert rows.lengths.tolist() == [71, decode_step.IDLE]
    assert rows.tokens[0] == found[0].argmax() == rows.log[0, 70 % decode_step.LOG_STEPS]

    by = "splitk"
    rows.lengths[1] = 9
    rows.tokens[1] = found[2].argmax()
    for step in range(2):
        for prompt, token in zip(prompts, rows.tokens.tolist(), strict=True):
            prompt.append(token)
        rows.run(bucket)
        for number, prompt in enumerate(prompts):
            assert close(rows.backend.logits[number], logits(reference, prompt))
        assert rows.tokens.tolist() == rows.backend.logits.argmax(1).tolist()
        assert rows.lengths.tolist() == [72 + step, 10 + step]
        position = torch.tensor([71, 9]) + step
        logged = rows.log[torch.arange(2), position % decode_step.LOG_STEPS]
        assert logged.tolist() == rows.tokens.tolist()
    config, mixes = backend.model.config, path.name.startswith(MIXED)
    ahead = [
        variant
        for card in (CARD, SMALL_CARD)
        for variant in variants(
            torch.float16, SPLITK_ROWS, card, head_dim=config.head_dim,
            group=config.num_heads // config.num_kv_heads, mixes=mixes,
            head_norms=path.name.startswith(("qwen3", "glm4")),
            routing=config.mixture.routing if config.mixture else None,
        )
    ]  # fmt: skip
    assert launched and all(variant in ahead for variant in launched)


@pytest.mark.parametrize("name", ["awq", "fp8-block"])
@pytest.mark.parametrize("mixture", [False, True])
def test_quantized_weights(
    name: str,
    mixture: bool,
    launched: list[tuple[str, dict[str, int]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A prompt and two steps of a model whose norms no matrix takes in, in two tiers."""
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 256}
    config: PreTrainedConfig = LlamaConfig(**COMMON, **sizes, initializer_range=0.1)
    if mixture:
        experts = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
        config = Qwen3MoeConfig(
            head_dim=64, norm_topk_prob=True, initializer_range=0.1, **experts, **COMMON, **sizes
        )
        config._experts_implementation = "eager"  # others need rows of a multiple of 16 bytes
    reference = quantised.save(
        tmp_path, *quantised.FORMATS[name], config=config, dtype=torch.float16
    )
    backend, cache, rows = model_of(tmp_path, 2)
    monkeypatch.setattr(products.Products, "kernel_for", lambda *_: "splitk")
    room = torch.empty(ROOM, dtype=torch.uint8)
    with_room = backend.with_buffers(128 + 2, PassStaging(staging(backend)), logits=False)
    prefill = Prefill(with_room, cache, KVShape(1, 64, 128), room, 128)
    prompt = torch.randint(3, 203, (9,), generator=torch.Generator().manual_seed(1)).tolist()
    assert cache.reserve(0, len(prompt) + 3)
    cache.flush()
    (found,), _ = prefill.logits([Row(0, 0, length=len(prompt), tokens=prompt)])
    assert close(found, logits(reference, prompt))
    rows.prepare([cache.counts])
    rows.slots.copy_(torch.arange(2))
    rows.lengths.copy_(torch.tensor([len(prompt), decode_step.IDLE]))
    rows.tokens.copy_(torch.tensor([int(found.argmax()), 0]))
    early: list[bool] = []  # whether products behind a norm without a launch of its own are
    multiply = products.Products.__call__

    def call(self: Any, *args: Any, scaled: Any = None, pdl: bool, **options: Any) -> Any:
        if scaled is not None:
            early.append(pdl)
        return multiply(self, *args, scaled=scaled, pdl=pdl, **options)

    monkeypatch.setattr(products.Products, "__call__", call)
    for held_up in (False, True):
        monkeypatch.setattr(
            products.Products, "holds_up_attention", lambda *_, held_up=held_up: held_up
        )
        early.clear()
        prompt.append(int(rows.tokens[0]))
        before = len(launched)
        rows.run(cache.counts)
        assert close(rows.backend.logits[0], logits(reference, prompt))
        assert mixture or set(early) == {not held_up}
        norms = [file for file, _ in launched[before:]].count("normalize.cu")
        # Others are a part of the products around them, which do not stand around a router.
        assert norms == (4 if mixture else 1)
    if not mixture:  # ops that are timed alone have the norms that they have in a step
        chains, before = rows.chains(cache.counts), len(launched)
        for launch in [*chains["gate_up"], *chains["embedding"], *chains["qkv"]]:
            launch()
        assert [file for file, _ in launched[before:]].count("normalize.cu") == 1
    assert {macros.get("CODE") for file, macros in launched if file == gemm.SOURCE} > {None}
    assert any("CODE" in macros for file, macros in launched if "grouped" in file) is mixture


@pytest.mark.parametrize("model", ["llama-gqa"], indirect=True)
@pytest.mark.parametrize("room", [0, ROOM])
def test_prompts_go_on_alike_in_any_tier(
    model: tuple[Path, PreTrainedModel], room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same prompt in a local and a remote slot, at and within the end of a block.

    Copies to the remote slot are late: nobody has waited for them when the pass attends.
    """
    path, reference = model
    late: list[tuple[torch.Tensor, torch.Tensor]] = []

    def join(_: CopyStream) -> None:
        while late:
            copy(*late.pop())

    monkeypatch.setattr(CopyStream, "copy", lambda _, *pairs: late.extend(pairs))
    monkeypatch.setattr(CopyStream, "join", join)
    monkeypatch.setattr(products.Products, "kernel_for", lambda *_: "torch")
    backend, cache, _ = model_of(path, 2)
    assert cache.counts == (1, 1)
    shape = KVShape(backend.model.config.num_kv_heads, backend.model.config.head_dim, 128)
    prefill = Prefill(
        backend.with_buffers(128, logits=False), cache, shape,
        torch.empty(room, dtype=torch.uint8), 128,
    )  # fmt: skip
    prompt = torch.randint(3, 203, (110,), generator=torch.Generator().manual_seed(2)).tolist()
    for slot in range(2):
        assert cache.reserve(slot, len(prompt))
    cache.flush()
    for start, end in ((0, 60), (60, 64), (64, 100), (100, 110)):
        parts = [
            Row(slot, start, length=end - start, tokens=prompt[start:end]) for slot in range(2)
        ]
        (local, remote), _ = prefill.logits(parts)
        assert close(local, logits(reference, prompt[:end])), end
        assert torch.equal(local, remote), end


@pytest.mark.parametrize(
    ("name", "tensor", "bad"),
    [
        ("opt", "model.decoder.layers.1.fc1.weight", (0, 1)),  # which relu keeps
        ("opt", "model.decoder.layers.0.self_attn.k_proj.weight", (0, 1)),
        ("llama-gqa", "model.embed_tokens.weight", (1,)),
    ],
)
def test_logits_of_nan_are_logged(
    name: str, tensor: str, bad: tuple[int, ...], tmp_path: Path
) -> None:
    """Of the rows that come upon NaN; their slots serve others as if nothing had been."""
    path = save_half(CONFIGS[name], tmp_path / name)
    given = torch.tensor([5, 7])
    damage(path, tensor, int(given[1]))
    _, cache, rows = model_of(path, 2)
    rows.prepare([cache.counts])
    rows.slots.copy_(torch.arange(2))
    cache.pretend(2)

    def step(tokens: torch.Tensor, length: int) -> list[int]:
        rows.tokens.copy_(tokens)
        rows.lengths.fill_(length)
        rows.run(cache.counts)
        return rows.log[:, length].tolist()

    first = [step(given, length) for length in range(2)]
    assert all((tokens[i] == NO_TOKEN) == (i in bad) for tokens in first for i in range(2))
    if len(bad) == 1:
        after = [step(given[:1], length) for length in range(2)]
        assert all(a == b == wanted for (a, b), (wanted, _) in zip(after, first, strict=True))
        assert all(NO_TOKEN not in tokens for tokens in after)


def begun(path: Path, prompts: list[list[int]]) -> tuple[DecodeStep, KVCache, list[Sampling]]:
    """Rows of two slots behind their prompts, whose first new tokens are chosen."""
    backend, cache, rows = model_of(path, 2)
    shape = KVShape(backend.model.config.num_kv_heads, backend.model.config.head_dim, 128)
    room = torch.empty(ROOM, dtype=torch.uint8)
    prefill = Prefill(backend.with_buffers(128 + 2, logits=False), cache, shape, room, 128)
    for slot, prompt in enumerate(prompts):
        assert cache.reserve(slot, len(prompt) + NEW)
    cache.flush()
    found, _ = prefill.logits([Row(i, 0, length=len(p), tokens=p) for i, p in enumerate(prompts)])
    slots = torch.arange(2, dtype=torch.int32)
    lengths = torch.tensor([len(p) - 1 for p in prompts], dtype=torch.int32)
    rows.prepare([cache.counts])
    rows.slots.copy_(slots)
    rows.tokens.copy_(rows.first_tokens(found, slots, lengths))
    rows.lengths.copy_(lengths)
    samplings = [Sampling(history=History(prompt, []), limit=NEW) for prompt in prompts]
    return rows, cache, samplings


NEW = 9  # tokens of a request


@pytest.mark.full
def test_steps_with_drafts_choose_what_steps_without_choose(
    model: tuple[Path, PreTrainedModel],
) -> None:
    """Over the border of a KV block, in two tiers; drafts are right, wrong, or none."""
    path, _ = model
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, 203, (n,), generator=generator).tolist() for n in (60, 21)]
    rows, cache, _ = begun(path, prompts)
    wanted = [[int(token)] for token in rows.newest]
    for _ in range(NEW - 1):
        rows.run(cache.counts)
        for own, token in zip(wanted, rows.tokens.tolist(), strict=True):
            own.append(token)

    rows, cache, samplings = begun(path, prompts)
    made = VerifyStep(rows, cache, rows._shape, {cache.counts: 4})
    assert made.width == 4 and made.widths == {cache.counts: 4}
    ends = [
        Row(i, 0, one, length=len(p), tokens=p)
        for i, (p, one) in enumerate(zip(prompts, samplings, strict=True))
    ]
    made.begin(ends, chosen=True)
    made.accepted(Step([], ends), [[1], [1]])
    # A text in which the first slot's answer is foretold, up to a wrong token; drafts come from it.
    foretold = [prompts[0][-1], *wanted[0]]
    foretold[6] = (foretold[6] + 1) % 203
    made._texts.text[0, : NEW + 1] = torch.tensor(foretold)
    tokens, steps, drafted = [own[:1] for own in wanted], 0, list[int]()
    while min(map(len, tokens)) < NEW:
        steps += 1
        assert steps < 2 * NEW
        decode = [
            Row(i, len(p) + len(new) - 1, one, length=4)
            for i, (p, new, one) in enumerate(zip(prompts, tokens, samplings, strict=True))
            if len(new) < NEW
        ]
        made.limit(decode, {})
        if steps == 1:
            made.assign(2)
        if steps == 2:
            rows.run(cache.counts)  # a step without drafts
            made.keep(2)
        else:
            made.run(cache.counts)
        found = made.accepted(Step(decode), [])
        drafted += found.drafted
        for row, new in zip(decode, found.tokens, strict=True):
            tokens[row.slot] += new
            samplings[row.slot].history.tokens[:] = tokens[row.slot]  # type: ignore[index]
    assert tokens == wanted
    assert max(drafted) == 3 and sum(map(len, tokens)) > len(drafted) + 2
    assert rows.lengths.tolist() == [decode_step.IDLE] * 2 and steps <= NEW - 1
