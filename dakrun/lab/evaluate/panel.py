"""A panel of a figure: its series, its axes, and the arithmetic of limits and rows.

Imports no matplotlib.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["measured", "predicted", "line", "missing"]


@dataclass(frozen=True, kw_only=True)
class Series:
    """A line, or a set of bars: x is then the number of the category.

    Series of one name share a colour and a marker. A "line" is a bound or an ideal. Of "missing"
    points only x counts; `note` says why they are missing.
    """

    name: str
    points: Sequence[tuple[float, float]]
    kind: Kind = "measured"
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Panel:
    """A set of axes. With `categories` the series are grouped bars, a group for each category.

    With `root_x` distances along x are those of square roots, which leaves more room near 0.
    `x` and `y` are the axes' titles with units, `marks` vertical lines with a short text.
    """

    title: str
    x: str
    y: str
    series: Sequence[Series]
    categories: Sequence[str] = ()
    log_x: bool = False
    log_y: bool = False
    root_x: bool = False
    marks: Sequence[tuple[float, str]] = ()


def usable(points: Iterable[tuple[float, float]], panel: Panel) -> list[tuple[float, float]]:
    """The points that can be drawn: finite, and positive on logarithmic axes."""
    log_x, log_y = panel.log_x and not panel.categories, panel.log_y
    return [
        (x, y)
        for x, y in points
        if math.isfinite(x) and math.isfinite(y) and (x > 0 or not log_x) and (y > 0 or not log_y)
    ]


def limits(values: Sequence[float], *, log: bool, zero: bool = False) -> tuple[float, float]:
    """The ends of an axis around `values`, at 0 if `zero` and nothing is negative."""
    if not values:
        return (1, 10) if log else (0, 1)
    low, high = min(values), max(values)
    if log:
        factor = max((high / low) ** 0.05, 1.15)
        return low / factor, high * factor
    if zero and low >= 0:
        return 0, 1.06 * high or 1
    pad = 0.05 * (high - low) or abs(high) / 10 or 1
    return low - pad, high + pad


def stack(spans: Sequence[tuple[float, float]]) -> list[int]:
    """A row for each span (start, end) so that none overlap; 0 is the first row."""
    rows: list[float] = []  # where each row is taken up to
    places = [0] * len(spans)
    for place in sorted(range(len(spans)), key=lambda i: spans[i]):
        start, end = spans[place]
        row = next((row for row, taken in enumerate(rows) if taken <= start), len(rows))
        rows[row:] = [end] if row == len(rows) else [end, *rows[row + 1 :]]
        places[place] = row
    return places


def number(value: float) -> str:
    """A tick's text."""
    return f"{value + 0.0:,.6g}"
