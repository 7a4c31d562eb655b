"""Embeddings of a step's tokens, their table in several tiers; wraps native/embed.cu."""

import ctypes

import torch

from dakrun.geometry import CHUNK, ELEMENTWISE_THREADS
from dakrun.kernels.gemm.packing import PackedTensor
from dakrun.kernels.runtime import jit, operands
from dakrun.units import ceil_div

SOURCE = "embed.cu"


class _Args(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("tokens", "lengths", "positions", "out")),
        *((name, ctypes.c_int) for name in ("rows", "cols", "position_count", "offset")),
        ("row_ctas", ctypes.c_int),
        ("table", operands.PackedMatrix),
    )


def embed(
    tokens: torch.Tensor,
    table: PackedTensor,
    out: torch.Tensor,
    *,
    positions: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    offset: int = 0,
    pdl: bool = False,
) -> torch.Tensor:
    """out [N, K] = rows of `table` [V, K], and of `positions` [P, K] at `lengths` + `offset`.

    `tokens` and `lengths` are int32 [N] on the GPU; a negative length, that of a row without a
    request, counts as 0. What lies outside of a table takes its nearest row. Sums are in float32,
    rounded once. With `pdl` the launch may start while the kernel before it ends.
    Raises ValueError where an operand does not fit the others.
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
        lengths=0 if lengths is None else lengths.data_ptr(),
        positions=0 if positions is None else positions.data_ptr(),
        out=out.data_ptr(),
        rows=rows,
        cols=cols,
        position_count=count,
        offset=offset,
        row_ctas=row_ctas,
        table=operands.packed_matrix(table),
    )
    kernel = jit.kernel(SOURCE, "embed", operands.defines(table.dtype))
    kernel.launch(n * row_ctas, ELEMENTWISE_THREADS, args, pdl=pdl)
    return out
