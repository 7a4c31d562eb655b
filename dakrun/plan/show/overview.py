"""All that `dakrun plan` shows, computed once: a plan, its prefill, comparisons and advice.

json.py and table.py write it for scripts and for people.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from dakrun.errors import CannotRun, DakrunError
from dakrun.hardware import Published
from dakrun.plan.advice import Advice, advise
from dakrun.plan.batch_size import MAX_BATCH_SIZE
from dakrun.plan.plan import Plan
from dakrun.plan.planner import make_plan
from dakrun.plan.prefill import PrefillForecast, predict_prefill
from dakrun.plan.prompt_pass import passes_of

CHANGED = 0.0005  # of a ratio, as it is written


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """A plan and the prefill of one full batch that it implies."""

    plan: Plan
    prefill: PrefillForecast

    @classmethod
    def of(cls, plan: Plan) -> "Forecast":
        """The forecast of `plan`."""
        return cls(plan=plan, prefill=predict_prefill(plan))


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A `published` measurement, and the plan with the same offload ratio.

    EB is effective bandwidth: weight bytes over the step's time. `efficiency` is the published EB
    over the bound's, `expected` the prediction's.
    """

    published: Published
    plan: Plan

    @property
    def efficiency(self) -> float:
        """The published EB over the bound's."""
        return self.published.eb_bytes_per_s / self.bound_eb

    @property
    def expected(self) -> float:
        """The predicted EB over the bound's."""
        return self.plan.bound_s / self.plan.predicted_s

    @property
    def bound_eb(self) -> float:
        """EB of the bound, in bytes/s."""
        return self.plan.weight_bytes / self.plan.bound_s

    @property
    def expected_eb(self) -> float:
        """EB of the prediction, in bytes/s."""
        return self.plan.weight_bytes / self.plan.predicted_s


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """Prompt `passes` that a decode step carries, and the ratios that they change.

    `changed` has, by op, the offload ratio that a plan for decode steps alone would have.
    """

    passes: float
    changed: dict[str, float]

    @classmethod
    def of(cls, plan: Plan) -> "Prompts":
        """Plan again for decode steps alone; with as many remote slots, so the search is short."""
        work, policy, alone = plan.workload, plan.policy, plan
        if plan.ratio > 0:
            held = sum(op.remote_bytes for op in plan.weights())
            policy = replace(
                policy,
                strategy=plan.strategy,
                kv_offload_ratio=plan.op("attention").ratio,
                offload_ratio=held / plan.weight_bytes
                if policy.offload_ratio is not None
                else None,
            )
        with suppress(CannotRun):
            alone = make_plan(plan.model, work, plan.profile, policy, prompts=False)
        ratios = {op.op.name: op.ratio for op in alone.ops}
        return cls(
            passes=passes_of(work, plan.prefill.chunk_tokens) / work.new_tokens,
            changed={
                op.op.name: ratios[op.op.name]
                for op in plan.ops
                if abs(op.ratio - ratios[op.op.name]) >= CHANGED
            },
        )


@dataclass(frozen=True, kw_only=True)
class Overview:
    """The plan `chosen` and its comparisons, for the same model, workload, machine and budgets.

    `uniform` has the same offload ratio for every op, or is the reason why that cannot run.
    """

    chosen: Forecast
    prompts: Prompts
    uniform: Forecast | CannotRun
    advice: Advice
    published: tuple[Comparison, ...] = ()

    @classmethod
    def of(
        cls, plan: Plan, max_decode_step: float | None = None, *, requests: int = MAX_BATCH_SIZE
    ) -> "Overview":
        """Plan again for decode steps alone, uniformly, at published ratios, and for advice.

        Advice is limited to `max_decode_step` seconds per decode step, if given, and to no more
        rows than there are `requests`.
        """
        policy = replace(plan.policy, strategy="uniform")
        uniform: Forecast | CannotRun
        try:
            uniform = Forecast.of(make_plan(plan.model, plan.workload, plan.profile, policy))
        except CannotRun as refusal:
            uniform = refusal
        return cls(
            chosen=Forecast.of(plan),
            prompts=Prompts.of(plan),
            uniform=uniform,
            advice=advise(plan, max_decode_step, requests=requests),
            published=tuple(_published(plan)),
        )


def _published(plan: Plan) -> Iterator[Comparison]:
    """The profile's published figures of this model and batch size whose ratio fits the budgets."""
    name = plan.model.name.rpartition("/")[2].lower()
    for figure in plan.profile.published:
        if (figure.model, figure.batch_size) == (name, plan.workload.batch_size):
            policy = replace(plan.policy, offload_ratio=figure.offload_ratio, kv_offload_ratio=None)
            with suppress(DakrunError):
                alike = make_plan(plan.model, plan.workload, plan.profile, policy)
                yield Comparison(published=figure, plan=alike)
