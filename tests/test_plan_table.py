"""The tables of a plan at every width, also where the uniform strategy cannot run."""

import functools
import io
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from dakrun.config import Workload
from dakrun.errors import CannotRun
from dakrun.hardware import load_profile
from dakrun.models import known_model
from dakrun.plan import Policy, make_plan
from dakrun.plan.show.json import overview_dict
from dakrun.plan.show.overview import Overview
from dakrun.plan.show.table import render, summary_rows

WORKLOAD = Workload(batch_size=8, prompt_len=32, new_tokens=32, max_model_len=64)


@functools.cache
def on_two_gpus(**fixed: Any) -> Overview:
    """OPT-30B on two H200s."""
    workload = Workload(batch_size=64, prompt_len=32, new_tokens=32, max_model_len=64)
    policy = Policy(hbm_budget=40 << 30, **fixed)
    model = known_model("opt-30b")
    assert model is not None
    return Overview.of(make_plan(model, workload, load_profile("h200-nvlink-peer"), policy))


def rendered(width: int, **fixed: Any) -> str:
    out = io.StringIO()
    render(on_two_gpus(**fixed), Console(file=out, width=width))
    return out.getvalue()


def test_80_columns_hold_a_row_of_two_tiers() -> None:
    narrow, wide = rendered(80), rendered(300)
    assert max(map(len, narrow.splitlines())) <= 80

    def rows(text: str) -> list[list[str]]:
        return [line.split() for line in text.splitlines() if line.startswith(("qkv", "fc2"))]

    assert len(rows(narrow)) == 4 and rows(narrow) == rows(wide)


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_no_width_breaks_a_row(width: int) -> None:
    """Cells of three tiers that do not fit are left out, and their columns are named."""
    lines = rendered(width, remote=("host", "peer")).splitlines()
    assert max(map(len, lines)) <= width
    whole = [line.split() for line in rendered(300, remote=("host", "peer")).splitlines()]
    shown = [line.split() for line in lines if line.startswith(("qkv", "fc2"))]
    assert len(shown) == 4
    for cells in shown:
        assert any(set(cells) <= set(row) for row in whole)
    assert ("units" in " ".join(lines).partition("not shown in")[2]) == (width < 120)


def test_uniform_that_cannot_run_is_said() -> None:
    plan = make_plan(known_model("opt-30b"), WORKLOAD, load_profile("gh200"), Policy())
    refusal = replace(Overview.of(plan), uniform=CannotRun("no room", hint="none"))
    assert overview_dict(refusal)["uniform"] == {"runs": False, "reason": "no room"}
    assert ("uniform", "the same ratio for every op cannot run: no room") in summary_rows(refusal)
