"""A plan and what is told beside it: its prefill, the uniform strategy's plan, and advice.

Everything that `dakrun plan` shows is computed here, once; present.py and texts.py put it in words.
"""

from dataclasses import dataclass, replace

from dakrun.errors import CannotRun
from dakrun.plan.advice import Advice, advise
from dakrun.plan.planner import Plan, make_plan
from dakrun.plan.prefill import Prefill, predict_prefill


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """A plan and the prefill of one full batch that it implies."""

    plan: Plan
    prefill: Prefill

    @classmethod
    def of(cls, plan: Plan) -> "Forecast":
        """The forecast of `plan`."""
        return cls(plan=plan, prefill=predict_prefill(plan))


@dataclass(frozen=True, kw_only=True)
class Overview:
    """`chosen` is the plan itself; `uniform` has the same share of every op remote, or cannot run.

    Both are for the same model, workload, machine and budgets.
    """

    chosen: Forecast
    uniform: Forecast | CannotRun
    advice: Advice


def overview(plan: Plan) -> Overview:
    """Plan again, with the uniform strategy and for advice, and forecast the prefill."""
    policy = replace(plan.policy, strategy="uniform")
    uniform: Forecast | CannotRun
    try:
        uniform = Forecast.of(make_plan(plan.model, plan.workload, plan.profile, policy))
    except CannotRun as refusal:
        uniform = refusal
    return Overview(chosen=Forecast.of(plan), uniform=uniform, advice=advise(plan))
