"""Exchanges of experts between steps: which, how many, and that no token changes."""

import io
import json
from pathlib import Path

import pytest
import tiny_models
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from dakrun.config import SamplingParams
from dakrun.engine import expert_copies, expert_moves
from dakrun.engine.expert_moves import pairs
from dakrun.engine.expert_use import ExpertUse
from dakrun.llm import LLM
from dakrun.models import popularity, read_model_config
from dakrun.models.families import decoder_of
from dakrun.plan import Policy
from dakrun.terminal.summary import render

PROMPTS = [[5, 6, 7, 8], [9], list(range(10, 40)), [3, 3, 3]]


def test_which_experts_change_places() -> None:
    tiers = [0, 0, None, 1, 1, 2]
    assert pairs([40, 5, 99, 80, 6, 60], tiers, 300, 8) == [(3, 1)]
    assert pairs([10, 5, 99, 80, 6, 90], tiers, 300, 8) == [(5, 1), (3, 0)]
    assert pairs([10, 10, 0, 12, 14, 11], tiers, 300, 8) == []  # may be chance
    assert pairs([20, 40, 0, 12, 54, 11], tiers, 300, 8) == []  # as well, of the extremes of many
    assert pairs([10, 5, 99, 80, 6, 90], tiers, 300, 512) == []  # all are read in nearly all steps
    assert pairs([0] * 6, tiers, 0, 8) == []


def test_drafts_are_tokens_of_a_step_too(tmp_path: Path) -> None:
    """They choose experts; a step's rows are counted without them."""
    use = ExpertUse(decoder_of(read_model_config(skewed(tmp_path / "model"))))
    use.begin_step(3, prompts=False)
    use.begin_step(2, prompts=False, width=5)
    use.begin_step(9, prompts=True)
    assert (use.steps, use.tokens, use.routed) == (2, 5, 13)
    use.clear()
    assert use.routed == 0


def skewed(path: Path, dtype: torch.dtype = torch.float32) -> Path:
    """A checkpoint whose routers like the experts of the highest numbers."""
    model = tiny_models.save("glm4-moe", path, dtype)
    file = model / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if name.endswith("e_score_correction_bias"):
            tensors[name] = torch.linspace(0, 0.4, len(tensor))
    save_file(tensors, file, metadata={"format": "pt"})
    return model


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_popular_experts_come_to_the_local_tier_and_no_token_changes(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expert_moves, "WINDOW", 8)
    model, params = skewed(tmp_path / "model"), SamplingParams(max_tokens=90, ignore_eos=True)
    options = {"device": "cpu", "batch_size": 4, "max_model_len": 128, "dtype": dtype}
    with LLM(model, **options, policy=Policy(offload_ratio=0.0)) as llm:
        expected = [one.token_ids for one in llm.generate(PROMPTS, params, progress=False)]
        counts = llm.engine.runner.expert_use.counts()
        assert llm.report()["expert_moves"] == {"exchanged_pairs": 0, "bytes": 0}
    popularity.kept_path(read_model_config(model)).unlink()
    policy = Policy(offload_ratio=0.5, strategy="uniform")
    with LLM(model, **options, policy=policy) as llm:
        weights, use = llm.engine.runner.weights, llm.engine.runner.expert_use
        before = {name: of.dense() for name, of in weights.matrices.items()}
        found = [one.token_ids for one in llm.generate(PROMPTS, params, progress=False)]
        report = llm.report()
        assert found == expected and use.counts() == counts
        moved = report["expert_moves"]["exchanged_pairs"]
        assert 0 < moved <= report["time"]["decode_steps"]
        assert report["expert_moves"]["bytes"] > 0
        for router in (mixture.router for mixture in use.mixtures):
            order, experts = list(router.order), router.routing.experts
            indices = use.stack_indices(router) or range(experts)
            for name in ("experts_gate_up", "experts_down"):
                matrix = weights.matrices[f"layers.{router.layer}.{name}"]
                now = matrix.dense().view(experts, -1, matrix.shape[1])
                then = before[f"layers.{router.layer}.{name}"].view_as(now)
                for expert in range(experts):
                    assert now[indices[expert]].equal(then[order.index(expert)])
        llm.engine.runner.moves_experts = False
        use.clear()
        again = [one.token_ids for one in llm.generate(PROMPTS, params, progress=False)]
        assert again == expected
        shares = [of["experts"]["measured_local_read_share"] for of in (report, llm.report())]
        assert shares[1] > shares[0] + 0.02
        assert llm.report()["expert_moves"]["exchanged_pairs"] == moved
        text = io.StringIO()
        render(llm.report(1.0), Console(file=text, width=300), verbose=True)
        assert f"{moved} pair" in text.getvalue() and "exchanged (" in text.getvalue()
    kept = json.loads(popularity.kept_path(read_model_config(model)).read_text())["counts"]
    assert kept == counts  # of the last batch, after the counts were cleared


@pytest.mark.gpu
def test_on_a_gpu_moves_change_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts are exchanged in pieces, beside the steps of captured graphs."""
    monkeypatch.setattr(expert_moves, "WINDOW", 8)
    monkeypatch.setattr(expert_copies, "LEAST_COPY", 50_000)
    model = skewed(tmp_path / "model", torch.bfloat16)
    params = SamplingParams(max_tokens=90, logprobs=1, ignore_eos=True)
    found, shares = [], list[float]()
    for ratio, runs in ((0.0, 1), (0.5, 5)):
        with LLM(
            model, device="cuda", batch_size=4, max_model_len=128, popularity="uniform",
            policy=Policy(offload_ratio=ratio, strategy="uniform"),
        ) as llm:  # fmt: skip
            assert llm.fallback is None
            (one, *_) = (op.op for op in llm.plan.ops if op.op.chances)
            stages = [llm.plan.prefill.stages(one.with_rows(n)) for n in (1, 30)]
            assert stages == [False, ratio > 0]
            use = llm.engine.runner.expert_use
            assert use is not None
            for _ in range(runs):
                use.clear()
                results = llm.generate(PROMPTS, params, progress=False)
                found.append([(one.token_ids, one.logprobs) for one in results] + [use.counts()])
                shares.append(llm.report()["experts"]["measured_local_read_share"])
            moved = llm.report().get("expert_moves")
    assert all(one == found[0] for one in found)
    assert moved["exchanged_pairs"] >= 2 and moved["bytes"] > 0
    assert shares[-1] > shares[1] + 0.02
