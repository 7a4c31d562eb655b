"""Logits that are NaN or infinite make their own request an error, and no other."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from tiny_models import damage, kernel_models, save_half

from dakrun.cli import main
from dakrun.config import SamplingParams
from dakrun.engine import GraphRunner
from dakrun.engine.logprobs import log_probabilities
from dakrun.errors import CannotRun
from dakrun.llm import LLM
from dakrun.plan import Policy
from dakrun.requests import Completion, Request, RowError

VOCAB = 211
BAD = 200
GREEDY = SamplingParams(max_tokens=8)
SAMPLED = SamplingParams(max_tokens=8, temperature=0.7, top_k=30, top_p=0.9, seed=5)
CONFIGS = kernel_models(
    {
        "vocab_size": VOCAB, "hidden_size": 128, "num_hidden_layers": 2, "eos_token_id": None,
        "max_position_embeddings": 64, "bos_token_id": 1, "pad_token_id": 0,
    },
    std=0.1,
    opt={"num_attention_heads": 2, "ffn_dim": 264},
    opt_350m={"num_attention_heads": 2, "ffn_dim": 200, "word_embed_proj_dim": 64},
    llama_gqa={"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 264},
    llama_tied={"num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 200},
)  # fmt: skip
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# A damaged tensor of each kind, in the last layer.
DAMAGED = {
    "opt": [
        "model.decoder.layers.1.self_attn.k_proj.weight",
        "model.decoder.layers.1.self_attn.v_proj.bias",
        "model.decoder.layers.1.self_attn_layer_norm.weight",
        "model.decoder.layers.1.fc1.weight",
        "model.decoder.layers.1.fc2.bias",
    ],
    "llama-gqa": [
        "model.layers.1.self_attn.q_proj.weight",
        "model.layers.1.self_attn.o_proj.weight",
        "model.layers.1.mlp.gate_proj.weight",
        "model.layers.1.mlp.up_proj.weight",
        "model.layers.1.post_attention_layernorm.weight",
        "model.norm.weight",
        "lm_head.weight",
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_half(CONFIGS["llama-gqa"], tmp_path_factory.mktemp("whole"))


def with_bad_token(path: Path, token: int) -> Path:
    """The checkpoint of `whole` with NaN as the embedding of `token`, whose logit is a number."""
    save_half(CONFIGS["llama-gqa"], path)
    damage(path, "model.embed_tokens.weight", token)
    return path


def load(path: Path, device: str, batch_size: int = 3) -> LLM:
    """A model in two tiers."""
    return LLM(
        path, device=device, dtype="float16" if device == "cuda" else "float32",  # type: ignore[arg-type]
        batch_size=batch_size, max_model_len=40,
        policy=Policy(offload_ratio=0.3, kv_offload_ratio=0.5),
    )  # fmt: skip


def requests(
    prompts: Iterable[Iterable[int]], params: SamplingParams, ends: Mapping[int, int] | None = None
) -> list[Request]:
    """Requests r0, r1, ...; those of `ends` have so many tokens at most."""
    return [
        Request(
            id=f"r{i}", line=i + 1, prompt_ids=tuple(ids),
            params=replace(params, max_tokens=(ends or {}).get(i, params.max_tokens)),
        )
        for i, ids in enumerate(prompts)
    ]  # fmt: skip


def tokens(results: Iterable[Completion | RowError]) -> dict[str, tuple[int, ...]]:
    """Tokens of all requests but those that failed."""
    return {r.id: r.token_ids for r in results if isinstance(r, Completion)}


def by_id(results: Iterable[Completion | RowError]) -> dict[str, Completion | RowError]:
    return {result.id: result for result in results}


def assert_position(found: Completion | RowError, position: int) -> None:
    assert isinstance(found, RowError) and found.code == "non_finite_logits"
    assert f"the logits of the token at position {position} (" in found.message


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_bad_prompt_fails_alone(
    whole: Path, params: SamplingParams, device: str, tmp_path: Path
) -> None:
    """Its slot, whose keys and values are NaN, serves other requests after it.

    Where nothing is damaged the same requests end as early, so that batches have the same sizes:
    what is computed together may change bits on a GPU.
    """

    def run(llm: LLM, bad: int) -> tuple[dict[str, Completion | RowError], ...]:
        prompts = [[7, bad, *range(20, 29)] if i % 2 else [5 + i] for i in range(9)]
        given = requests(prompts, params, dict.fromkeys(range(1, 9, 2), 1))
        return tuple(by_id(llm.stream(some)) for some in (given, given[::2]))

    with load(whole, device) as llm:
        assert isinstance(llm.engine.runner, GraphRunner) == (device == "cuda")
        wanted = run(llm, 0)
    used = {token for ids in tokens(wanted[0].values()).values() for token in ids}
    bad = next(token for token in range(30, VOCAB) if token not in used)
    with load(with_bad_token(tmp_path, bad), device) as llm:
        found = run(llm, bad)
    for i in range(1, 9, 2):
        assert_position(found[0].pop(f"r{i}"), 11)
        del wanted[0][f"r{i}"]
    for results, others in zip(found, wanted, strict=True):
        assert tokens(results.values()) == tokens(others.values())
        assert len(results) == 5


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_bad_token_ends_its_request_in_the_step_after_it(
    whole: Path, params: SamplingParams, device: str, tmp_path: Path
) -> None:
    """The embedding of a token that only one request of three comes to is NaN."""
    prompts = [[5], [8], [11]]
    with load(whole, device) as llm:
        found = tokens(llm.stream(requests(prompts, params)))
        names = sorted(found)
        number, at, bad = next(
            (number, at, token)
            for number, name in enumerate(names)
            for at, token in enumerate(found[name][:6])
            if at > 1 and not any(token in found[n][: at if n == name else None] for n in names)
        )
        wanted = tokens(llm.stream(requests(prompts, params, {number: at + 2})))
    with load(with_bad_token(tmp_path, bad), device) as llm:
        results = by_id(llm.stream(requests(prompts, params)))
    assert_position(results.pop(names[number]), 1 + at + 1)
    del wanted[names[number]]
    assert tokens(results.values()) == wanted and len(wanted) == 2


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("name", "tensor"), [(name, tensor) for name, some in DAMAGED.items() for tensor in some]
)
def test_a_damaged_tensor_fails_every_request(
    name: str, tensor: str, device: str, tmp_path: Path
) -> None:
    """One NaN in it is enough, whatever lies between it and the logits."""
    path = save_half(CONFIGS[name], tmp_path)
    damage(path, tensor, 3)
    with load(path, device) as llm:
        for params in (GREEDY, SAMPLED):
            for others in (range(3, 38), [5, 6]):  # prompts of one length have another kernel
                prompts = {"r0": [7, 8], "r1": others, "r2": [9, 10]}
                for result in llm.stream(requests(prompts.values(), params)):
                    assert_position(result, len(prompts[result.id]))
        assert llm.engine.stats.requests == 0
        assert llm.report()["requests"]["finished"] == 0
        with pytest.raises(CannotRun, match="prompt 0: the logits of the token at position 1 "):
            llm.generate([[5]])


@pytest.mark.parametrize("device", DEVICES)
def test_infinity_is_told_and_minus_infinity_is_a_mask(device: str, tmp_path: Path) -> None:
    """A logit is one or the other, as the sign of a hidden state has it."""
    results = []
    for value in (0.0, torch.inf, -torch.inf):
        path = save_half(CONFIGS["llama-gqa"], tmp_path / str(value))
        if value:
            damage(path, "lm_head.weight", (7, 3), value)
        with load(path, device) as llm:
            results += llm.stream(requests([[5]], replace(GREEDY, max_tokens=1)))
    whole, *others = results
    (failed,) = (r for r in others if isinstance(r, RowError))
    assert_position(failed, 1)
    assert tokens(others) == tokens([whole]) != {}


def test_error_rows_of_a_run(tmp_path: Path) -> None:
    """Exit code 1, the row's line, and the other rows' results."""
    damaged = with_bad_token(tmp_path / "model", BAD)
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    batch = {"method": "POST", "url": "/v1/completions"}
    for rows, key in (
        ([{"id": str(i), "prompt_token_ids": ids} for i, ids in enumerate(([5], [BAD]))], "id"),
        (
            [
                {"custom_id": str(i), **batch, "body": {"prompt": ids}}
                for i, ids in enumerate(([5], [BAD]))
            ],
            "custom_id",
        ),
    ):
        source.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
        options = ["--overwrite", "--device", "cpu", "--max-tokens", "3"]
        result = CliRunner().invoke(
            main, ["generate", "--model", str(damaged), "-i", str(source), "-o", str(out), *options]
        )
        assert result.exit_code == 1, result.stderr
        assert result.stderr.splitlines()[-1] == "1 row done, 1 failed, 0 skipped"
        found = {row[key]: row for row in map(json.loads, out.read_text().splitlines())}
        assert found["0"].get("error") is None
        error = found["1"]["error"]
        assert (error["code"], error["line"]) == ("non_finite_logits", 2)
        assert "at position 1 (" in error["message"]


@pytest.mark.parametrize("device", DEVICES)
def test_a_bad_prompt_has_no_scores(whole: Path, device: str, tmp_path: Path) -> None:
    """Other rows of its step keep theirs."""
    params = SamplingParams(max_tokens=0, prompt_logprobs=1)
    prompts = [[7, 9, BAD, 20, 21], [5, 6, 8]]
    with load(whole, device) as llm:
        wanted = by_id(llm.stream(requests(prompts, params)))["r1"]
    with load(with_bad_token(tmp_path, BAD), device) as llm:
        found = by_id(llm.stream(requests(prompts, params)))
    assert_position(found["r0"], 5)
    good = found["r1"]
    assert isinstance(good, Completion) and isinstance(wanted, Completion)
    assert good.prompt_logprobs is not None and wanted.prompt_logprobs is not None
    for one, other in zip(good.prompt_logprobs[1:], wanted.prompt_logprobs[1:], strict=True):
        assert one is not None and other is not None
        assert one.chosen.logprob == pytest.approx(other.chosen.logprob, abs=0.02)


def test_a_token_of_a_prompt_without_a_score(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits that overflow ahead of one token make no NaN in a result."""
    bad = torch.tensor([[0.0, torch.inf, 1.0], [0.0, torch.nan, 1.0], [0.0, -torch.inf, 1.0]])
    _, values = log_probabilities(bad, torch.tensor([0, 0, 1]), 1)
    assert values[:2].isnan().all() and values[2].tolist() == pytest.approx(
        [-9999.0, -0.3133], 1e-3
    )

    def scored(logits: torch.Tensor, tokens: torch.Tensor, top: int) -> object:
        return log_probabilities(logits.masked_fill((tokens == 9)[:, None], torch.inf), tokens, top)

    monkeypatch.setattr("dakrun.engine.logprobs.log_probabilities", scored)
    params = SamplingParams(max_tokens=2, prompt_logprobs=0)
    with load(whole, "cpu") as llm:
        found = by_id(llm.stream(requests([[7, 8, 9, 10], [5, 6, 8]], params)))
    assert_position(found["r0"], 2)
    assert isinstance(found["r1"], Completion)
