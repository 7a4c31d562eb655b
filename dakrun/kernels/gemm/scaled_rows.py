"""An RMSNorm between two products of SplitK_GEMM with weights of 4 or 8 bits, half of it in each.

The first product writes, beside its output y, rows y * weight * factor and partial sums of y^2. The
second multiplies these rows and scales its accumulators by rsqrt(mean(y^2) + eps) / factor.
native/splitk_norm.cuh describes both.
"""

import math
from dataclasses import dataclass

import torch

from dakrun.geometry import ROWS_PER_BLOCK
from dakrun.kernels.runtime import operands
from dakrun.memory.matrix import TieredMatrix
from dakrun.units import ceil_div

SQUARES = 4  # a row's number of partial sums is a multiple: kernels load that many at once


@dataclass(frozen=True)
class ScaledRows:
    """Rows y after the first half of an RMSNorm.

    `rows` [N, M] are y * `weight` [M] * `factor`, a power of two. `squares`, float32 [N, 4 i], has
    the sum of y^2 of each row block, and zeros behind the last one.
    """

    rows: torch.Tensor
    squares: torch.Tensor
    weight: torch.Tensor
    factor: float

    @classmethod
    def empty(cls, n: int, weight: torch.Tensor, factor: float | None = None) -> "ScaledRows":
        """Memory for `n` rows, for a norm with `weight`; `factor` is by default factor_of it."""
        squares = weight.new_zeros(n, squares_of_row(len(weight)), dtype=torch.float32)
        factor = factor_of(weight) if factor is None else factor
        return cls(weight.new_empty(n, len(weight)), squares, weight, factor)

    def of(self, rows: slice) -> "ScaledRows":
        """Some of the rows."""
        return ScaledRows(self.rows[rows], self.squares[rows], self.weight, self.factor)

    def check(self, x: torch.Tensor, n: int, m: int) -> None:
        """Raise ValueError unless this has `n` rows of `m` columns, in the dtype and GPU of `x`."""
        wanted: dict[str, operands.Wanted] = {
            "scaled rows": (self.rows, (n, m), x.dtype),
            "squares": (self.squares, (n, squares_of_row(m)), torch.float32),
            "weight of scaled rows": (self.weight, (m,), x.dtype),
        }
        operands.check_operands(x.device, wanted)
        if self.squares.data_ptr() % operands.ALIGNMENT:
            raise ValueError(f"expected squares to be aligned to {operands.ALIGNMENT} bytes")


def check_scaled(
    x: torch.Tensor,
    weight: TieredMatrix,
    out: torch.Tensor,
    scaled: ScaledRows | None,
    scales: ScaledRows | None,
) -> None:
    """Raise ValueError if a product of x and `weight` cannot read `scaled` or write `scales`."""
    if not weight.format.macros:
        raise ValueError(f"expected no scaled rows for {weight.format.name} weights")
    if scaled is not None:
        scaled.check(x, *x.shape)
        if x.data_ptr() != scaled.rows.data_ptr():
            raise ValueError("expected x to be the scaled rows")
    if scales is not None:
        scales.check(x, len(x), weight.shape[0])
        if out.shape[1] != weight.shape[0]:
            raise ValueError("expected no scales with silu_mul")


def squares_of_row(cols: int) -> int:
    """Number of partial sums of a row of `cols` columns, with the zeros behind them."""
    return SQUARES * ceil_div(cols, ROWS_PER_BLOCK * SQUARES)


def factor_of(weight: torch.Tensor) -> float:
    """The largest power of two f with |`weight`| f <= 1, so that no row overflows."""
    most = weight.abs().max().item() if len(weight) else 0.0
    if most == 0 or not math.isfinite(most):
        return 1.0
    mantissa, exponent = math.frexp(most)  # most = mantissa * 2^exponent, 0.5 <= mantissa < 1
    return math.ldexp(1.0, (mantissa == 0.5) - exponent)
