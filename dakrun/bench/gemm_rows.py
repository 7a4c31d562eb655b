"""The rows of a GEMM benchmark: what rows.py has, and the ablations.

Pure; tables, CSV and JSON are made of these by output.py.
"""

from dataclasses import dataclass
from typing import Any

from dakrun.bench.gemm_cases import GemmCase
from dakrun.bench.gemm_sweep import GemmSweep
from dakrun.bench.output import Column
from dakrun.bench.rows import Row, common_columns, microseconds


@dataclass(frozen=True, kw_only=True)
class GemmRow(Row):
    """Seconds of a launch of one case, beside cuBLAS. An ablation that does not apply is None.

    `by` is what computes it: SplitK_GEMM ("splitk"), the tiled GEMM, or torch.
    """

    case: GemmCase
    by: str
    window_off_s: float | None = None
    alignment_off_s: float | None = None

    def figures(self, *, ablations: bool) -> dict[str, Any]:
        """The row under keys with units; bytes are of W as it is stored."""
        shape = self.case.shape
        off = {"window_off_s": self.window_off_s, "alignment_off_s": self.alignment_off_s}
        return {
            "shape": str(shape),
            "ops": "+".join(shape.ops),
            "n": self.case.n,
            "by": self.by,
            **self.common(operand="weight", rival="cublas"),
        } | (off if ablations else {})


def gemm_columns(sweep: GemmSweep) -> tuple[Column, ...]:
    """The columns of a table: those of ablations and ops only where there are any."""
    ops = (Column("ops", "op"),) if any(shape.ops for shape in sweep.shapes) else ()
    off = (
        Column("window_off_s", "no window us", microseconds),
        Column("alignment_off_s", "unaligned us", microseconds),
    )
    return (
        Column("shape", "shape"),
        *ops,
        Column("n", "N"),
        Column("by", "by"),
        *common_columns(Column("cublas_s", "cuBLAS us", microseconds)),
        *(off if sweep.ablations else ()),
    )
