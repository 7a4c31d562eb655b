"""Ratios of every op over several remote tiers: a linear program, solved by the simplex method.

README.md in this folder derives the program. With one remote tier its optimum is the greedy's.
Knows no row blocks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from dakrun.plan.prompt_pass import WORK, PassTimes
from dakrun.plan.roofline import Line

_TOLERANCE = 1e-10
Matrix = npt.NDArray[np.float64]


@dataclass(frozen=True)
class OpLines:
    """One op (all its layers): its `resident` bytes and the lower bounds of its time.

    Tier 0 is the local one. `lines` are in seconds per ratio of the bytes read, as in Links.lines.
    `classes` divide the resident bytes into equal parts; each number is the share of the bytes read
    that is read of a part. `prompts` are the op's times in prompt passes, which read all classes
    alike.
    """

    resident: float
    lines: tuple[Line, ...]
    classes: tuple[float, ...] = (1.0,)
    prompts: PassTimes = field(default_factory=lambda: PassTimes(((0.0, {}),), {}))


def best_ratios(
    ops: Sequence[OpLines],
    capacities: Sequence[float],
    remote_bytes: float | None,
    *,
    uniform: bool = False,
    elsewhere: Mapping[str, float] | None = None,
) -> list[tuple[float, ...]] | None:
    """Ratio of each op's bytes in every tier, in the least total time; None if nothing fits.

    The total is the sum of the ops' times in a step, and the longest of what its prompt passes wait
    for: the work of all ops, or copies over a link. `elsewhere` has seconds of work and copies
    besides those of `ops`. `capacities` are bytes per tier, the local one first; `remote_bytes`
    fixes the bytes outside it. With `uniform` all ops have the same ratios, and so have all classes
    of an op.
    """
    tiers = len(capacities)
    # Each class of an op has ratios of its own: its op, and its shares of resident and read bytes.
    parts = [
        (i, 1 / len(classes), share)
        for i, op in enumerate(ops)
        for classes in [(1.0,) if uniform else op.classes]
        for share in classes
    ]
    blocks = 1 if uniform else len(parts)
    total = sum(op.resident for op in ops)
    if total == 0 or min(capacities) < 0:
        return None
    # The columns: ratios; times of each op above its floor, in steps and in passes, scaled to about
    # 1; and, if passes may wait for copies, the time of passes above its least value.
    copies = sorted({name for op in ops for name in op.prompts.copies})
    step = range(blocks * tiers, blocks * tiers + len(ops))
    work = range(step.stop, step.stop + len(ops))
    whole_pass = work.stop
    width = whole_pass + bool(copies)
    rows: list[Matrix] = []
    limits: list[float] = []
    cost = np.zeros(width)

    def add(
        of: Mapping[int, Mapping[int, float]], seconds: Mapping[int, float], limit: float,
        unit: float, *, by_reads: bool = False,
    ) -> None:  # fmt: skip
        """Keep ratios times the seconds `of` each op, and columns of `seconds`, below `limit`."""
        row = np.zeros(width)
        for part, (i, held, read) in enumerate(parts):
            for tier, k in of[i].items() if i in of else ():
                column = (0 if uniform else part) * tiers + tier
                row[column] += (read if by_reads else held) * k / unit
        for column, value in seconds.items():
            row[column] = value / unit
        if limit < -1e-12 * unit:
            raise ValueError("expected every line's constant to be at most the op's floor")
        rows.append(row)
        limits.append(max(0.0, limit) / unit)

    def longest(lines: Sequence[Line]) -> float:
        return max((k for _, by in lines for k in by.values()), default=0.0)

    passes: dict[int, float] = {}  # seconds by column
    for i, op in enumerate(ops):
        cost[step[i]] = unit = longest(op.lines)
        for constant, by in op.lines if unit else ():
            if by:
                limit = _floor(op.lines) - constant
                add({i: by}, {step[i]: -unit}, limit, unit, by_reads=True)
        passes[work[i]] = unit = longest(op.prompts.work)
        for constant, by in op.prompts.work if unit else ():
            if by:
                add({i: by}, {work[i]: -unit}, _floor(op.prompts.work) - constant, unit)
    if copies:
        waits = dict(elsewhere or {})
        waits[WORK] = waits.get(WORK, 0.0) + sum(_floor(op.prompts.work) for op in ops)
        least = max(waits.values())
        copied = {
            name: {i: op.prompts.copies[name][1] for i, op in enumerate(ops)
                   if name in op.prompts.copies} for name in copies
        }  # fmt: skip
        unit = max(*passes.values(), *(k for of in copied.values() for by in of.values()
                                       for k in by.values()))  # fmt: skip
        add({}, passes | {whole_pass: -unit}, least - waits[WORK], unit)
        for name, of in copied.items():
            add(of, {whole_pass: -unit}, least - waits.get(name, 0.0), unit)
        passes = {whole_pass: unit}
    for column, seconds in passes.items():
        cost[column] = seconds
    cost /= cost.max()
    for tier, capacity in enumerate(capacities):
        row = np.zeros(width)
        for part, (i, share, _) in enumerate(parts):
            row[(0 if uniform else part) * tiers + tier] += share * ops[i].resident / total
        rows.append(row)
        limits.append(min(capacity / total, 1.0))
    whole = np.zeros((blocks, width))
    for block in range(blocks):
        whole[block, block * tiers : (block + 1) * tiers] = 1.0
    sums = np.ones(blocks)
    if remote_bytes is not None:
        whole = np.vstack([whole, rows[-tiers]])
        sums = np.append(sums, 1 - min(remote_bytes / total, 1.0))
    x = minimise(cost, (np.array(rows), np.array(limits)), (whole, sums))
    if x is None:
        return None
    ratios, found = x[: blocks * tiers].reshape(blocks, tiers), np.zeros((len(ops), tiers))
    for part, (i, share, _) in enumerate(parts):
        found[i] += share * ratios[0 if uniform else part]
    return [tuple(of.tolist()) for of in found]


def _floor(lines: Sequence[Line]) -> float:
    """The highest of the constant lines, in seconds; 0 if there are none."""
    return max((constant for constant, by in lines if not by), default=0.0)


def minimise(
    cost: Matrix, at_most: tuple[Matrix, Matrix], equal: tuple[Matrix, Matrix]
) -> Matrix | None:
    """The x >= 0 with the least cost @ x under A x <= b and E x = d; None if there is none.

    `cost` is [n]; `at_most` is (A [p, n], b [p]) and `equal` (E [q, n], d [q]); entries of b and d
    are at least 0 (else ValueError). Coefficients should be of the order of 1. Dense two-phase
    simplex method for a few dozen variables (Chvatal, Linear Programming, 1983, chapters 2, 3).
    """
    (a, b), (e, d) = at_most, equal
    p, q, n = len(b), len(d), len(cost)
    if min(b.min(initial=0.0), d.min(initial=0.0)) < 0:
        raise ValueError("expected right-hand sides of at least 0")
    table = np.zeros((p + q, n + p + q + 1))
    table[:p, :n], table[p:, :n] = a, e
    table[:, n : n + p + q] = np.eye(p + q)
    table[:p, -1], table[p:, -1] = b, d
    basis = list(range(n, n + p + q))
    artificial = np.zeros(n + p + q)
    artificial[n + p :] = 1.0
    _improve(table, basis, artificial, n + p + q)
    if artificial[basis] @ table[:, -1] > 1e-7:
        return None
    for row in range(p + q):  # artificial variables that stay at zero must not come back
        columns = np.flatnonzero(np.abs(table[row, : n + p]) > 1e-9)
        if basis[row] >= n + p and len(columns):
            _pivot(table, basis, row, int(columns[0]))
    _improve(table, basis, np.concatenate([cost, np.zeros(p + q)]), n + p)
    x = np.zeros(n + p + q)
    x[basis] = table[:, -1]
    return x[:n]


def _improve(table: Matrix, basis: list[int], cost: Matrix, columns: int) -> None:
    """Pivot on the first `columns` columns until no step lowers the cost.

    The steepest column enters. After 20 steps without progress the first one does (Bland's rule),
    which cannot cycle.
    """
    idle, best = 0, np.inf
    reduced = np.append(cost, 0.0) - cost[basis] @ table  # the last one is the cost, negated
    while True:
        entering = np.flatnonzero(reduced[:columns] < -_TOLERANCE)
        if not len(entering):
            return
        value = -float(reduced[-1])
        idle, best = (0, value) if value < best - _TOLERANCE else (idle + 1, best)
        column = int(entering[0] if idle > 20 else reduced[:columns].argmin())
        rising = np.flatnonzero(table[:, column] > _TOLERANCE)
        if not len(rising):
            raise ArithmeticError("the linear program has no bound")
        ratios = table[rising, -1] / table[rising, column]
        tied = rising[ratios <= ratios.min() + 1e-13]
        row = min(tied.tolist(), key=lambda row: basis[row])
        _pivot(table, basis, row, column)
        reduced -= reduced[column] * table[row]


def _pivot(table: Matrix, basis: list[int], row: int, column: int) -> None:
    table[row] /= table[row, column]
    factors = table[:, column].copy()
    factors[row] = 0.0
    table -= factors[:, None] * table[row]
    basis[row] = column
