"""What a figure is, and what figures share: panels from results, factors and crossings.

Imports neither torch nor matplotlib.
"""

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar, get_args

from dakrun.config import Dtype
from dakrun.lab.evaluate.panel import Panel, Series
from dakrun.lab.evaluate.points import Entry, FigureData, Result, Source
from dakrun.lab.evaluate.scope import Scope
from dakrun.plan import Op, compute_time, greedy
from dakrun.units import format_seconds

Curve = Sequence[tuple[float, float]]  # (x, seconds)
ROOT_BELOW = 0.05  # of the turning point: curves by ratio then need room near 0
PERCENT = "weight and KV bytes outside HBM (%)"
EB_AXIS = "EB: weight bytes per step time (GB/s)"
STEP_AXIS = "decode step (ms)"
US_AXIS = "time of a launch (us)"
RATE_AXIS = "bytes read per time (GB/s)"
SAME = 0.005  # factors closer to 1 than this are equal


class Figure(ABC):
    """A figure of the paper: what it measures, and what is said and drawn of the results."""

    name: ClassVar[str]
    title: ClassVar[str]
    paper: ClassVar[str]  # what the paper shows

    @abstractmethod
    def entries(self, scope: Scope) -> list[Entry]:
        """The points to measure."""

    @abstractmethod
    def panels(self, data: FigureData, scope: Scope) -> list[Panel]:
        """The pictures."""

    @abstractmethod
    def finding(self, data: FigureData, scope: Scope) -> str:
        """What the results say: who wins, by what factor, where the crossing lies."""

    @abstractmethod
    def claim(self, data: FigureData, scope: Scope) -> str:
        """The paper's claim beside this machine's figure."""

    def table(self, data: FigureData, scope: Scope) -> list[list[str]]:
        """Rows of a table beside the panels, the header first; none for most figures."""
        return []

    def notes(self, scope: Scope) -> list[str]:
        """Differences from the paper, and what to know when reading."""
        return []


def panel_of(
    data: FigureData,
    name: str,
    value: Callable[[Result], float | None],
    *,
    title: str,
    x: str,
    y: str,
    lines: Iterable[Series] = (),
    categories: Sequence[str] = (),
    log_x: bool = False,
    log_y: bool = False,
    root_x: bool = False,
    marks: Sequence[tuple[float, str]] = (),
) -> Panel:
    """The panel `name` with `value` of each result, and further `lines`.

    What has no value is a marker at its place, with the reason.
    """
    series: list[Series] = []
    for label, line in data.lines(name).items():
        for kind in get_args(Source):
            known = [
                (entry.x, of)
                for entry, result in line
                if result.source == kind and (of := value(result)) is not None
            ]
            if known:
                series.append(Series(name=label, points=known, kind=kind))
        reasons: dict[str, list[tuple[float, float]]] = {}
        for entry, result in line:
            if result.problem:
                reasons.setdefault(brief(result.problem), []).append((entry.x, 0.0))
        series += [
            Series(name=label, points=points, kind="missing", note=reason)
            for reason, points in reasons.items()
        ]
    return Panel(
        title=title,
        x=x,
        y=y,
        series=[*series, *lines],
        categories=categories,
        log_x=log_x,
        log_y=log_y,
        root_x=root_x,
        marks=marks,
    )


def root_x(scope: Scope) -> bool:
    """Whether curves by ratio are drawn over square roots: what matters then lies near 0."""
    return scope.turning_point < ROOT_BELOW


def brief(problem: str) -> str:
    """The beginning of a problem, for a label."""
    first = problem.partition("; ")[0].partition(": ")[0]
    return first if len(first) <= 48 else f"{first[:45]}..."


def gigabytes(rate: float | None) -> float | None:
    return None if rate is None else rate / 1e9


def milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


def microseconds(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e6


def fastest(curve: Curve) -> tuple[float, float] | None:
    """The point of least time."""
    return min(curve, key=lambda of: of[1], default=None)


def thresholds(op: Op, dtype: Dtype, scope: Scope) -> tuple[float, float]:
    """The offload ratios (a, b) between which `op` is at its fastest, by rates alone."""
    local, remote, _ = scope.rates
    compute = compute_time(op, scope.profile, dtype)
    least = max(compute, op.read_bytes / scope.links.total_rate())
    curve = greedy.Curve(op.read_bytes, op.read_bytes, least, local, remote)
    return curve.a, curve.b


def at(curve: Curve, x: float) -> float | None:
    """The time at `x`."""
    return next((seconds for of, seconds in curve if math.isclose(of, x, abs_tol=1e-6)), None)


def crossing(curve: Curve, other: Curve) -> float | None:
    """The least x from which `other` is faster than `curve`, between points in a straight line.

    Only x that both have count. None if it is not faster at the last of them.
    """
    both = [(x, s - o) for x, s in curve if (o := at(other, x)) is not None]
    if not both or both[-1][1] <= 0:
        return None
    found = both[0][0]
    for (x0, d0), (x1, d1) in itertools.pairwise(both):
        if d0 <= 0 < d1:
            found = x0 + (x1 - x0) * -d0 / (d1 - d0)
    return found


def factors(curve: Curve, other: Curve) -> list[tuple[float, float]]:
    """(x, time of `other` over that of `curve`) where both have one: above 1, `curve` is faster."""
    return [(x, o / s) for x, s in curve if (o := at(other, x)) is not None]


def largest(curve: Curve, other: Curve) -> tuple[float, float] | None:
    """(x, factor) by which `curve` is faster than `other` at most."""
    return max(factors(curve, other), key=lambda of: of[1], default=None)


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


def seconds(value: float) -> str:
    return format_seconds(value)


def sentence(parts: Iterable[str], data: FigureData) -> str:
    """The parts, each a sentence; or why there are none."""
    if text := " ".join(parts):
        return text
    if problems := data.problems():
        return f"Too few points have a time: {', '.join(map(brief, problems))}."
    return "Nothing is measured yet."
