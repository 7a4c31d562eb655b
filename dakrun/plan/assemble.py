"""Stage 3 of planning: the time and buffers of a placement, and the Plan of the fastest candidate.

Takes placements as given: placement.py makes them, planner.py chooses.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

from dakrun.plan.greedy import best_total
from dakrun.plan.op_costs import waits_s
from dakrun.plan.placed_op import PlacedOp
from dakrun.plan.placement import Placement
from dakrun.plan.plan import OpPlan, Plan
from dakrun.plan.policy import Strategy, Transport
from dakrun.plan.problem import Problem
from dakrun.plan.roofline import regime, sampling_time
from dakrun.plan.staging import staging_bytes


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """All ops placed by a strategy, with `staging` bytes reserved, and a step's predicted time.

    The prompt passes that a step carries take `prompts_s` seconds, without launches.
    """

    strategy: Strategy
    ops: tuple[PlacedOp, ...]
    staging: int
    predicted_s: float
    prompts_s: float

    @property
    def total_s(self) -> float:
        """Seconds of a step with the prompts that it carries: what candidates are compared by."""
        return self.predicted_s + self.prompts_s

    def remote_bytes(self) -> int:
        """Bytes of weights and KV outside the local tier."""
        return sum(op.op.layers * op.op.resident_bytes - op.resident_bytes(0) for op in self.ops)

    def in_tiers(self, used: Sequence[str], tiers: Sequence[str]) -> "Candidate":
        """This candidate, which is of the tiers `used`, with nothing in the others of `tiers`."""

        def spread(counts: Sequence[int]) -> tuple[int, ...]:
            held = dict(zip(used, counts, strict=True))
            return tuple(held.get(tier, 0) for tier in tiers)

        ops = (
            replace(op, sms=spread(op.sms), placement=tuple(map(spread, op.placement)))
            for op in self.ops
        )
        return replace(self, ops=tuple(ops))


def cost_placement(problem: Problem, placed: Placement) -> Candidate:
    """The fastest candidate with the given units per layer and tier of every op.

    If the problem does not fix a transport, three choices are compared: all remote parts of
    matrices direct, all staged, or each op in its faster way. The candidate reserves the problem's
    staging bytes; its buffers may need more. Raises CannotRun if a tier holds more than its budget.
    """
    transports: tuple[Transport, ...] = ("direct", "staged")
    if problem.transport:
        transports = (problem.transport,)
    options = [
        tuple(problem.costs.placed(op, placed[op.name], transport) for op in problem.costs.ops)
        for transport in transports
    ]
    pairs = list(zip(*options, strict=True))
    if problem.experts_alone:
        options = [tuple(pair[pair[0].op.category == "experts"] for pair in pairs)]
    elif len(options) > 1:
        options.append(tuple(min(pair, key=lambda op: sum(op.predicted_s)) for pair in pairs))
    candidate = min((_candidate(problem, ops) for ops in options), key=lambda c: c.total_s)
    _check_budgets(problem, candidate)
    return candidate


def _candidate(problem: Problem, ops: tuple[PlacedOp, ...]) -> Candidate:
    seconds = sum(sum(op.predicted_s) for op in ops) + waits_s(ops, problem.costs.links)
    free = problem.budgets[0] - _local_bytes(problem, ops)
    staged = replace(problem.prefill, transport="staged")
    ring = staging_bytes(ops, staged, *problem.machine) - problem.staging
    passes = problem.passes(free - max(0, ring), staged=ring <= free)
    waits = problem.prompts_in(passes).seconds((op.op.name, op.shares) for op in ops)
    return Candidate(
        strategy=problem.strategy,
        ops=ops,
        staging=problem.staging,
        predicted_s=seconds,
        prompts_s=max(waits.values()),
    )


def _local_bytes(problem: Problem, ops: Iterable[PlacedOp]) -> int:
    """Bytes of the local tier that are in use."""
    return sum(op.resident_bytes(0) for op in ops) + sum(problem.fixed.values())


def _check_budgets(problem: Problem, candidate: Candidate) -> None:
    """Raise CannotRun where a tier of `candidate` holds more than its budget."""
    fixed = (problem.policy.offload_ratio, problem.policy.kv_offload_ratio) != (None, None)
    for tier, (name, budget) in enumerate(zip(problem.tiers, problem.budgets, strict=True)):
        used = sum(op.resident_bytes(tier) for op in candidate.ops)
        used = used if tier else _local_bytes(problem, candidate.ops)
        if used > budget and tier == 0 and not fixed and not problem.one_ratio:
            raise problem.too_small(used - budget)
        if used > budget:
            raise problem.over_budget(name, budget, used - budget)


def assemble(
    problem: Problem,
    chosen: Candidate,
    tried_s: Mapping[Strategy, float],
    *,
    forgone: Plan | None = None,
) -> Plan:
    """The Plan of the chosen candidate, for decode steps; prefill.py plans the prefill.

    `problem` has the policy's own strategy and transport; the ops' thresholds follow from these.
    `tried_s` has the predicted seconds of a step by strategy. Neither these seconds nor those of
    `chosen` include sampling.
    """
    costs, curves = problem.costs, problem.curves
    ops = tuple(
        OpPlan(
            **{field.name: getattr(placed, field.name) for field in fields(PlacedOp)},
            regime=regime(placed.op, costs.compute[placed.op.name], costs.links),
            a=curves[placed.op.name].a,
            b=curves[placed.op.name].b,
        )
        for placed in chosen.ops
    )
    problem = problem.with_staging(chosen.staging)
    sampling_s = sampling_time(costs.model, costs.workload.batch_size, costs.profile)
    return Plan(
        model=costs.model,
        workload=costs.workload,
        profile=costs.profile,
        policy=problem.policy,
        phase=_phase(problem, chosen),
        required_ratio=max(0.0, problem.total - problem.caps[0]) / problem.total,
        tiers=problem.tiers,
        budgets=problem.budgets,
        fixed_bytes=problem.fixed,
        ops=ops,
        sampling_s=sampling_s,
        waits_s=waits_s(ops, costs.links),
        strategy=chosen.strategy,
        tried_s={strategy: seconds + sampling_s for strategy, seconds in tried_s.items()},
        forgone=forgone,
    )


def _phase(problem: Problem, chosen: Candidate) -> Literal[1, 2, 3]:
    """1 if no more bytes are remote than with all ops at their best, 2 than at their b, else 3."""
    curves = list(problem.curves.values())
    moved = chosen.remote_bytes()
    if moved <= best_total(curves) * 1.001:
        return 1
    return 2 if moved <= sum(curve.b * curve.resident for curve in curves) else 3
