"""The tiles of a tier in one launch of the tiled GEMM: which they are, and how long they take.

Needs no GPU. What they take is fitted to an H200; no shape is special.
"""

import bisect
import math

from dakrun.geometry import ATOM_BYTES, ROWS_PER_BLOCK, TILE_ROW_BLOCKS, WARPGROUPS
from dakrun.kernels.gemm.splitk_config import TierAccess
from dakrun.kernels.gemm.tiled_shapes import Limits, Shape, TierTiles
from dakrun.units import ceil_div

# Cycles of an SM, at 1.75 GHz. Of a stage: for 8 rows by 64 that warpgroups multiply, what it takes
# to issue it, at least, and until it has landed; for 1 KiB that goes to or from shared memory;
# where CTAs wait for each other; the bytes that HBM and L2 give each of all SMs in a cycle, of
# which those of W, often on their way from HBM, count more; and what taking them adds to products,
# wide ones and others.
ATOM_CYCLES = 36.2
STAGE_CYCLES = 360
LANDING_CYCLES = 1530
SHARED_CYCLES = 7.1
SHARING_CYCLES = 43
HBM_BYTES = 19.8
L2_BYTES = 68
READS_OF_W = 4.3
SHARE_OF_READS, SHARE_OF_WIDE_READS = 0.188, 0.168
EVEN_READS = 1.24  # where clusters share the last tiles, and others are at other columns
# Of a tile, when nothing is multiplied: before it, and for 8 rows by 64 a warpgroup outputs, sums
# left and taken, and segments added, but for the CTA's own. Of a launch, before it waits for
# others: CTAs that share.
START_CYCLES = 2200
STORE_CYCLES = 110
CARRY_CYCLES = 630
MEET_CYCLES = 3200
ADD_CYCLES = 50
JOIN_CYCLES = 800
# Of a launch, from the end of the one before until something is multiplied, beyond a tile's start.
LAUNCH_CYCLES = 6000


def tiles_cycles(
    n: int,
    row_blocks: int,
    sms: int,
    atoms: int,
    shape: Shape,
    limits: Limits,
    tile_row_blocks: int,
    waves: float,
    *,
    even: bool,
) -> float:
    """What the busiest cluster takes where there are `waves` of tiles.

    With `even` clusters share the last ones. That is products, or the copies that they wait for.
    """
    along_x = min(WARPGROUPS // shape.row_groups, ceil_div(n, ROWS_PER_BLOCK * shape.x_tiles))
    groups = ceil_div(tile_row_blocks, shape.group_row_blocks) * along_x
    across = min(along_x * shape.x_tiles, ceil_div(n, ROWS_PER_BLOCK))
    landed = tile_row_blocks + across
    shared = SHARED_CYCLES * (landed + groups * (TILE_ROW_BLOCKS + shape.tiles))
    lands = LANDING_CYCLES / (shape.stages(limits, tile_row_blocks) - 1)
    stage = max(STAGE_CYCLES, ATOM_CYCLES * shape.tiles * groups / WARPGROUPS, shared, lands)
    reads = ATOM_BYTES * (READS_OF_W * tile_row_blocks + across / shape.w_ctas) / L2_BYTES
    share = SHARE_OF_WIDE_READS if shape.wide else SHARE_OF_READS
    stage += share * min(1.0, waves) * reads * (EVEN_READS if even else 1)
    stage += SHARING_CYCLES if shape.w_ctas > 1 else 0
    per_tile: float = START_CYCLES + STORE_CYCLES * shape.tiles
    if shape.k_ctas > 1:
        per_tile += MEET_CYCLES + ADD_CYCLES * shape.tiles * (1 - 1 / shape.k_ctas)
    products = ceil_div(atoms, shape.k_ctas) * stage
    fetched = ATOM_BYTES * atoms * row_blocks / (HBM_BYTES * sms)
    rest = math.ceil(waves) * per_tile + (JOIN_CYCLES if shape.w_ctas > 1 else 0)
    if shape.k_ctas > 1:  # sums meet where the next tile's stages would land
        rest += (math.ceil(waves) - 1) * LANDING_CYCLES
    if even:  # tiles beside each other are at other columns, so that L2 does not have W for them
        fetched *= ceil_div(n, shape.rows)
        return max(waves * products + CARRY_CYCLES * shape.tiles, fetched) + rest
    return max(math.ceil(waves) * products, fetched) + rest


def tile_count(n: int, row_blocks: int, tile_row_blocks: int, shape: Shape) -> int:
    """Tiles of clusters."""
    return ceil_div(row_blocks, tile_row_blocks * shape.w_ctas) * ceil_div(n, shape.rows)


def shares(tiles: int, clusters: int) -> bool:
    """Whether `clusters` can share the last of `tiles`."""
    return tiles > clusters and tiles % clusters > 0


def even_tile(n: int, row_blocks: int, clusters: int, shape: Shape) -> int:
    """The row blocks of a CTA's tile: as few as do not make more waves than the most would."""

    def waves(tile_row_blocks: int) -> int:
        return ceil_div(tile_count(n, row_blocks, tile_row_blocks, shape), clusters)

    sizes = range(1, shape.row_blocks + 1)
    return sizes[bisect.bisect_left(sizes, -waves(shape.row_blocks), key=lambda size: -waves(size))]


def tier_tiles(
    n: int,
    row_blocks: int,
    shape: Shape,
    clusters: int,
    access: TierAccess,
    stages: int,
    tile_row_blocks: int,
    *,
    even: bool,
) -> TierTiles:
    """How `row_blocks` of W are computed for `n` rows of X, in tiles of `tile_row_blocks` a CTA.

    By `clusters`, or as many as have a tile, with rings of `stages` as far as `access` lets them be
    in flight. They share the last tiles if `even` is wanted, and possible.
    """
    across = ceil_div(n, shape.rows)
    even = (
        even
        and shape.k_ctas == 1
        and shares(tile_count(n, row_blocks, tile_row_blocks, shape), clusters)
    )
    clusters = min(clusters, tile_count(n, row_blocks, tile_row_blocks, shape))
    window = stages
    if access.window_bytes is not None:
        rings = clusters * shape.w_ctas * shape.k_ctas
        window = access.window_bytes // (ATOM_BYTES * tile_row_blocks * rings)
        window = max(1, min(stages, window))
    w_rows = ROWS_PER_BLOCK * tile_row_blocks * shape.w_ctas
    block = _block_tiles(across, clusters, w_rows, shape.rows)
    return TierTiles(clusters, tile_row_blocks, block, even, window)


def _block_tiles(across: int, clusters: int, w_rows: int, x_rows: int) -> int:
    """Tiles along X, of `across`, with which those of a wave read the fewest rows of W and X."""
    best = max(1, min(across, round(math.sqrt(clusters * w_rows / x_rows))))
    return ceil_div(across, ceil_div(across, best))
