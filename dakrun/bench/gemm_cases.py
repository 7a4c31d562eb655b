"""The cases of a GEMM sweep: row blocks of each tier, launches of the chain, and the planner's op.

Pure arithmetic on sizes that the caller gives; needs no GPU and no torch.
"""

from dataclasses import dataclass

from dakrun.bench.cases import Case
from dakrun.bench.gemm_sweep import Shape
from dakrun.bench.sweep import BenchDtype
from dakrun.config import DTYPE_BYTES
from dakrun.plan.ops import Op, linear_op


@dataclass(frozen=True, kw_only=True)
class GemmCase(Case):
    """X [n, K] times a weight of `shape`, whose units are row blocks."""

    shape: Shape
    n: int

    def op(self, dtype: BenchDtype) -> Op:
        """What the planner makes of it."""
        shape = (self.shape.rows, self.shape.cols)
        return linear_op(str(self.shape), shape, n=self.n, element_bytes=DTYPE_BYTES[dtype])
