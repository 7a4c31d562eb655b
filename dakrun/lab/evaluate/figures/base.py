"""What a figure is, and what figures share: quantities, factors and crossings.

Imports neither torch nor matplotlib.
"""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import ClassVar

from dakrun.config import Dtype
from dakrun.lab.evaluate.charts import Chart, Curve, FigureData, Quantity, brief
from dakrun.lab.evaluate.points import Result
from dakrun.lab.evaluate.scope import Scope
from dakrun.plan import Op, compute_time, greedy

SAME = 0.005  # factors closer to 1 than this are equal


class Figure(ABC):
    """A figure of the paper: its measurements, and sentences on their results.

    `paper` says what the paper shows. `claimed` is the paper's claim, as a beginning of a sentence
    that `here` ends with this machine's figures.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    paper: ClassVar[str]
    claimed: ClassVar[str]

    @abstractmethod
    def charts(self, scope: Scope) -> list[Chart]:
        """What is measured, and how it is drawn."""

    def sentences(self, data: FigureData) -> Iterable[str]:
        """What the results say: who wins, by what factor, where the crossing lies.

        By default, where the first series of each chart is faster than the others at most.
        """
        for chart in data.charts:
            for other, x, gain in gains(data, chart):
                clause = faster(gain, chart.entries[0].series, other)
                yield f"{chart.name}: at most, at {chart.where(x)}, {clause}."

    def here(self, data: FigureData) -> Iterable[str]:
        """This machine's figures beside the paper's claim.

        By default the largest factor by which the first series is faster than each other one.
        """
        most: dict[str, float] = {}
        for chart in data.charts:
            for other, _, gain in gains(data, chart):
                most[other] = max(gain, most.get(other, 0.0))
        yield from (f"{factor(gain)} as fast as {other}" for other, gain in most.items())

    def missing(self, scope: Scope) -> str:
        """Why `here` gives none."""
        return "not measured yet"

    def table(self, data: FigureData) -> list[list[str]]:
        """Rows of a table beside the pictures, the header first; none for most figures."""
        return []

    def notes(self, scope: Scope) -> list[str]:
        """Differences from the paper, and what to know when reading."""
        return []

    def data(self, scope: Scope, results: dict[str, Result]) -> FigureData:
        """The charts with the `results` that are known, by the points' keys."""
        return FigureData(scope, self.charts(scope), results)

    def finding(self, data: FigureData) -> str:
        """The sentences; or why there are none."""
        if text := " ".join(self.sentences(data)):
            return text
        if problems := data.problems():
            return f"Too few points have a time: {', '.join(map(brief, problems))}."
        return "Nothing is measured yet."

    def claim(self, data: FigureData) -> str:
        """The paper's claim beside this machine's figures."""
        here = ", ".join(self.here(data)) or self.missing(data.scope)
        return f"{self.claimed} {here}." if self.claimed.endswith(":") else self.claimed


def scaled(name: str, scale: float) -> Callable[[Result], float | None]:
    """The figure `name` of a result, times `scale`."""

    def value(result: Result) -> float | None:
        known = getattr(result, name)
        return None if known is None else known * scale

    return value


EB = Quantity("EB: weight bytes per step time (GB/s)", scaled("eb", 1e-9), log=True)
STEP = Quantity("decode step (ms)", scaled("seconds", 1e3), log=True)
STEP_LINEAR = replace(STEP, log=False)
LAUNCH = Quantity("time of a launch (us)", scaled("seconds", 1e6))


def thresholds(op: Op, dtype: Dtype, scope: Scope) -> tuple[float, float]:
    """The offload ratios (a, b) between which `op` is at its fastest, by rates alone."""
    local, remote, _ = scope.rates
    compute = compute_time(op, scope.profile, dtype)
    least = max(compute, op.read_bytes / scope.links.total_rate())
    curve = greedy.Curve(op.read_bytes, op.read_bytes, least, local, remote)
    return curve.a, curve.b


def fastest(curve: Curve) -> tuple[float, float] | None:
    """The point of least time."""
    return min(curve.items(), key=lambda of: of[1], default=None)


def crossing(curve: Curve, other: Curve) -> float | None:
    """The least x from which `other` is faster than `curve`, between points in a straight line.

    Only x that both have count. None if it is not faster at the last of them.
    """
    both = [(x, s - other[x]) for x, s in curve.items() if x in other]
    if not both or both[-1][1] <= 0:
        return None
    steps = [(x0 + (x1 - x0) * -d0 / (d1 - d0)) for (x0, d0), (x1, d1) in itertools.pairwise(both)
             if d0 <= 0 < d1]  # fmt: skip
    return steps[-1] if steps else both[0][0]


def largest(curve: Curve, other: Curve) -> tuple[float, float] | None:
    """(x, factor) by which `curve` is faster than `other` at most, where both have a time."""
    factors = {x: other[x] / s for x, s in curve.items() if x in other}
    return max(factors.items(), key=lambda of: of[1], default=None)


def gains(data: FigureData, chart: Chart) -> list[tuple[str, float, float]]:
    """(series, x, factor) by which a chart's first series is faster than each other one at most."""
    first, *others = data.lines(chart)
    found = [(of, largest(data.times(chart, first), data.times(chart, of))) for of in others]
    return [(other, *gain) for other, gain in found if gain]


def factor(value: float) -> str:
    """ "1.32 x"."""
    return f"{value:.2f} x"


def faster(value: float, what: str, other: str) -> str:
    """A clause that says by what factor `what` is faster or slower than `other`."""
    if abs(value - 1) < SAME:
        return f"{what} and {other} take the same time"
    if value > 1:
        return f"{what} is {factor(value)} as fast as {other}"
    return f"{what} takes {factor(1 / value)} as long as {other}"
