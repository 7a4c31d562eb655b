"""Steps with drafts on the GPU's kernels, against steps without and against float32."""

import json
import math
import os
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peers import readable_peer, with_peers
from teacher_forced import (
    TOP,
    Divergence,
    divergences,
    first_divergences,
    units_apart,
)
from tiny_models import kernel_models, save_half
from tiny_tokenizer import make_tokenizer_files
from tools.draft_speed import QUESTIONS, SUBJECTS
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from dakrun import StructuredOutputsParams
from dakrun.config import SamplingParams
from dakrun.demo import MODEL, task
from dakrun.engine import Admission, GraphRunner, SwapSpace
from dakrun.llm import LLM
from dakrun.plan import Policy
from dakrun.requests import Completion, Request, Tokenizer

pytestmark = pytest.mark.gpu
VOCAB, NEW = 5003, 96
# Units in the last place between scores that nearly tie, where two runs in 16 bits may disagree:
# as one of the runs has the scores, and as the model in float32 has them. Between transformers' own
# runs they move by up to 6 and 13 units; the scores of any two tokens are hundreds of units apart.
NEAR, FAR = 8, 32
SLACK = 1e-3  # of a unit: log-probabilities in float32 tell the gaps
COMMON = {
    "vocab_size": VOCAB, "hidden_size": 1024, "num_hidden_layers": 3,
    "max_position_embeddings": 512, "eos_token_id": None, "bos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
CONFIGS = kernel_models(
    COMMON, std=0.04,
    opt={"num_attention_heads": 16, "ffn_dim": 4096},
    opt_350m={"num_attention_heads": 16, "ffn_dim": 1024, "word_embed_proj_dim": 512},
    llama_gqa={"num_attention_heads": 16, "num_key_value_heads": 4, "intermediate_size": 2816},
    llama_tied={"num_attention_heads": 16, "num_key_value_heads": 8, "intermediate_size": 2048},
    mqa={"num_attention_heads": 64, "intermediate_size": 2048},
)  # fmt: skip

OF_TOKENIZER = LlamaConfig(
    **(COMMON | {"vocab_size": 331, "eos_token_id": 2}), initializer_range=0.04,
    num_attention_heads=16, num_key_value_heads=4, intermediate_size=2816,
)  # fmt: skip


@pytest.fixture(scope="module", params=list(CONFIGS))
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, PreTrainedModel]:
    """A checkpoint in float16 whose texts repeat themselves, and the same in float32 on the GPU."""
    path = save_half(CONFIGS[request.param], tmp_path_factory.mktemp("model"), repeats=True)
    return path, in_float32(path)


@pytest.fixture
def spelling(tmp_path: Path) -> tuple[Path, PreTrainedModel]:
    """The same of a model that has a tokenizer of bytes and ends its texts."""
    path = save_half(OF_TOKENIZER, tmp_path / "model")
    tokenizer = make_tokenizer_files(tmp_path / "tokenizer")
    for name in ("vocab.json", "merges.txt", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, path / name)
    return path, in_float32(path)


def in_float32(path: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).cuda().eval()


def load(path: Path, speculate: str, batch_size: int = 16, **policy: object) -> LLM:
    return LLM(
        path, device="cuda", batch_size=batch_size, max_model_len=320, expected_tokens=NEW,
        speculate=speculate, policy=Policy(**policy),
    )  # fmt: skip


def repeating(count: int) -> list[list[int]]:
    """Prompts of 1 to 150 tokens; some repeat themselves, and some begin alike."""
    generator = torch.Generator().manual_seed(1)

    def some(n: int) -> list[int]:
        return torch.randint(3, VOCAB, (n,), generator=generator).tolist()

    common, lengths = some(70), torch.randint(1, 80, (count,), generator=generator).tolist()
    return [
        some(n) if i % 3 == 0 else common + some(n) if i % 3 == 1 else (some(7) * 20)[: n + 20]
        for i, n in enumerate(lengths)
    ]


def check(
    model: PreTrainedModel,
    dtype: torch.dtype,
    positions: int,
    differ: Sequence[Divergence],
    units: float = NEAR,
    most: float = 0.01,
) -> None:
    """At most a share of `most` choices differ, where scores are within `units` in the last place.

    The model in float32 says how large the logits are. A mixture may choose other experts in a step
    of other rows, which changes more.
    """
    if hasattr(model.config, "num_experts_per_tok"):
        assert len(differ) <= 0.03 * positions
        return
    assert len(differ) <= most * positions
    apart = [units_apart(model, one, dtype) for one in differ]
    assert max(apart, default=0.0) <= units + SLACK


def run(llm: LLM, requests: Sequence[Request]) -> dict[str, Completion]:
    """Completions by id; all KV blocks are back."""
    found = {}
    for one in llm.stream(requests):
        assert isinstance(one, Completion), one
        found[one.id] = one
    cache = llm.engine.runner.cache
    free = [cache.free(tier) for tier in range(len(cache.blocks))]
    assert free == list(cache.blocks), "all blocks are back"
    return found


@pytest.mark.parametrize("ratio", [0.0, 0.3])
@pytest.mark.parametrize("speculate", ["suffix:3", "suffix:7", "suffix:31"])
def test_drafts_change_tokens_only_at_near_ties(
    model: tuple[Path, PreTrainedModel], speculate: str, ratio: float
) -> None:
    path, reference = model
    kinds = ({}, {"temperature": 0.8})
    requests = [
        Request(
            id=str(i), line=i + 1, prompt_ids=tuple(ids),
            params=SamplingParams(max_tokens=NEW, ignore_eos=True, logprobs=TOP, **kinds[i % 2]),
        )
        for i, ids in enumerate(repeating(48))
    ]  # fmt: skip
    with load(path, speculate, offload_ratio=ratio, kv_offload_ratio=ratio) as llm:
        assert isinstance(llm.engine.runner, GraphRunner)
        found, stats = run(llm, requests), llm.engine.stats
        accepted, rows = sum(stats.accepted_drafts.values()), sum(stats.drafts.values())
        rejected = sum(drafts * times for drafts, times in stats.drafts.items()) - accepted
        assert min(accepted, rejected) > 0.05 * rows
    with load(path, "off", offload_ratio=ratio, kv_offload_ratio=ratio) as llm:
        check(reference, torch.float16, *divergences(partial(run, llm), requests, found))


CHATS = [Path(MODEL), *map(Path, filter(None, [os.environ.get("DAKRUN_TEST_CHAT_MODEL")]))]


@pytest.mark.parametrize("path", CHATS, ids=lambda path: path.name)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("ratio", [0.0, 0.3, 0.5])
def test_chats_with_a_shared_prefix(path: Path, dtype: str, ratio: float) -> None:
    """The demo's model, and the checkpoint of real text in DAKRUN_TEST_CHAT_MODEL.

    In bfloat16 SmolLM2's best logits are 27, where a unit is 0.125, and 3% of them tie: batches of
    17 and of 64 without drafts differ at 1.2 to 1.7% of positions. So where more than 1% differ, or
    by more than two units, these two batches are the measure.
    """

    def loaded(speculate: str, batch_size: int = 64) -> LLM:
        return LLM(
            path, device="cuda", batch_size=batch_size, speculate=speculate,
            dtype=dtype,  # type: ignore[arg-type]
            max_model_len=prompt + new, policy=Policy(offload_ratio=ratio, kv_offload_ratio=ratio),
        )  # fmt: skip

    texts, new = chats(path)
    prompt = max(map(len, texts))
    requests = [
        Request(
            id=str(i), line=i + 1, prompt_ids=ids,
            params=SamplingParams(
                max_tokens=new, ignore_eos=True, logprobs=TOP, temperature=0.7 * (i % 2)
            ),
        )
        for i, ids in enumerate(texts)
    ]  # fmt: skip
    with loaded("suffix") as llm:
        found = run(llm, requests)
        assert sum(llm.engine.stats.accepted_drafts.values()) > 0
    with loaded("off") as llm:
        positions, differ = divergences(partial(run, llm), requests, found)
    of, reference = getattr(torch, dtype), in_float32(path)
    most, units = 0.01, 2.0
    if len(differ) > most * positions or any(
        units_apart(reference, one, of) > units for one in differ
    ):
        with loaded("off", 17) as llm:
            found = run(llm, requests)
        with loaded("off") as llm:
            compared, own = divergences(partial(run, llm), requests, found)
        # Three standard deviations of a count; the largest of so few gaps varies as well.
        most = max(most, (len(own) + 3 * math.sqrt(len(own))) / compared)
        units = max(units, 1.5 * max(units_apart(reference, one, of) for one in own))
    check(reference, of, positions, differ, units=units, most=most)


def chats(path: Path) -> tuple[list[tuple[int, ...]], int]:
    """64 chats of a checkpoint whose first KV blocks are the same, and how many tokens follow.

    The demo's model has no room for a block: its prompts are sums, as it was trained.
    """
    tokenizer, positions = Tokenizer.load(path), 0
    positions = json.loads((path / "config.json").read_text())["max_position_embeddings"]
    if tokenizer.has_chat_template:
        asked = [question.format(subject) for question in QUESTIONS for subject in SUBJECTS]
        begin = {"role": "system", "content": SYSTEM * 3}
        found = [tokenizer.chat([begin, {"role": "user", "content": text}]) for text in asked]
    else:
        found = [tokenizer.encode(task.prompt(a, b)) for a, b in task.held_out()]
    texts = [tuple(ids) for ids in found[:64]]
    assert len(set(texts)) == 64
    return texts, min(128, positions - max(map(len, texts)))


SYSTEM = (
    "You are an assistant of a small town library. Say in your own words what the visitor asks, "
    "then answer in plain sentences. Give a reason and an example where it helps. The library "
    "opens at nine and closes at six. "
)


def test_few_blocks_and_other_options(
    model: tuple[Path, PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests give their blocks up; samples, penalties, log-probabilities, stops of all lengths.

    Results have the right lengths and log-probabilities, and first differ at near ties.
    """
    path, reference = model
    monkeypatch.setattr(Admission, "_has_room", lambda *_: True)
    kinds: list[dict[str, Any]] = [
        {}, {"temperature": 0.8, "top_k": 50}, {"logprobs": 2}, {"repetition_penalty": 1.3},
    ]  # fmt: skip
    given = repeating(60)
    requests = [
        Request(
            id=str(i), line=i + 1, prompt_ids=tuple(ids),
            params=SamplingParams(max_tokens=1 + 37 * i % 150, ignore_eos=True, **kinds[i % 4]),
        )
        for i, ids in enumerate(given)
    ]  # fmt: skip
    results: list[list[Completion]] = []
    for choice in ("off", "suffix:5"):
        with LLM(
            path, device="cuda", batch_size=16, max_model_len=320, expected_prompt=20,
            expected_tokens=20, speculate=choice,
            policy=Policy(offload_ratio=0.2, kv_offload_ratio=0.25),
        ) as llm:  # fmt: skip
            found = run(llm, requests)
            assert llm.engine.stats.preempted
        results.append([found[request.id] for request in requests])
        for request, one in zip(requests, results[-1], strict=True):
            assert len(one.token_ids) == request.params.max_tokens
            if one.logprobs is not None:
                assert [a.chosen.token_id for a in one.logprobs] == list(one.token_ids)
    params = [request.params for request in requests]
    check(reference, torch.float16, *first_divergences(reference, params, *results), FAR)


@pytest.mark.parametrize("swaps", [True, False])
def test_answers_with_forms_that_give_their_blocks_up(
    swaps: bool, spelling: tuple[Path, PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forms and penalties while requests are preempted: as without drafts, up to near ties."""
    monkeypatch.setattr(Admission, "_has_room", lambda *_: True)
    path, reference = spelling
    form = StructuredOutputsParams(regex="([a-z]{3} ){20,40}")
    kinds = ({"structured_outputs": form}, {"repetition_penalty": 1.3}, {"presence_penalty": 0.4})
    params = [SamplingParams(max_tokens=150, **kinds[i % 3]) for i in range(36)]
    prompts = [f"{word} plus {other} equals" for word in WORDS for other in WORDS]
    found = []
    for choice in ("off", "suffix:7"):
        with LLM(
            path, device="cuda", batch_size=16, max_model_len=320, expected_prompt=20,
            expected_tokens=20, speculate=choice,
            policy=Policy(offload_ratio=0.2, kv_offload_ratio=0.25),
        ) as llm:  # fmt: skip
            space = SwapSpace(llm.engine.runner.cache, 16 * swaps)
            space.open()
            space.wait()
            llm.engine.preemption.swap = space
            found.append(llm.generate(prompts, params))
            stats = llm.engine.stats
            assert stats.preempted and bool(stats.swapped) == swaps
            assert choice == "off" or sum(stats.accepted_drafts.values()) > 0
    check(reference, torch.float16, *first_divergences(reference, params, *found), FAR)


def test_parts_on_a_peer(model: tuple[Path, PreTrainedModel]) -> None:
    path, reference = model
    profile = with_peers(readable_peer())
    requests = [
        Request(
            id=str(i), line=i + 1, prompt_ids=tuple(ids),
            params=SamplingParams(max_tokens=NEW, ignore_eos=True, logprobs=TOP),
        )
        for i, ids in enumerate(repeating(24))
    ]  # fmt: skip
    found = dict[str, Completion]()
    for choice in ("suffix:7", "off"):
        with LLM(
            path, device="cuda", batch_size=16, max_model_len=320, speculate=choice,
            profile=profile, policy=Policy(
                remote=("peer",), offload_ratio=0.4, kv_offload_ratio=0.4
            ),
        ) as llm:  # fmt: skip
            if choice == "off":
                check(reference, torch.float16, *divergences(partial(run, llm), requests, found))
            else:
                found = run(llm, requests)


@pytest.mark.parametrize("speculate", ["suffix:7", "auto"])
def test_answers_with_a_form_and_stops(
    speculate: str, spelling: tuple[Path, PreTrainedModel]
) -> None:
    """Stop strings, a grammar, the end of a sequence, samples: as without drafts."""
    path, reference = spelling
    form = StructuredOutputsParams(regex="(one |two ){3}")
    params = [
        SamplingParams(max_tokens=40, stop=("e", "n", "a", "o", "1", "8")),
        SamplingParams(max_tokens=40, structured_outputs=form),
        SamplingParams(max_tokens=40, temperature=0.9, seed=3),
    ] * 12
    prompts = [f"{word} plus {other} equals" for word in WORDS for other in WORDS]
    found = []
    for choice in ("off", speculate):
        with LLM(path, device="cuda", batch_size=8, speculate=choice) as llm:
            found.append(llm.generate(prompts, params))
    assert all(one.valid for one in found[1][1::3])
    assert len({one.finish_reason for one in found[1][::3]}) == 2, "some stop, and some do not"
    check(reference, torch.float16, *first_divergences(reference, params, *found), FAR)


WORDS = ("one", "two", "seven", "ten", "twelve", "thirty")
