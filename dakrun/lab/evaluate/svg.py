"""A panel as HTML: its titles and legend as text, its axes and data as inline SVG.

Lengths are pixels of a phone, whose width a picture has. Colours are those of the style sheet.
"""

import math
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

from dakrun.lab.panel import Panel, Series

WIDTH, LEFT, RIGHT, HEIGHT = 360, 56, 14, 190  # of the picture, beside the axes, and of the axes
ACROSS = WIDTH - LEFT - RIGHT
LETTER, LINE, ROW = 6.6, 15, 13  # width of a letter, about; heights of texts and of missing points
GROUP = 0.84  # width of a group of bars; groups are 1 apart
COLOURS = 6
LETTERS = "ABCDEFGHIJKLMNOP"  # of marks
MARKERS = (
    "m-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0z", "m-3.5-3.5h7v7h-7z", "m0-4.5l4.5 8h-9z",
    "m0-5l5 5l-5 5l-5-5z", "m0 4.5l4.5-8h-9z", "m-1.5-4.5h3v3h3v3h-3v3h-3v-3h-3v-3h3z",
    "m-4.5 0l4.5-2l4.5 2l-4.5 2z", "m-2-4.5h4v9h-4z",
)  # fmt: skip
DASHES = ("2 3", "8 3 2 3", "9 4")  # of bounds
ROOT_TICKS = (0, 1, 2, 5, 10, 20, 40, 60, 80, 100)


def figure(panel: Panel) -> str:
    """The panel as a <figure> with a legend below its picture."""
    scale = ", square-root scale" if panel.root_x else ""
    picture = Picture(panel)
    return (
        f"<figure><figcaption><b>{escape(panel.title)}</b> {escape(panel.y)}</figcaption>"
        f'{picture.svg()}<p class="x">{escape(panel.x + scale)}</p>'
        f'<ul class="key">{"".join(picture.legend())}</ul></figure>'
    )


@dataclass(frozen=True)
class Axis:
    """The range of an axis, `bend` being its scale."""

    low: float
    high: float
    bend: Callable[[float], float]

    def __call__(self, value: float) -> float:
        """Where `value` lies, from 0 to 1."""
        low, high = self.bend(self.low), self.bend(self.high)
        return (self.bend(value) - low) / (high - low)

    def ticks(self) -> list[float]:
        """Round numbers within the range."""
        low, high, found = self.low, self.high, []
        if self.bend is math.sqrt:
            return [float(tick) for tick in ROOT_TICKS if low <= tick <= high]
        if self.bend is math.log10:
            steps = (1,) if high / low > 200 else (1, 2, 5) if high / low > 20 else (1, 2, 3, 5, 7)
            powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)))
            found = [step * 10.0**n for n in powers for step in steps]
        if len([tick for tick in found if low <= tick <= high]) < 3:
            least = (high - low) / 6
            size = 10.0 ** math.floor(math.log10(least))
            step = next(step * size for step in (1, 2, 2.5, 5, 10) if step * size >= least)
            found = [step * n for n in range(math.ceil(low / step), math.floor(high / step) + 1)]
        return [tick for tick in found if low <= tick <= high]


def axis_of(values: Sequence[float], *, log: bool = False, root: bool = False) -> Axis:
    """An axis for `values`, from 0 if its scale is linear and nothing is negative."""
    low, high = min(values, default=1.0), max(values, default=10.0)
    if log:
        factor = max((high / low) ** 0.05, 1.15)
        return Axis(low / factor, high * factor, math.log10)
    if root:
        return Axis(0.0, max(values, default=1.0) or 1.0, math.sqrt)
    return Axis(min(low, 0.0) * 1.06, max(high, 0.0) * 1.06 or 1.0, float)


class Picture:
    """The SVG of one panel."""

    def __init__(self, panel: Panel) -> None:
        self.panel, self.bars = panel, bool(panel.categories)
        self.drawn = [(of, panel.usable(of)) for of in panel.series if of.kind != "missing"]
        self.missing = [of for of in panel.series if of.kind == "missing" and panel.usable(of)]
        self.marks = [(x, text) for x, text in panel.marks if x > 0 or not panel.log_x]
        self.order, self.bounds = (
            {name: place for place, name in enumerate(dict.fromkeys(
                of.name for of in panel.series if (of.kind == "line") == is_bound))}
            for is_bound in (False, True)
        )  # fmt: skip
        rows = min(len(self.missing), 1) if self.bars else len(self.missing)
        self.bottom, self.slot = HEIGHT + ROW * rows, GROUP / max(len(self.order), 1)
        places = [x for of in panel.series for x, _ in panel.usable(of)]
        places += [x for x, _ in self.marks]
        heights = [y for _, points in self.drawn for _, y in points]
        if heights and panel.log_y and self.bars:
            heights.append(min(heights) / 2)  # the lowest bar has a height too
        self.y = axis_of(heights, log=panel.log_y)
        self.x = axis_of(places, log=panel.log_x, root=panel.root_x)
        if self.bars:  # categories are 1 apart
            self.x = Axis(-0.5, len(panel.categories) - 0.5, float)

    def svg(self) -> str:
        """The picture, described in words for those who cannot see it."""
        panel, any_drawn = self.panel, any(points for _, points in self.drawn)
        parts = [f'<path class="axis" d="M0 0V{self.bottom}H{ACROSS}"/>']
        for tick in self.y.ticks() if any_drawn else []:
            parts.append(f'<path class="grid" d="M0 {self._y(tick)}H{ACROSS}"/>')
            parts.append(_text(-6, self._y(tick) + 4, number(tick), "end"))
        for place, (x, _) in enumerate(self.marks):
            parts.append(f'<path class="mark" d="M{self._x(x)} 0V{self.bottom}"/>')
            parts.append(_text(self._x(x), -4 - LINE * (place % 2), LETTERS[place]))
        parts += [*self._places(), *self._data()]
        if not any_drawn:
            text = "no point has a value" if self.missing else "nothing measured yet"
            parts.append(_text(ACROSS / 2, HEIGHT / 2, text))
        lines = max(map(len, self._names()), default=1)
        top = 8 + LINE * min(len(self.marks), 2)
        box = f"{-LEFT} {-top} {WIDTH} {top + self.bottom + LINE * lines + 6}"
        names = ", ".join(dict.fromkeys(of.name for of in panel.series))
        label = escape(f"{panel.title}: {panel.y} against {panel.x}; {names}")
        return f'<svg role="img" aria-label="{label}" viewBox="{box}">{"".join(parts)}</svg>'

    def legend(self) -> Iterator[str]:
        """List items: the letters of marks with their texts, samples of series with their names."""
        for letter, (_, text) in zip(LETTERS, self.marks, strict=False):
            yield f'<li><b class="key">{letter}</b>{escape(text)}</li>'
        notes = {"predicted": ", predicted"}
        texts = {
            of.name + (f": {of.note}" if of.kind == "missing" else notes.get(of.kind, "")): of
            for of in [*(of for of, points in self.drawn if points), *self.missing]
        }
        for text, series in texts.items():
            sample = self._line(series, [(0, 7), (32, 7)]) + self._markers(series, [(16, 7)])
            image = f'<svg class="key" viewBox="0 0 32 14" aria-hidden="true">{sample}</svg>'
            yield f"<li>{image}{escape(text)}</li>"

    def _places(self) -> Iterator[str]:
        """Texts below the axes: categories, or ticks whose numbers do not overlap.

        A logarithmic axis with few x has its ticks there.
        """
        for place, lines in enumerate(self._names()):
            for row, line in enumerate(lines):
                yield _text(self._x(place), self.bottom + LINE * (row + 1), line)
        known = [of for of in self.panel.series if of.kind != "line"]
        places = sorted({x for of in known for x, _ in self.panel.usable(of)})
        exact, end = self.panel.log_x and 1 < len(places) <= 10, -math.inf
        for tick in [] if self.bars else places if exact else self.x.ticks():
            x, half = self._x(tick), LETTER * len(number(tick)) / 2
            yield f'<path class="grid" d="M{x} 0V{self.bottom}"/>'
            if x - half > end:
                yield _text(x, self.bottom + LINE, number(tick))
                end = x + half + 3

    def _names(self) -> list[list[str]]:
        """The lines below each category.

        Words that are a little too long stay whole; every other name is then a line lower.
        """
        names = self.panel.categories
        width = max(int(ACROSS / max(len(names), 1) / LETTER) - 1, 1)
        longest = max((len(word) for name in names for word in name.split()), default=0)
        whole = width < longest <= 1.7 * width
        wrapped = [textwrap.wrap(name, width, break_long_words=not whole) for name in names]
        return [[""] * (place % 2 * whole) + lines for place, lines in enumerate(wrapped)]

    def _data(self) -> Iterator[str]:
        for series, points in self.drawn:
            spots = [(self._x(x + self._shift(series)), self._y(y)) for x, y in points]
            if not self.bars:
                yield self._line(series, spots)
            elif series.kind == "line":  # across each group
                half = ACROSS / len(self.panel.categories) / 2 - 2
                yield from (self._line(series, [(x - half, y), (x + half, y)]) for x, y in spots)
            else:
                width = round(ACROSS / len(self.panel.categories) * self.slot - 1, 1)
                yield from (
                    f'<rect class="{self._look(series)}" x="{x - width / 2:.1f}" y="{y}" '
                    f'width="{width}" height="{max(HEIGHT - y, 0):.1f}"/>'
                    for x, y in spots
                )
            yield self._markers(series, spots)
        for row, series in enumerate(self.missing):
            height = HEIGHT + ROW * (0.5 if self.bars else row + 0.5)
            places = [x + self._shift(series) for x, _ in self.panel.usable(series)]
            yield self._markers(series, [(self._x(x), height) for x in places])

    def _shift(self, series: Series) -> float:
        """From the middle of a group to the middle of the series' bar."""
        place = self.order.get(series.name) if self.bars else None
        return 0.0 if place is None else self.slot * (place + 0.5) - GROUP / 2

    def _look(self, series: Series) -> str:
        """The classes of a series in the style sheet."""
        return f"{series.kind} s{self.order.get(series.name, 0) % COLOURS}"

    def _line(self, series: Series, spots: Sequence[tuple[float, float]]) -> str:
        if series.kind == "missing" or not spots:
            return ""
        path, dash = "L".join(f"{x} {y}" for x, y in spots), ""
        if series.kind == "line":
            dash = f'stroke-dasharray="{DASHES[self.bounds[series.name] % len(DASHES)]}"'
        return f'<path class="{self._look(series)} l" {dash} d="M{path}"/>'

    def _markers(self, series: Series, spots: Sequence[tuple[float, float]]) -> str:
        if series.kind == "line" or not spots:
            return ""
        shape = MARKERS[self.order[series.name] % len(MARKERS)]
        path = "".join(f"M{x} {y}{shape}" for x, y in spots)
        return f'<path class="{self._look(series)} p" d="{path}"/>'

    def _x(self, value: float) -> float:
        return round(ACROSS * self.x(value), 1)

    def _y(self, value: float) -> float:
        return round(HEIGHT * (1 - self.y(value)), 1)


def number(value: float) -> str:
    """A tick's text."""
    return f"{value + 0.0:,.6g}"


def _text(x: float, y: float, text: str, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
