"""Log-probabilities of chosen and of likely tokens, against transformers."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from click.testing import CliRunner
from transformers import AutoModelForCausalLM, LlamaConfig

from dakrun.cli import main
from dakrun.config import SamplingParams
from dakrun.demo import MODEL, task
from dakrun.engine import GraphRunner
from dakrun.engine.logprobs import log_probabilities
from dakrun.errors import UsageError
from dakrun.llm import LLM
from dakrun.plan import Policy
from dakrun.requests import Completion

PROMPTS = [[5, 6, 7], [8, 9], [11, 12, 13, 14], [20]]
GREEDY = SamplingParams(max_tokens=6, logprobs=5)
PARAMS = [
    GREEDY,
    replace(GREEDY, temperature=0.8, top_k=20, top_p=0.9, seed=4),
    replace(GREEDY, logprobs=None),
    replace(GREEDY, temperature=1.5, logprobs=0),
]


def load(path: Path, device: str, batch_size: int = 3) -> LLM:
    policy = Policy(offload_ratio=0.3, kv_offload_ratio=0.5)
    return LLM(path, device=device, batch_size=batch_size, max_model_len=60, policy=policy)  # type: ignore[arg-type]


@torch.no_grad()
def assert_logprobs(
    model: torch.nn.Module, prompt: list[int], found: Completion, params: SamplingParams, by: float
) -> None:
    """They are the logarithm of the softmax of the model's logits."""
    if params.logprobs is None:
        assert found.logprobs is None
        return
    assert found.logprobs is not None
    ids = torch.tensor([[*prompt, *found.token_ids]], device=model.device)
    wanted = model(ids).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1).cpu()
    assert len(found.logprobs) == len(found.token_ids) == len(wanted)
    for row, token, (chosen, top) in zip(wanted, found.token_ids, found.logprobs, strict=True):
        assert chosen.token_id == token and chosen.text is None
        assert abs(chosen.logprob - row[token]) < by
        assert len(top) == params.logprobs
        for one, value in zip(top, row.topk(params.logprobs).values, strict=True):
            assert abs(one.logprob - row[one.token_id]) < by and abs(one.logprob - value) < by
        if params.temperature == 0:
            assert top[0].logprob == chosen.logprob  # there may be equal ones in float16


@pytest.mark.parametrize("name", ["opt-like-125m", "llama-gqa4-rope3"])
def test_they_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Of rows with and without them, greedy and sampled, in one batch; tokens stay the same."""
    path = tiny_models.save(name, tmp_path)
    with load(path, "cpu") as llm:
        found = llm.generate(PROMPTS, PARAMS)
        without = llm.generate(PROMPTS, [replace(p, logprobs=None) for p in PARAMS])
    for prompt, params, one in zip(PROMPTS, PARAMS, found, strict=True):
        assert_logprobs(tiny_models.reference(name), prompt, one, params, 1e-3)
    assert [c.token_ids for c in found] == [c.token_ids for c in without]


@pytest.mark.gpu
def test_on_kernels(tmp_path: Path) -> None:
    """Steps of which a row asks for them read the logits of the graph; tokens stay the same."""
    config = LlamaConfig(
        vocab_size=211, hidden_size=256, intermediate_size=384, num_attention_heads=4,
        num_key_value_heads=2, num_hidden_layers=3, initializer_range=0.06, eos_token_id=None,
    )  # fmt: skip
    path = tiny_models.save_half(config, tmp_path)
    with load(path, "cuda") as llm:
        assert isinstance(llm.engine.runner, GraphRunner)
        found = llm.generate(PROMPTS, PARAMS)
        without = llm.generate(PROMPTS, [replace(p, logprobs=None) for p in PARAMS])
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).cuda().eval()
    for prompt, params, one in zip(PROMPTS, PARAMS, found, strict=True):
        assert_logprobs(model, prompt, one, params, 0.05)
    assert [c.token_ids for c in found] == [c.token_ids for c in without]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_many_rows_small_vocabularies_and_masks(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dakrun.engine.logprobs._GROUP_LOGITS", 10)
    logits = torch.randn(7, 4, generator=torch.Generator().manual_seed(1)).to(dtype)
    logits[2, 1] = -math.inf
    ids, values = log_probabilities(logits, torch.full((7,), 1), 20)
    wanted = logits.float().log_softmax(-1).clamp(min=-9999.0)
    assert ids.shape == values.shape == (7, 5) and values[2, 0] == -9999.0
    assert torch.equal(values, wanted.gather(1, ids)) or torch.allclose(
        values, wanted.gather(1, ids), atol=1e-6
    )
    assert torch.equal(ids[:, 1:].sort().values, torch.arange(4).expand(7, 4))
    assert (values[:, 1:].diff() <= 0).all()


@pytest.mark.parametrize("bad", [-1, 21, 2.0, True, "5"])
def test_counts_that_are_refused(bad: object) -> None:
    with pytest.raises(UsageError, match="logprobs"):
        SamplingParams(logprobs=bad)  # type: ignore[arg-type]


def test_rows_of_every_format(tmp_path: Path) -> None:
    """Through the command line, with the text of the tokens."""
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    prompt = task.prompt(47, 85)
    batch = {"custom_id": "q", "method": "POST", "url": "/v1/completions"}
    found = []
    for row in (
        {"id": "q", "prompt": prompt, "logprobs": 2},
        {**batch, "body": {"prompt": prompt, "logprobs": 2, "n": 2}},
    ):
        source.write_text(json.dumps(row))
        options = ["-i", str(source), "-o", str(out), "--device", "cpu", "--overwrite"]
        result = CliRunner().invoke(main, ["generate", "--model", str(MODEL), *options])
        assert result.exit_code == 0, result.stderr
        found.append(json.loads(out.read_text()))
    native, choices = found[0], found[1]["response"]["body"]["choices"]
    for choice in choices:
        own = choice["logprobs"]
        assert own["tokens"] == [t["text"] for t in native["logprobs"]]
        assert own["token_logprobs"] == pytest.approx(
            [t["logprob"] for t in native["logprobs"]], abs=1e-4
        )
        assert all(len(top) == 2 for top in own["top_logprobs"])
    assert [t["token_id"] for t in native["logprobs"]] == native["token_ids"]
    assert (
        "".join(t["text"] for t in native["logprobs"]).replace("</s>", "").strip()
        == native["text"].strip()
    )


@torch.no_grad()
def assert_scores(
    model: torch.nn.Module, prompt: list[int], found: Completion, top: int, by: float
) -> None:
    """The log-probabilities of a prompt are those of the model's logits before each token."""
    assert found.prompt_logprobs is not None and found.prompt_logprobs[0] is None
    assert len(found.prompt_logprobs) == len(prompt)
    wanted = model(torch.tensor([prompt], device=model.device)).logits[0].float().log_softmax(-1)
    for row, token, one in zip(wanted.cpu(), prompt[1:], found.prompt_logprobs[1:], strict=False):
        assert one is not None and one.chosen.token_id == token
        assert abs(one.chosen.logprob - row[token]) < by
        assert len(one.top) == top
        for likely, value in zip(one.top, row.topk(top).values, strict=True):
            assert abs(likely.logprob - value) < by


def random_prompts(count: int, most: int, vocabulary: int = 120) -> list[list[int]]:
    draw = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, most + 1, (count,), generator=draw).tolist()
    return [torch.randint(4, vocabulary, (n,), generator=draw).tolist() for n in lengths]


def scoring(n: int) -> list[SamplingParams]:
    """Rows of all kinds: scored alone, scored and continued, and neither."""
    kinds = [
        SamplingParams(max_tokens=0, prompt_logprobs=0),
        SamplingParams(max_tokens=3, prompt_logprobs=3, logprobs=1),
        SamplingParams(max_tokens=0, prompt_logprobs=2, ignore_eos=True),
        SamplingParams(max_tokens=4),
    ]
    return [kinds[i % 4] for i in range(n)]


@pytest.mark.parametrize("count", [12, pytest.param(100, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", ["opt-like-125m", "llama-gqa4-rope3"])
def test_prompts_are_scored_as_by_transformers(
    name: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In parts, in groups of logits, beside rows that are not; twice, so that blocks are cached."""
    monkeypatch.setattr("dakrun.engine.reference_runner.SCORED_LOGITS", 2048)
    path = tiny_models.save(name, tmp_path)
    prompts, params = random_prompts(count, 59 - 4), scoring(count)
    with load(path, "cpu") as llm:
        llm.engine.runner.chunk_tokens = 24
        found = llm.generate(prompts, params)
        again = llm.generate(prompts, params)
        plain = llm.generate(prompts[:4], SamplingParams(max_tokens=4))
    for prompt, own, one, other in zip(prompts, params, found, again, strict=True):
        if own.prompt_logprobs is None:
            assert one.prompt_logprobs is None
            continue
        assert_scores(tiny_models.reference(name), prompt, one, own.prompt_logprobs, 1e-3)
        assert len(one.token_ids) == own.max_tokens and one.finish_reason == "length"
        assert one.prompt_logprobs == other.prompt_logprobs
    assert plain[3].token_ids == found[3].token_ids
    assert plain[1].token_ids[:3] == found[1].token_ids


@pytest.mark.gpu
def test_prompts_are_scored_on_kernels(tmp_path: Path) -> None:
    """Of the logits of a pass about a third have room in its buffers at a time."""
    config = LlamaConfig(
        vocab_size=2003, hidden_size=256, intermediate_size=384, num_attention_heads=4,
        num_key_value_heads=2, num_hidden_layers=3, initializer_range=0.06, eos_token_id=None,
    )  # fmt: skip
    path = tiny_models.save_half(config, tmp_path)
    prompts, params = random_prompts(40, 55), scoring(40)
    with load(path, "cuda") as llm:
        assert isinstance(llm.engine.runner, GraphRunner)
        found = llm.generate(prompts, params)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).cuda().eval()
    for prompt, own, one in zip(prompts, params, found, strict=True):
        if own.prompt_logprobs is not None:
            assert_scores(model, prompt, one, own.prompt_logprobs, 0.05)
            assert len(one.token_ids) == own.max_tokens


def run_rows(rows: list[object], folder: Path) -> list[dict[str, Any]]:
    source, out = folder / "in.jsonl", folder / "out.jsonl"
    source.write_text("\n".join(map(json.dumps, rows)))
    options = ["-i", str(source), "-o", str(out), "--device", "cpu", "--overwrite", "--ordered"]
    result = CliRunner().invoke(main, ["generate", "--model", str(MODEL), *options])
    assert result.exit_code in (0, 1), result.stderr
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_requests_of_lm_eval(tmp_path: Path) -> None:
    """Its local-completions sends prompts as ids with `echo`, and reads as parse_logprobs does."""
    with LLM(MODEL, device="cpu", batch_size=2) as llm:
        assert llm.rules.tokenizer is not None
        contexts = [llm.rules.tokenizer.encode(task.prompt(a, b)) for a, b in ((47, 85), (3, 4))]
        answers = [
            one.token_ids[:2]
            for one in llm.generate([list(ids) for ids in contexts], SamplingParams(max_tokens=2))
        ]
    wrong = (*answers[0][:1], (answers[0][1] + 1) % 60)
    prompts = [[*contexts[0], *answers[0]], [*contexts[1], *answers[1]], [*contexts[0], *wrong]]
    body = {"prompt": prompts, "temperature": 0, "logprobs": 1, "echo": True, "seed": 1234}
    batch = {"method": "POST", "url": "/v1/completions"}
    one, none = run_rows(
        [{"custom_id": str(n), **batch, "body": {**body, "max_tokens": n}} for n in (1, 0)],
        tmp_path,
    )
    for row, new in ((one, 1), (none, 0)):
        greedy = []
        for prompt, choice in zip(prompts, row["response"]["body"]["choices"], strict=True):
            logprobs = choice["logprobs"]
            start, end = len(prompt) - 2, len(prompt)
            assert {len(values) for values in logprobs.values()} == {len(prompt) + new}
            assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
            assert sum(logprobs["token_logprobs"][start:end]) <= 0
            tops = logprobs["top_logprobs"][start:end]
            pairs = zip(logprobs["tokens"][start:end], tops, strict=True)
            greedy.append(all(token == max(top, key=top.get) for token, top in pairs))
            places = logprobs["text_offset"]
            assert (
                "".join(
                    choice["text"][a:b] for a, b in zip(places, [*places[1:], None], strict=True)
                )
                == choice["text"]
            )
        assert greedy == [True, True, False]
        assert row["response"]["body"]["usage"]["completion_tokens"] == 3 * new


def test_choices_of_native_rows(tmp_path: Path) -> None:
    """`n` choices differ in their seeds; the first is that of a row without `n`."""
    row = {"prompt": task.prompt(47, 85), "temperature": 3.0, "max_tokens": 5, "logprobs": 0}
    several, single, scored, bad = run_rows(
        [{"id": "a", **row, "n": 3}, {"id": "b", **row, "n": 1},
         {"id": "c", **row, "n": 2, "max_tokens": 0, "prompt_logprobs": 1},
         {"id": "d", **row, "n": 9}],
        tmp_path,
    )  # fmt: skip
    assert [one["index"] for one in several["choices"]] == [0, 1, 2] and "text" not in several
    assert len({tuple(one["token_ids"]) for one in several["choices"]}) > 1
    new = sum(len(one["token_ids"]) for one in several["choices"])
    assert several["usage"]["completion_tokens"] == new
    assert all(len(one["logprobs"]) == len(one["token_ids"]) for one in several["choices"])
    assert "choices" not in single and single["text"]
    assert [one["text"] for one in scored["choices"]] == ["", ""]
    assert len(scored["prompt_logprobs"]) == scored["usage"]["prompt_tokens"]
    assert bad["error"]["message"] == "n is 9, not an integer from 1 to 8"


def test_rows_without_new_tokens_need_scores(tmp_path: Path) -> None:
    (bad,) = run_rows([{"prompt": "one", "max_tokens": 0}], tmp_path)
    assert bad["error"]["code"] == "invalid_field" and "max_tokens is 0" in bad["error"]["message"]
    assert "at least 1, or 0 with prompt_logprobs" in bad["error"]["message"]


def test_perplexities_of_a_file(tmp_path: Path) -> None:
    """As the README takes them from results; the summary counts the prompts' tokens."""
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    texts = [task.prompt(a, b) for a, b in ((47, 85), (3, 4), (90, 90))]
    rows = [{"prompt": text, "max_tokens": 0, "prompt_logprobs": 0} for text in texts]
    source.write_text("\n".join(map(json.dumps, rows)))
    options = ["-i", str(source), "-o", str(out), "--device", "cpu", "--dtype", "float32"]
    result = CliRunner().invoke(main, ["generate", "--model", str(MODEL), *options, "--ordered"])
    assert result.exit_code == 0 and " prompt tokens/s" in result.stderr
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    with LLM(MODEL, device="cpu", dtype="float32", batch_size=1) as llm:
        assert llm.rules.tokenizer is not None
        prompts = [torch.tensor([llm.rules.tokenizer.encode(text)]) for text in texts]
    for line, ids in zip(out.read_text().splitlines(), prompts, strict=True):
        scores = [one["logprob"] for one in json.loads(line)["prompt_logprobs"][1:]]
        with torch.no_grad():
            loss = model(ids, labels=ids).loss.item()
        assert -sum(scores) / len(scores) == pytest.approx(loss, abs=1e-3)
