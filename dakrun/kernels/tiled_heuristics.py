"""How the tiled GEMM is run: pure choices from shapes, octets per tier and figures of the GPU.

Needs no GPU. No shape is special, and no choice changes a bit of the result.
"""

import bisect
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from dakrun.kernels.heuristics import ATOM_BYTES, TILE_OCTETS, TierAccess
from dakrun.kernels.packing import ATOM_COLS
from dakrun.octets import OCTET_ROWS
from dakrun.units import ceil_div

MAX_ROWS = 4096  # of X in one launch
X_TILES = (8, 16, 24, 32)  # of 8 rows of X, that a warpgroup multiplies
PORTABLE_X_TILES = (8, 16)  # the same where there is no wgmma
WARPGROUPS = 2
MAX_STAGES = 8
PASS_ROWS = 64  # of X, whose outputs a warpgroup stages at a time
STAGING_BYTES = WARPGROUPS * PASS_ROWS * TILE_OCTETS * OCTET_ROWS * 2
BARRIER_BYTES = 1024  # of a CTA's shared memory
ATOM_CYCLES = 32  # of an SM's tensor cores, for a warpgroup's 64 rows of W x 8 of X x 64 columns
L2_BYTES = 42  # that an SM has from L2 in a cycle
STORE_CYCLES = 60  # for 8 rows of X of a tile's outputs, while nothing is multiplied
START_CYCLES = 1500  # of a tile, likewise


@dataclass(frozen=True)
class Limits:
    """What a GPU sets: bytes of shared memory of a CTA, and the `x_tiles` that there are."""

    shared_bytes: int = 227 * 1024
    x_tiles: tuple[int, ...] = X_TILES


H200 = Limits()


@dataclass(frozen=True)
class TierTiles:
    """How a tier is computed: by `ctas` CTAs, in tiles of `tile_octets` octets of W.

    The two warpgroups of a CTA have rows beside each other of W, with 2 `row_groups`, or of X.
    `block_tiles` tiles along X are beside each other in the order in which CTAs take them. A ring
    has `stages` of 64 columns, of whose W `window` may be in flight.
    """

    ctas: int
    row_groups: int
    tile_octets: int
    block_tiles: int
    stages: int
    window: int


@dataclass(frozen=True)
class TiledConfig:
    """How a tiled GEMM is launched: a warpgroup multiplies `x_tiles` x 8 rows of X."""

    x_tiles: int
    shared_bytes: int
    tiers: tuple[TierTiles, ...]

    @property
    def ctas(self) -> int:
        """Those of all tiers."""
        return sum(tier.ctas for tier in self.tiers)


def tiled_config(
    n: int,
    octets: Sequence[int],
    tiers: Sequence[TierAccess],
    *,
    cols: int,
    sms: int,
    limits: Limits = H200,
) -> TiledConfig:
    """Choose for a W of `cols` columns with `octets` in each of `tiers`, and an X of `n` rows.

    The local tier comes first. `sms` are those of the GPU, `limits` an H200's where none are given.
    """
    if not 1 <= n <= MAX_ROWS:
        raise ValueError(f"expected 1 to {MAX_ROWS} rows, got {n}")
    remote = [
        min(sms if tier.sms is None else tier.sms, count)
        for tier, count in zip(tiers[1:], octets[1:], strict=True)
    ]
    ctas = (max(1, sms - sum(remote)), *remote)
    options = [
        (x_tiles, row_groups)
        for x_tiles, row_groups in itertools.product(limits.x_tiles, range(1, WARPGROUPS + 1))
        if _stages(x_tiles, row_groups, limits) >= 2
    ]
    atoms = ceil_div(cols, ATOM_COLS)
    x_tiles, rows = min(
        options, key=lambda option: cycles(n, octets[0] or sum(octets), ctas[0], atoms, *option)
    )
    wide = 1 if (x_tiles, 1) in options else rows  # what is read once more often costs the link
    chosen = [
        _tier(n, count, of, access, x_tiles, wide if number else rows, limits)
        for number, (count, of, access) in enumerate(zip(octets, ctas, tiers, strict=True))
    ]
    return TiledConfig(
        x_tiles,
        max(
            ring_bytes(x_tiles, tier.row_groups, tier.stages)
            for tier, count in zip(chosen, octets, strict=True)
            if count
        ),
        tuple(chosen),
    )


def cycles(n: int, octets: int, ctas: int, atoms: int, x_tiles: int, row_groups: int) -> float:
    """What the busiest of `ctas` takes: its tiles' products, or what it reads for them from L2."""
    tile_octets = even_tile(n, octets, ctas, x_tiles, row_groups)
    across = x_tiles * WARPGROUPS // row_groups
    waves = ceil_div(ceil_div(octets, tile_octets) * ceil_div(n, OCTET_ROWS * across), ctas)
    products = ATOM_CYCLES * WARPGROUPS * x_tiles / 2
    reads = ATOM_BYTES * (tile_octets + across) / L2_BYTES
    return waves * (atoms * max(products, reads) + START_CYCLES + STORE_CYCLES * x_tiles)


def even_tile(n: int, octets: int, ctas: int, x_tiles: int, row_groups: int) -> int:
    """The octets of a tile: as few as do not make more waves than the largest would."""
    largest = row_groups * TILE_OCTETS
    across = ceil_div(n, OCTET_ROWS * x_tiles * WARPGROUPS // row_groups)

    def waves(tile_octets: int) -> int:
        return ceil_div(ceil_div(octets, tile_octets) * across, ctas)

    sizes = range(1, largest + 1)
    return sizes[bisect.bisect_left(sizes, -waves(largest), key=lambda size: -waves(size))]


def ring_bytes(x_tiles: int, row_groups: int, stages: int) -> int:
    """Shared memory of a CTA: outputs on their way, and the stages."""
    return STAGING_BYTES + stages * _stage_bytes(x_tiles, row_groups)


def _tier(
    n: int,
    octets: int,
    ctas: int,
    access: TierAccess,
    x_tiles: int,
    row_groups: int,
    limits: Limits,
) -> TierTiles:
    tile_octets = even_tile(n, octets, ctas, x_tiles, row_groups) if octets else 1
    rows = OCTET_ROWS * x_tiles * WARPGROUPS // row_groups
    across = ceil_div(n, rows)
    ctas = min(ctas, ceil_div(octets, tile_octets) * across)
    stages = _stages(x_tiles, row_groups, limits)
    window = stages
    if access.window_bytes is not None and ctas:
        window = access.window_bytes // (ATOM_BYTES * tile_octets * ctas)
        window = max(1, min(stages, window))
    block = _block_tiles(across, ctas, OCTET_ROWS * tile_octets, rows)
    return TierTiles(ctas, row_groups, tile_octets, block, stages, window)


def _block_tiles(across: int, ctas: int, w_rows: int, x_rows: int) -> int:
    """Tiles along X, of `across`, with which those of a wave read the fewest rows of W and X."""
    best = max(1, min(across, round(math.sqrt(ctas * w_rows / x_rows))))
    return ceil_div(across, ceil_div(across, best))


def _stage_bytes(x_tiles: int, row_groups: int) -> int:
    return ATOM_BYTES * (row_groups * TILE_OCTETS + x_tiles * WARPGROUPS // row_groups)


def _stages(x_tiles: int, row_groups: int, limits: Limits) -> int:
    room = limits.shared_bytes - BARRIER_BYTES - STAGING_BYTES
    return min(MAX_STAGES, room // _stage_bytes(x_tiles, row_groups))
