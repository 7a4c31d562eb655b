"""Parts of all pictures: colours, a roofline's lines, captions and the PNG file.

matplotlib is imported when drawing starts.
"""

import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from dakrun.errors import CannotRun, UsageError, check_new_file
from dakrun.hardware import LOCAL, HardwareProfile
from dakrun.plan.roofline import Links
from dakrun.units import format_decimal

# Okabe and Ito's palette, safe for all colour vision.
BLUE, ORANGE, GREEN, VERMILION, SKY, PURPLE = (
    "#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7",
)  # fmt: skip
GREY = "#666666"
ROOF_STYLES = ((BLUE, "-"), (SKY, "--"), (PURPLE, "-."), (GREEN, ":"))
PEAK_STYLES = (("-", 1.8), ("--", 1.2))
SAME = 1.005  # rates that differ by less than this factor share a line


def check_target(path: Path) -> None:
    """Raise UsageError if no PNG can be written to `path`, CannotRun without matplotlib."""
    check_new_file(path, (".png",), "a picture is a .png file", option="--plot")
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise CannotRun(
            "drawing needs matplotlib, which is not installed",
            hint="pip install 'dakrun[plot]'",
        ) from None


def new_figure(width: float, height: float) -> Any:
    """An empty figure, in inches, without matplotlib's global state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=150)
    FigureCanvasAgg(figure)
    return figure


def save(figure: Any, path: Path) -> None:
    """Write `figure` to `path` as a PNG. Raises UsageError where that fails."""
    try:
        figure.savefig(path, format="png")
    except OSError as problem:
        raise UsageError(f"{path}: {problem.strerror}", hint="change --plot") from None


def caption(axes: Any, title: str, x: str, y: str) -> None:
    """Set the title, the axis labels and a grid behind the data."""
    axes.set_title(title, fontsize=11)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(True, which="major", color="#dddddd", lw=0.6)
    axes.set_axisbelow(True)


def roofs(profile: HardwareProfile, remote: Iterable[str]) -> list[tuple[str, float]]:
    """(tiers, bytes/s) of HBM, of each `remote` tier and of all together, the fastest first.

    Rates within SAME of each other are merged.
    """
    links = Links.of(profile, tuple(remote))
    rates = [(name.upper() if name == LOCAL else name, r) for name, r in links.direct.items()]
    if len(rates) > 1:
        rates.append((" + ".join(name for name, _ in rates), links.total_rate()))
    return merged(rates, ", ")


def merged(rates: Iterable[tuple[str, float]], joint: str) -> list[tuple[str, float]]:
    """(names, rate), the highest first; those within SAME of each other are one, of joint names."""
    found: list[tuple[str, float]] = []
    for name, rate in sorted(rates, key=lambda of: -of[1]):
        if found and found[-1][1] / rate < SAME:
            found[-1] = (f"{found[-1][0]}{joint}{name}", found[-1][1])
        else:
            found.append((name, rate))
    return found


def draw_roofs(
    axes: Any, slopes: Sequence[tuple[str, float]], peaks: Sequence[tuple[str, float]], hbm: float
) -> None:
    """Draw the `slopes` (bytes/s), the `peaks` (FLOP/s) and the ridge of `hbm` bytes/s.

    x is in FLOP/B. Slopes end at the first peak, the highest. Needs the limits of `axes` set.
    """
    (low, high), (bottom, _), highest = axes.get_xlim(), axes.get_ylim(), peaks[0][1]
    for (name, bandwidth), (colour, style) in zip(slopes, itertools.cycle(ROOF_STYLES)):
        ends = (low, min(highest / bandwidth, high))
        label = f"{name}: {format_decimal(bandwidth, 'B/s')}"
        axes.plot(ends, [bandwidth * x for x in ends], style, color=colour, label=label, lw=1.8)
    for (name, rate), (style, width) in zip(peaks, itertools.cycle(PEAK_STYLES)):
        ends = (rate / slopes[0][1], high)
        label = f"{name}: {format_decimal(rate, 'FLOP/s')}"
        axes.plot(ends, (rate, rate), style, color="black", lw=width, label=label)
    ridge = highest / hbm
    label = f"HBM ridge: {ridge:.3g} FLOP/B"
    axes.plot((ridge, ridge), (bottom, highest), ":", color=GREY, lw=1.2, label=label)
