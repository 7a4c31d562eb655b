"""The time of steps of fewer rows, and of several tokens a row, under a plan."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from planned import known, work

from dakrun.hardware import load_profile
from dakrun.plan import VERIFIED_TOKENS, DraftForecast, Plan, Policy, draft_forecasts, make_plan
from dakrun.plan.step_time import StepTimes, tokens_kept

DRAFTS = 7


def plan_of(name: str, batch: int, **policy: Any) -> Plan:
    workload = replace(work(batch, 256, 128), drafts=DRAFTS)
    return make_plan(known(name), workload, load_profile("h200-pcie5"), Policy(**policy))


def steps_of(name: str, batch: int, **policy: Any) -> dict[int, DraftForecast]:
    return {one.rows: one for one in draft_forecasts(plan_of(name, batch, **policy), DRAFTS)}


@pytest.mark.parametrize("name", ["opt-6.7b", "llama-3-8b", "qwen3-30b-a3b"])
def test_a_whole_batch_of_one_token_a_row_takes_the_plan_s_step(name: str) -> None:
    plan = plan_of(name, 48, offload_ratio=0.2, kv_offload_ratio=0.0)
    assert StepTimes(plan).step(48) == pytest.approx(plan.predicted_s)


def test_a_step_that_waits_for_a_link_takes_no_longer_with_drafts() -> None:
    steps = steps_of("opt-6.7b", 64, offload_ratio=0.48, kv_offload_ratio=0.0)
    assert list(steps) == [1, 2, 4, 8, 16, 32, 64]
    assert all(1 <= one.break_even < 1.01 for one in steps.values())
    assert steps[64].token_s(0.8) < steps[64].plain_s / 3.5


def test_in_hbm_few_rows_have_room_for_drafts_and_many_have_not() -> None:
    """Steps of more tokens than VERIFIED_TOKENS carry none."""
    steps = steps_of("llama-3-8b", 256)
    assert max(steps) == VERIFIED_TOKENS // (1 + DRAFTS) == 64
    assert steps[1].break_even < 1.05 and steps[64].break_even > 2
    assert all(a.break_even < b.break_even for a, b in pairwise(steps.values()))


def test_tokens_of_drafts_touch_further_experts() -> None:
    """A dense model's step of few rows takes hardly longer; a mixture reads more of its experts."""
    mixture, dense = steps_of("qwen3-30b-a3b", 64), steps_of("llama-3-8b", 64)
    assert mixture[4].break_even > 2 > 1.2 > dense[4].break_even
    assert mixture[64].break_even < mixture[4].break_even, "most are read without drafts too"


def test_tokens_that_are_kept() -> None:
    assert tokens_kept(0.0, 7) == 1 and tokens_kept(1.0, 7) == 8
    assert tokens_kept(0.5, 2) == 1.75
    assert list(draft_forecasts(plan_of("opt-1.3b", 2), 0)) == []
