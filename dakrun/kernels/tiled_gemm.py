"""Y = epilogue(X W^T) over a packed W in several tiers, for many rows; wraps native/tiled_gemm.cu.

Knows operands and a configuration, no models and no plans.
"""

import ctypes
import functools
from typing import Any

import torch

from dakrun.kernels import jit, operands
from dakrun.kernels.gemm import ACTIVATIONS, THREADS, Activation
from dakrun.kernels.packing import PackedTensor
from dakrun.kernels.tensor_map import atoms_map
from dakrun.kernels.tiled_heuristics import (
    MAX_ROWS,
    PORTABLE_X_TILES,
    X_TILES,
    Limits,
    TiledConfig,
)

SOURCE = "tiled_gemm.cu"


class _TierTiles(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_int)
        for name in (
            "first_cta",
            "row_groups",
            "tile_octets",
            "block_tiles",
            "stages",
            "window",
        )
    )


class _Args(ctypes.Structure):
    _fields_ = (
        ("x", ctypes.c_uint64 * 16),
        *((name, ctypes.c_int) for name in ("m", "n", "activation", "width")),
        *((name, ctypes.c_uint64) for name in ("bias", "residual", "y")),
        ("tiers", _TierTiles * (operands.MAX_TIERS + 1)),
        ("weight", operands.PackedMatrix),
    )


def tiled_gemm(
    x: torch.Tensor,
    weight: PackedTensor,
    config: TiledConfig,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    activation: Activation = "none",
    overlap: bool = False,
) -> torch.Tensor:
    """out [N, M] = activation(x [N, K] weight [M, K]^T + bias [M]) + residual [N, M].

    All in the weight's dtype on one GPU, sums in float32; N is up to 4,096. With "silu_mul" the
    weight's rows are gates and what they multiply in turn, silu(x gate^T) * (x up^T), and out is
    [N, M / 2]. With `overlap` the launch may start while the kernel before it ends, and reads
    weights meanwhile.
    Raises ValueError where an operand does not fit the others.
    """
    (m, k), n = weight.shape, x.shape[0]
    gated = activation == "silu_mul"
    if gated and (m % 2 or residual is not None):
        raise ValueError("expected an even number of rows and no residual with silu_mul")
    width = m // 2 if gated else m
    wanted: dict[str, operands.Wanted] = {
        "x": (x, (n, k), weight.dtype),
        "out": (out, (n, width), weight.dtype),
        "bias": (bias, (m,), weight.dtype),
        "residual": (residual, (n, m), weight.dtype),
    }
    operands.check_operands(x.device, wanted)
    operands.check_gpu(x.device)
    if not 1 <= n <= MAX_ROWS or len(config.tiers) != len(weight.parts):
        raise ValueError(f"the configuration is not one for {n} rows and this weight: {config}")
    args = _Args(
        m=m,
        n=n,
        activation=ACTIVATIONS.index(activation),
        width=width,
        bias=0 if bias is None else bias.data_ptr(),
        residual=0 if residual is None else residual.data_ptr(),
        y=out.data_ptr(),
        weight=operands.packed_matrix(weight),
    )
    args.x[:] = atoms_map(x.data_ptr(), x.dtype, (n, k), 8 * config.x_tiles, 1)
    cta = 0
    for number, (part, tier) in enumerate(zip(weight.parts, config.tiers, strict=True)):
        if part.split.octets and not tier.ctas:
            raise ValueError(f"expected CTAs for the octets in {part.tier}, got {config}")
        args.tiers[number] = _TierTiles(
            cta, tier.row_groups, tier.tile_octets, tier.block_tiles, tier.stages, tier.window
        )
        cta += tier.ctas
    args.tiers[len(weight.parts)] = _TierTiles(first_cta=cta)
    kernel = jit.kernel(SOURCE, "tiled_gemm", defines(weight.dtype, config.x_tiles))
    kernel.launch(cta, THREADS, args, shared_bytes=config.shared_bytes, overlap=overlap)
    return out


def defines(dtype: torch.dtype, x_tiles: int) -> dict[str, int]:
    """The macros of one variant of the kernel."""
    return {**operands.defines(dtype), "X_TILES": x_tiles}


@functools.cache
def limits(device: int) -> Limits:
    """What `device`, a CUDA device index, sets to configurations."""
    properties: Any = torch.cuda.get_device_properties(device)
    wgmma = (properties.major, properties.minor) == (9, 0)
    return Limits(properties.shared_memory_per_block_optin, X_TILES if wgmma else PORTABLE_X_TILES)
