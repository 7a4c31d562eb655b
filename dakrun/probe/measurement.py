"""Figures measured several times: medians with their spread, measured again where unsteady.

Knows neither CPUs nor GPUs.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from dakrun.units import format_bytes, format_seconds

STEADY = 0.05  # spread up to which a figure counts as steady


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """A median over `runs` runs; `spread` is the distance of the quartiles over the median."""

    what: str
    value: float
    unit: str
    spread: float
    runs: int

    @property
    def steady(self) -> bool:
        """Whether the runs agree well enough to plan with."""
        return self.spread <= STEADY

    @property
    def text(self) -> str:
        """The median in its unit."""
        if self.unit == "s":
            return format_seconds(self.value)
        if self.unit == "B":
            return format_bytes(self.value)
        return f"{self.value:.2f}" if not self.unit else f"{self.value / 1e9:,.1f} G{self.unit}"


@dataclass
class Log:
    """Takes measurements and keeps them in order."""

    measurements: list[Measurement] = field(default_factory=list)

    def measure(self, what: str, unit: str, samples: Callable[[], Sequence[float]]) -> float:
        """The median of `samples`, taken again, once, where it is not steady; kept under `what`."""
        return self.add(what, unit, steadier(samples))

    def add(self, what: str, unit: str, values: Sequence[float]) -> float:
        """The median of `values`, which are already as steady as they get; kept under `what`."""
        return self.keep(what, unit, statistics.median(values), spread(values), len(values))

    def keep(self, what: str, unit: str, value: float, spread: float, runs: int) -> float:
        """Keep a median of `runs` values; four digits, more than any spread allows."""
        found = Measurement(
            what=what, value=float(f"{value:.4g}"), unit=unit, spread=spread, runs=runs
        )
        self.measurements.append(found)
        return found.value


def steadier(samples: Callable[[], Sequence[float]]) -> Sequence[float]:
    """What `samples` gives; where it is not steady it is asked once more, and the steadier kept."""
    values = samples()
    return values if spread(values) <= STEADY else min(values, samples(), key=spread)


def spread(values: Sequence[float]) -> float:
    """Distance of the quartiles of two or more `values` over their median."""
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / median
