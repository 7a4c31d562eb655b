"""Drawing of a panel with matplotlib: lines or grouped bars, legend, marks and missing points.

All lengths are in units of the SVG, which is WIDTH of them wide. matplotlib is imported when
drawing starts.
"""

import math
import textwrap
from typing import Any

from dakrun.lab.evaluate.panel import Panel, Series, limits, number, stack, usable
from dakrun.plan.show.picture import BLUE, GREEN, PURPLE, VERMILION, new_figure

WIDTH, HEIGHT, TEXT = 480, 268, 12  # HEIGHT without legend, marks and missing points
ACROSS = 400  # width of the axes, about
LETTER = 6.9  # width of a letter, on average and on the safe side
LEGEND_ROW, MARK_ROW, MISSING_ROW = 19, 15, 30
GROUP = 0.84  # width of a group of bars; groups are 1 apart
# Okabe and Ito's orange and sky blue, darker: on white the originals have a contrast of 2.2.
COLOURS = (BLUE, VERMILION, GREEN, PURPLE, "#B57D00", "#3C94C8")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
HATCHES = ("", "///", "...", "\\\\\\", "xxx", "--", "++", "oo")
DASHES: tuple[Any, ...] = (":", "-.", (0, (9, 3)), (0, (6, 2, 1, 2, 1, 2)))
INK, PAPER = "#010203", "#fdfcfb"  # stand for the page's colours: see chart.py
ROOT_TICKS = (0, 0.01, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1)  # of a power of ten
NOTHING, NO_VALUE = "nothing measured yet", "no point has a value"


class Drawing:
    """The axes of one panel while they are drawn."""

    def __init__(self, panel: Panel) -> None:
        self.panel = panel
        self.log_x = panel.log_x and not panel.categories
        self.drawn = [
            (series, points)
            for series in panel.series
            if series.kind != "missing" and (points := usable(series.points, panel))
        ]
        self.missing = [
            (series, [x for x, _ in usable([(x, 1) for x, _ in series.points], panel)])
            for series in panel.series
            if series.kind == "missing"
        ]
        named = dict.fromkeys(of.name for of in panel.series if of.kind != "line")
        self.order = {name: place for place, name in enumerate(named)}
        self.legend: dict[str, Any] = {}  # artists by text
        self.axes: Any = None

    def figure(self) -> Any:
        """The finished figure."""
        panel = self.panel
        figure = new_figure(WIDTH / 72, HEIGHT / 72)
        figure.set_layout_engine("constrained", w_pad=4 / 72, h_pad=4 / 72)
        self.axes = axes = figure.add_subplot()
        height = float(HEIGHT)
        self._set_limits()
        axes.grid(True, axis="y" if panel.categories else "both", color=INK, alpha=0.14, lw=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["bottom", "left"]].set_color(INK)
        if panel.categories:
            self._draw_bars()
        else:
            self._draw_lines()
            height += self._draw_missing()
        if not self.drawn:
            text = NO_VALUE if self.missing else NOTHING
            axes.text(0.5, 0.6, text, ha="center", va="center", transform=axes.transAxes)
            axes.set_yticks([])
        above = self._draw_marks() if self.drawn else 0
        axes.set_title(_wrap(panel.y, ACROSS), loc="left", fontsize=TEXT, color=INK, pad=7 + above)
        title = _wrap(panel.title, WIDTH * 0.9)  # bold letters are wider
        figure.suptitle(title, x=0.01, ha="left", fontsize=TEXT + 1, weight="bold", color=INK)
        scale = ", square-root scale" if panel.root_x else ""
        axes.set_xlabel(_wrap(panel.x + scale, ACROSS), color=INK)
        height += above + 15 * title.count("\n") + self._draw_legend(figure)
        figure.set_size_inches(WIDTH / 72, height / 72)
        return figure

    def _set_limits(self) -> None:
        """Set scales, limits and ticks from all that will be drawn."""
        panel, axes = self.panel, self.axes
        ys = [y for _, points in self.drawn for _, y in points]
        if panel.log_y:
            axes.set_yscale("log")
        low, high = limits(ys, log=panel.log_y, zero=True)
        if panel.log_y and panel.categories and ys:
            low /= 2  # the lowest bar has a height too
        if panel.categories and min(ys, default=0) < 0:
            high = max(high, 0)
        axes.set_ylim(low, high)
        ticks = _ticks(low, high, log=panel.log_y)
        axes.set_yticks(ticks, [number(tick) for tick in ticks])
        axes.set_yticks([], minor=True)
        if panel.categories:
            axes.set_xlim(-0.5, len(panel.categories) - 0.5)
            self._name_categories()
            return
        xs = [x for _, points in self.drawn for x, _ in points]
        xs += [x for _, places in self.missing for x in places]
        marks = [x for x, _ in panel.marks if math.isfinite(x) and (x > 0 or not self.log_x)]
        if self.log_x:
            axes.set_xscale("log")
        low, high = limits(xs + marks, log=self.log_x)
        if panel.root_x:
            axes.set_xscale("function", functions=(_root, _square))
            low = -0.0002 * high
        axes.set_xlim(low, high)
        known = {x for of, points in self.drawn if of.kind != "line" for x, _ in points}
        shown = sorted(known or set(xs))
        spans = [self._span(ACROSS * self._fraction(x), number(x), clamp=False) for x in shown]
        exact = len(shown) == 1 or (self.log_x and 1 < len(shown) <= 10)
        ticks = shown if exact and not any(stack(spans)) else _ticks(low, high, log=self.log_x)
        if panel.root_x:
            top = 10 ** math.ceil(math.log10(high / 1.5))
            ticks = [top * part for part in ROOT_TICKS if top * part <= high]
        axes.set_xticks(ticks if xs else [], [number(tick) for tick in ticks] if xs else [])
        axes.set_xticks([], minor=True)

    def _name_categories(self) -> None:
        """Write the categories below their groups: on several lines, or slanted if too long."""
        names, axes = self.panel.categories, self.axes
        room = ACROSS / len(names) - LETTER
        slanted = any(LETTER * len(word) > room for name in names for word in name.split())
        axes.set_xticks(range(len(names)), [""] * len(names))
        axes.tick_params(axis="x", length=0)
        put = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points", "va": "top"}
        for place, name in enumerate(names):
            if slanted:
                name = textwrap.shorten(name, 24, placeholder=" …")
                turn = {"rotation": 40, "rotation_mode": "anchor", "ha": "right"}
                axes.annotate(name, (place, 0), xytext=(4, -5), **put, **turn)
                continue
            # A text for each line: the browser's font then centres it.
            for row, line in enumerate(_wrap(name, room).split("\n")):
                axes.annotate(line, (place, 0), xytext=(0, -5 - 14 * row), ha="center", **put)
        deepest = max(_wrap(name, room).count("\n") for name in names)
        longest = max(len(name) for name in names)
        pad = 5 * min(longest, 24) + 6 if slanted else 14 * deepest + 16
        axes.xaxis.labelpad = pad

    def _look(self, series: Series) -> dict[str, Any]:
        """Colour and marker of a line."""
        if series.kind == "line":
            bounds = [of.name for of in self.panel.series if of.kind == "line"]
            dash = DASHES[bounds.index(series.name) % len(DASHES)]
            return {"color": INK, "ls": dash, "lw": 1.3, "alpha": 0.75}
        place = self.order[series.name]
        colour, marker = COLOURS[place % len(COLOURS)], MARKERS[place % len(MARKERS)]
        look = {"color": colour, "marker": marker, "ms": 6.5, "lw": 1.8, "mew": 1.4}
        if series.kind == "measured":
            return {**look, "mec": PAPER, "mew": 0.6, "ms": 7.5}
        dash = "none" if series.kind == "missing" else (0, (5, 2.5))
        return {**look, "mfc": PAPER, "ls": dash}

    def _draw_lines(self) -> None:
        for series, points in self.drawn:
            xs, ys = zip(*points, strict=True)
            clip = series.kind == "line"  # markers at the edge are drawn whole
            (line,) = self.axes.plot(xs, ys, clip_on=clip, **self._look(series))
            self.legend.setdefault(_label(series), line)

    def _draw_bars(self) -> None:
        """Draw the bars; a bound is a tick across its group, a missing bar its reason, upright."""
        axes, bounded = self.axes, {"measured": False, "predicted": True}
        slots = list(dict.fromkeys((of.name, of.kind == "predicted") for of in self.panel.series
                                   if of.kind in bounded))  # fmt: skip
        has_bars = {name for name, _ in slots}
        slots += [(name, False) for name in self.order if name not in has_bars]
        width = GROUP / max(len(slots), 1)

        def middle(slot: tuple[str, bool]) -> float:
            return width * (slots.index(slot) + 0.5) - GROUP / 2

        for series, points in self.drawn:
            look, (xs, ys) = self._look(series), zip(*points, strict=True)
            if series.kind == "line":
                reach = (GROUP / 2 + 0.03,) * len(xs)
                artist = axes.errorbar(xs, ys, xerr=reach, fmt="none", ecolor=INK, lw=1.6)
                artist.lines[2][0].set_linestyle(look["ls"])
            else:
                hatch = HATCHES[self.order[series.name] % len(HATCHES)]
                hollow = series.kind == "predicted"
                shift = middle((series.name, hollow))
                fill, edge = ("none", look["color"]) if hollow else (look["color"], PAPER)
                artist = axes.bar([x + shift for x in xs], ys, width * (0.9 if hollow else 1),
                                  facecolor=fill, edgecolor=edge, hatch=hatch, lw=1,
                                  ls="--" if hollow else "-")  # fmt: skip
            self.legend.setdefault(_label(series), artist)
        for series, places in self.missing:
            slot = next(slot for slot in slots if slot[0] == series.name)
            note = textwrap.shorten(series.note or "missing", 25, placeholder=" …")
            look, across = self._look(series), axes.get_xaxis_transform()
            spots = [x + middle(slot) for x in places]
            (artist,) = axes.plot(spots, [0.03] * len(spots), transform=across, **look)
            for x in spots:
                axes.text(x, 0.07, note, transform=across, rotation=90, rotation_mode="anchor",
                          ha="left", va="center", fontsize=TEXT)  # fmt: skip
            self.legend.setdefault(_label(series), artist)

    def _draw_missing(self) -> float:
        """Draw missing points in rows below the data. Returns the height that they need."""
        axes, shown, spans = self.axes, [of for of in self.missing if of[1]], []
        for series, places in shown:
            ends = [ACROSS * self._fraction(x) for x in places]
            spans.append((*self._span(sum(ends) / len(ends), series.note), *ends))
        rows = stack([(min(of), max(of)) for of in spans])
        needed = MISSING_ROW * (max(rows, default=-1) + 1)
        row_part = MISSING_ROW / (190 + needed)
        (low, high), grow = axes.get_ylim(), needed / 190
        bottom = low * (low / high) ** grow if self.panel.log_y else low - (high - low) * grow
        axes.set_ylim(bottom, high)
        for (series, places), (start, end, *_), row in zip(shown, spans, rows, strict=True):
            base, across = row_part * (row + 0.25), axes.get_xaxis_transform()
            (artist,) = axes.plot(places, [base] * len(places), transform=across, clip_on=False,
                                  **self._look(series))  # fmt: skip
            axes.text((start + end) / 2 / ACROSS, base + 0.22 * row_part, series.note,
                      transform=axes.transAxes, ha="center", va="bottom")  # fmt: skip
            self.legend.setdefault(_label(series), artist)
        return needed

    def _draw_marks(self) -> float:
        """Draw the marks, their texts above the axes in rows. Returns the rows' height."""
        axes = self.axes
        marks = [(x, text) for x, text in self.panel.marks if self._allowed(x)]
        spans = [self._span(ACROSS * self._fraction(x), text) for x, text in marks]
        rows = stack(spans)
        for (x, text), (start, end), row in zip(marks, spans, rows, strict=True):
            axes.axvline(x, color=INK, lw=1.1, ls=(0, (2, 2)), alpha=0.8)
            axes.annotate(text, ((start + end) / 2 / ACROSS, 1), xycoords="axes fraction",
                          xytext=(0, 3 + MARK_ROW * row), textcoords="offset points",
                          ha="center", va="bottom")  # fmt: skip
        return MARK_ROW * (max(rows, default=-1) + 1)

    def _draw_legend(self, figure: Any) -> float:
        """Put the legend below the axes. Returns its height."""
        if not self.legend:
            return 0
        names = [_wrap(name, WIDTH - 60) for name in self.legend]
        longest = max(len(line) for name in names for line in name.split("\n"))
        columns = max(1, min(3, len(names), int(WIDTH / (LETTER * longest + 52))))
        figure.legend(self.legend.values(), names, loc="outside lower left", ncols=columns,
                      frameon=False, handlelength=2.8, columnspacing=1.4, borderpad=0)  # fmt: skip
        lines = sum(name.count("\n") + 1 for name in names)
        return LEGEND_ROW * math.ceil(lines / columns)

    def _allowed(self, x: float) -> bool:
        return math.isfinite(x) and (x > 0 or not self.log_x)

    def _fraction(self, x: float) -> float:
        """Where `x` lies on the axis, 0 to 1."""
        point = (self.axes.transScale + self.axes.transLimits).transform((x, 1))
        return float(point[0])

    def _span(self, middle: float, text: str, *, clamp: bool = True) -> tuple[float, float]:
        """Start and end of a text around `middle`; with `clamp` moved to lie within the axes."""
        half = LETTER * (len(text) + 1) / 2
        if clamp:
            middle = max(min(middle, ACROSS - half), half)
        return middle - half, middle + half


def _label(series: Series) -> str:
    """A series' text in the legend."""
    name, note = series.name, series.note
    if series.kind == "predicted" and "predicted" not in name:
        return f"{name}, predicted"
    if series.kind == "missing":
        return note if note.startswith(name) else f"{name}: {note or 'missing'}"
    return name


def _root(values: Any) -> Any:
    """Square roots, with the sign of the values."""
    return (values > 0) * abs(values) ** 0.5 - (values < 0) * abs(values) ** 0.5


def _square(values: Any) -> Any:
    """The inverse of _root."""
    return values * abs(values)


def _ticks(low: float, high: float, *, log: bool) -> list[float]:
    """Round numbers between `low` and `high`."""
    from matplotlib.ticker import LogLocator, MaxNLocator

    inside: list[float] = []
    if log:
        subs = (1, 2, 5) if high / low < 200 else (1,)
        values = LogLocator(subs=subs, numticks=8).tick_values(low, high)
        inside = [float(value) for value in values if low <= value <= high]
    if len(inside) < 2:
        values = MaxNLocator(nbins=6, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high)
        inside = [float(value) for value in values if low <= value <= high]
    return inside


def _wrap(text: str, width: float) -> str:
    return "\n".join(textwrap.wrap(text, max(int(width / LETTER), 1)))
