"""After the greedy, where no ratio is asked for: row blocks moved to where both parts end together.

Knows one remote tier. Keeps within a unit's time of the op's least bound.
"""

import functools
from collections.abc import Sequence

from dakrun.plan.greedy import Curve, best_total
from dakrun.plan.op_times import OpTimes
from dakrun.plan.ops import Op
from dakrun.plan.problem import Problem
from dakrun.plan.roofline import kernel_time
from dakrun.plan.rounding import RemoteBytes, remote_bytes
from dakrun.plan.waves import launch_times, sms_by_tier

REACH = 16  # row blocks, up or down


def settled(
    problem: Problem, totals: Sequence[tuple[int, ...]], goal: RemoteBytes
) -> list[tuple[int, ...]]:
    """Remote units of every layer of the problem's weights, which `totals` are as rounded.

    The same in all layers, and such that the op ends soonest. As they are where budgets decide.
    """
    unsettled, ops = list(totals), problem.weights
    best = best_total([problem.curves[op.name] for op in ops])
    if not goal.required <= best <= goal.limit:
        return unsettled
    moved = [
        (_settled(problem.op_times, op, problem.curves[op.name], max(units)),) * op.layers
        if op.category == "linear"
        else units
        for op, units in zip(ops, totals, strict=True)
    ]
    placed = sum(remote_bytes(op, n) for op, units in zip(ops, moved, strict=True) for n in units)
    return moved if goal.required <= placed <= goal.limit else unsettled


@functools.lru_cache(maxsize=256)
def _settled(of: OpTimes, op: Op, curve: Curve, start: int) -> int:
    """The number of remote units of a layer, about `start`, with which it ends soonest."""
    compute, profile, remote = of.compute[op.name], of.profile, of.remote
    unit = op.unit_bytes(0, 1) / min(curve.local_rate, curve.remote_rate)
    most = curve.floor / op.layers + unit

    def bound(units: int) -> float:
        return of.bound(op, op.tier_bytes((op.units - units, units)), "direct")

    def seconds(units: int) -> float:
        counts, least = (op.units - units, units), bound(units)
        sms = sms_by_tier(op, [counts], compute, least, profile, remote)
        kernel, link = launch_times(op, counts, sms, compute, profile, remote)
        work = kernel_time(op, max(kernel, compute), profile)
        return max(least, work, link)

    near = range(max(1, start - REACH), min(op.units, start + REACH + 1))
    options = [units for units in near if bound(units) <= most]
    if not start or not options:
        return start
    return min(options, key=lambda n: (seconds(n), abs(n - start)))
