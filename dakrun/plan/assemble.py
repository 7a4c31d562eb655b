"""From placements to a Plan: each op's transport, SMs, bound and predicted time; budgets kept.

Takes the placements as given; planner.py chose them.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from dakrun.plan.greedy import best_total
from dakrun.plan.op_times import OpTimes
from dakrun.plan.ops import Op
from dakrun.plan.plan import OpPlan, Plan
from dakrun.plan.policy import Transport
from dakrun.plan.problem import Problem
from dakrun.plan.roofline import Links, predicted_time, regime, sampling_time, staged_time
from dakrun.plan.waves import launch_times, sms_by_tier

Counts = tuple[int, ...]


def assemble(problem: Problem, placements: Mapping[str, tuple[Counts, ...]]) -> Plan:
    """The plan with the given units per layer and tier of every op.

    Remote parts of matrices are read as asked for; or else all of them directly, all staged, or
    each in the way that is faster for its op, whichever of the three makes for the fastest step.
    Raises CannotRun where a tier then holds more than its budget.
    """
    transports: tuple[Transport, ...] = ("direct", "staged")
    if problem.policy.transport:
        transports = (problem.policy.transport,)
    options = [
        tuple(_op_plan(problem, op, placements[op.name], transport) for op in problem.ops)
        for transport in transports
    ]
    if len(options) > 1:
        both = zip(*options, strict=True)
        options.append(tuple(min(of, key=lambda op: sum(op.predicted_s)) for of in both))
    plan = min((_plan(problem, ops) for ops in options), key=lambda plan: plan.predicted_s)
    _check(problem, plan)
    return plan


def adopted(problem: Problem, plan: Plan) -> Plan:
    """`plan`, which was made with more of the policy fixed, as one of `problem`."""
    curves = problem.curves
    return _plan(
        problem,
        tuple(replace(op, a=curves[op.op.name].a, b=curves[op.op.name].b) for op in plan.ops),
    )


def _plan(problem: Problem, ops: tuple[OpPlan, ...]) -> Plan:
    of = problem.op_times
    return Plan(
        model=of.model,
        workload=of.workload,
        profile=of.profile,
        policy=problem.policy,
        tiers=problem.tiers,
        budgets=problem.budgets,
        fixed_bytes=problem.fixed,
        required_ratio=max(0.0, problem.total - problem.caps[0]) / problem.total,
        phase=_phase(problem, ops),
        ops=ops,
        sampling_s=sampling_time(of.model, of.workload.batch_size, of.profile),
        waits_s=waits_s(ops, problem.links),
    )


def waits_s(ops: Sequence[OpPlan], links: Links) -> float:
    """Seconds that direct and staged reads of matrices from the same tier wait for each other.

    Copies run ahead, and are under way while ops read directly: each takes the link from the other,
    for as long as the shorter of both needs it. `links` are of the tiers of `ops`, in their order.
    """
    seconds = 0.0
    for tier, name in enumerate(links.direct):
        needed = {"direct": 0.0, "staged": 0.0}
        for op in ops:
            if tier and op.op.category == "linear":
                rates = links.staged if op.transport == "staged" else links.direct
                needed[op.transport] += op.read_bytes(tier) / rates[name]
        seconds += min(needed.values())
    return seconds


def _phase(problem: Problem, ops: tuple[OpPlan, ...]) -> Literal[1, 2, 3]:
    curves = list(problem.curves.values())
    remote = range(1, len(problem.tiers))
    moved = sum(op.resident_bytes(tier) for op in ops for tier in remote)
    if moved <= best_total(curves) * 1.001:
        return 1
    return 2 if moved <= sum(curve.b * curve.resident for curve in curves) else 3


def _op_plan(
    problem: Problem, op: Op, placement: tuple[Counts, ...], transport: Transport
) -> OpPlan:
    """With its matrix read by `transport`, where some of it is remote.

    Slots and rows of a table are read where they lie.
    """
    if op.category != "linear" or not any(sum(counts[1:]) for counts in placement):
        transport = "direct"
    times, curve = problem.op_times, problem.curves[op.name]
    sms, bounds, predictions = _timed(times, op, placement, transport)
    return OpPlan(
        op=op,
        regime=regime(op, times.compute[op.name], problem.links),
        transport=transport,
        sms=sms,
        a=curve.a,
        b=curve.b,
        placement=placement,
        bounds_s=bounds,
        predicted_s=predictions,
    )


@functools.lru_cache(maxsize=4096)  # of candidates for a plan most differ in a few ops
def _timed(
    of: OpTimes, op: Op, placement: tuple[Counts, ...], transport: Transport
) -> tuple[tuple[int, ...], tuple[float, ...], tuple[float, ...]]:
    """SMs per tier, and of each layer the bound and the expected time in seconds."""
    profile, remote, compute = of.profile, of.remote, of.compute[op.name]
    scale = op.read_bytes / op.resident_bytes
    times = {
        counts: of.times(op, [n * scale for n in op.tier_bytes(counts)], transport)
        for counts in set(placement)
    }
    bounds = tuple(max(times[counts]) for counts in placement)
    sms: tuple[int, ...] = (profile.sms, *(0 for _ in remote))
    if transport == "direct":  # else the copy engine reads the remote tiers, and SMs only HBM
        sms = sms_by_tier(op, placement, compute, sum(bounds) / len(bounds), profile, remote)

    def predicted(counts: Counts) -> float:
        """Seconds that one layer with the given units per tier is expected to take."""
        kernel, link = times[counts]
        if transport == "direct":
            launched = launch_times(op, counts, sms, compute, profile, remote)
            kernel, link = max(kernel, launched[0]), max(link, launched[1])
        elif any(counts[1:]):
            return staged_time(op, kernel, profile, link=link)
        return predicted_time(op, kernel, profile, link=link)

    predictions = {counts: predicted(counts) for counts in times}
    return sms, bounds, tuple(predictions[counts] for counts in placement)


def _check(problem: Problem, plan: Plan) -> None:
    """No budget is exceeded, whatever ratios were asked for."""
    for tier, (name, budget) in enumerate(zip(plan.tiers, plan.budgets, strict=True)):
        over = sum(plan.memory(tier).values()) - budget
        ratios = (problem.policy.offload_ratio, problem.policy.kv_offload_ratio)
        if over > 0 and ratios == (None, None) and not tier:
            raise problem.too_small(over)
        if over > 0:
            raise problem.over_budget(name, budget, over)
