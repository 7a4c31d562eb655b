"""Charts: points that share axes, what is drawn of their results, and what figures ask of them.

Imports neither torch nor matplotlib.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import get_args

from dakrun.lab.evaluate.points import Point, Result, Source
from dakrun.lab.evaluate.scope import Scope
from dakrun.lab.panel import Axes, Panel, Series

Curve = dict[float, float]  # seconds by x, in order


@dataclass(frozen=True)
class Entry:
    """A point in a chart: its series (a line or colour of bars) and its place there.

    Entries of lower `rank` are measured first.
    """

    series: str
    x: float
    point: Point
    rank: int = 1


@dataclass(frozen=True)
class Quantity:
    """What is drawn of a result: `value` on an axis called `axis`, with further `lines`.

    `title` is added to the chart's. With `only`, the picture has only the series of that name, with
    `until` only values of x up to it. With `needed`, the picture is left out unless `needed` is
    true of a result.
    """

    axis: str
    value: Callable[[Result], float | None]
    log: bool = False
    lines: Sequence[Series] = ()
    title: str = ""
    only: str | None = None
    until: float | None = None
    needed: Callable[[Result], bool] | None = None


@dataclass(frozen=True, kw_only=True)
class Chart(Axes):
    """The points of a panel: a picture for each of `shown`.

    `name` tells a figure's charts apart in its CSV. `place` says in words where an x lies.
    """

    name: str
    shown: Sequence[Quantity]
    entries: Sequence[Entry]
    place: str = "{:,.0f}"

    def where(self, x: float) -> str:
        """The place `x` in words."""
        return self.categories[int(x)] if self.categories else self.place.format(x)


Line = list[tuple[Entry, Result]]


@dataclass(frozen=True)
class FigureData:
    """The charts of a figure and the results that are known by now."""

    scope: Scope
    charts: Sequence[Chart]
    results: dict[str, Result]  # by the point's key

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
        return {round(entry.x, 6): result.seconds for entry, result in line if result.seconds}

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
        """The values of each result; what has none is a marker at its place, with the reason."""
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


def brief(problem: str) -> str:
    """The beginning of a problem, for a label."""
    first = problem.partition("; ")[0].partition(": ")[0]
    return first if len(first) <= 48 else f"{first[:45]}..."
