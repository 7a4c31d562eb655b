"""Tiled GEMM: Y = epilogue(X W^T) for many rows of X, W in several tiers (native/tiled_gemm.cu).

Knows operands and a launch configuration, no models and no plans.
"""

import ctypes
import functools
from dataclasses import dataclass

import torch

from dakrun.config import Activation
from dakrun.formats import PACKED16, WeightFormat
from dakrun.geometry import (
    MAX_TIERS,
    ROWS_PER_BLOCK,
    TILED_MAX_ROWS,
    TILED_THREADS,
    TILED_X_TILES,
    WARPGROUPS,
    unit_atoms,
)
from dakrun.kernels.gemm.packed_matrix import PackedMatrix, packed_matrix
from dakrun.kernels.gemm.splitk import ACTIVATIONS, check_product
from dakrun.kernels.runtime import jit, operands
from dakrun.kernels.runtime.needs import Macros, Needs, compiled_ahead
from dakrun.kernels.runtime.operands import ints, pointers
from dakrun.kernels.runtime.tensor_map import atoms_map, boxes_map
from dakrun.launches import (
    PARTIAL_BYTES,
    Launch,
    Shape,
    TiledConfig,
    sharing_tiles,
    tiled_rows,
    wide_tiles,
    x_tiles,
)
from dakrun.memory.matrix import TieredMatrix
from dakrun.units import ceil_div

SOURCE = "tiled_gemm.cu"
TMA_BYTES = 16  # alignment of addresses and rows that TMA writes
WARPS = 4 * WARPGROUPS  # consumer warps of a CTA
ALONE, BEFORE_LOCAL, AFTER_REMOTE = range(3)  # Order of native/tiled_gemm.cuh


class TierTiles(ctypes.Structure):
    """TierTiles of native/tiled_gemm.cuh."""

    _fields_ = (
        *ints("first_row_block", "first_cluster", "clusters", "row_groups", "tile_row_blocks"),
        *ints("w_tiles", "x_tiles", "block_tiles", "waves", "stages", "window"),
    )


class Args(ctypes.Structure):
    """TiledGemmArgs of native/tiled_gemm.cuh."""

    _fields_ = (
        ("x", ctypes.c_uint64 * 16),
        ("x_rest", ctypes.c_uint64 * 16),
        ("y_boxes", ctypes.c_uint64 * 16),
        *ints("boxes", "m", "n", "box_rows", "rest_rows", "activation", "order"),
        *ints("w_ctas", "x_ctas", "k_ctas", "segment_atoms", "output_blocks", "width"),
        *pointers("bias", "residual", "y", "partials", "partial_flags"),
        ("tiers", TierTiles * (MAX_TIERS + 1)),
        ("weight", PackedMatrix),
    )


@dataclass(frozen=True)
class StreamKWorkspace:
    """Stream-K's partial tiles: one workspace for all launches of a stream.

    `partials` is uint8, `flags` int32 [CTAs * warps], zero between launches.
    """

    partials: torch.Tensor
    flags: torch.Tensor

    @classmethod
    def empty(cls, config: TiledConfig, device: torch.device | str) -> "StreamKWorkspace":
        """Allocate what launches of `config` need."""
        return cls(
            torch.empty(config.partial_bytes, dtype=torch.uint8, device=device),
            torch.zeros(config.stream_k_ctas * WARPS, dtype=torch.int32, device=device),
        )

    @classmethod
    def largest(cls, sms: int, device: torch.device | str) -> "StreamKWorkspace":
        """Allocate what any launches on `sms` SMs need.

        Two CTAs may share an SM, whose partial tiles are smaller than those of one alone.
        """
        size = sms * max(TILED_X_TILES) * PARTIAL_BYTES
        return cls(
            torch.empty(size, dtype=torch.uint8, device=device),
            torch.zeros(2 * sms * WARPS, dtype=torch.int32, device=device),
        )

    def fits(self, config: TiledConfig) -> bool:
        """Whether it has what `config` needs."""
        partials, flags = self.partials.numel(), self.flags.numel()
        return partials >= config.partial_bytes and flags >= config.stream_k_ctas * WARPS


def tiled_gemm(
    x: torch.Tensor,
    weight: TieredMatrix,
    config: TiledConfig,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    activation: Activation = "none",
    workspace: StreamKWorkspace | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """out [N, M] = activation(x [N, K] weight [M, K]^T + bias [M]) + residual [N, M].

    All operands are in the weight's dtype on one GPU; accumulators are float32; N is at most
    TILED_MAX_ROWS. `config` is for the tiers of weight.row_blocks_by_tier. With "silu_mul" even
    rows of `weight` are gates and odd rows ups, out [N, M / 2] = silu(x gate^T) * (x up^T). With
    `pdl` the launch may start while its predecessor ends, and reads weights meanwhile.
    Raises ValueError if an operand does not fit the others.
    """
    (m, k), n = weight.shape, x.shape[0]
    check_product(x, weight, out, bias, residual, activation)
    gated = activation == "silu_mul"
    width = m // 2 if gated else m
    if not 1 <= n <= TILED_MAX_ROWS or not config.launches:
        raise ValueError(f"the configuration is not one for {n} rows and this weight: {config}")
    _check_tiers(weight.row_blocks_by_tier, config)
    if config.stream_k_ctas and not (workspace and workspace.fits(config)):
        raise ValueError(f"expected a workspace for Stream-K's partial tiles of {config}")
    args = Args(
        boxes=int(not gated and takes_boxes(out)),
        m=m,
        n=n,
        activation=ACTIVATIONS.index(activation),
        width=width,
        bias=operands.address(bias),
        residual=operands.address(residual),
        y=out.data_ptr(),
        partials=workspace.partials.data_ptr() if workspace else 0,
        partial_flags=workspace.flags.data_ptr() if workspace else 0,
        weight=packed_matrix(weight, x.device),
    )
    orders = (ALONE,) if len(config.launches) == 1 else (BEFORE_LOCAL, AFTER_REMOTE)
    for order, launch in zip(orders, config.launches, strict=True):
        shape = launch.shape
        args.order = order
        args.w_ctas, args.x_ctas, args.k_ctas = shape.w_ctas, shape.x_ctas, shape.k_ctas
        args.segment_atoms = ceil_div(args.weight.atoms, shape.k_ctas)
        args.output_blocks = launch.blocks
        whole = ROWS_PER_BLOCK * shape.x_tiles
        args.box_rows = whole // shape.w_ctas
        args.rest_rows = ROWS_PER_BLOCK * ceil_div(n % whole, ROWS_PER_BLOCK * shape.w_ctas)
        for field, rows in ((args.x, args.box_rows), (args.x_rest, args.rest_rows)):
            field[:] = atoms_map(x.data_ptr(), x.dtype, (n, k), rows or args.box_rows, 1)
        if args.boxes:
            args.y_boxes[:] = boxes_map(out.data_ptr(), out.dtype, (n, width), shape.output_box)
        args.tiers[:] = _tiers(n, weight.row_blocks_by_tier, launch)
        macros = defines(weight.dtype, shape)
        kernel = jit.kernel(SOURCE, "tiled_gemm", {**macros, **weight.format.macros})
        kernel.launch(
            launch.ctas, TILED_THREADS, args, shared_bytes=launch.shared_bytes, cluster=shape.ctas,
            pdl=pdl or order == AFTER_REMOTE,
        )  # fmt: skip
        if workspace:
            args.partials += launch.partial_bytes
            args.partial_flags += 4 * WARPS * launch.stream_k_ctas
    return out


def takes_boxes(out: torch.Tensor) -> bool:
    """Whether TMA can write to `out` [rows, width]: its rows begin at multiples of 16 bytes."""
    return out.data_ptr() % TMA_BYTES == 0 and out.shape[1] * out.itemsize % TMA_BYTES == 0


@functools.lru_cache(maxsize=4096)
def _check_tiers(tiers: tuple[tuple[str, int], ...], config: TiledConfig) -> None:
    """Check that each tier with row blocks has one launch, and all have the same segments of K."""
    launches = config.launches
    if any(len(launch.tiers) != len(tiers) for launch in launches) or (
        len({launch.shape.k_ctas for launch in launches}) > 1
    ):
        raise ValueError(f"the configuration is not one for this weight: {config}")
    for number, (tier, row_blocks) in enumerate(tiers):
        by = sum(launch.tiers[number].clusters > 0 for launch in launches)
        if by != (row_blocks > 0):
            raise ValueError(f"expected one launch for the row blocks in {tier}, got {config}")
    for launch in launches:
        if launch.stages < 2 or (launch.stream_k_ctas and launch.shape.k_ctas > 1):
            raise ValueError(
                f"expected two stages or more, and no Stream-K with segments of K, got {launch}"
            )


@functools.lru_cache(maxsize=4096)
def _tiers(n: int, by_tier: tuple[tuple[str, int], ...], launch: Launch) -> tuple[TierTiles, ...]:
    """The kernel's `tiers` for `n` rows of X, with the end of the last one behind it."""
    found, first, cluster, shape = [], 0, 0, launch.shape
    for (_, row_blocks), tier in zip(by_tier, launch.tiers, strict=True):
        w_tiles = ceil_div(row_blocks, tier.tile_row_blocks * shape.w_ctas)
        x_tiles = ceil_div(n, shape.rows)
        waves = ceil_div(w_tiles * x_tiles, max(1, tier.clusters))
        if tier.stream_k and w_tiles * x_tiles % tier.clusters:
            waves = max(0, waves - 2)  # leaves each cluster one tile or more, but less than two
        found.append(
            TierTiles(
                first_row_block=first,
                first_cluster=cluster,
                clusters=tier.clusters,
                row_groups=shape.row_groups,
                tile_row_blocks=tier.tile_row_blocks,
                w_tiles=w_tiles,
                x_tiles=x_tiles,
                block_tiles=tier.block_tiles,
                waves=waves,
                stages=launch.stages,
                window=tier.window,
            )
        )
        first += row_blocks
        cluster += tier.clusters
    none = MAX_TIERS + 1 - len(found)
    return (*found, *[TierTiles(first_row_block=first, first_cluster=cluster)] * none)


def defines(dtype: torch.dtype, shape: Shape) -> dict[str, int]:
    """Macros of the kernel variant for `shape`, without those of W's format."""
    macros = {**operands.defines(dtype), "TILES": shape.tiles, "WIDE": int(shape.wide)}
    return macros | ({"CTAS_PER_SM": shape.ctas_per_sm} if shape.ctas_per_sm > 1 else {})


def all_defines(
    dtype: torch.dtype, *, wgmma: bool, format: WeightFormat = PACKED16
) -> list[dict[str, int]]:
    """Macros of all kernel variants, with wgmma or without, the longest to compile first."""
    units = unit_atoms(format.atom_bytes) > 1
    shapes = [
        *(Shape(tiles, 1) for tiles in x_tiles(wgmma=wgmma)),
        *(Shape(tiles, 1, wide=True) for tiles in wide_tiles(wgmma=wgmma, units=units)),
        *(Shape(t, 1, ctas_per_sm=2) for t in sharing_tiles(wgmma=wgmma, units=units)),
    ]
    shapes.sort(key=lambda shape: (-shape.tiles, not shape.wide))
    return [{**defines(dtype, shape), **format.macros} for shape in shapes]


@compiled_ahead(SOURCE, seconds=4)
def _variants(needs: Needs) -> list[Macros]:
    return [
        macros
        for stored in needs.formats
        if needs.every or tiled_rows(needs.card, stored.atom_bytes)
        for macros in all_defines(needs.dtype, wgmma=needs.card.has_wgmma, format=stored)
    ]
