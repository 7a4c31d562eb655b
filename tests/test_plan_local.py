"""Profiles without remote tiers: everything lies in HBM, and what cannot is one clear error."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_models
from click.testing import CliRunner
from planned import GIB, known, work

from dakrun.cli import main
from dakrun.config import SamplingParams
from dakrun.errors import CannotRun, UsageError
from dakrun.hardware import HardwareProfile, load_profile, profile_text
from dakrun.llm import LLM
from dakrun.plan import Policy, choose_batch_size, make_plan
from dakrun.plan.show.picture import roofs
from dakrun.plan.show.plot import ratio_curve

WITH_HOST = load_profile("h100-sxm")
ALONE = replace(WITH_HOST, name="alone", remote=())
MODEL = known("opt-6.7b")


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "alone.toml"
    path.write_text(profile_text(ALONE))
    return path


@pytest.mark.parametrize(
    "choices",
    [
        {},
        {"offload_ratio": 0.0},
        {"kv_offload_ratio": 0.0},
        {"offload_ratio": 0.0, "kv_offload_ratio": 0.0},
        {"strategy": "greedy"},
        {"strategy": "uniform"},
        {"transport": "direct"},
        {"transport": "staged"},
        {"hbm_budget": 24 * GIB, "host_budget": GIB},
    ],
)
def test_all_lies_in_hbm_as_with_a_host_that_is_not_used(choices: Mapping[str, Any]) -> None:
    found = make_plan(MODEL, work(8), ALONE, Policy(**choices))
    assert found.tiers == ("hbm",) and found.ratio == 0 and found.required_ratio == 0
    assert all(counts == (op.op.units,) for op in found.ops for counts in op.placement)
    local = Policy(offload_ratio=0.0)
    assert found.predicted_s == make_plan(MODEL, work(8), WITH_HOST, local).predicted_s
    assert found.memory(0)["weights"] == sum(op.resident_bytes(0) for op in found.weights())


def test_a_batch_size_is_chosen_that_fits_in_hbm() -> None:
    found = choose_batch_size(MODEL, work(1), ALONE, Policy(hbm_budget=24 * GIB))
    plan = make_plan(MODEL, found, ALONE, Policy(hbm_budget=24 * GIB))
    assert found.batch_size > 8 and sum(plan.memory(0).values()) <= 24 * GIB


def test_too_small_a_budget_says_so_in_terms_of_hbm() -> None:
    with pytest.raises(CannotRun) as error:
        make_plan(MODEL, work(8), ALONE, Policy(hbm_budget=10 * GIB))
    assert "too small: 10.00 GiB of HBM for 12.63 GiB of weights" in str(error.value)
    assert error.value.hint.startswith("raise --hbm-budget, or lower")


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"offload_ratio": 0.2}, "the offload ratio is 0.2, but profile alone has no remote tiers"),
        ({"kv_offload_ratio": 1}, "the KV offload ratio is 1, but profile alone has no remote"),
        ({"remote": ("host",)}, "profile alone has no remote tier 'host'"),
        ({"remote": ("peer",)}, "profile alone has no remote tier 'peer'"),
    ],
)
def test_what_needs_a_remote_tier_is_refused(choices: Mapping[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make_plan(MODEL, work(8), ALONE, Policy(**choices))


def test_the_default_remote_tier_is_the_host_where_there_is_one() -> None:
    peers = load_profile("h200-nvlink-peer")
    assert Policy().remote_tiers(peers) == Policy(remote=("host",)).remote_tiers(peers) == ("host",)
    only_peer = replace(peers, remote=tuple(t for t in peers.remote if t.name != "host"))
    with pytest.raises(UsageError, match="no remote tier 'host'") as error:
        Policy().remote_tiers(only_peer)
    assert "peer" in error.value.hint


def test_pictures_and_published_figures_have_hbm_alone() -> None:
    plan = make_plan(MODEL, work(8), ALONE, Policy())
    assert [ratio for ratio, _, _ in ratio_curve(plan, "greedy", 4)] == [0]
    assert [name for name, _ in roofs(ALONE, ())] == ["HBM"]


def test_the_command_plans_it(profile: Path) -> None:
    args = ["plan", "--model", "opt-6.7b", "--profile", str(profile)]
    for options in ([], ["--offload-ratio", "auto"], ["--remote", "auto"], ["--json"]):
        shown = CliRunner().invoke(main, [*args, *options])
        assert shown.exit_code == 0 and shown.stderr == "", shown.stderr
    refused = CliRunner().invoke(main, [*args, "--remote", "host"])
    assert refused.exit_code == 2 and len(refused.stderr.splitlines()) == 2
    assert "it has none: leave out --remote" in refused.stderr


def test_an_llm_runs_in_one_tier_and_gives_the_same_tokens(tmp_path: Path) -> None:
    path = tiny_models.save("llama-gqa3-tied", tmp_path / "model")
    shipped = load_profile("cpu")
    prompts, params = [[5, 6, 7], [8, 9], [3] * 40], SamplingParams(max_tokens=12, ignore_eos=True)

    def tokens(machine: HardwareProfile, size: Any, policy: Policy) -> list[list[int]]:
        with LLM(path, device="cpu", batch_size=size, profile=machine, policy=policy) as llm:
            assert len(llm.plan.tiers) == 1 + len(machine.remote)
            return [list(done.token_ids) for done in llm.generate(prompts, params)]

    expected = tokens(shipped, 2, Policy(offload_ratio=0.3))
    alone = replace(shipped, remote=())
    assert tokens(alone, 2, Policy()) == expected
    assert tokens(alone, "auto", Policy(transport="staged")) == expected
    with pytest.raises(UsageError, match="no remote tiers"):
        LLM(path, device="cpu", profile=alone, policy=Policy(offload_ratio=0.3))
