"""The least time of a step and its prompts over one remote tier, by a solver of its own (HiGHS)."""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
from scipy.optimize import linprog

from dakrun.plan.linear_program import OpLines
from dakrun.plan.prompt_pass import WORK
from dakrun.plan.roofline import Line


def sides(line: Line) -> tuple[float, float]:
    """Seconds of a line at ratio 0 and 1."""
    constant, by_tier = line
    return constant + by_tier.get(0, 0.0), constant + by_tier.get(1, 0.0)


def least_seconds(
    ops: Sequence[OpLines], low: float, high: float, elsewhere: Mapping[str, float] | None = None
) -> float:
    """Least sum of the ops' times, and of the longest that their prompt passes wait for.

    `low` to `high` bytes are remote. `elsewhere` has seconds of passes besides.
    """
    n, elsewhere = len(ops), elsewhere or {}
    unit = max(max(sides(line)) for op in ops for line in op.lines)
    rows: list[npt.NDArray[np.float64]] = []
    limits: list[float] = []

    def add(x: Mapping[int, float], other: Mapping[int, float], limit: float) -> None:
        row = np.zeros(3 * n + 1)  # ratios, seconds in steps, seconds in passes, the passes
        for i, value in x.items():
            row[i] = value / unit
        for i, value in other.items():
            row[i] = value
        rows.append(row)
        limits.append(limit / unit)

    for i, op in enumerate(ops):
        for column, lines in ((n + i, op.lines), (2 * n + i, op.prompts.work)):
            for start, end in map(sides, lines):
                add({i: end - start}, {column: -1.0}, -start)
    work = dict.fromkeys(range(2 * n, 3 * n), 1.0)
    add({}, work | {3 * n: -1.0}, -elsewhere.get(WORK, 0.0))
    for name in {name for op in ops for name in op.prompts.copies}:
        copied = {
            i: sides(op.prompts.copies[name])[1]
            for i, op in enumerate(ops)
            if name in op.prompts.copies
        }
        add(copied, {3 * n: -1.0}, -elsewhere.get(name, 0.0))
    total = sum(op.resident for op in ops)
    share = np.concatenate([[op.resident / total for op in ops], np.zeros(2 * n + 1)])
    result = linprog(
        [0.0] * n + [1.0] * n + [0.0] * n + [1.0],
        A_ub=np.vstack([*rows, share, -share]),
        b_ub=[*limits, high / total, -low / total],
        bounds=[(0, 1)] * n + [(0, None)] * (2 * n + 1),
        method="highs",
    )
    assert result.success, result.message
    return float(result.fun) * unit
