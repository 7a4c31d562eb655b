"""A packed matrix as a dense one, for libraries that read no other; wraps native/unpack.cu."""

import ctypes

import torch

from dakrun.geometry import ATOM_COLS, CHUNK, ELEMENTWISE_THREADS, ROWS_PER_BLOCK
from dakrun.kernels.gemm.packing import PackedTensor
from dakrun.kernels.runtime import jit, operands
from dakrun.units import ceil_div

CTA_COLS = ELEMENTWISE_THREADS // 32 * 4 * ATOM_COLS  # four atoms a warp
SOURCE = "unpack.cu"


class _Args(ctypes.Structure):
    _fields_ = (
        ("out", ctypes.c_uint64),
        *((name, ctypes.c_int) for name in ("rows", "chunks", "first_row_block", "row_block_ctas")),
        ("weight", operands.PackedMatrix),
    )


def unpack(
    weight: PackedTensor, out: torch.Tensor, *, first_row: int = 0, pdl: bool = False
) -> torch.Tensor:
    """out [rows, K] = rows of `weight` [M, K] from `first_row` on, a multiple of 8.

    All of them where `out` is as large; with `pdl` the launch may start while the kernel before
    it ends, and reads the weight meanwhile.
    Raises ValueError where `out` does not fit the weight.
    """
    (m, cols), rows = weight.shape, len(out)
    if first_row % ROWS_PER_BLOCK or not 0 <= first_row < first_row + rows <= m:
        raise ValueError(
            f"expected some of {m} rows, from a multiple of {ROWS_PER_BLOCK} on, got {rows} from "
            f"{first_row} on"
        )
    operands.check_operands(out.device, {"out": (out, (rows, cols), weight.dtype)})
    operands.check_gpu(out.device)
    row_block_ctas = ceil_div(cols, CTA_COLS)
    args = _Args(
        out=out.data_ptr(),
        rows=rows,
        chunks=cols // CHUNK,
        first_row_block=first_row // ROWS_PER_BLOCK,
        row_block_ctas=row_block_ctas,
        weight=operands.packed_matrix(weight),
    )
    kernel = jit.kernel(SOURCE, "unpack")
    kernel.launch(
        ceil_div(rows, ROWS_PER_BLOCK) * row_block_ctas, ELEMENTWISE_THREADS, args, pdl=pdl
    )
    return out
