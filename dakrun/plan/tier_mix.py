"""Shares of every op over several remote tiers: the linear program of DESIGN.md's planner.

With one remote tier its optimum is what greedy.py finds without it. Knows no row blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dakrun.plan.roofline import Line, time_of
from dakrun.plan.simplex import minimise


@dataclass(frozen=True)
class MixedOp:
    """One op (all its layers): its `resident` bytes, and lower bounds of its time by tier.

    Tier 0 is the local one.
    """

    resident: float
    lines: tuple[Line, ...]


def mixed_shares(
    ops: Sequence[MixedOp],
    capacities: Sequence[float],
    remote_bytes: float | None,
    *,
    uniform: bool = False,
) -> list[tuple[float, ...]] | None:
    """Share of each tier for every op, in the least total time; None where nothing fits.

    `capacities` are bytes per tier, the local one first; `remote_bytes` fixes how many lie outside
    it. With `uniform` all ops get the same shares.
    """
    tiers, count = len(capacities), len(ops)
    blocks = 1 if uniform else count
    width = blocks * tiers + count  # shares, then each op's time above its constant floor
    total = sum(op.resident for op in ops)
    if total == 0 or min(capacities) < 0:
        return None
    floors = [max(c for c, by in op.lines if not by) for op in ops]
    scale = max(time_of(op.lines, [1.0] + [0.0] * (tiers - 1)) for op in ops)

    def column(op: int, tier: int) -> int:
        return (0 if uniform else op) * tiers + tier

    rows, limits = [], []
    for i, op in enumerate(ops):
        for constant, by in op.lines:
            if not by:
                continue
            row = np.zeros(width)
            for tier, k in by.items():
                row[column(i, tier)] = k / scale
            row[blocks * tiers + i] = -1.0
            if floors[i] < constant:
                raise ValueError("expected every line's constant to be at most the op's floor")
            rows.append(row)
            limits.append((floors[i] - constant) / scale)
    for tier, capacity in enumerate(capacities):
        row = np.zeros(width)
        for i, op in enumerate(ops):
            row[column(i, tier)] += op.resident / total
        rows.append(row)
        limits.append(min(capacity / total, 1.0))
    whole = np.zeros((blocks, width))
    for block in range(blocks):
        whole[block, block * tiers : (block + 1) * tiers] = 1.0
    sums = np.ones(blocks)
    if remote_bytes is not None:
        whole = np.vstack([whole, rows[-tiers]])
        sums = np.append(sums, 1 - min(remote_bytes / total, 1.0))
    cost = np.concatenate([np.zeros(blocks * tiers), np.ones(count)])
    x = minimise(cost, (np.array(rows), np.array(limits)), (whole, sums))
    if x is None:
        return None
    found = x[: blocks * tiers].reshape(blocks, tiers)
    return [tuple(found[0 if uniform else i].tolist()) for i in range(count)]
