"""SplitK_GEMM: Y = epilogue(X W^T) for few rows of X, W in several tiers (native/splitk_gemm.cu).

Knows operands and a launch configuration, no models and no plans.
"""

import ctypes
import itertools
import math
from dataclasses import dataclass
from typing import Literal

import torch

from dakrun.config import Activation, NormKind
from dakrun.formats import PACKED16, WeightFormat
from dakrun.geometry import (
    ATOM_COLS,
    FEW_ROWS,
    MAX_TIERS,
    ROWS_PER_BLOCK,
    SPLITK_THREADS,
    SPLITK_UNITS_MAX_ROWS,
    SPLITK_X_TILES,
    TILE_ROW_BLOCKS,
    UNIT_ATOMS,
    UNIT_COLS,
    row_block_count,
)
from dakrun.hardware import LOCAL
from dakrun.kernels.gemm.packed_matrix import addresses, atom_count
from dakrun.kernels.gemm.scaled_rows import ScaledRows, check_scaled
from dakrun.kernels.runtime import jit, operands
from dakrun.kernels.runtime.needs import Macros, Needs, compiled_ahead
from dakrun.kernels.runtime.operands import CtaOrder, address, fields, ints, pointers
from dakrun.kernels.runtime.tensor_map import atoms_map
from dakrun.launches import K_SHARES, GemmConfig, can_mix, splitk_rows, tiles_for
from dakrun.memory.matrix import TieredMatrix
from dakrun.units import ceil_div

SOURCE = "splitk_gemm.cu"
# Bytes that each CTA prefetches for a later launch. All CTAs together prefetch about as much as HBM
# delivers in the gap between two launches.
AHEAD_BYTES = 32 * 1024
AHEAD_ALIGN = 128  # bytes: L2's lines

ACTIVATIONS: tuple[Activation, ...] = ("none", "relu", "silu_mul")
FusedNorm = Literal["none"] | NormKind  # of rows of X, without weight and bias
NORMS: tuple[FusedNorm, ...] = ("none", "rms", "layer")


class _Tier(ctypes.Structure):
    """Tier of native/splitk_gemm.cuh."""

    _fields_ = (
        *ints("first_row_block", "first_cta", "wave_row_blocks", "group_row_blocks"),
        *ints("step_atoms", "stage_atoms", "stages", "window", "x_boxes", "group_stages"),
        *ints("groups", "all_groups", "mixed_groups"),
    )


class _Args(ctypes.Structure):
    """SplitKGemmArgs of native/splitk_gemm.cuh."""

    _fields_ = (
        ("x", ctypes.c_uint64 * 16),
        *ints("tier_count", "m", "n", "k", "x_atoms", "activation"),
        ("order", CtaOrder),
        *ints("mixed_tier"),
        *pointers("addresses", "bias"),
        ("tiers", _Tier * (MAX_TIERS + 1)),
        *pointers("residual", "y"),
        *ints("norm"),
        *fields(ctypes.c_float, "eps", "inverse_k"),
        *ints("half_atoms"),
        *pointers("arrivals", "partials", "ahead"),
        *ints("ahead_bytes", "k_shares"),
        *pointers("x_squares", "squares", "next_weight", "scaled"),
        *fields(ctypes.c_float, "x_factor", "next_factor"),
        *ints("x_row_blocks"),
    )


@dataclass(frozen=True)
class HalvesWorkspace:
    """Partial sums of halves of K: one workspace for all launches of a stream.

    `partials` is float32 [2 * row blocks * 8 rows of W * 8 * x_tiles rows of X] or more, `arrivals`
    int32 [row blocks] or more, zero between launches.
    """

    partials: torch.Tensor
    arrivals: torch.Tensor

    @classmethod
    def empty(cls, config: GemmConfig, device: torch.device | str) -> "HalvesWorkspace":
        """Allocate what launches of `config` need."""
        row_blocks = sum(split.row_blocks for split in config.splits)
        return cls(
            torch.empty(_partial_count(row_blocks, config), dtype=torch.float32, device=device),
            torch.zeros(row_blocks, dtype=torch.int32, device=device),
        )


def splitk_gemm(
    x: torch.Tensor,
    weight: TieredMatrix,
    config: GemmConfig,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    activation: Activation = "none",
    norm: FusedNorm = "none",
    eps: float = 0.0,
    scaled: ScaledRows | None = None,
    scales: ScaledRows | None = None,
    workspace: HalvesWorkspace | None = None,
    pdl: bool = False,
    ahead: torch.Tensor | None = None,
) -> torch.Tensor:
    """out [N, M] = activation(r x [N, K] weight [M, K]^T + bias [M]) + residual [N, M].

    r is 1; with `norm` "rms" it is 1 / sqrt(mean(x^2) + `eps`) of each row of x, with "layer"
    1 / sqrt(var(x) + `eps`), the variance being mean(x^2) - mean(x)^2. For a whole norm, fold
    the rest of it into the operands before: multiply the columns of `weight` by the norm's weight;
    for a LayerNorm also subtract from each of these rows its mean, and add to `bias` the product of
    the original `weight` and the norm's bias.

    All operands are in the weight's dtype on one GPU; accumulators are float32. With "silu_mul"
    even rows of `weight` are gates and odd rows ups, out [N, M / 2] = silu(x gate^T) * (x up^T).
    With `pdl` the launch may start while its predecessor ends, and reads weights meanwhile.
    `ahead`, uint8 1-D in the GPU's own memory, is prefetched into L2 as this launch ends. Halves of
    K need a `workspace` and no norm. A W of fewer than 16 bits needs at most
    SPLITK_UNITS_MAX_ROWS rows of x, and no `norm`. It may do halves of RMSNorms instead: with
    `scaled`, x is its `rows`, and r is 1 / RMS of the rows that they were scaled from, over its
    factor. `scales`, if given, is written from out for the norm behind it.
    Raises ValueError if an operand does not fit the others.
    """
    (m, k), n = weight.shape, x.shape[0]
    check_product(x, weight, out, bias, residual, activation)
    if norm not in NORMS:
        raise ValueError(f"expected a norm of {', '.join(NORMS)}, got {norm}")
    if n > ROWS_PER_BLOCK * config.x_tiles or config.splits != tuple(
        part.split for part in weight.parts
    ):
        raise ValueError(f"the configuration is not one for {n} rows and this weight: {config}")
    if config.k_shares > K_SHARES and any(s.group > TILE_ROW_BLOCKS for s in config.splits):
        raise ValueError(
            f"expected groups of at most {TILE_ROW_BLOCKS} row blocks with {config.k_shares} "
            f"shares of K, got {config}"
        )
    _check_halves(config, workspace, k, normalised=norm != "none")
    if weight.format.macros and (n > SPLITK_UNITS_MAX_ROWS or norm != "none"):
        raise ValueError(
            f"expected at most {SPLITK_UNITS_MAX_ROWS} rows of x and no norm for "
            f"{weight.format.name} weights, got {n} rows and norm {norm}"
        )
    if scaled is not None or scales is not None:
        check_scaled(x, weight, out, scaled, scales)
    atoms = atom_count(k, weight.format)
    used = zip(config.splits, config.rings, strict=True)
    common = math.gcd(*(ring.atoms for split, ring in used if split.row_blocks))
    x_atoms = 1 if k % ATOM_COLS else common
    args = _Args(
        tier_count=len(weight.parts),
        m=m,
        n=n,
        k=atoms * ATOM_COLS,
        x_atoms=x_atoms,
        activation=ACTIVATIONS.index(activation),
        order=CtaOrder.of(config.splits[0].ctas, config.ctas),
        addresses=addresses(weight, x.device),
        bias=address(bias),
        residual=address(residual),
        y=out.data_ptr(),
        norm=NORMS.index(norm),
        eps=eps,
        inverse_k=1 / k,
        half_atoms=config.half_cols // ATOM_COLS or atoms,
        k_shares=config.k_shares,
        arrivals=0 if workspace is None else workspace.arrivals.data_ptr(),
        partials=0 if workspace is None else workspace.partials.data_ptr(),
        x_row_blocks=row_block_count(k),
    )
    if scaled is not None:
        args.x_squares, args.x_factor = scaled.squares.data_ptr(), 1 / scaled.factor
    if scales is not None:
        args.squares, args.scaled = scales.squares.data_ptr(), scales.rows.data_ptr()
        args.next_weight, args.next_factor = scales.weight.data_ptr(), scales.factor
    args.x[:] = atoms_map(x.data_ptr(), x.dtype, (n, k), ROWS_PER_BLOCK * config.x_tiles, x_atoms)
    _set_tiers(args, weight, config, atoms)
    if ahead is not None:
        _check_ahead(ahead, x.device)
        if config.splits[0].ctas:
            args.ahead = ahead.data_ptr()
            args.ahead_bytes = ahead.numel() // config.splits[0].ctas // AHEAD_ALIGN * AHEAD_ALIGN
    macros = defines(weight.dtype, config.x_tiles, norm != "none", config.mixes)
    jit.kernel(SOURCE, "splitk_gemm", {**macros, **weight.format.macros}).launch(
        config.ctas, SPLITK_THREADS, args, shared_bytes=config.shared_bytes, pdl=pdl
    )
    return out


def _set_tiers(args: _Args, weight: TieredMatrix, config: GemmConfig, atoms: int) -> None:
    """Fill in `args.tiers` and `args.mixed_tier` for a weight of `atoms` along K."""
    groups = [ceil_div(split.row_blocks, split.group) for split in config.splits]
    if config.mixes:
        args.mixed_tier = next(i for i, split in enumerate(config.splits) if split.mixed)
    row_block = cta = 0
    for number, (split, ring) in enumerate(zip(config.splits, config.rings, strict=True)):
        mixed = groups[args.mixed_tier] if config.mixes and number == 0 else 0
        args.tiers[number] = _Tier(
            first_row_block=row_block,
            first_cta=cta,
            wave_row_blocks=split.wave,
            group_row_blocks=split.group,
            step_atoms=split.step_cols // ATOM_COLS,
            stage_atoms=ring.atoms,
            stages=ring.stages,
            window=ring.window,
            x_boxes=ring.atoms // args.x_atoms,
            group_stages=ceil_div(atoms, ring.atoms),
            groups=ring.groups,
            all_groups=groups[number] + mixed,
            mixed_groups=mixed,
        )
        row_block += split.row_blocks
        cta += 0 if config.mixes and split.mixed else split.ctas
    args.tiers[len(weight.parts)] = _Tier(first_row_block=row_block, first_cta=cta)


def look_ahead(weight: TieredMatrix, config: GemmConfig) -> torch.Tensor | None:
    """The bytes that a launch reads from HBM after its first copies: `ahead` of another launch.

    None if there are none: the first tier is not the GPU's own memory, or the first copies read
    all of it. Also None for stages of two groups and for halves of K, whose order is another.
    """
    part, ring = weight.parts[0], config.rings[0]
    if part.tier != LOCAL or ring.groups > 1 or config.half_cols:
        return None
    elements = part.format.arrays(UNIT_COLS)[0].row_block_bytes // UNIT_ATOMS  # of an atom
    first = part.split.wave * ring.atoms * ring.stages * elements
    found = part.arrays[0][first : first + part.split.ctas * AHEAD_BYTES]
    return found if found.numel() else None


def check_product(
    x: torch.Tensor,
    weight: TieredMatrix,
    out: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    activation: Activation,
) -> None:
    """Raise ValueError if an operand of either GEMM does not fit the others or the current GPU."""
    (m, k), n = weight.shape, x.shape[0]
    gated = activation == "silu_mul"
    if gated and (m % 2 or residual is not None):
        raise ValueError("expected an even number of rows and no residual with silu_mul")
    wanted: dict[str, operands.Wanted] = {
        "x": (x, (n, k), weight.dtype),
        "out": (out, (n, m // 2 if gated else m), weight.dtype),
        "bias": (bias, (m,), weight.dtype),
        "residual": (residual, (n, m), weight.dtype),
    }
    operands.check_operands(x.device, wanted)
    operands.check_gpu(x.device)


def _check_ahead(ahead: torch.Tensor, device: torch.device) -> None:
    if (
        ahead.dtype != torch.uint8
        or ahead.dim() != 1
        or not ahead.is_contiguous()
        or ahead.device != device
        or ahead.data_ptr() % operands.ALIGNMENT
    ):
        raise ValueError(
            f"expected ahead as contiguous bytes on x's GPU, aligned to {operands.ALIGNMENT}"
        )


def _check_halves(
    config: GemmConfig, workspace: HalvesWorkspace | None, k: int, *, normalised: bool
) -> None:
    half, row_blocks = config.half_cols, sum(split.row_blocks for split in config.splits)
    if not half:
        return
    if normalised or half >= k or any(half % split.step_cols for split in config.splits):
        raise ValueError(
            f"expected no norm and a half of K of whole steps, below {k} columns, got {config}"
        )
    if (
        workspace is None
        or workspace.partials.numel() < _partial_count(row_blocks, config)
        or workspace.arrivals.numel() < row_blocks
    ):
        raise ValueError(f"expected a workspace for halves of {row_blocks} row blocks")


def _partial_count(row_blocks: int, config: GemmConfig) -> int:
    """Floats of two halves' partial sums."""
    return 2 * row_blocks * ROWS_PER_BLOCK * ROWS_PER_BLOCK * config.x_tiles


def defines(
    dtype: torch.dtype, x_tiles: int, norm: bool = False, mixes: bool = False
) -> dict[str, int]:
    """Macros of one kernel variant; `norm` is for "rms" and "layer", `mixes` for mixed tiers."""
    return {**operands.defines(dtype), "TILES": x_tiles, "NORM": int(norm), "MIXES": int(mixes)}


def defines_of_tiers(
    dtype: torch.dtype, x_tiles: int, norm: bool = False, *, mixes: bool
) -> list[dict[str, int]]:
    """Macros of the variants for one size of X; with `mixes` also the one for mixed tiers."""
    kinds = (False, True) if mixes and can_mix(x_tiles) else (False,)
    return [defines(dtype, x_tiles, norm, mixed) for mixed in kinds]


def all_defines(dtype: torch.dtype) -> list[dict[str, int]]:
    """Macros of all kernel variants for `dtype`."""
    return [
        macros
        for x_tiles, norm in itertools.product(SPLITK_X_TILES, (False, True))
        for macros in defines_of_tiers(dtype, x_tiles, norm, mixes=True)
    ]


@compiled_ahead(SOURCE)
def _variants(needs: Needs) -> list[Macros]:
    """For mixed tiers too where weights have them."""
    return [
        {**macros, **stored.macros}
        for stored in needs.formats
        for x_tiles, norm in sorted(_sizes(needs, stored), reverse=True)
        for macros in defines_of_tiers(needs.dtype, x_tiles, norm, mixes=needs.mixes)
    ]


def _sizes(needs: Needs, stored: WeightFormat) -> set[tuple[int, bool]]:
    """Tiles of X and whether it is normalized, for the launches of products of few rows."""
    if stored == PACKED16:
        norms = [(n, needs.every or n <= FEW_ROWS) for n in needs.rows]
        return {(tiles_for(n), norm) for n, may in norms for norm in (False, may)}
    most = splitk_rows(stored.atom_bytes)
    launched = {part for n in needs.rows for part in (min(n, most), n % most or most)}
    return {(tiles_for(n), False) for n in launched}
