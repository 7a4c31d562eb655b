"""Medians of repeated measurements with their spread, and a log of them. Needs no torch."""

import datetime
import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from dakrun.hardware import Provenance
from dakrun.units import format_bytes, format_seconds

STEADY = 0.05  # spread up to which a figure is steady
_SPREADS = re.compile(  # the end of a source, as _spreads writes it
    r"(\d+) of (\d+) figures spread by more than \d+%, most of all (.+) \((\d+)%\)$"
)


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """A median over `runs` runs; `spread` is the interquartile range over the median."""

    name: str
    value: float
    unit: str
    spread: float
    runs: int

    @property
    def steady(self) -> bool:
        """Whether the spread is small enough to plan with."""
        return self.spread <= STEADY

    @property
    def text(self) -> str:
        """The median with its unit."""
        if self.unit == "s":
            return format_seconds(self.value)
        if self.unit == "B":
            return format_bytes(self.value)
        return f"{self.value:.2f}" if not self.unit else f"{self.value / 1e9:,.1f} G{self.unit}"


@dataclass
class Log:
    """Measurements in the order in which they were taken."""

    measurements: list[Measurement] = field(default_factory=list)

    def measure(self, name: str, unit: str, samples: Callable[[], Sequence[float]]) -> float:
        """Log the median of `samples` as `name`; an unsteady one is measured once more."""
        return self.add(name, unit, steadier(samples))

    def add(self, name: str, unit: str, values: Sequence[float]) -> float:
        """Log the median of `values` as `name`."""
        return self.keep(name, unit, statistics.median(values), spread(values), len(values))

    def keep(self, name: str, unit: str, value: float, spread: float, runs: int) -> float:
        """Log a median of `runs` values, rounded to four digits."""
        found = Measurement(
            name=name, value=float(f"{value:.4g}"), unit=unit, spread=spread, runs=runs
        )
        self.measurements.append(found)
        return found.value


def call_seconds(
    call: Callable[[], object], runs: int, *, least_s: float = 0.0, warm_up: int = 1,
    wait: Callable[[], object] = lambda: None,
) -> list[float]:  # fmt: skip
    """Seconds of `runs` calls, or of as many as take `least_s`, after others to `warm_up`.

    `wait` returns when the work of a call has ended.
    """
    found: list[float] = []
    wait()
    while len(found) < warm_up + runs or sum(found[warm_up:]) < least_s:
        start = time.perf_counter()
        call()
        wait()
        found.append(time.perf_counter() - start)
    return found[warm_up:]


def steadier(samples: Callable[[], Sequence[float]]) -> Sequence[float]:
    """Samples; if they are not steady, the steadier of two sets of samples."""
    values = samples()
    return values if spread(values) <= STEADY else min(values, samples(), key=spread)


def spread(values: Sequence[float], *, of: Sequence[float] | None = None) -> float:
    """Interquartile range of two or more `values` over their median, or over the median `of` what
    they are a part of."""
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / (median if of is None else statistics.median(of))


def provenance(source: str, measurements: Sequence[Measurement]) -> Provenance:
    """Date and `source` of a profile measured today, and how far its figures spread."""
    return Provenance(
        kind="measured",
        date=datetime.date.today().isoformat(),
        source=f"dakrun profile: medians; {source}; {_spreads(*_counted(measurements))}",
    )


def extended(before: Provenance, measurements: Sequence[Measurement]) -> Provenance:
    """The provenance of a profile with more figures: same date, spreads of all figures together."""
    if (said := _SPREADS.search(before.source)) is None:
        return before
    unsteady, total, name, worst = _counted(measurements)
    if int(said[4]) / 100 >= worst:
        name, worst = said[3], int(said[4]) / 100
    together = _spreads(unsteady + int(said[1]), total + int(said[2]), name, worst)
    return replace(before, source=before.source[: said.start()] + together)


def _counted(measurements: Sequence[Measurement]) -> tuple[int, int, str, float]:
    """Number of unsteady figures and of all; name and spread of the figure that spreads most."""
    worst = max(measurements, key=lambda m: m.spread)
    return sum(not m.steady for m in measurements), len(measurements), worst.name, worst.spread


def _spreads(unsteady: int, total: int, name: str, worst: float) -> str:
    return (
        f"{unsteady} of {total} figures spread by more than {STEADY:.0%}, most of all {name} "
        f"({worst:.0%})"
    )
