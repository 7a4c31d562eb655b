"""RMSNorm and LayerNorm of rows; wraps native/normalize.cu."""

import ctypes
from typing import Literal

import torch

from dakrun.geometry import CHUNK, NORMALIZE_CHUNKS, ROW_THREADS
from dakrun.kernels.gemm.packing import DTYPES
from dakrun.kernels.runtime import jit, operands
from dakrun.units import ceil_div

WARP = 32
MAX_COLS = NORMALIZE_CHUNKS * CHUNK * ROW_THREADS
SOURCE = "normalize.cu"

Norm = Literal["rms", "layer"]


class _Args(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("x", "weight", "bias", "out")),
        *((name, ctypes.c_int) for name in ("rows", "cols", "centered")),
        ("eps", ctypes.c_float),
    )


def normalize(
    x: torch.Tensor,
    out: torch.Tensor,
    norm: Norm,
    *,
    eps: float,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    pdl: bool = False,
    fills_sms: bool = False,
) -> torch.Tensor:
    """out [N, K] = `norm` of the rows of x [N, K], times weight [K], plus bias [K].

    All of a 16-bit dtype on one GPU, statistics in float32; `out` may be x. As in Llama, "rms"
    rounds what is normalised before the weight, and has no bias. With `pdl` the launch may
    start while the kernel before it ends, and reads weight and bias meanwhile. `fills_sms` gives
    each SM as many CTAs, where the next kernel is to start meanwhile and has two to an SM: beside
    the few with a row each, the GPU would put both of an SM there before one elsewhere.
    Raises ValueError where an operand does not fit the others.
    """
    if x.dim() != 2 or x.dtype not in DTYPES:
        raise ValueError(f"expected x as [N, K] in 16 bits, got {list(x.shape)} of {x.dtype}")
    n, cols = x.shape
    if cols % CHUNK or not 0 < cols <= MAX_COLS:
        raise ValueError(f"expected up to {MAX_COLS} columns, in eights, got {cols}")
    if norm == "rms" and bias is not None:
        raise ValueError("expected no bias with rms")
    wanted: dict[str, operands.Wanted] = {
        "x": (x, (n, cols), x.dtype),
        "out": (out, (n, cols), x.dtype),
        "weight": (weight, (cols,), x.dtype),
        "bias": (bias, (cols,), x.dtype),
    }
    operands.check_operands(x.device, wanted)
    operands.check_gpu(x.device)
    args = _Args(
        x=x.data_ptr(),
        weight=0 if weight is None else weight.data_ptr(),
        bias=0 if bias is None else bias.data_ptr(),
        out=out.data_ptr(),
        rows=n,
        cols=cols,
        centered=norm == "layer",
        eps=eps,
    )
    threads = min(ROW_THREADS, WARP * ceil_div(cols, WARP * CHUNK))
    kernel = jit.kernel(SOURCE, "normalize", operands.defines(x.dtype))
    sms = jit.sm_count(x.device) if fills_sms else 1
    kernel.launch(sms * ceil_div(n, sms), threads, args, pdl=pdl)
    return out
