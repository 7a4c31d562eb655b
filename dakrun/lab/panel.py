"""A panel, a set of axes with its series, which png.py and the page of `dakrun evaluate` draw.

Imports no matplotlib.
"""

import math
from collections.abc import Sequence
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

    def usable(self, series: Series) -> list[tuple[float, float]]:
        """The points of `series` that can be drawn: finite, and positive on logarithmic axes."""
        return [
            (x, y)
            for x, y in series.points
            if math.isfinite(x)
            and math.isfinite(y)
            and (x > 0 or not self.log_x)
            and (y > 0 or not self.log_y or series.kind == "missing")
        ]
