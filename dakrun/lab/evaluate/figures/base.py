"""What a figure is, and what figures share: quantities, factors and crossings.

Imports neither torch nor matplotlib.
"""

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from typing import ClassVar, get_args

from dakrun.config import Dtype
from dakrun.lab.evaluate.charts import Chart, Entry, Quantity, brief
from dakrun.lab.evaluate.points import Result, Source
from dakrun.lab.evaluate.scope import Scope
from dakrun.lab.panel import Axes, Panel, Series
from dakrun.plan import Op, compute_time, greedy

Line = list[tuple[Entry, Result]]
SAME = 0.005  # factors closer to 1 than this are equal


class Curve(dict[float, float]):
    """Seconds by x, in order."""

    def fastest(self) -> tuple[float, float] | None:
        """The point of least time."""
        return min(self.items(), key=lambda of: of[1], default=None)

    def crossing(self, other: "Curve") -> float | None:
        """The least x from which `other` is faster, between points in a straight line.

        Only x that both have count. None if it is not faster at the last of them.
        """
        both = [(x, s - other[x]) for x, s in self.items() if x in other]
        if not both or both[-1][1] <= 0:
            return None
        pairs = itertools.pairwise(both)
        steps = [x0 + (x1 - x0) * -d0 / (d1 - d0) for (x0, d0), (x1, d1) in pairs if d0 <= 0 < d1]
        return steps[-1] if steps else both[0][0]

    def largest(self, other: "Curve") -> tuple[float, float] | None:
        """(x, factor) by which this is faster than `other` at most, where both have a time."""
        factors = {x: other[x] / s for x, s in self.items() if x in other}
        return max(factors.items(), key=lambda of: of[1], default=None)


class Figure(ABC):
    """A figure of the paper on a machine: its charts, and sentences on the results known by now.

    `results` are by the points' keys. `paper` says what the paper shows. `claimed` is the paper's
    claim, as a beginning of a sentence that `here` ends with this machine's figures.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    paper: ClassVar[str]
    claimed: ClassVar[str]

    def __init__(self, scope: Scope, results: dict[str, Result]) -> None:
        self.scope, self.results = scope, results
        self.charts = self.make_charts()

    @abstractmethod
    def make_charts(self) -> list[Chart]:
        """What is measured, and how it is drawn."""

    def sentences(self) -> Iterable[str]:
        """What the results say: who wins, by what factor, where the crossing lies.

        By default, where the first series of each chart is faster than the others at most.
        """
        for chart in self.charts:
            for other, x, gain in self.gains(chart):
                clause = faster(gain, chart.entries[0].series, other)
                yield f"{chart.name}: at most, at {chart.where(x)}, {clause}."

    def here(self) -> Iterable[str]:
        """This machine's figures beside the paper's claim.

        By default the largest factor by which the first series is faster than each other one.
        """
        most: dict[str, float] = {}
        for chart in self.charts:
            for other, _, gain in self.gains(chart):
                most[other] = max(gain, most.get(other, 0.0))
        yield from (f"{factor(gain)} as fast as {other}" for other, gain in most.items())

    def missing(self) -> str:
        """Why `here` gives none."""
        return "not measured yet"

    def table(self) -> list[list[str]]:
        """Rows of a table beside the pictures, the header first; none for most figures."""
        return []

    def notes(self) -> list[str]:
        """Differences from the paper, and what to know when reading."""
        return []

    def finding(self) -> str:
        """The sentences; or why there are none."""
        if text := " ".join(self.sentences()):
            return text
        if problems := self.problems():
            return f"Too few points have a time: {', '.join(map(brief, problems))}."
        return "Nothing is measured yet."

    def claim(self) -> str:
        """The paper's claim beside this machine's figures."""
        here = ", ".join(self.here()) or self.missing()
        return f"{self.claimed} {here}." if self.claimed.endswith(":") else self.claimed

    @property
    def entries(self) -> list[Entry]:
        return [entry for chart in self.charts for entry in chart.entries]

    def of(self, entry: Entry) -> Result | None:
        """The result of `entry`; None if it is not known yet."""
        return self.results.get(entry.point.key)

    def lines(self, chart: Chart) -> dict[str, Line]:
        """The series of a chart: entries with known results, problems included, in order of x."""
        lines: dict[str, Line] = {entry.series: [] for entry in chart.entries}
        for entry in sorted(chart.entries, key=lambda entry: entry.x):
            if (result := self.of(entry)) is not None:
                lines[entry.series].append((entry, result))
        return lines

    def times(self, chart: Chart, series: str) -> Curve:
        """The times of a series where there are any; x has six digits after the point."""
        line = self.lines(chart).get(series, [])
        return Curve((round(entry.x, 6), of.seconds) for entry, of in line if of.seconds)

    def problems(self) -> list[str]:
        """The reasons why entries have no time, each once."""
        known = map(self.of, self.entries)
        return list(dict.fromkeys(of.problem for of in known if of and of.problem))

    def panels(self, *, parts: bool = True) -> list[Panel]:
        """The pictures, with those that show a part of another one if `parts`."""
        return [
            self.panel(chart, shown)
            for chart in self.charts
            for shown in chart.shown
            if parts or shown.until is None
            if not shown.needed
            or any(shown.needed(of) for e in chart.entries if (of := self.of(e)))
        ]

    def panel(self, chart: Chart, shown: Quantity) -> Panel:
        """The values of each result; what has none is a marker at its x, with the reason."""
        end = math.inf if shown.until is None else shown.until
        series: list[Series] = []
        for name, line in self.lines(chart).items():
            if shown.only not in (None, name):
                continue
            drawn = [(entry.x, result) for entry, result in line if entry.x <= end]
            for kind in get_args(Source):
                known = [(x, shown.value(result)) for x, result in drawn if result.source == kind]
                points = [(x, y) for x, y in known if y is not None]
                series += [Series(name=name, points=points, kind=kind)] if points else []
            missing: dict[str, list[tuple[float, float]]] = {}
            for x, result in drawn:
                if result.problem:
                    missing.setdefault(brief(result.problem), []).append((x, 0.0))
            series += [
                Series(name=name, points=points, kind="missing", note=reason)
                for reason, points in missing.items()
            ]
        for bound in shown.lines:
            series.append(replace(bound, points=[(x, y) for x, y in bound.points if x <= end]))
        looks = {of.name: getattr(chart, of.name) for of in fields(Axes)}
        looks |= {"title": chart.title + shown.title, "log_y": shown.log}
        looks |= {"root_x": chart.root_x and shown.until is None}
        return Panel(**looks, y=shown.axis, series=series)

    def gains(self, chart: Chart) -> list[tuple[str, float, float]]:
        """(series, x, factor) by which a chart's first series is faster than each other at most."""
        first, *others = self.lines(chart)
        curve = self.times(chart, first)
        found = [(of, curve.largest(self.times(chart, of))) for of in others]
        return [(other, *gain) for other, gain in found if gain]


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
