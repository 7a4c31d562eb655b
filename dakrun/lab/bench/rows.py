"""The rows of kernel benchmarks: times of a case, the figures derived from them, and their columns.

Pure; output.py turns them into tables, CSV and JSON. The rows of models are in model_rows.py.
"""

import statistics
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dakrun.lab.bench.attention_sweep import AttentionCase, AttentionSweep
from dakrun.lab.bench.gemm_sweep import GemmCase, GemmSweep
from dakrun.lab.bench.output import Column, microseconds
from dakrun.lab.bench.sweep import Case
from dakrun.lab.probe.measurement import spread
from dakrun.units import format_seconds


@dataclass(frozen=True, kw_only=True)
class Row(ABC):
    """Seconds of one launch of a case.

    `samples_s` has one value per replay. `bound_s` follows from the ceilings, `predicted_s` from
    the profile. `baseline_s` is torch's time with the whole operand in HBM.
    """

    case: Case
    samples_s: Sequence[float]
    bound_s: float
    predicted_s: float
    baseline_s: float

    @abstractmethod
    def figures(self) -> dict[str, Any]:
        """The figures by key; keys carry units."""

    @property
    def time_s(self) -> float:
        """The median of the replays."""
        return statistics.median(self.samples_s)

    @property
    def summary(self) -> str:
        """Ratio, time and percentage of the ceiling, for a progress message."""
        utilization = f"{self.bound_s / self.time_s:.1%} of the ceiling"
        return f"{self.case.ratio:.2%} remote: {format_seconds(self.time_s)}, {utilization}"

    def common(self, *, operand: str, baseline: str) -> dict[str, Any]:
        """The figures that all kernels have; bytes are those of the stored `operand`."""
        case, time = self.case, self.time_s
        return {
            "asked_ratio": case.requested,
            "ratio": case.ratio,
            f"{operand}_bytes": case.read_bytes,
            "launches": case.launches,
            "time_s": time,
            "spread": spread(self.samples_s),
            "bytes_per_s": case.read_bytes / time,
            "bound_s": self.bound_s,
            "bound_over_time": self.bound_s / time,
            "predicted_s": self.predicted_s,
            f"{baseline}_s": self.baseline_s,
            "speedup": self.baseline_s / time,
        }


@dataclass(frozen=True, kw_only=True)
class GemmRow(Row):
    """A case of X W^T; cuBLAS is the baseline.

    `by` is the kernel: "splitk" (SplitK_GEMM), "tiled" (tiled GEMM) or "torch". The times without
    window and without alignment are None if they were not measured.
    """

    case: GemmCase
    by: str
    window_off_s: float | None = None
    alignment_off_s: float | None = None

    def figures(self) -> dict[str, Any]:
        shape = self.case.shape
        off = {"window_off_s": self.window_off_s, "alignment_off_s": self.alignment_off_s}
        return {
            "shape": str(shape),
            "ops": "+".join(shape.ops),
            "n": self.case.n,
            "by": self.by,
            **self.common(operand="weight", baseline="cublas"),
        } | (off if self.alignment_off_s is not None else {})


@dataclass(frozen=True, kw_only=True)
class AttentionRow(Row):
    """A case of decode attention; torch's scaled_dot_product_attention is the baseline."""

    case: AttentionCase

    def figures(self) -> dict[str, Any]:
        slots = self.case.slots
        return {
            "case": str(slots),
            "batch": slots.batch,
            "heads": slots.heads,
            "kv_heads": slots.kv_heads,
            "length": slots.length,
            "mean_length": statistics.fmean(slots.lengths),
            "head_dim": self.case.head_dim,
            **self.common(operand="kv", baseline="sdpa"),
        }


def columns(sweep: GemmSweep | AttentionSweep) -> tuple[Column, ...]:
    """The columns of a table; those of ops and ablations only if the sweep has any."""
    if isinstance(sweep, AttentionSweep):
        return (Column("case", "case"), *_common_columns("sdpa_s", "SDPA us"))
    ops = (Column("ops", "op", rank=4),) if any(shape.ops for shape in sweep.shapes) else ()
    off = (
        Column("window_off_s", "no window us", microseconds, rank=1),
        Column("alignment_off_s", "unaligned us", microseconds, rank=1),
    )
    return (
        Column("shape", "shape"),
        *ops,
        Column("n", "N"),
        Column("by", "kernel", rank=6),
        *_common_columns("cublas_s", "cuBLAS us"),
        *(off if sweep.ablations else ()),
    )


def _common_columns(baseline: str, title: str) -> tuple[Column, ...]:
    return (
        Column("ratio", "remote", "{:.2%}".format),
        Column("time_s", "time us", microseconds),
        Column("spread", "spread", "{:.1%}".format, rank=7),
        Column("bytes_per_s", "GB/s", lambda rate: f"{rate / 1e9:,.0f}"),
        Column("bound_over_time", "share of ceiling", "{:.1%}".format),
        Column("predicted_s", "predicted us", microseconds, rank=5),
        Column(baseline, title, microseconds, rank=3),
        Column("speedup", "speedup", "{:.2f}".format, rank=2),
    )
