"""What the rows of all benchmarks share: times of a case, and the figures that follow from them.

Pure; tables, CSV and JSON are made of these by output.py.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dakrun.bench.cases import Case
from dakrun.bench.output import Column
from dakrun.probe.measurement import spread
from dakrun.units import format_seconds


@dataclass(frozen=True, kw_only=True)
class Row:
    """Seconds of a launch of one case.

    `samples_s` are the replays; `bound_s` is what the ceilings allow, `predicted_s` the profile's;
    `rival_s` is torch's with all of the operand in HBM.
    """

    case: Case
    samples_s: Sequence[float]
    bound_s: float
    predicted_s: float
    rival_s: float

    @property
    def time_s(self) -> float:
        """The median of the replays."""
        return statistics.median(self.samples_s)

    @property
    def summary(self) -> str:
        """The outcome in a few words."""
        of_ceiling = f"{self.bound_s / self.time_s:.1%} of the ceiling"
        return f"{self.case.ratio:.2%} remote: {format_seconds(self.time_s)}, {of_ceiling}"

    def common(self, *, operand: str, rival: str) -> dict[str, Any]:
        """Its figures under keys with units; bytes are of the `operand` as it is stored."""
        case, time = self.case, self.time_s
        return {
            "asked_ratio": case.asked,
            "ratio": case.ratio,
            f"{operand}_bytes": case.read_bytes,
            "launches": case.launches,
            "time_s": time,
            "spread": spread(self.samples_s),
            "bytes_per_s": case.read_bytes / time,
            "bound_s": self.bound_s,
            "bound_over_time": self.bound_s / time,
            "predicted_s": self.predicted_s,
            f"{rival}_s": self.rival_s,
            "speedup": self.rival_s / time,
        }


def common_columns(rival: Column) -> tuple[Column, ...]:
    """The columns of those figures, the `rival`'s among them."""
    return (
        Column("ratio", "remote", "{:.2%}".format),
        Column("time_s", "time us", microseconds),
        Column("spread", "spread", "{:.1%}".format),
        Column("bytes_per_s", "GB/s", _gigabytes),
        Column("bound_over_time", "of ceiling", "{:.1%}".format),
        Column("predicted_s", "predicted us", microseconds),
        rival,
        Column("speedup", "speed-up", "{:.2f}".format),
    )


def microseconds(seconds: float) -> str:
    """Seconds as microseconds, for a cell under a title with the unit."""
    return f"{seconds * 1e6:.2f}"


def _gigabytes(rate: float) -> str:
    return f"{rate / 1e9:,.0f}"
