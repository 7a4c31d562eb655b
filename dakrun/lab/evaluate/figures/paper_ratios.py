"""Required ratios of figure 10 on GH200: the paper's, its way of counting, and the planner's.

Knows the shipped profile alone; measures nothing.
"""

import functools
from typing import NamedTuple

from dakrun.hardware import load_profile
from dakrun.lab.evaluate.scope import Scope
from dakrun.models import known_model

MODEL, ROOM = "opt-30b", 96_000_000_000
PERCENT = {(32, 1024): 6.0, (128, 256): 10.0, (128, 512): 37.0, (128, 1024): 60.0}  # the paper's
NEW_TOKENS = 32  # with which the paper's ratios can be derived


class RequiredRatio(NamedTuple):
    """The ratio of bytes that must lie outside HBM for a batch of prompts, in percent.

    `paper` is the paper's, `mixed` that of GiB of weights and decimal GB of KV in 96, `decimal`
    that of GB of both, `planned` the one of dakrun's planner.
    """

    case: str
    paper: float
    mixed: float
    decimal: float
    planned: float


@functools.cache
def paper_ratios() -> tuple[RequiredRatio, ...]:
    """The paper's cases that do not fit in 96 GB, from the profile `gh200`."""
    model = known_model(MODEL)
    assert model is not None
    machine = load_profile("gh200")
    scope = Scope(models={MODEL: model}, profile=machine, remote="host", quick=False, predict=True)

    def outside(needed: float) -> float:
        return 100 * max(0.0, 1 - ROOM / needed)

    found = []
    for (batch, prompt), paper in PERCENT.items():
        more = {"prompt_len": prompt, "new_tokens": NEW_TOKENS, "hbm_budget": ROOM}
        plan = scope.plan(scope.step(MODEL, batch, None, **more))
        kv = model.kv_bytes_per_token * batch * (prompt + NEW_TOKENS)
        mixed, decimal = (
            outside(plan.weight_bytes * 1e9 / 2**30 + kv),
            outside(plan.weight_bytes + kv),
        )
        planned = 100 * plan.required_ratio
        found.append(RequiredRatio(named((batch, prompt)), paper, mixed, decimal, planned))
    return tuple(found)


def counting() -> str:
    """How the paper's ratios seem to be counted, with the outcome of that calculation."""
    ratios = paper_ratios()
    same = all(round(ratio.mixed) == ratio.paper for ratio in ratios)
    shown = ", ".join(f"{ratio.mixed:.1f}%" for ratio in ratios)
    return (
        "The paper's required ratios seem to add GiB of weights to decimal GB of KV cache for "
        f"{NEW_TOKENS} new tokens: this gives {shown}, which {'are' if same else 'are not'} its "
        "figures when rounded. dakrun counts both in bytes, and whole KV blocks, activations, the "
        "CUDA context and a reserve as well."
    )


def named(case: tuple[int, int]) -> str:
    """A batch and prompt length in words."""
    return f"{case[0]} x {case[1]:,}"
