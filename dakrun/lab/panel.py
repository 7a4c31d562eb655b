"""A panel, a set of axes with its series, and panels side by side as a PNG.

The page of `dakrun evaluate` draws panels itself (svg.py there). matplotlib is imported when a PNG
is drawn.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dakrun.plan.show import picture

Kind = Literal["measured", "predicted", "line", "missing"]

COLOURS = [
    *(picture.BLUE, picture.VERMILION, picture.GREEN),
    *(picture.ORANGE, picture.PURPLE, picture.SKY),
]
MARKERS = "os^DvP"
DASHES = {"measured": "-", "predicted": "--", "line": "--", "missing": ""}


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
class Axes:
    """Looks of a panel. With `categories` the series are grouped bars, a group for each category.

    With `root_x` distances along x are those of square roots, which leaves more room near 0.
    `x` is the axis's title with units, `marks` vertical lines with a short text.
    """

    title: str
    x: str
    categories: Sequence[str] = ()
    log_x: bool = False
    root_x: bool = False
    marks: Sequence[tuple[float, str]] = ()


@dataclass(frozen=True, kw_only=True)
class Panel(Axes):
    """A set of axes with its series; `y` is the axis's title with units."""

    y: str
    series: Sequence[Series]
    log_y: bool = False

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


def png(
    panels: Sequence[Panel | Callable[[Any], None]],
    path: Path,
    *,
    title: str = "",
    columns: int = 2,
) -> None:
    """Write `panels` to `path`, a function of its axes being drawn by itself.

    Raises UsageError if the file cannot be written.
    """
    columns = min(columns, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure = picture.new_figure(6.8 * columns + 0.6, 5.0 * rows + 0.6)
    figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.12)
    layout = figure.add_gridspec(rows, 2 * columns)
    for number, panel in enumerate(panels):
        row, column = divmod(number, columns)
        last_alone = number == len(panels) - 1 and column == 0 and columns > 1
        first = 1 if last_alone else 2 * column
        axes = figure.add_subplot(layout[row, first : first + 2])
        draw(panel, axes) if isinstance(panel, Panel) else panel(axes)
    figure.suptitle(title, fontsize=12)
    picture.save(figure, path)


def draw(panel: Panel, axes: Any) -> None:
    """Draw a panel of lines: bounds in grey, a colour and a marker for each name of a series."""
    names = list(dict.fromkeys(of.name for of in panel.series if of.kind != "line"))
    axes.set(xscale="log" if panel.log_x else "linear", yscale="log" if panel.log_y else "linear")
    for series in panel.series:
        points = panel.usable(series)
        if not points:
            continue
        look: dict[str, Any] = {"color": picture.GREY, "lw": 1.0, "zorder": 1}
        if series.kind != "line":
            place = names.index(series.name)
            look = {"color": COLOURS[place % len(COLOURS)], "lw": 1.2, "ms": 5}
            look["marker"] = MARKERS[place % len(MARKERS)]
        label: str | None = f"{series.name}, {series.note}" if series.note else series.name
        if any(line.get_label() == label for line in axes.lines):
            label = None  # once in the legend
        axes.plot(*zip(*points, strict=True), DASHES[series.kind], label=label, **look)
    for x, text in panel.marks:
        axes.axvline(x, color="black", ls=":", lw=1.1, label=text)
    axes.legend(fontsize=8, framealpha=0.95)
    picture.caption(axes, panel.title, panel.x, panel.y)
