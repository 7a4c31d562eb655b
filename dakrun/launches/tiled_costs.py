"""Costs of tiles of the tiled GEMM on a card.

Costs are fitted to an H200 and an H100; no shape has a special case.
"""

import math

from dakrun.geometry import ATOM_BYTES, ROWS_PER_BLOCK, TILE_ROW_BLOCKS, WARPGROUPS
from dakrun.hardware import Card
from dakrun.launches.tiled_shapes import Shape
from dakrun.units import ceil_div

GROUP_WARPS = 4  # of a warpgroup
# Costs of a stage, in cycles of an SM at 1.75 GHz.
ATOM_CYCLES = 36.2  # products of an 8 x 64 tile
STAGE_CYCLES = 360  # the whole stage, at least: its issue
LANDING_CYCLES = 2000  # latency of the stage's copies
SHARED_CYCLES = 7.1  # each KiB to or from shared memory
EXPAND_CYCLES = 200  # of a stage of a W of fewer bits, in which no product runs
SHARING_CYCLES_OF_STAGE = 450  # of such a stage, at least, where two CTAs share an SM: its issue
SHARING_CYCLES = 43  # wait for the CTAs that share X
# Reads, while all SMs read.
HBM_BYTES = 19.8  # bytes per cycle that an SM gets from HBM
L2_BYTES = 68  # bytes per cycle that an SM gets from L2
W_READ_WEIGHT = 5.5  # factor for bytes of W, many of which miss L2
READ_FRACTION, WIDE_READ_FRACTION = 0.188, 0.168  # of a read's time that adds to products
STREAM_K_READ_WEIGHT = 1.24  # factor with Stream-K, where clusters are at different columns
# Costs of a tile, in cycles in which nothing is multiplied.
START_CYCLES = 2200  # its start
STORE_CYCLES = 110  # storing outputs, per 8 x 64 tile of a warpgroup
STREAM_K_CYCLES = 630  # passing on Stream-K's partial tile, per 8 x 64 tile of a warpgroup
SEGMENTS_CYCLES = 3200  # exchange of the partial sums of segments of K
SEGMENTS_ADD_CYCLES = 50  # adding an 8 x 64 tile of another segment
# Costs of a launch, in cycles.
CLUSTER_SYNC_CYCLES = 800  # wait for the CTAs that share X
LAUNCH_CYCLES = 6000  # predecessor's end to the first product, besides START_CYCLES


def tiles_cycles(
    n: int,
    row_blocks: int,
    atoms: int,
    shape: Shape,
    card: Card,
    tile_row_blocks: int,
    waves: float,
    *,
    stream_k: bool,
) -> float:
    """Cycles of the busiest cluster, for `waves` of tiles of a tier's `row_blocks` on `card`.

    The larger of products and reads from HBM; with `stream_k` the last, partial wave is shared.
    """
    along_x = min(WARPGROUPS // shape.row_groups, ceil_div(n, ROWS_PER_BLOCK * shape.x_tiles))
    groups = ceil_div(tile_row_blocks, shape.group_row_blocks) * along_x
    x_tiles = min(along_x * shape.x_tiles, ceil_div(n, ROWS_PER_BLOCK))
    w_size = shape.atom_bytes / ATOM_BYTES
    landed = w_size * tile_row_blocks + x_tiles
    # With mma.sync each warp of a warpgroup reads X; with wgmma they read it together.
    x_reads = 1 if card.has_wgmma else GROUP_WARPS
    shared = SHARED_CYCLES * (landed + groups * (w_size * TILE_ROW_BLOCKS + x_reads * shape.tiles))
    lands = LANDING_CYCLES / (shape.stages(card, tile_row_blocks) - 1)
    sharing = shape.ctas_per_sm  # CTAs, each of which gets its part of the SM
    products = ATOM_CYCLES * shape.tiles * groups / WARPGROUPS
    if sharing > 1:
        stage = max(sharing * max(SHARING_CYCLES_OF_STAGE, products, shared), lands)
    else:
        stage = max(STAGE_CYCLES, products, shared, lands)
        stage += EXPAND_CYCLES if shape.has_units else 0
    w, x = shape.atom_bytes * W_READ_WEIGHT * tile_row_blocks, ATOM_BYTES * x_tiles / shape.w_ctas
    reads = sharing * (w + x) / L2_BYTES
    fraction = WIDE_READ_FRACTION if shape.wide else READ_FRACTION
    stage += fraction * min(1.0, waves) * reads * (STREAM_K_READ_WEIGHT if stream_k else 1)
    stage += SHARING_CYCLES if shape.w_ctas > 1 else 0
    per_tile: float = START_CYCLES + STORE_CYCLES * shape.tiles
    if shape.k_ctas > 1:
        per_tile += SEGMENTS_CYCLES + SEGMENTS_ADD_CYCLES * shape.tiles * (1 - 1 / shape.k_ctas)
    multiplied = ceil_div(atoms, shape.k_ctas) * stage
    fetched = sharing * shape.atom_bytes * atoms * row_blocks / (HBM_BYTES * card.sms)
    rest = math.ceil(waves) * per_tile + (CLUSTER_SYNC_CYCLES if shape.w_ctas > 1 else 0)
    if shape.k_ctas > 1:  # partial sums are exchanged where the next tile's stages would land
        rest += (math.ceil(waves) - 1) * LANDING_CYCLES
    if stream_k:  # neighbouring tiles are at other columns, so that L2 does not hold W for them
        fetched *= ceil_div(n, shape.rows)
        return max(waves * multiplied + STREAM_K_CYCLES * shape.tiles, fetched) + rest
    return max(math.ceil(waves) * multiplied, fetched) + rest
