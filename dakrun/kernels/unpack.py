"""Unpacks a packed matrix into a dense one, for torch's GEMM; wraps native/unpack.cu."""

import ctypes

import torch

from dakrun.formats import WeightFormat
from dakrun.geometry import ATOM_COLS, CHUNK, ELEMENTWISE_THREADS, ROWS_PER_BLOCK, UNPACK_ATOMS
from dakrun.hardware import ANY_ROWS
from dakrun.kernels.gemm.packed_matrix import PackedMatrix, packed_matrix
from dakrun.kernels.runtime import jit, operands
from dakrun.kernels.runtime.needs import Macros, Needs, compiled_ahead
from dakrun.launches import tiled_rows
from dakrun.memory.matrix import TieredMatrix
from dakrun.units import ceil_div

CTA_COLS = ELEMENTWISE_THREADS // 32 * UNPACK_ATOMS * ATOM_COLS
SOURCE = "unpack.cu"


class _Args(ctypes.Structure):
    _fields_ = (
        *operands.pointers("out"),
        *operands.ints("rows", "chunks", "first_row_block", "row_block_ctas"),
        ("weight", PackedMatrix),
    )


def unpack(
    weight: TieredMatrix, out: torch.Tensor, *, first_row: int = 0, pdl: bool = False
) -> torch.Tensor:
    """out [rows, K] = weight [M, K][first_row : first_row + rows]; `first_row` is a multiple of 8.

    With `pdl` the launch may start before its predecessor ends, and reads the weight early.
    Raises ValueError if `out` does not fit the weight.
    """
    (m, cols), rows = weight.shape, len(out)
    if first_row % ROWS_PER_BLOCK or not 0 <= first_row < first_row + rows <= m:
        raise ValueError(
            f"expected some of {m} rows, from a multiple of {ROWS_PER_BLOCK} on, got {rows} from "
            f"row {first_row} on"
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
        weight=packed_matrix(weight, out.device),
    )
    kernel = jit.kernel(SOURCE, "unpack", defines(weight.dtype, weight.format))
    kernel.launch(
        ceil_div(rows, ROWS_PER_BLOCK) * row_block_ctas, ELEMENTWISE_THREADS, args, pdl=pdl
    )
    return out


def defines(dtype: torch.dtype, stored: WeightFormat) -> dict[str, int]:
    """Macros of the variant for a format; 16-bit elements of all dtypes are copied alike."""
    return {**operands.defines(dtype), **stored.macros} if stored.macros else {}


@compiled_ahead(SOURCE)
def _variants(needs: Needs) -> list[Macros]:
    """Only torch multiplies by weights that are unpacked."""
    return [
        defines(needs.dtype, stored)
        for stored in needs.formats
        if needs.every or tiled_rows(needs.card, stored.atom_bytes) < ANY_ROWS
    ]
