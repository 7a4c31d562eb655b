"""Grouped tiled GEMM: products of rows sorted by expert; wraps native/grouped_tiled.cu.

Knows operands and a launch configuration, neither a router nor a plan.
"""

import functools

import torch

from dakrun.config import Activation
from dakrun.geometry import MAX_TIERS, ROWS_PER_BLOCK, TILED_THREADS
from dakrun.kernels.gemm.packed_matrix import check_stacked, packed_matrix
from dakrun.kernels.gemm.splitk import ACTIVATIONS
from dakrun.kernels.gemm.tiled import (
    BEFORE_LOCAL,
    Args,
    TierTiles,
    defines,
    takes_boxes,
)
from dakrun.kernels.runtime import jit, operands
from dakrun.kernels.runtime.needs import Macros, Needs, compiled_ahead
from dakrun.kernels.runtime.tensor_map import atoms_map, boxes_map
from dakrun.launches import Launch, grouped_shape
from dakrun.memory.matrix import TieredMatrix
from dakrun.units import ceil_div

SOURCE = "grouped_tiled.cu"
BOX_ROWS, REST_ROWS = 64, 16  # rows of X of boxes, and of those that hold a tile's last rows


class _Args(Args):
    """TiledGemmArgs of native/tiled_gemm.cuh with GROUPED."""

    _fields_ = (
        *operands.pointers("ends", "taken", "shifts"),
        *operands.ints("experts", "expert_row_blocks", "listed", "cols"),
        *operands.pointers("rows"),
        *operands.ints("x_rows"),
    )


def tile_counters(device: torch.device | str) -> torch.Tensor:
    """Counters of tiles, for all launches of a stream; zero between launches."""
    return torch.zeros(MAX_TIERS, dtype=torch.int32, device=device)


def grouped_tiled_gemm(
    x: torch.Tensor,
    ends: torch.Tensor,
    weight: TieredMatrix,
    launch: Launch,
    out: torch.Tensor,
    *,
    counters: torch.Tensor,
    activation: Activation = "none",
    listed: bool = False,
    pdl: bool = False,
) -> torch.Tensor:
    """out[i] = activation(x[i] of [N, K] times the matrix of its expert), [N, M].

    `weight` [E M, K] stacks the matrices of E experts, of M rows each, a multiple of 8, stored
    expert after expert (launches.expert_splits). Rows of x
    up to `ends`[e], int32 [E], are those of the experts up to e; rows behind the last are left out.
    With "silu_mul" even rows of a matrix are gates and odd rows ups, and out is [N, M / 2].
    Operands are in the weight's dtype on one GPU; accumulators are float32. `launch` is for the
    tiers of weight.row_blocks_by_tier, `counters` are those of tile_counters(). With `pdl` the
    launch may start while its predecessor ends, and reads weights meanwhile: `listed` says that
    `ends` is complete by then, since the predecessor was written to let it start only then.
    Raises ValueError if an operand does not fit the others.
    """
    (rows, k), n, experts = weight.shape, len(x), len(ends)
    gated = activation == "silu_mul"
    m = rows // experts
    width = m // 2 if gated else m
    if rows % (experts * ROWS_PER_BLOCK):
        raise ValueError(f"expected {experts} matrices of whole row blocks, got {rows} rows")
    check_stacked(weight, experts)
    wanted: dict[str, operands.Wanted] = {
        "x": (x, (n, k), weight.dtype),
        "ends": (ends, (experts,), torch.int32),
        "out": (out, (n, width), weight.dtype),
        "counters": (counters, (MAX_TIERS,), torch.int32),
    }
    operands.check_operands(x.device, wanted)
    operands.check_gpu(x.device)
    args = _Args(
        boxes=int(not gated and takes_boxes(out)),
        m=m,
        n=n,
        activation=ACTIVATIONS.index(activation),
        order=BEFORE_LOCAL,
        w_ctas=1,
        x_ctas=1,
        k_ctas=1,
        output_blocks=launch.blocks,
        width=width,
        y=out.data_ptr(),
        weight=packed_matrix(weight, x.device),
        ends=ends.data_ptr(),
        taken=counters.data_ptr(),
        shifts=operands.address(weight.shifts),
        experts=experts,
        expert_row_blocks=m // ROWS_PER_BLOCK,
        listed=listed,
        cols=k,
        rows=x.data_ptr(),
        x_rows=launch.shape.rows,
    )
    shape = launch.shape
    args.segment_atoms = args.weight.atoms
    args.box_rows, args.rest_rows = BOX_ROWS, REST_ROWS
    for field, box_rows in ((args.x, args.box_rows), (args.x_rest, args.rest_rows)):
        field[:] = atoms_map(x.data_ptr(), x.dtype, (n, k), box_rows, 1)
    if args.boxes:
        args.y_boxes[:] = boxes_map(out.data_ptr(), out.dtype, (n, width), shape.output_box)
    args.tiers[:] = _tiers(ceil_div(n, experts), weight.row_blocks_by_tier, launch)
    macros = defines(weight.dtype, shape)
    kernel = jit.kernel(SOURCE, "tiled_gemm", {**macros, **weight.format.macros})
    kernel.launch(launch.ctas, TILED_THREADS, args, shared_bytes=launch.shared_bytes, pdl=pdl)
    return out


@functools.lru_cache(maxsize=4096)
def _tiers(
    rows: int, by_tier: tuple[tuple[str, int], ...], launch: Launch
) -> tuple[TierTiles, ...]:
    """The kernel's `tiers` for about `rows` rows of X an expert, with the last one's end."""
    found, first, cluster = [], 0, 0
    for (name, row_blocks), tier in zip(by_tier, launch.tiers, strict=True):
        if row_blocks and not tier.clusters:
            raise ValueError(f"expected CTAs for the row blocks in {name}, got {launch}")
        found.append(
            TierTiles(
                first_row_block=first,
                first_cluster=cluster,
                clusters=tier.clusters,
                row_groups=launch.shape.row_groups,
                tile_row_blocks=tier.tile_row_blocks,
                x_tiles=ceil_div(rows, launch.shape.rows),
                stages=launch.stages,
                window=tier.window,
            )
        )
        first += row_blocks
        cluster += tier.clusters
    none = MAX_TIERS + 1 - len(found)
    return (*found, *[TierTiles(first_row_block=first, first_cluster=cluster)] * none)


@compiled_ahead(SOURCE, seconds=5)
def _variants(needs: Needs) -> list[Macros]:
    return [
        {**defines(needs.dtype, shape), **stored.macros}
        for stored in needs.formats
        if needs.every or needs.routing
        if (shape := grouped_shape(needs.card, stored.atom_bytes))
    ]
