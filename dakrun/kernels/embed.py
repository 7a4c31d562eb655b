"""Embedding of a step's tokens from a packed table in several tiers; wraps native/embed.cu."""

import ctypes

import torch

from dakrun.geometry import CHUNK, ELEMENTWISE_THREADS
from dakrun.kernels.gemm.packed_matrix import PackedMatrix, packed_matrix
from dakrun.kernels.runtime import jit, operands
from dakrun.kernels.runtime.needs import Macros, Needs, compiled_ahead
from dakrun.memory.matrix import TieredMatrix
from dakrun.units import ceil_div

SOURCE = "embed.cu"


class _Args(ctypes.Structure):
    _fields_ = (
        *operands.pointers("tokens", "lengths", "positions", "out"),
        *operands.ints("rows", "cols", "position_count", "offset", "row_ctas"),
        ("table", PackedMatrix),
    )


def embed(
    tokens: torch.Tensor,
    table: TieredMatrix,
    out: torch.Tensor,
    *,
    positions: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    offset: int = 0,
    pdl: bool = False,
) -> torch.Tensor:
    """out [N, K] = table [V, K][tokens] + positions [P, K][lengths + offset].

    `tokens` and `lengths` are int32 [N] on the GPU; a negative length, of a row without a request,
    counts as 0. Indices are clamped to their table. Sums are float32, rounded once to the table's
    dtype. Without learned positions, give neither `positions` nor `lengths`. With `pdl` the launch
    may start before its predecessor ends.
    Raises ValueError if an operand has the wrong shape, dtype, device or alignment.
    """
    (rows, cols), n, device = table.shape, len(tokens), tokens.device
    if (positions is None) != (lengths is None):
        raise ValueError("expected positions and lengths, or neither")
    count = 0 if positions is None else len(positions)
    operands.check_operands(
        device,
        {
            "tokens": (tokens, (n,), torch.int32),
            "lengths": (lengths, (n,), torch.int32),
            "positions": (positions, (count, cols), table.dtype),
            "out": (out, (n, cols), table.dtype),
        },
    )
    operands.check_gpu(device)
    row_ctas = ceil_div(cols, CHUNK * ELEMENTWISE_THREADS)
    args = _Args(
        tokens=tokens.data_ptr(),
        lengths=operands.address(lengths),
        positions=operands.address(positions),
        out=out.data_ptr(),
        table=packed_matrix(table, device),
        rows=rows,
        cols=cols,
        position_count=count,
        offset=offset,
        row_ctas=row_ctas,
    )
    kernel = jit.kernel(SOURCE, "embed", {**operands.defines(table.dtype), **table.format.macros})
    kernel.launch(n * row_ctas, ELEMENTWISE_THREADS, args, pdl=pdl)
    return out


@compiled_ahead(SOURCE)
def _variants(needs: Needs) -> list[Macros]:
    return [{**operands.defines(needs.dtype), **stored.macros} for stored in needs.formats]
