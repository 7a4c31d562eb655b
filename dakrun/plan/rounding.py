"""Rounding of ideal ratios to whole row blocks and slots. Knows ops, no budgets and no machine."""

import bisect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dakrun.plan.ops import Op

_FUZZ = 1e-9
_FUZZ_BYTES = 1e-4  # above the rounding error of a ratio, far below an element


@dataclass(frozen=True)
class RemoteGoal:
    """Goal of rounding, in resident bytes outside the local tier.

    `required` must be reached and `limit` must not be exceeded. `wanted` is met to the nearest row
    block. With None, row blocks are moved as long as that makes an op faster.
    """

    required: float
    limit: float
    wanted: float | None


def remote_bytes(op: Op, units: int) -> int:
    """Bytes of the last `units` units of one layer of `op`, which go to remote tiers first."""
    return op.unit_bytes(op.units - units, op.units)


def units_within(op: Op, size: float) -> int:
    """Most units of one layer of `op`, from its end, that have `size` bytes or less in all.

    The last row block of a matrix may have fewer rows than the others.
    """
    units = range(op.units + 1)
    return bisect.bisect(units, size + _FUZZ_BYTES, key=lambda n: remote_bytes(op, n)) - 1


def round_ratios(
    ops: Sequence[Op],
    ratios: Sequence[float],
    goal: RemoteGoal,
    time: Callable[[Op, int], float],
) -> list[tuple[int, ...]]:
    """Remote units of every layer of every op, within one unit of ratio x bytes.

    All ops are rounded down. Then single layers get one unit more, in the order of the least added
    `time(op, remote units)` (seconds) per byte, spread evenly over the model.
    """
    ideal = [x * op.resident_bytes for op, x in zip(ops, ratios, strict=True)]
    low = [units_within(op, size) for op, size in zip(ops, ideal, strict=True)]
    raised = [0] * len(ops)
    placed = float(sum(op.layers * remote_bytes(op, n) for op, n in zip(ops, low, strict=True)))

    def cost(i: int) -> float:
        return time(ops[i], low[i] + 1) - time(ops[i], low[i])

    def size(i: int) -> int:
        return remote_bytes(ops[i], low[i] + 1) - remote_bytes(ops[i], low[i])

    uneven = [i for i, op in enumerate(ops) if ideal[i] - remote_bytes(op, low[i]) > _FUZZ_BYTES]
    for i in sorted(uneven, key=lambda i: cost(i) / size(i)):
        if goal.wanted is None:
            count = ops[i].layers if cost(i) < 0 else 0
        else:
            count = math.floor((goal.wanted - placed) / size(i) + 0.5)
        count = max(count, math.ceil((goal.required - placed) / size(i) - _FUZZ), 0)
        fits = max(0, math.floor((goal.limit - placed) / size(i) + _FUZZ))
        raised[i] = min(count, ops[i].layers, fits)
        placed += raised[i] * size(i)
    return [
        tuple(
            n + (k * (layer + 1) // op.layers - k * layer // op.layers)
            for layer in range(op.layers)
        )
        for op, n, k in zip(ops, low, raised, strict=True)
    ]


def split_units(
    op: Op, remote_units: Sequence[int], ratios: Sequence[float], sink: int
) -> tuple[tuple[int, ...], ...]:
    """Units of every tier, the local one first, for each layer of `op`.

    `remote_units` has the remote units of each layer, `ratios` the op's ratio in each remote tier.
    Each tier gets its ratio, rounded down over the layers so that no capacity is exceeded; remote
    tier number `sink` gets the rest.
    """
    whole = max(op.unit_bytes(0, 1), 1)
    others = [  # units a layer of the tiers that have some, but for the sink
        (tier, ratio * op.resident_bytes / whole)
        for tier, ratio in enumerate(ratios)
        if tier != sink and ratio > 0
    ]
    placed = [0] * len(ratios)
    placement = []
    for layer, units in enumerate(remote_units, 1):
        counts, left = [0] * len(ratios), units
        for tier, ideal in others:
            count = min(math.floor(ideal * layer + _FUZZ) - placed[tier], left)
            counts[tier] = count
            placed[tier] += count
            left -= count
        counts[sink] = left
        placement.append((op.units - units, *counts))
    return tuple(placement)
