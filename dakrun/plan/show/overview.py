"""A plan and what is told beside it: its prefill, the uniform strategy's plan, what others
published, and advice.

Everything that `dakrun plan` shows is computed here, once; present.py and texts.py put it in words.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from dakrun.errors import CannotRun
from dakrun.hardware.profile import Published
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
class Comparison:
    """A figure that others `published`, and the plan with the same share outside HBM.

    `efficiency` is their share of the bound, `expected` the plan's.
    """

    published: Published
    plan: Plan

    @property
    def efficiency(self) -> float:
        """Of what bandwidths allow: the published EB over the bound's."""
        return self.published.eb_bytes_per_s / self.bound_eb

    @property
    def expected(self) -> float:
        """The same of the prediction."""
        return self.plan.bound_s / self.plan.predicted_s

    @property
    def bound_eb(self) -> float:
        """The bound's EB, in bytes/s."""
        return self.plan.weight_bytes / self.plan.bound_s

    @property
    def expected_eb(self) -> float:
        """The prediction's."""
        return self.plan.weight_bytes / self.plan.predicted_s


@dataclass(frozen=True, kw_only=True)
class Overview:
    """`chosen` is the plan itself; `uniform` has the same share of every op remote, or cannot run.

    Both are for the same model, workload, machine and budgets, as is what was `published`.
    """

    chosen: Forecast
    uniform: Forecast | CannotRun
    advice: Advice
    published: tuple[Comparison, ...] = ()


def overview(plan: Plan, max_tpot: float | None = None) -> Overview:
    """Plan again: with the uniform strategy, as others ran the model, and for advice.

    That keeps to `max_tpot` seconds per output token, if they are given.
    """
    policy = replace(plan.policy, strategy="uniform")
    uniform: Forecast | CannotRun
    try:
        uniform = Forecast.of(make_plan(plan.model, plan.workload, plan.profile, policy))
    except CannotRun as refusal:
        uniform = refusal
    return Overview(
        chosen=Forecast.of(plan),
        uniform=uniform,
        advice=advise(plan, max_tpot),
        published=tuple(_published(plan)),
    )


def _published(plan: Plan) -> Iterator[Comparison]:
    """What the profile knows to be published of this model and batch size, if it fits here."""
    name = plan.model.name.rpartition("/")[2].lower()
    for figure in plan.profile.published:
        if (figure.model, figure.batch_size) == (name, plan.workload.batch_size):
            policy = replace(plan.policy, offload_ratio=figure.offload_ratio, kv_offload_ratio=None)
            with suppress(CannotRun):
                alike = make_plan(plan.model, plan.workload, plan.profile, policy)
                yield Comparison(published=figure, plan=alike)
