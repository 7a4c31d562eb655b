"""RMSNorm and LayerNorm of rows; wraps native/normalize.cu."""

import ctypes

import torch

from dakrun.config import NormKind
from dakrun.geometry import (
    CHUNK,
    NORMALIZE_MAX_COLS,
    NORMALIZE_SHARING_COLS,
    ROW_THREADS,
)
from dakrun.kernels.runtime import jit, operands
from dakrun.kernels.runtime.card import card_of
from dakrun.kernels.runtime.needs import Macros, Needs, compiled_ahead
from dakrun.units import ceil_div

WARP = 32  # threads
SOURCE = "normalize.cu"


class _Args(ctypes.Structure):
    _fields_ = (
        *operands.pointers("x", "weight", "bias", "out"),
        *operands.ints("rows", "cols", "centered"),
        ("eps", ctypes.c_float),
        *operands.fields(ctypes.c_int64, "x_stride", "out_stride"),
    )


def normalize(
    x: torch.Tensor,
    out: torch.Tensor,
    norm: NormKind,
    *,
    eps: float,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    pdl: bool = False,
    pad_grid: bool = False,
) -> torch.Tensor:
    """out [N, K] = norm(x [N, K]) * weight [K] + bias [K], row by row; N may be 0.

    Rows of x and of out may lie apart. All operands have one 16-bit dtype and are on one GPU;
    statistics are float32; `out` may be x. "rms" rounds the normalized row before it multiplies the
    weight, as Llama does, and takes no bias. With `pdl` the launch may start before its predecessor
    ends, and reads weight and bias early. `pad_grid` adds idle CTAs up to the same number on each
    SM, for a successor launched with PDL that runs two CTAs per SM, where two share one: on free
    SMs the GPU would place both of them together. Up to NORMALIZE_SHARING_COLS columns a CTA of the
    successor fits beside one of this launch.
    Raises ValueError if an operand has the wrong shape, dtype, device or alignment.
    """
    if x.dim() != 2 or x.dtype not in operands.DTYPES:
        raise ValueError(f"expected x as [N, K] in 16 bits, got {list(x.shape)} of {x.dtype}")
    n, cols = x.shape
    if cols % CHUNK or not 0 < cols <= NORMALIZE_MAX_COLS:
        raise ValueError(
            f"expected a multiple of {CHUNK} columns up to {NORMALIZE_MAX_COLS}, got {cols}"
        )
    if norm == "rms" and bias is not None:
        raise ValueError("expected no bias with rms")
    rows: dict[str, operands.Wanted] = {
        "x": (x, (n, cols), x.dtype),
        "out": (out, (n, cols), x.dtype),
    }
    operands.check_operands(x.device, rows, contiguous=False)
    if any(
        t.stride(1) != 1 or t.stride(0) % CHUNK or t.data_ptr() % operands.ALIGNMENT
        for t in (x, out)
    ):
        raise ValueError(
            f"expected rows of x and out to be contiguous and aligned to {operands.ALIGNMENT} bytes"
        )
    vectors: dict[str, operands.Wanted] = {
        "weight": (weight, (cols,), x.dtype),
        "bias": (bias, (cols,), x.dtype),
    }
    operands.check_operands(x.device, vectors)
    operands.check_gpu(x.device)
    args = _Args(
        x=x.data_ptr(),
        weight=operands.address(weight),
        bias=operands.address(bias),
        out=out.data_ptr(),
        rows=n,
        cols=cols,
        centered=norm == "layer",
        eps=eps,
        x_stride=x.stride(0),
        out_stride=out.stride(0),
    )
    threads = min(ROW_THREADS, WARP * ceil_div(cols, WARP * CHUNK))
    kernel = jit.kernel(SOURCE, "normalize", defines(x.dtype, cols))
    card = card_of(x.device)
    sms = card.with_idle(1) if pad_grid else 1
    ctas = sms * ceil_div(n, sms)
    shared_bytes = card.ringless_bytes(n, ctas) if pad_grid else 0
    if n:
        kernel.launch(ctas, threads, args, shared_bytes=shared_bytes, pdl=pdl)
    return out


def defines(dtype: torch.dtype, cols: int) -> Macros:
    """Macros of the variant for rows of `cols` columns."""
    chunks = 1 if cols <= NORMALIZE_SHARING_COLS else 2
    return {**operands.defines(dtype), "NORMALIZE_CHUNKS": chunks}


@compiled_ahead(SOURCE)
def _variants(needs: Needs) -> list[Macros]:
    return [defines(needs.dtype, cols) for cols in (NORMALIZE_SHARING_COLS, NORMALIZE_MAX_COLS)]
