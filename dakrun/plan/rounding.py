"""From ideal shares to whole row blocks: which layers of an op get one more than the others."""

import bisect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dakrun.plan.ops import Op

_FUZZ = 1e-9
_FUZZ_BYTES = 1e-4  # above the rounding error of a share, far below an element


@dataclass(frozen=True)
class RemoteBytes:
    """What rounding aims at, in resident bytes outside the local tier.

    `required` must be reached and `limit` not passed; `wanted` is met to the nearest row block,
    or, where it is None, row blocks are moved as long as that makes an op faster.
    """

    required: float
    limit: float
    wanted: float | None


def remote_bytes(op: Op, units: int) -> int:
    """Bytes of the last `units` units of one layer of `op`: those that go to remote tiers."""
    return op.unit_bytes(op.units - units, op.units)


def units_within(op: Op, size: float) -> int:
    """Most units of one layer of `op`, counted from its end, that are `size` bytes or less.

    Counted in bytes because the last row block of a matrix may have fewer rows than the others.
    """
    units = range(op.units + 1)
    return bisect.bisect(units, size + _FUZZ_BYTES, key=lambda n: remote_bytes(op, n)) - 1


def round_shares(
    ops: Sequence[Op],
    shares: Sequence[float],
    goal: RemoteBytes,
    time: Callable[[Op, int], float],
) -> list[tuple[int, ...]]:
    """Remote units of every layer of every op, within one unit of share x bytes.

    Ops are rounded down, then single layers are raised by one unit where that costs the least
    `time(op, remote units)` (seconds) per byte; raised layers are spread evenly over the model.
    """
    ideal = [s * op.resident_bytes for op, s in zip(ops, shares, strict=True)]
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
    op: Op, remote_units: Sequence[int], shares: Sequence[float], sink: int
) -> tuple[tuple[int, ...], ...]:
    """Units of every tier, the local one first, for each layer of `op`.

    `remote_units` of a layer are divided over the remote tiers: each gets its share of the op,
    rounded down over the layers so that no capacity is passed, and tier `sink` gets the rest.
    """
    whole = max(op.unit_bytes(0, 1), 1)
    placed = [0] * len(shares)
    placement = []
    for layer, units in enumerate(remote_units):
        counts, left = [0] * len(shares), units
        for tier, share in enumerate(shares):
            if tier != sink:
                ideal = math.floor(share * op.resident_bytes * (layer + 1) / whole + _FUZZ)
                counts[tier] = min(ideal - placed[tier], left)
                placed[tier] += counts[tier]
                left -= counts[tier]
        counts[sink] = left
        placement.append((op.units - units, *counts))
    return tuple(placement)
