"""From placements to a Plan: each op's transport, SMs, bound and predicted time; budgets kept.

Takes the placements as given; planner.py chose them.
"""

from collections.abc import Mapping
from typing import Literal

from dakrun.errors import CannotRun
from dakrun.plan.greedy import best_total
from dakrun.plan.ops import Op
from dakrun.plan.plan import OpPlan, Plan
from dakrun.plan.policy import Transport
from dakrun.plan.problem import Problem
from dakrun.plan.roofline import predicted_time, regime
from dakrun.plan.waves import read_time, sms_by_tier
from dakrun.units import format_bytes

Counts = tuple[int, ...]
# What a staged op costs besides: it starts when its copy has ended, not beside the op before.
# The mean over OPT-6.7B's on an H200, at 0.5 to 10% in host memory.
STAGED_SECONDS = 5.5e-6


def assemble(problem: Problem, placements: Mapping[str, tuple[Counts, ...]]) -> Plan:
    """The plan with the given units per layer and tier of every op.

    Raises CannotRun where a tier then holds more than its budget.
    """
    ops = tuple(_op_plan(problem, op, placements[op.name]) for op in problem.ops)
    plan = Plan(
        model=problem.model,
        workload=problem.workload,
        profile=problem.profile,
        policy=problem.policy,
        tiers=problem.tiers,
        budgets=problem.budgets,
        fixed_bytes=problem.fixed,
        required_ratio=max(0.0, problem.total - problem.caps[0]) / problem.total,
        phase=_phase(problem, ops),
        ops=ops,
    )
    _check(problem, plan)
    return plan


def _phase(problem: Problem, ops: tuple[OpPlan, ...]) -> Literal[1, 2, 3]:
    curves = list(problem.curves.values())
    remote = range(1, len(problem.tiers))
    moved = sum(op.resident_bytes(tier) for op in ops for tier in remote)
    if moved <= best_total(curves) * 1.001:
        return 1
    return 2 if moved <= sum(curve.b * curve.resident for curve in curves) else 3


def _op_plan(problem: Problem, op: Op, placement: tuple[Counts, ...]) -> OpPlan:
    scale = op.read_bytes / op.resident_bytes
    times: dict[Transport, dict[Counts, float]] = {"direct": {}, "staged": {}}
    for counts in set(placement):
        tier_bytes = [n * scale for n in op.tier_bytes(counts)]
        for transport, by_counts in times.items():
            by_counts[counts] = problem.bound(op, tier_bytes, transport)
    totals = {t: sum(by[counts] for counts in placement) for t, by in times.items()}
    slower = totals["direct"] - op.layers * STAGED_SECONDS
    better: Transport = "staged" if totals["staged"] < slower else "direct"
    transport = problem.policy.transport or better
    if op.category != "linear":  # slots and rows of a table are read where they lie
        transport = "direct"
    bounds = tuple(times[transport][counts] for counts in placement)
    curve, compute = problem.curves[op.name], problem.compute[op.name]
    sms: tuple[int, ...] = (problem.profile.sms, *(0 for _ in problem.remote))
    if transport == "direct":  # else the copy engine reads the remote tiers, and SMs only HBM
        mean = sum(bounds) / len(bounds)
        sms = sms_by_tier(op, placement, compute, mean, problem.profile, problem.remote)
    predicted = {
        counts: _predicted(problem, op, transport, counts, sms, times[transport][counts])
        for counts in set(placement)
    }
    return OpPlan(
        op=op,
        regime=regime(op, compute, problem.links),
        transport=transport,
        sms=sms,
        a=curve.a,
        b=curve.b,
        placement=placement,
        bounds_s=bounds,
        predicted_s=tuple(predicted[counts] for counts in placement),
    )


def _predicted(
    problem: Problem, op: Op, transport: Transport, counts: Counts, sms: Counts, bound: float
) -> float:
    """Seconds that one layer of `op` with the given units per tier is expected to take."""
    if transport == "staged":
        return STAGED_SECONDS + predicted_time(op, bound, problem.profile)
    read = read_time(op, counts, sms, problem.profile, problem.remote)
    return predicted_time(op, max(bound, read), problem.profile)


def _check(problem: Problem, plan: Plan) -> None:
    """No budget is exceeded, whatever ratios were asked for."""
    for tier, (name, budget) in enumerate(zip(plan.tiers, plan.budgets, strict=True)):
        over = sum(plan.memory(tier).values()) - budget
        ratios = (problem.policy.offload_ratio, problem.policy.kv_offload_ratio)
        if over > 0 and ratios == (None, None) and not tier:
            raise problem.too_small(over)
        if over > 0:
            raise CannotRun(
                f"with these offload ratios {name} memory is over its budget of "
                f"{format_bytes(budget)} by {format_bytes(over)}",
                hint="leave --offload-ratio and --kv-offload-ratio at auto, or raise the "
                "budget of that tier",
            )
