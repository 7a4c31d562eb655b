"""Plans of known models on shipped profiles against recorded predictions.

plan_corpus.json holds a row per plan: the problem, and the predicted seconds of a decode step and
of a batch's prefill, or the error. Compared is the time of a batch, its prefill and all of its
decode steps. A faster plan passes; recorded anew, it stays as fast.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dakrun import errors
from dakrun.config import Workload
from dakrun.hardware import load_profile
from dakrun.models import known_model
from dakrun.plan import Plan, Policy, make_plan, predict_prefill

ROWS = json.loads((Path(__file__).parent / "plan_corpus.json").read_text(encoding="utf-8"))
TOLERANCE = 0.01


def planned(row: dict[str, Any]) -> Plan:
    model = known_model(row["model"])
    assert model is not None
    workload = Workload(
        batch_size=row["batch_size"],
        prompt_len=row["prompt_len"],
        new_tokens=row["new_tokens"],
        max_model_len=row["prompt_len"] + row["new_tokens"],
    )
    options = dict(row["policy"])
    if "remote" in options:
        options["remote"] = tuple(options["remote"])
    model = model.with_dtype(row.get("dtype", model.dtype))
    profile = load_profile(row["profile"])
    return make_plan(model, workload, profile, Policy(**options), thorough=row["thorough"])


def test_the_corpus_has_all_kinds_of_problems() -> None:
    assert sum("error" not in row for row in ROWS) >= 35
    assert sum("error" in row for row in ROWS) >= 3
    strategies = {row["policy"].get("strategy", "auto") for row in ROWS}
    assert strategies == {"auto", "greedy", "uniform"}
    assert {row["policy"].get("transport") for row in ROWS} == {None, "direct", "staged"}
    assert len({row["profile"] for row in ROWS}) >= 6


def check(plan: Plan, row: dict[str, Any]) -> None:
    """A time at most TOLERANCE above the recorded one, budgets kept, all units placed."""
    seconds = row["new_tokens"] * plan.predicted_s + predict_prefill(plan).predicted_s
    assert seconds <= (row["new_tokens"] * row["step_s"] + row["ttft_s"]) * (1 + TOLERANCE)
    for tier, budget in enumerate(plan.budgets):
        assert sum(plan.memory(tier).values()) <= budget
    for op in plan.ops:
        assert all(sum(counts) == op.op.units for counts in op.placement)


@pytest.mark.parametrize("row", ROWS, ids=range(len(ROWS)))
def test_no_plan_gets_slower(row: dict[str, Any]) -> None:
    if "error" in row:
        with pytest.raises(getattr(errors, row["error"])):
            planned(row)
    else:
        check(planned(row), row)


def test_what_is_slower_or_over_budget_fails() -> None:
    """And what is faster passes."""
    row = ROWS[0]
    plan = planned(row)
    check(plan, {**row, "step_s": 1.5 * row["step_s"], "ttft_s": 1.5 * row["ttft_s"]})
    for time in ("step_s", "ttft_s"):
        with pytest.raises(AssertionError):
            check(plan, {**row, time: 0.9 * row[time]})
    for tier, held in enumerate(sum(plan.memory(t).values()) for t in range(len(plan.budgets))):
        budgets = list(plan.budgets)
        budgets[tier] = held - 1
        with pytest.raises(AssertionError):
            check(replace(plan, budgets=tuple(budgets)), row)
