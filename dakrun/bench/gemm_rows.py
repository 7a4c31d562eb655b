"""The rows of a GEMM benchmark: what was measured of a case, and the figures that follow from it.

Pure; tables, CSV and JSON are made of these by output.py.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dakrun.bench.gemm_cases import GemmCase
from dakrun.bench.gemm_sweep import GemmSweep
from dakrun.bench.output import Column
from dakrun.probe.measurement import spread


@dataclass(frozen=True, kw_only=True)
class GemmRow:
    """Seconds of a launch of one case.

    `samples_s` are the replays; `bound_s` is what the ceilings allow, `predicted_s` the profile's;
    `cublas_s` has all of the weight in HBM. An ablation that does not apply is None.
    """

    case: GemmCase
    samples_s: Sequence[float]
    bound_s: float
    predicted_s: float
    cublas_s: float
    window_off_s: float | None = None
    alignment_off_s: float | None = None

    @property
    def time_s(self) -> float:
        """The median of the replays."""
        return statistics.median(self.samples_s)

    def figures(self, *, ablations: bool) -> dict[str, Any]:
        """The row under keys with units; bytes are of W as it is stored."""
        case, time = self.case, self.time_s
        off = {"window_off_s": self.window_off_s, "alignment_off_s": self.alignment_off_s}
        return {
            "shape": str(case.shape),
            "ops": "+".join(case.shape.ops),
            "n": case.n,
            "asked_ratio": case.asked,
            "ratio": case.ratio,
            "weight_bytes": case.weight_bytes,
            "launches": case.launches,
            "time_s": time,
            "spread": spread(self.samples_s),
            "bytes_per_s": case.weight_bytes / time,
            "bound_s": self.bound_s,
            "bound_over_time": self.bound_s / time,
            "predicted_s": self.predicted_s,
            "cublas_s": self.cublas_s,
            "speedup": self.cublas_s / time,
        } | (off if ablations else {})


def gemm_columns(sweep: GemmSweep) -> tuple[Column, ...]:
    """The columns of a table: those of ablations and ops only where there are any."""
    ops = (Column("ops", "op"),) if any(shape.ops for shape in sweep.shapes) else ()
    off = (
        Column("window_off_s", "no window us", _microseconds),
        Column("alignment_off_s", "unaligned us", _microseconds),
    )
    return (
        Column("shape", "shape"),
        *ops,
        Column("n", "N"),
        Column("ratio", "remote", "{:.2%}".format),
        Column("time_s", "time us", _microseconds),
        Column("spread", "spread", "{:.1%}".format),
        Column("bytes_per_s", "GB/s", _gigabytes),
        Column("bound_over_time", "of ceiling", "{:.1%}".format),
        Column("predicted_s", "predicted us", _microseconds),
        Column("cublas_s", "cuBLAS us", _microseconds),
        Column("speedup", "speed-up", "{:.2f}".format),
        *(off if sweep.ablations else ()),
    )


def _microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:.2f}"


def _gigabytes(rate: float) -> str:
    return f"{rate / 1e9:,.0f}"
