"""SplitK_GEMM: Y = epilogue(X W^T) over a packed W in several tiers; wraps native/splitk_gemm.cu.

Knows operands and a configuration, no models and no plans.
"""

import ctypes
import functools
import itertools
import math
from dataclasses import dataclass
from typing import Literal

import torch

from dakrun.geometry import (
    ATOM_BYTES,
    ATOM_COLS,
    MAX_TIERS,
    ROWS_PER_BLOCK,
    SPLITK_THREADS,
    SPLITK_X_TILES,
)
from dakrun.hardware import LOCAL
from dakrun.kernels.gemm.packing import PackedTensor, padded_cols
from dakrun.kernels.gemm.splitk_config import GemmConfig, can_mix
from dakrun.kernels.runtime.jit import Kernel, kernel
from dakrun.kernels.runtime.operands import CtaOrder
from dakrun.kernels.runtime.tensor_map import atoms_map
from dakrun.units import ceil_div

SOURCE = "splitk_gemm.cu"
AHEAD_BYTES = 32 * 1024  # a CTA: what memory can bring while one launch ends and the next begins
AHEAD_ALIGN = 128

Activation = Literal["none", "relu", "silu_mul"]
ACTIVATIONS: tuple[Activation, ...] = ("none", "relu", "silu_mul")
Norm = Literal["none", "rms", "layer"]
NORMS: tuple[Norm, ...] = ("none", "rms", "layer")


class _Tier(ctypes.Structure):
    _fields_ = (
        ("base", ctypes.c_uint64),
        ("first_row_block", ctypes.c_int),
        ("first_cta", ctypes.c_int),
        ("wave_row_blocks", ctypes.c_int),
        ("group_row_blocks", ctypes.c_int),
        ("step_atoms", ctypes.c_int),
        ("stage_atoms", ctypes.c_int),
        ("stages", ctypes.c_int),
        ("window", ctypes.c_int),
        ("x_boxes", ctypes.c_int),
        ("group_stages", ctypes.c_int),
        ("groups", ctypes.c_int),
        ("all_groups", ctypes.c_int),
        ("mixed_groups", ctypes.c_int),
    )


class _Args(ctypes.Structure):
    _fields_ = (
        ("x", ctypes.c_uint64 * 16),
        ("tier_count", ctypes.c_int),
        ("m", ctypes.c_int),
        ("n", ctypes.c_int),
        ("k", ctypes.c_int),
        ("x_atoms", ctypes.c_int),
        ("activation", ctypes.c_int),
        ("order", CtaOrder),
        ("mixed_tier", ctypes.c_int),
        ("bias", ctypes.c_uint64),
        ("tiers", _Tier * (MAX_TIERS + 1)),
        ("residual", ctypes.c_uint64),
        ("y", ctypes.c_uint64),
        ("norm", ctypes.c_int),
        ("eps", ctypes.c_float),
        ("inverse_k", ctypes.c_float),
        ("half", ctypes.c_int),
        ("arrivals", ctypes.c_uint64),
        ("halves", ctypes.c_uint64),
        ("ahead", ctypes.c_uint64),
        ("ahead_bytes", ctypes.c_int),
    )


@dataclass(frozen=True)
class Workspace:
    """Where the halves of sums meet: one for all launches of a stream.

    `halves` is float32 [2 * row blocks * 8 rows of W * 8 * x_tiles rows of X] or more, `arrivals`
    int32 [row blocks] or more, zero between launches.
    """

    halves: torch.Tensor
    arrivals: torch.Tensor

    @classmethod
    def empty(cls, config: GemmConfig, device: torch.device | str) -> "Workspace":
        """For launches of `config`, and others that need no more."""
        row_blocks = sum(split.row_blocks for split in config.splits)
        return cls(
            torch.empty(_halves(row_blocks, config), dtype=torch.float32, device=device),
            torch.zeros(row_blocks, dtype=torch.int32, device=device),
        )


def splitk_gemm(
    x: torch.Tensor,
    weight: PackedTensor,
    config: GemmConfig,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    activation: Activation = "none",
    norm: Norm = "none",
    eps: float = 0.0,
    workspace: Workspace | None = None,
    pdl: bool = False,
    ahead: torch.Tensor | None = None,
) -> torch.Tensor:
    """out [N, M] = activation(r x [N, K] weight [M, K]^T + bias [M]) + residual [N, M].

    r is 1; with `norm` "rms" it is 1 / sqrt(mean(x^2) + `eps`) of each row of x, with "layer"
    1 / sqrt(var(x) + `eps`), the variance being mean(x^2) - mean(x)^2. That makes a whole norm
    where its weight has been multiplied into the columns of `weight`, and of a LayerNorm the mean
    of each row then been subtracted from it, and its bias's product been added to `bias`.

    All in the weight's dtype on one GPU, sums in float32. With "silu_mul" the weight's rows are
    gates and what they multiply in turn, silu(x gate^T) * (x up^T), and out is [N, M / 2]. With
    `pdl` the launch may start while the kernel before it ends, and reads weights meanwhile.
    `ahead` (uint8, 1-D, in the GPU's own memory) is brought to L2 as this launch ends. A
    configuration with sums of halves needs a `workspace`, and x no norm.
    Raises ValueError where an operand does not fit the others.
    """
    (m, k), n = weight.shape, x.shape[0]
    gated = activation == "silu_mul"
    _check_operands(x, weight, out, bias, residual, m // 2 if gated else m)
    if gated and (m % 2 or residual is not None):
        raise ValueError("expected an even number of rows and no residual with silu_mul")
    if norm not in NORMS:
        raise ValueError(f"expected a norm of {', '.join(NORMS)}, got {norm}")
    if n > 8 * config.x_tiles or config.splits != tuple(part.split for part in weight.parts):
        raise ValueError(f"the configuration is not one for {n} rows and this weight: {config}")
    _check_halves(config, workspace, k, normalised=norm != "none")
    atoms = padded_cols(k) // ATOM_COLS
    used = zip(config.splits, config.rings, strict=True)
    common = math.gcd(*(ring.atoms for split, ring in used if split.row_blocks))
    x_atoms = 1 if k % ATOM_COLS else common
    args = _Args(
        y=out.data_ptr(),
        bias=0 if bias is None else bias.data_ptr(),
        residual=0 if residual is None else residual.data_ptr(),
        m=m,
        n=n,
        k=atoms * ATOM_COLS,
        tier_count=len(weight.parts),
        x_atoms=x_atoms,
        activation=ACTIVATIONS.index(activation),
        norm=NORMS.index(norm),
        eps=eps,
        inverse_k=1 / k,
        half=config.half_cols // ATOM_COLS or atoms,
        arrivals=0 if workspace is None else workspace.arrivals.data_ptr(),
        halves=0 if workspace is None else workspace.halves.data_ptr(),
    )
    if ahead is not None and (
        ahead.dtype != torch.uint8
        or ahead.dim() != 1
        or not ahead.is_contiguous()
        or ahead.device != x.device
        or ahead.data_ptr() % 16
    ):
        raise ValueError("expected ahead as contiguous bytes on x's GPU, aligned to 16 of them")
    args.x[:] = atoms_map(x.data_ptr(), x.dtype, (n, k), 8 * config.x_tiles, x_atoms)
    if ahead is not None and config.splits[0].ctas:
        args.ahead = ahead.data_ptr()
        args.ahead_bytes = ahead.numel() // config.splits[0].ctas // AHEAD_ALIGN * AHEAD_ALIGN
    groups = [ceil_div(split.row_blocks, split.group) for split in config.splits]
    if config.mixes:
        args.mixed_tier = next(i for i, split in enumerate(config.splits) if split.mixed)
    args.order = CtaOrder.of(config.splits[0].ctas, config.ctas)
    row_block = cta = 0
    tiers = zip(weight.parts, config.splits, config.rings, strict=True)
    for number, (part, split, ring) in enumerate(tiers):
        mixed = groups[args.mixed_tier] if config.mixes and number == 0 else 0
        args.tiers[number] = _Tier(
            part.data.data_ptr(),
            row_block,
            cta,
            split.wave,
            split.group,
            split.step_cols // ATOM_COLS,
            ring.atoms,
            ring.stages,
            ring.window,
            ring.atoms // x_atoms,
            ceil_div(atoms, ring.atoms),
            ring.groups,
            groups[number] + mixed,
            mixed,
        )
        row_block += split.row_blocks
        cta += 0 if config.mixes and split.mixed else split.ctas
    args.tiers[len(weight.parts)] = _Tier(first_row_block=row_block, first_cta=cta)
    _kernel(
        weight.dtype, config.x_tiles, norm != "none", config.mixes, torch.cuda.current_device()
    ).launch(config.ctas, SPLITK_THREADS, args, shared_bytes=config.shared_bytes, pdl=pdl)
    return out


def look_ahead(weight: PackedTensor, config: GemmConfig) -> torch.Tensor | None:
    """What a launch reads of its first tier behind what it reads at once: the `ahead` of another.

    Of none where that is not the GPU's own memory, or where it reads two groups at a time.
    """
    part, ring = weight.parts[0], config.rings[0]
    if part.tier != LOCAL or ring.groups > 1 or config.half_cols:
        return None
    first = part.split.wave * ring.atoms * ring.stages * ATOM_BYTES
    found = part.data[first : first + part.split.ctas * AHEAD_BYTES]
    return found if found.numel() else None


def _check_operands(
    x: torch.Tensor,
    weight: PackedTensor,
    out: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    width: int,
) -> None:
    m, k = weight.shape
    n = x.shape[0]
    wanted = {
        "x": (x, (n, k)),
        "out": (out, (n, width)),
        "bias": (bias, (m,)),
        "residual": (residual, (n, m)),
    }
    for name, (tensor, shape) in wanted.items():
        if tensor is None:
            continue
        if tensor.shape != shape or tensor.dtype != weight.dtype or tensor.device != x.device:
            raise ValueError(
                f"expected {name} as {list(shape)} of {weight.dtype} on {x.device}, got "
                f"{list(tensor.shape)} of {tensor.dtype} on {tensor.device}"
            )
        if not tensor.is_contiguous() or tensor.data_ptr() % 16:
            raise ValueError(f"expected {name} to be contiguous and aligned to 16 bytes")
    if not x.is_cuda or x.device.index != torch.cuda.current_device() or k % 8:
        raise ValueError(
            f"expected x on the current GPU with columns in eights, got {k} on {x.device}"
        )
    if len(weight.parts) > MAX_TIERS or any(part.data.data_ptr() % 128 for part in weight.parts):
        raise ValueError(f"expected at most {MAX_TIERS} tiers, aligned to 128 bytes")


def _check_halves(
    config: GemmConfig, workspace: Workspace | None, k: int, *, normalised: bool
) -> None:
    half, row_blocks = config.half_cols, sum(split.row_blocks for split in config.splits)
    if not half:
        return
    if normalised or half >= k or any(half % split.step_cols for split in config.splits):
        raise ValueError(f"expected no norm and halves of whole steps of {k} columns, got {config}")
    if (
        workspace is None
        or workspace.halves.numel() < _halves(row_blocks, config)
        or workspace.arrivals.numel() < row_blocks
    ):
        raise ValueError(f"expected a workspace for sums of halves of {row_blocks} row blocks")


def _halves(row_blocks: int, config: GemmConfig) -> int:
    return 2 * row_blocks * ROWS_PER_BLOCK * ROWS_PER_BLOCK * config.x_tiles


def defines(
    dtype: torch.dtype, x_tiles: int, norm: bool = False, mixes: bool = False
) -> dict[str, int]:
    """The macros of one variant of the kernel: with `norm` for "rms" and "layer"."""
    macros = {"BFLOAT16": int(dtype == torch.bfloat16), "X_TILES": x_tiles}
    return {**macros, "NORM": int(norm), "MIXES": int(mixes)}


def defines_of_tiers(
    dtype: torch.dtype, x_tiles: int, norm: bool = False, *, mixes: bool
) -> list[dict[str, int]]:
    """The macros of the variants for one size of X; with `mixes` also where tiers are mixed."""
    kinds = (False, True) if mixes and can_mix(x_tiles) else (False,)
    return [defines(dtype, x_tiles, norm, mixed) for mixed in kinds]


def all_defines(dtype: torch.dtype) -> list[dict[str, int]]:
    """The macros of all variants of the kernel for `dtype`."""
    return [
        macros
        for x_tiles, norm in itertools.product(SPLITK_X_TILES, (False, True))
        for macros in defines_of_tiers(dtype, x_tiles, norm, mixes=True)
    ]


@functools.cache
def _kernel(dtype: torch.dtype, x_tiles: int, norm: bool, mixes: bool, device: int) -> Kernel:
    del device  # a kernel is loaded on one
    return kernel(SOURCE, "splitk_gemm", defines(dtype, x_tiles, norm, mixes))
