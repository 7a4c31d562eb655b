"""Log-probabilities of chosen and of likely tokens, against transformers."""

import json
import math
from dataclasses import replace
from pathlib import Path

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
