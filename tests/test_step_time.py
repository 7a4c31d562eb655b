"""The time of steps of fewer rows, and of several tokens a row, under a plan."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from planned import known, work

from dakrun.config import MAX_DRAFT, OFF, Speculation
from dakrun.hardware import load_profile
from dakrun.plan import (
    DRAFTING_ROWS,
    DraftForecast,
    Plan,
    Policy,
    draft_forecasts,
    drafts_of,
    make_plan,
)
from dakrun.plan.step_time import StepTimes, tokens_kept

DRAFTS = 7


def plan_of(name: str, batch: int, **policy: Any) -> Plan:
    workload = replace(work(batch, 256, 128), speculation=Speculation("suffix", DRAFTS))
    return make_plan(known(name), workload, load_profile("h200-pcie5"), Policy(**policy))


def steps_of(
    name: str, batch: int, speculate: str = f"suffix:{DRAFTS}", **policy: Any
) -> dict[int, DraftForecast]:
    plan = plan_of(name, batch, **policy)
    return {one.rows: one for one in draft_forecasts(plan, Speculation.of(speculate))}


@pytest.mark.parametrize("name", ["opt-6.7b", "llama-3-8b", "qwen3-30b-a3b"])
def test_a_whole_batch_of_one_token_a_row_takes_the_plan_s_step(name: str) -> None:
    plan = plan_of(name, 48, offload_ratio=0.2, kv_offload_ratio=0.0)
    assert StepTimes(plan).step(48) == pytest.approx(plan.predicted_s)


def test_a_step_that_waits_for_a_link_takes_no_longer_with_drafts() -> None:
    steps = steps_of("opt-6.7b", 64, offload_ratio=0.48, kv_offload_ratio=0.0)
    assert list(steps) == [1, 2, 4, 8, 16, 32, 64]
    assert all(1 <= one.break_even < 1.01 for one in steps.values())
    assert steps[64].token_s(0.8) < steps[64].plain_s / 3.5


def test_in_hbm_few_rows_have_room_for_drafts_and_many_have_less() -> None:
    """Steps of more tokens than VERIFIED_TOKENS carry fewer, of more rows than a bound none."""
    steps = steps_of("llama-3-8b", 384)
    assert list(steps) == [1, 2, 4, 8, 16, 32, 64, 128, 256] and max(steps) == DRAFTING_ROWS
    assert steps[1].break_even < 1.05 and steps[64].break_even > 2
    assert all(one.drafts == min(DRAFTS, 1024 // one.rows - 1) for one in steps.values())
    assert all(a.break_even < b.break_even for a, b in pairwise(steps.values()) if b.rows <= 128)
    found = list(steps.values())
    assert [drafts_of(found, rows) for rows in (1, 128, 129, 256, 257)] == [7, 7, 3, 3, 0]


def test_the_plan_chooses_the_number_of_drafts() -> None:
    """As many as fit where a step waits for a link; in HBM fewer, the more rows there are."""
    linked = steps_of("opt-6.7b", 64, "suffix", offload_ratio=0.48, kv_offload_ratio=0.0)
    assert [one.drafts for one in linked.values()] == [*[MAX_DRAFT] * 6, 15]
    resident = steps_of("llama-3-8b", 256, "auto")
    numbers = [one.drafts for one in resident.values()]
    assert numbers == sorted(numbers, reverse=True)
    assert numbers[0] > 7 and numbers[-1] < 1024 // 256 - 1
    fixed = steps_of("llama-3-8b", 256)
    assert all(resident[rows].token_s(0.8) <= fixed[rows].token_s(0.8) for rows in fixed)


def test_tokens_of_drafts_touch_further_experts() -> None:
    """A dense model's step of few rows takes hardly longer; a mixture reads more of its experts."""
    mixture, dense = steps_of("qwen3-30b-a3b", 64), steps_of("llama-3-8b", 64)
    assert mixture[4].break_even > 2 > 1.2 > dense[4].break_even
    assert mixture[64].break_even < mixture[4].break_even, "most are read without drafts too"
    mixture = steps_of("qwen3-30b-a3b", 64, "auto")
    assert mixture[1].drafts < 7 <= mixture[64].drafts


def test_tokens_that_are_kept() -> None:
    assert tokens_kept(0.0, 7) == 1 and tokens_kept(1.0, 7) == 8
    assert tokens_kept(0.5, 2) == 1.75
    assert draft_forecasts(plan_of("opt-1.3b", 2), OFF) == []
