"""Stage 2 of planning: placements of a problem, from ideal ratios to row blocks and slots.

greedy.py and linear_program.py find the ratios, rounding.py makes them whole. The times that
decide are bounds; planner.py compares predicted times.
"""

import functools
import itertools
import math
from collections.abc import Mapping, Sequence

from dakrun.plan.greedy import (
    Curve,
    best_total,
    best_uniform_total,
    greedy_ratios,
    uniform_ratios,
)
from dakrun.plan.op_costs import Counts, StepCosts
from dakrun.plan.ops import Op
from dakrun.plan.problem import Problem
from dakrun.plan.roofline import bound_time, kernel_compute_time
from dakrun.plan.rounding import RemoteGoal, remote_bytes, round_ratios, split_units

SAME_TIME = 1e-9  # relative: the error of a sum
REACH = 16  # maximum row blocks by which an op is moved up or down to balance it

Placement = Mapping[str, tuple[Counts, ...]]  # units per layer and tier, by op


def ideal_ratios(
    problem: Problem,
    ops: Sequence[Op],
    remote: float | None,
    caps: Sequence[float],
    placed: Mapping[str, Sequence[float]],
) -> list[tuple[float, ...]]:
    """Ratio of every tier for each of `ops`, before rounding, within `caps` bytes per tier.

    `remote` fixes the bytes outside the local tier; `placed` has the ratios of all other ops.
    Raises CannotRun where nothing fits.
    """
    if len(caps) == 1:
        return [(1.0,)] * len(ops)
    resident = sum(op.layers * op.resident_bytes for op in ops)
    uniform = problem.strategy == "uniform"
    required, limit = max(0.0, resident - caps[0]), max(0.0, sum(caps[1:]))
    passes = problem.prompts
    # Try each thing that passes may wait for. The ratios that are best if passes wait for it alone
    # are the best of all if, at these ratios, passes do wait for it (README.md proves it).
    for limiting, by_op in problem.curves_by_limit.items() if len(caps) == 2 else ():
        curves = [by_op[op.name] for op in ops]
        best = best_uniform_total(curves) if uniform else best_total(curves)
        auto = min(max(best, required), limit, resident)
        choose = uniform_ratios if uniform else greedy_ratios
        alone: list[tuple[float, ...]] = [
            (1 - x, x) for x in choose(curves, auto if remote is None else remote)
        ]
        names = (op.name for op in ops)
        waits = passes.seconds([*zip(names, alone, strict=True), *placed.items()])
        if waits[limiting] >= max(waits.values()) * (1 - SAME_TIME):
            return alone
    from dakrun.plan.linear_program import OpLines, best_ratios  # imports numpy, which is slow

    bounds = [
        OpLines(op.layers * op.resident_bytes, problem.lines(op), op.classes, passes.times[op.name])
        for op in ops
    ]
    free = (resident, *caps[1:]) if remote is not None else caps
    elsewhere = passes.seconds(placed.items())
    ratios = best_ratios(bounds, free, remote, uniform=uniform, elsewhere=elsewhere)
    if ratios is None:
        if remote is not None and remote > limit:
            raise problem.over_budget(" and ".join(problem.tiers[1:]), limit, remote - limit)
        raise problem.too_small(max(resident - sum(caps), -min(free), 1.0))
    return ratios


@functools.lru_cache(maxsize=16)
def whole_ratios(problem: Problem) -> list[tuple[float, ...]]:
    """Ratio of every tier for each op of `problem`, before rounding. Raises CannotRun."""
    policy, remote = problem.policy, None
    if policy.offload_ratio is not None and policy.kv_offload_ratio is None:
        remote = policy.offload_ratio * problem.total
    return ideal_ratios(problem, problem.costs.ops, remote, problem.caps, {})


def slot_candidates(problem: Problem) -> list[Counts]:
    """Candidate numbers of KV slots, or of their parts, in each remote tier.

    They are the ideal numbers, rounded down and up, and 0 if the problem has `free_slots` and no
    fixed offload ratio. A fixed KV ratio gives the total.
    """
    n, policy = problem.attention.units, problem.policy
    fixed = policy.kv_offload_ratio
    if fixed is not None and len(problem.tiers) == 2:
        return [(math.floor(fixed * n + 0.5),)]
    kv = whole_ratios(problem)[problem.costs.ops.index(problem.attention)][1:]
    if fixed is not None:
        return _slot_splits(problem, math.floor(fixed * n + 0.5), kv)
    options = [{math.floor(x * n + 1e-9), min(math.ceil(x * n - 1e-9), n)} for x in kv]
    if problem.free_slots and policy.offload_ratio is None:
        options = [{0, *of} for of in options]
    counts = sorted(c for c in itertools.product(*options) if sum(c) <= n)
    if problem.one_ratio and policy.offload_ratio is not None:  # which is met to the nearest slot
        counts = [c for c in counts if abs(sum(c) - sum(kv) * n) <= 0.5 + 1e-9]
    return counts


def _slot_splits(problem: Problem, total: int, ratios: Sequence[float]) -> list[Counts]:
    """Ways to give `total` slots to the remote tiers: in proportion to `ratios`, and to one tier.

    Where all ratios are 0, the proportion is that of the tiers' rates.
    """
    rates = [problem.costs.links.direct[tier] for tier in problem.tiers[1:]]
    weights = ratios if sum(ratios) > 0 else rates
    ends = [
        math.floor(total * sum(weights[: i + 1]) / sum(weights) + 0.5) for i in range(len(weights))
    ]
    spread = tuple(end - start for start, end in zip([0, *ends], ends, strict=False))
    alone = [tuple(total * (i == j) for j in range(len(rates))) for i in range(len(rates))]
    return sorted({spread, *alone})


def place(problem: Problem, slots: Counts) -> Placement:
    """Units per layer and tier of every op, with `slots` KV slots in the remote tiers.

    Weights get the ideal ratios in the room that the slots leave, rounded to row blocks. Raises
    CannotRun where they do not fit there.
    """
    attention, weights, policy = problem.attention, problem.weights, problem.policy
    if len(problem.tiers) == 1:
        return all_local(problem)
    local_slots = attention.units - sum(slots)
    kv = [attention.layers * size for size in attention.tier_bytes((local_slots, *slots))]
    slot_ratios = {attention.name: [n / attention.units for n in (local_slots, *slots)]}
    caps = [cap - held for cap, held in zip(problem.caps, kv, strict=True)]
    resident = sum(op.layers * op.resident_bytes for op in weights)
    wanted = policy.offload_ratio
    room = (max(0.0, resident - caps[0]), sum(caps[1:])) if wanted is None else (0.0, resident)
    if problem.one_ratio:
        ratios = whole_ratios(problem)[: len(weights)]
        wanted = (1 - ratios[0][0]) * resident
    else:
        if wanted is not None and policy.kv_offload_ratio is None:
            wanted = min(max(wanted * problem.total - sum(kv[1:]), 0.0), resident)
        elif wanted is not None:
            wanted = wanted * resident
        ratios = ideal_ratios(problem, weights, wanted, caps, slot_ratios)
    by_name = {op.name: of for op, of in zip(weights, ratios, strict=True)}
    goal = RemoteGoal(*room, wanted)

    def time(op: Op, units: int) -> float:
        """Bound in seconds of a layer of `op` with `units` remote units, and its prompts' work."""
        read = problem.tier_bytes(op, units, by_name[op.name])
        seconds, work = problem.costs.bound(op, read, "direct"), problem.prompts.times[op.name].work
        if len(work) > 1:
            seconds += bound_time(work, [n / op.read_bytes for n in read]) / op.layers
        return seconds

    totals = round_ratios(weights, [1 - of[0] for of in ratios], goal, time)
    greedy = problem.strategy != "uniform"
    if greedy and wanted is None and len(caps) == 2 and problem.transport != "staged":
        totals = balanced(problem, totals, goal)
    free = [
        cap
        - sum(r[t] * op.layers * op.resident_bytes for op, r in zip(weights, ratios, strict=True))
        for t, cap in enumerate(caps)
    ][1:]
    sink = free.index(max(free))  # this tier takes the units left over by rounding
    placed = {
        op.name: split_units(op, units, by_name[op.name][1:], sink)
        for op, units in zip(weights, totals, strict=True)
    }
    placed[attention.name] = ((local_slots, *slots),) * attention.layers
    return placed


def all_local(problem: Problem) -> Placement:
    """Every unit in the local tier."""
    nowhere_else = (0,) * (len(problem.tiers) - 1)
    return {op.name: ((op.units, *nowhere_else),) * op.layers for op in problem.costs.ops}


def balanced(
    problem: Problem, totals: Sequence[tuple[int, ...]], goal: RemoteGoal
) -> list[tuple[int, ...]]:
    """Remote units of every layer of the problem's weights with which each op is fastest.

    `totals` are the ideal remote units of each op's layers, rounded; there is one remote tier. A
    linear op may be faster in the CTA model with a few row blocks more or fewer. Numbers are tried
    whose bound is within one unit's time of the op's least bound. Returns `totals` unchanged if
    the budgets determine the total.
    """
    unchanged, ops = list(totals), problem.weights
    if not goal.required <= best_total([problem.curves[op.name] for op in ops]) <= goal.limit:
        return unchanged
    moved = [
        (_balanced_units(problem.costs, op, problem.curves[op.name], max(units)),) * op.layers
        if op.category == "linear"
        else units
        for op, units in zip(ops, totals, strict=True)
    ]
    placed = sum(remote_bytes(op, n) for op, units in zip(ops, moved, strict=True) for n in units)
    return moved if goal.required <= placed <= goal.limit else unchanged


@functools.lru_cache(maxsize=256)
def _balanced_units(costs: StepCosts, op: Op, curve: Curve, start: int) -> int:
    """Remote units of one layer with which `op` is fastest in the CTA model, near `start`."""
    unit = op.unit_bytes(0, 1) / min(curve.local_rate, curve.remote_rate)
    highest = curve.floor / op.layers + unit

    def bound(units: int) -> float:
        return costs.bound(op, op.tier_bytes((op.units - units, units)), "direct")

    def seconds(units: int) -> float:
        kernel, link = costs.in_place(op, (op.units - units, units))
        work = kernel_compute_time(op, max(kernel, costs.compute[op.name]), costs.profile)
        return max(bound(units), work, link)

    near = range(max(1, start - REACH), min(op.units, start + REACH + 1))
    options = [units for units in near if bound(units) <= highest]
    if not start or not options:
        return start
    return min(options, key=lambda n: (seconds(n), abs(n - start)))
