"""Plans of known models on shipped profiles against recorded predictions.

plan_corpus.json holds a row per plan: the problem, and the predicted seconds of a decode step and
of a batch's prefill, or the error. A plan may become faster; then record it anew.
"""

import json
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


@pytest.mark.parametrize("row", ROWS, ids=range(len(ROWS)))
def test_no_plan_gets_slower(row: dict[str, Any]) -> None:
    if "error" in row:
        with pytest.raises(getattr(errors, row["error"])):
            planned(row)
        return
    plan = planned(row)
    assert plan.predicted_s == pytest.approx(row["step_s"], rel=TOLERANCE)
    assert predict_prefill(plan).predicted_s == pytest.approx(row["ttft_s"], rel=TOLERANCE)
    for tier, budget in enumerate(plan.budgets):
        assert sum(plan.memory(tier).values()) <= budget
    for op in plan.ops:
        assert all(sum(counts) == op.op.units for counts in op.placement)
