"""Charts: points that share axes, and what is drawn of their results. Needs no torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dakrun.lab.evaluate.points import Point, Result
from dakrun.lab.panel import Axes, Series


@dataclass(frozen=True)
class Entry:
    """A point in a chart: its series (a line or colour of bars) and its `x`.

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

    `name` tells a figure's charts apart in its CSV. `place` formats an x in words.
    """

    name: str
    shown: Sequence[Quantity]
    entries: Sequence[Entry]
    place: str = "{:,.0f}"

    def where(self, x: float) -> str:
        """The value `x` of the axis in words."""
        return self.categories[int(x)] if self.categories else self.place.format(x)


def brief(problem: str) -> str:
    """The beginning of a problem, for a label."""
    first = problem.partition("; ")[0].partition(": ")[0]
    return first if len(first) <= 48 else f"{first[:45]}..."
