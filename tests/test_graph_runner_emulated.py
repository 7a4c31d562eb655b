"""The GPU's runner on the CPU: its launches are emulated, and graphs repeat them one by one.

Whole runs of the engine with steps that run ahead, with drafts and without.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import test_kernel_decoder
import torch
from cases import cases
from test_kernel_decoder import COMMON, CPU, ROOM, launched, model_of, plan_of
from tiny_models import kernel_models, save_half
from tiny_tokenizer import make_tokenizer_files
from transformers import LlamaConfig

from dakrun import StructuredOutputsParams
from dakrun.config import OFF, SamplingParams, Speculation
from dakrun.engine import (
    Admission,
    DecodeStep,
    Engine,
    GraphRunner,
    Prefill,
    Staging,
    build,
    graph_runner,
    pass_graphs,
    step_graphs,
)
from dakrun.engine.pass_graphs import PassGraphs
from dakrun.engine.step import Step
from dakrun.grammars import Grammars
from dakrun.kernels.attention import KVShape
from dakrun.memory.matrix import TieredMatrix
from dakrun.models.modules import Fused
from dakrun.plan import Plan, step_time
from dakrun.requests import Completion, Request, Tokenizer

__all__ = ["launched"]  # a fixture that all tests use
CONFIGS = kernel_models(
    COMMON, std=0.1,
    opt={"num_attention_heads": 2, "ffn_dim": 264},
    opt_350m={"num_attention_heads": 2, "ffn_dim": 200, "word_embed_proj_dim": 64},
    llama_gqa={"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 264},
    llama_tied={"num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 200},
    mqa={"num_attention_heads": 17, "intermediate_size": 200},
)  # fmt: skip


class Graph:
    """Launches in place of a graph of them."""

    def __init__(self, launches: Callable[[], object], *_: object, **__: object) -> None:
        self.replay = launches


class Event:
    """A point of a stream in which all is done at once."""

    def __init__(self, **_: object) -> None:
        pass

    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: "Event") -> float:
        return 0.0


@pytest.fixture(autouse=True)
def graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (step_graphs, pass_graphs):
        monkeypatch.setattr(module, "capture", Graph)
    monkeypatch.setattr(step_graphs, "edge_kinds", lambda _: (1000, 0))
    monkeypatch.setattr(step_graphs, "graph_edges", lambda _: [])
    monkeypatch.setattr(step_graphs, "programmatic_lead", lambda _: 0)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "Event", Event)


def engine_of(
    path: Path,
    speculation: Speculation,
    batch: int = 3,
    tokenizer: Tokenizer | None = None,
    *,
    stages: bool = False,
) -> Engine:
    backend, cache, step = model_of(path, batch)
    if stages:
        steps, _ = build._stagings(plan_of(path, batch), backend)
        step = DecodeStep(backend.with_buffers(batch, steps), cache, step._shape, step._accesses)
    config = backend.model.config
    shape = KVShape(config.num_kv_heads, config.head_dim, 128)
    room = torch.empty(ROOM, dtype=torch.uint8, device=CPU)
    prefill = Prefill(backend.with_buffers(128 + batch, logits=False), cache, shape, room, 128)
    runner = GraphRunner(step, prefill, cache, shape)
    grammars = Grammars(tokenizer.as_json, config.vocab_size, [2]) if tokenizer else None
    return Engine(runner, plan_of(path, batch), tokenizer, grammars, speculation)


def requests() -> list[Request]:
    generator = torch.Generator().manual_seed(3)
    kinds: Sequence[dict[str, Any]] = (
        {},
        {"logprobs": 1},
        {"temperature": 0.8},
        {"presence_penalty": 0.2, "temperature": 0.3, "seed": 5},
        {"repetition_penalty": 1.01},
    )
    repeated = torch.randint(3, 203, (6,), generator=generator).tolist() * 10
    lengths = (58, 57, 50, 60, 59)
    return [
        Request(
            id=str(i), line=i + 1,
            prompt_ids=tuple(repeated[:n] if i % 2 == 0 else range(9 + i, 9 + i + n)),
            params=SamplingParams(max_tokens=9 + 3 * i, ignore_eos=True, **kinds[i]),
        )
        for i, n in enumerate(lengths)
    ]  # fmt: skip


def run(engine: Engine) -> dict[str, tuple[int, ...]]:
    found, runner, launch = {}, engine.runner, engine.runner.launch

    def checked(step: Step) -> None:
        launch(step)
        slots = [row.slot for row in step.decode]
        assert isinstance(runner, GraphRunner)
        assert runner.tokens_beside(slots, 1) == (len(runner._rows.slots) if slots else 0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "launch", checked)
        completions = list(engine.generate(requests()))
    for one in completions:
        assert isinstance(one, Completion), one
        found[one.id] = one.token_ids
        if one.logprobs is not None:
            assert [given.chosen.token_id for given in one.logprobs] == list(one.token_ids)
    cache = engine.runner.cache
    assert all(cache.free(tier) == count for tier, count in enumerate(cache.blocks))
    return found


def test_copies_behind_attention_change_no_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps stage matrices while half of the slots are outside HBM; copies start at each o."""
    path = save_half(CONFIGS["llama-tied"], tmp_path)
    wanted = run(engine_of(path, OFF))
    policy = replace(test_kernel_decoder.POLICY, transport="staged")
    monkeypatch.setattr(test_kernel_decoder, "POLICY", policy)
    monkeypatch.setattr(build, "STAGED_TOGETHER", 1)  # each matrix is copied by itself
    plan = plan_of(path, 3)
    parts = [op.largest_remote_part for op in plan.weights() if op.op.in_layer]
    monkeypatch.setattr(build, "bytes_ahead", lambda *_: 2 * sum(parts))
    used, at = "", Counter[str]()  # the matrix that is used next, and copies that start there
    copy, fetch = Staging._copy, Staging.fetch

    def noted(staging: Staging, name: str) -> TieredMatrix:
        nonlocal used
        used = name
        return fetch(staging, name)

    def counted(staging: Staging, number: int) -> None:
        at[used.rpartition(".")[2]] += 1
        copy(staging, number)

    monkeypatch.setattr(Staging, "fetch", noted)
    monkeypatch.setattr(Staging, "_copy", counted)
    assert run(engine_of(path, OFF, stages=True)) == wanted
    assert at["o"] > 100 and "qkv" not in at, "those are ahead of attention"


# In 16 bits a router may choose other experts where a step has other rows.
DENSE = [name for name in CONFIGS if not hasattr(CONFIGS[name], "num_experts_per_tok")]


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "few"),
    [("llama-gqa", True), *zip(DENSE, itertools.cycle([True, False]), strict=False)],
)
def test_results_are_those_without_drafts(
    name: str, few: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With too `few` KV blocks requests give theirs up, and go on later.

    Steps of few rows have more drafts a row.
    """
    path = save_half(CONFIGS[name], tmp_path / name)
    wanted = run(engine_of(path, OFF))
    if few:
        monkeypatch.setattr(Admission, "_has_room", lambda *_: True)
        placed = plan_of(path, 3).kv_placement()
        fewer = [(tier, slots, max(2, slots)) for tier, slots, _ in placed]
        monkeypatch.setattr(Plan, "kv_placement", lambda _: fewer)
    monkeypatch.setattr(step_time, "VERIFIED_TOKENS", 14)
    engine = engine_of(path, Speculation("suffix", 5))
    verify = engine.runner._verify  # type: ignore[attr-defined]
    assert {sum(bucket): width for bucket, width in verify.widths.items()} == {1: 6, 2: 6, 3: 4}
    beside, logits = list[bool](), Prefill.logits

    def counted(prefill: Prefill, *given: Any) -> Any:
        beside.append(given[2] is verify.backend.logits)
        return logits(prefill, *given)

    monkeypatch.setattr(Prefill, "logits", counted)
    for _ in range(2):
        assert run(engine) == wanted
    assert sum(beside) > 1, "rows have drafts beside prompts, too"
    stats = engine.stats
    assert stats.preempted or not few
    assert sum(stats.accepted_drafts.values()) > 10, "the second run repeats the first"


@pytest.mark.parametrize(
    ("name", "speculation"),
    cases(
        itertools.product(
            ("llama-gqa", "opt-like-350m", "mistral-mqa", "qwen3-moe"),
            (OFF, Speculation("suffix", 5)),
        ),
        lambda name, speculation: "gqa" in name and speculation == OFF,
    ),
)
def test_small_passes_are_graphs(
    name: str, speculation: Speculation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes of like sizes replay one graph: other prompts, other slots, results as op by op."""
    path = save_half(CONFIGS[name], tmp_path / name)
    local = replace(test_kernel_decoder.POLICY, kv_offload_ratio=0)
    monkeypatch.setattr(test_kernel_decoder, "POLICY", local)
    captured = list[Graph]()

    class Counted(Graph):
        def __init__(self, launches: Callable[[], object], *_: object, **__: object) -> None:
            captured.append(self)
            self.replays = 0
            self._launches = launches

        def replay(self) -> None:
            self.replays += 1
            self._launches()

    monkeypatch.setattr(pass_graphs, "capture", Counted)
    engine = engine_of(path, speculation)
    runs = 4 if speculation.most else 2  # drafts that get better change a step's rows
    found = [run(engine) for _ in range(runs)]
    assert max(graph.replays for graph in captured) > 1
    with monkeypatch.context() as patch:
        patch.setattr(PassGraphs, "run", lambda _, __, inputs, launch: launch(inputs))
        assert found == [run(engine_of(path, speculation))] * runs


@pytest.mark.full
def test_passes_beside_many_rows_are_no_graphs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few of those are alike."""
    local = replace(test_kernel_decoder.POLICY, kv_offload_ratio=0)
    monkeypatch.setattr(test_kernel_decoder, "POLICY", local)
    monkeypatch.setattr(graph_runner, "GRAPHED_ROWS", 1)
    run_graph, logits = PassGraphs.run, Prefill.logits
    graphed, beside = list[int](), list[int]()

    def run_kind(graphs: PassGraphs, kind: Any, *given: Any) -> Any:
        (bucket, _), *_ = kind
        graphed.append(sum(bucket))
        return run_graph(graphs, kind, *given)

    def of_rows(prefill: Prefill, parts: Any, rows: Any = None, *given: Any) -> Any:
        beside.append(len(rows.ids) if rows else 0)
        return logits(prefill, parts, rows, *given)

    monkeypatch.setattr(PassGraphs, "run", run_kind)
    monkeypatch.setattr(Prefill, "logits", of_rows)
    run(engine_of(save_half(CONFIGS["llama-gqa"], tmp_path / "model"), OFF))
    assert max(beside) > 1 and graphed == [rows for rows in beside if rows <= 1]


@pytest.mark.full
@pytest.mark.parametrize("speculation", [OFF, Speculation("suffix", 5)])
def test_a_rehearsal_leaves_no_trace(speculation: Speculation, tmp_path: Path) -> None:
    path = save_half(CONFIGS["llama-gqa"], tmp_path / "model")
    wanted = run(engine_of(path, speculation))
    engine = engine_of(path, speculation)
    runner: Any = engine.runner

    def of_drafts() -> list[Any]:
        verify = runner._verify
        if not verify:
            return []
        texts, lengths = verify._texts, verify.lengths
        known = [texts.cached, texts.common, texts.index]
        return [*map(torch.Tensor.tolist, known), list(lengths.by_match), verify._common.token]

    before = of_drafts()
    runner.rehearse()
    assert runner.details()["buckets"] == [] and of_drafts() == before
    cache = runner.cache
    assert all(cache.free(tier) == count for tier, count in enumerate(cache.blocks))
    assert run(engine) == wanted


def test_ops_are_timed_without_a_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only ops that have the part are launched; the step goes on with whole ones."""
    runner = engine_of(save_half(CONFIGS["llama-gqa"], tmp_path / "model"), OFF).runner
    assert isinstance(runner, GraphRunner)

    def outputs(chain: Callable[[], list[object]]) -> Any:
        runner._decode.tokens.fill_(5)  # a step has chosen others
        return [found.clone() for found in chain() if isinstance(found, torch.Tensor)]

    def of(part: Fused | None) -> dict[str, Any]:
        return runner.op_seconds(8, part)  # type: ignore[return-value]

    monkeypatch.setattr(graph_runner, "replay_seconds", outputs)
    whole, ffn = of(None), CONFIGS["llama-gqa"].intermediate_size
    parts: dict[Fused, set[str]] = {
        "norms": {"qkv", "gate_up", "lm_head"}, "activation": {"gate_up"}, "rope": {"attention"},
    }  # fmt: skip
    for part, ops in parts.items():
        found = of(part)
        assert found.keys() == ops
        assert all(not torch.equal(found[op][0], whole[op][0]) for op in ops), part
        if part == "activation":
            assert all(out.shape[1] == 2 * ffn for out in found["gate_up"])
    assert of(None).keys() == whole.keys() >= {"embedding", "o", "down", "sampling"}


@pytest.mark.full
def test_what_a_form_forces_takes_few_steps(tmp_path: Path) -> None:
    """Beside a row without a form; tokens are those of steps without drafts."""
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 264}
    vocabulary = COMMON | {"vocab_size": 331, "eos_token_id": 2}
    path = save_half(LlamaConfig(**vocabulary, initializer_range=0.1, **sizes), tmp_path / "model")
    tokenizer = Tokenizer.load(make_tokenizer_files(tmp_path / "tokenizer"))
    form = StructuredOutputsParams(regex="[a-c] and then nothing else [0-9]{2}")
    asked = [
        Request(id="form", line=1, prompt_ids=(5, 6), params=SamplingParams(
            max_tokens=40, structured_outputs=form)),
        Request(id="free", line=2, prompt_ids=(7,), params=SamplingParams(
            max_tokens=9, ignore_eos=True)),
    ]  # fmt: skip
    found, steps = [], []
    for speculation in (OFF, Speculation("suffix", 7)):
        engine = engine_of(path, speculation, 2, tokenizer)
        found.append({one.id: one for one in engine.generate(asked)})  # type: ignore[misc]
        steps.append(len(engine.stats.step_s))
        engine.close()
    texts = [one["form"].text for one in found]  # type: ignore[union-attr]
    assert texts[0] == texts[1] and " and then nothing else " in texts[0]
    assert found[0]["free"].token_ids == found[1]["free"].token_ids  # type: ignore[union-attr]
    assert steps[1] < 0.7 * steps[0]
