"""Y = epilogue(X W^T) over a packed W in several tiers, for many rows; wraps native/tiled_gemm.cu.

Knows operands and a configuration, no models and no plans.
"""

import ctypes
import functools
import itertools
from dataclasses import dataclass
from typing import Any

import torch

from dakrun.geometry import (
    MAX_TIERS,
    ROWS_PER_BLOCK,
    TILED_MAX_ROWS,
    TILED_PORTABLE_X_TILES,
    TILED_THREADS,
    TILED_WIDE_TILES,
    TILED_X_TILES,
    WARPGROUPS,
)
from dakrun.kernels.gemm.packed_matrix import PackedMatrix, packed_matrix
from dakrun.kernels.gemm.packing import PackedTensor
from dakrun.kernels.gemm.splitk import ACTIVATIONS, Activation
from dakrun.kernels.gemm.tiled_shapes import (
    BARRIER_BYTES,
    MAX_CLUSTER,
    SUM_BYTES,
    Launch,
    Limits,
    TiledConfig,
)
from dakrun.kernels.runtime import jit, operands
from dakrun.kernels.runtime.tensor_map import atoms_map, boxes_map
from dakrun.units import ceil_div

SOURCE = "tiled_gemm.cu"
TMA_BYTES = 16  # that addresses and rows of what TMA writes are multiples of
WARPS = 4 * WARPGROUPS  # that multiply
ALONE, BEFORE_LOCAL, AFTER_REMOTE = range(3)  # what a launch waits for


class _TierTiles(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_int)
        for name in (
            *("first_row_block", "first_cluster", "clusters", "row_groups", "tile_row_blocks"),
            *("w_tiles", "x_tiles", "block_tiles", "rounds", "stages", "window"),
        )
    )


class _Args(ctypes.Structure):
    _fields_ = (
        ("x", ctypes.c_uint64 * 16),
        ("y_boxes", ctypes.c_uint64 * 16),
        *((name, ctypes.c_int) for name in ("boxes", "m", "n", "box_rows", "activation", "order")),
        *((name, ctypes.c_int) for name in ("w_ctas", "x_ctas", "k_ctas")),
        *((name, ctypes.c_int) for name in ("segment", "blocks", "width")),
        *((name, ctypes.c_uint64) for name in ("bias", "residual", "y", "carried", "flags")),
        ("tiers", _TierTiles * (MAX_TIERS + 1)),
        ("weight", PackedMatrix),
    )


@dataclass(frozen=True)
class Workspace:
    """Where clusters leave sums for others: one for all launches of a stream.

    `carried` are bytes, `flags` int32 [CTAs * warps], zero between launches, each of them as many
    as some launch needs, or more.
    """

    carried: torch.Tensor
    flags: torch.Tensor

    @classmethod
    def empty(cls, config: TiledConfig, device: torch.device | str) -> "Workspace":
        """For `config`, and others that need no more."""
        return cls(
            torch.empty(config.carried, dtype=torch.uint8, device=device),
            torch.zeros(config.carriers * WARPS, dtype=torch.int32, device=device),
        )

    @classmethod
    def largest(cls, sms: int, device: torch.device | str) -> "Workspace":
        """For all launches on a GPU with so many SMs."""
        sums = torch.empty(sms * max(TILED_X_TILES) * SUM_BYTES, dtype=torch.uint8, device=device)
        return cls(sums, torch.zeros(sms * WARPS, dtype=torch.int32, device=device))

    def fits(self, config: TiledConfig) -> bool:
        """Whether it has what `config` needs."""
        carried, flags = self.carried.numel(), self.flags.numel()
        return carried >= config.carried and flags >= config.carriers * WARPS


def row_blocks_by_tier(weight: PackedTensor) -> tuple[tuple[str, int], ...]:
    """The tiers that rows of `weight` lie in, in their order, and how many row blocks each has.

    Parts of one tier that follow each other, as staged rows do behind local ones, are one.
    """
    runs = itertools.groupby(weight.parts, key=lambda part: part.tier)
    return tuple((tier, sum(part.split.row_blocks for part in parts)) for tier, parts in runs)


def tiled_gemm(
    x: torch.Tensor,
    weight: PackedTensor,
    config: TiledConfig,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    activation: Activation = "none",
    workspace: Workspace | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """out [N, M] = activation(x [N, K] weight [M, K]^T + bias [M]) + residual [N, M].

    All in the weight's dtype on one GPU, sums in float32; N is up to 4,096. `config` has the tiers
    of row_blocks_by_tier(weight). With "silu_mul" the weight's rows are gates and what they
    multiply in turn, silu(x gate^T) * (x up^T), and out is [N, M / 2]. With `pdl` the launch
    may start while the kernel before it ends, and reads weights meanwhile. Raises ValueError where
    an operand does not fit the others.
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
    if not 1 <= n <= TILED_MAX_ROWS or not config.launches:
        raise ValueError(f"the configuration is not one for {n} rows and this weight: {config}")
    _check_tiers(weight, config)
    given = workspace or Workspace.empty(TiledConfig(()), x.device)
    if not given.fits(config):
        raise ValueError(f"expected a workspace for sums that clusters leave for others: {config}")
    args = _Args(
        boxes=int(not gated and _takes_boxes(out)),
        m=m,
        n=n,
        activation=ACTIVATIONS.index(activation),
        width=width,
        bias=0 if bias is None else bias.data_ptr(),
        residual=0 if residual is None else residual.data_ptr(),
        y=out.data_ptr(),
        carried=given.carried.data_ptr(),
        flags=given.flags.data_ptr(),
        weight=packed_matrix(weight),
    )
    orders = (ALONE,) if len(config.launches) == 1 else (BEFORE_LOCAL, AFTER_REMOTE)
    for order, launch in zip(orders, config.launches, strict=True):
        shape = launch.shape
        args.order = order
        args.w_ctas, args.x_ctas, args.k_ctas = shape.w_ctas, shape.x_ctas, shape.k_ctas
        args.segment = ceil_div(args.weight.atoms, shape.k_ctas)
        args.blocks = launch.blocks
        args.box_rows = ROWS_PER_BLOCK * ceil_div(
            min(shape.x_tiles, ceil_div(n, ROWS_PER_BLOCK)), shape.w_ctas
        )
        args.x[:] = atoms_map(x.data_ptr(), x.dtype, (n, k), args.box_rows, 1)
        if args.boxes:
            args.y_boxes[:] = boxes_map(out.data_ptr(), out.dtype, (n, width), shape.output_box)
        args.tiers[:] = _tiers(n, weight, launch)
        kernel = jit.kernel(
            SOURCE, "tiled_gemm", defines(weight.dtype, shape.tiles, wide=shape.wide)
        )
        kernel.launch(
            launch.ctas, TILED_THREADS, args, shared_bytes=launch.shared_bytes, cluster=shape.ctas,
            pdl=pdl or order == AFTER_REMOTE,
        )  # fmt: skip
        args.carried += launch.carried
        args.flags += 4 * WARPS * launch.carriers
    return out


def _takes_boxes(out: torch.Tensor) -> bool:
    """Whether TMA can write to `out` [rows, width], whose rows begin at multiples of 16 bytes."""
    return out.data_ptr() % TMA_BYTES == 0 and out.shape[1] * out.itemsize % TMA_BYTES == 0


def _check_tiers(weight: PackedTensor, config: TiledConfig) -> None:
    """Each tier that holds row blocks has one launch; all split k into the same segments."""
    launches, tiers = config.launches, row_blocks_by_tier(weight)
    if any(len(launch.tiers) != len(tiers) for launch in launches) or (
        len({launch.shape.k_ctas for launch in launches}) > 1
    ):
        raise ValueError(f"the configuration is not one for this weight: {config}")
    for number, (tier, row_blocks) in enumerate(tiers):
        by = sum(launch.tiers[number].clusters > 0 for launch in launches)
        if by != (row_blocks > 0):
            raise ValueError(f"expected one launch for the row blocks in {tier}, got {config}")
    for launch in launches:
        even = any(tier.even for tier in launch.tiers)
        if launch.stages < 2 or (even and launch.shape.k_ctas > 1):
            raise ValueError(f"expected two stages or more, and no segments to share: {launch}")


def _tiers(n: int, weight: PackedTensor, launch: Launch) -> tuple[_TierTiles, ...]:
    found, first, cluster, shape = [], 0, 0, launch.shape
    for (_, row_blocks), tier in zip(row_blocks_by_tier(weight), launch.tiers, strict=True):
        w_tiles = ceil_div(row_blocks, tier.tile_row_blocks * shape.w_ctas)
        x_tiles = ceil_div(n, shape.rows)
        rounds = ceil_div(w_tiles * x_tiles, max(1, tier.clusters))
        if tier.even and w_tiles * x_tiles % tier.clusters:
            rounds = max(0, rounds - 2)  # what is left is a tile for each, and less than another
        found.append(
            _TierTiles(
                first, cluster, tier.clusters, shape.row_groups, tier.tile_row_blocks, w_tiles,
                x_tiles, tier.block_tiles, rounds, launch.stages, tier.window,
            )
        )  # fmt: skip
        first += row_blocks
        cluster += tier.clusters
    none = MAX_TIERS + 1 - len(found)
    return (*found, *[_TierTiles(first_row_block=first, first_cluster=cluster)] * none)


def defines(dtype: torch.dtype, tiles: int, *, wide: bool = False) -> dict[str, int]:
    """The macros of one variant of the kernel: of `Shape.tiles`, and whether it is wide."""
    return {**operands.defines(dtype), "X_TILES": tiles, "WIDE": int(wide)}


def all_defines(dtype: torch.dtype) -> list[dict[str, int]]:
    """Those of all variants for GPUs with wgmma, the longest to compile first."""
    sizes = [(tiles, False) for tiles in TILED_X_TILES] + [
        (tiles, True) for tiles in TILED_WIDE_TILES
    ]
    return [defines(dtype, tiles, wide=wide) for tiles, wide in sorted(sizes)[::-1]]


def x_tiles(device: int) -> tuple[int, ...]:
    """What `device`, a CUDA device index, has of the kernel; asking compiles nothing."""
    return (
        TILED_X_TILES
        if torch.cuda.get_device_capability(device) == (9, 0)
        else TILED_PORTABLE_X_TILES
    )


@functools.cache
def limits(device: int) -> Limits:
    """What `device`, a CUDA device index, sets to configurations."""
    properties: Any = torch.cuda.get_device_properties(device)
    shared_bytes = properties.shared_memory_per_block_optin
    if x_tiles(device) != TILED_X_TILES:
        return Limits(shared_bytes, TILED_PORTABLE_X_TILES)
    with torch.cuda.device(device):
        kernel = jit.kernel(SOURCE, "tiled_gemm", defines(torch.float16, TILED_X_TILES[0]))
    most = shared_bytes - BARRIER_BYTES
    clusters = (kernel.clusters(size, TILED_THREADS, most) for size in range(2, MAX_CLUSTER + 1))
    return Limits(shared_bytes, TILED_X_TILES, tuple(clusters))
