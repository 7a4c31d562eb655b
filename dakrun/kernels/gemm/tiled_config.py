"""How the tiled GEMM is run: pure choices from shapes, row blocks per tier and figures of the GPU.

Needs no GPU. No shape is special. Bits of the result depend on the segments of sums alone, which
are chosen from a matrix's shape, rows of X and the GPU, not from where the matrix lies.
"""

import functools
import itertools
from collections.abc import Iterator, Sequence

from dakrun.geometry import ATOM_COLS, TILED_MAX_ROWS, WARPGROUPS
from dakrun.kernels.gemm.splitk_config import TierAccess
from dakrun.kernels.gemm.tiled_remote import Remote
from dakrun.kernels.gemm.tiled_shapes import H200, Launch, Limits, Shape, TierTiles, TiledConfig
from dakrun.kernels.gemm.tiled_tiers import (
    LAUNCH_CYCLES,
    even_tile,
    shares,
    tier_tiles,
    tile_count,
    tiles_cycles,
)
from dakrun.units import ceil_div

SEGMENTS = (1, 2, 4, 5)  # of sums; 3 and 6 gained 1% at most where they were measured
SMALL_TILE_ROWS = 128  # of X, for which HBM has to give W faster than most of it is multiplied


def tiled_config(
    n: int,
    row_blocks: Sequence[int],
    tiers: Sequence[TierAccess],
    *,
    cols: int,
    sms: int,
    limits: Limits = H200,
    multicast: bool = True,
) -> TiledConfig:
    """Choose for a W of `cols` columns with `row_blocks` in each of `tiers`, and an X of `n` rows.

    The local tier comes first. Where the others have no limits, nothing is known of their links:
    all SMs compute them, before what comes first. Else what may be in flight counts, and SMs are as
    many as end beside the local ones. `sms` are those of the GPU, `limits` an H200's where none are
    given.
    Without `multicast` a remote row block crosses the link once for each 512 rows of X.
    """
    if not 1 <= n <= TILED_MAX_ROWS:
        raise ValueError(f"expected 1 to {TILED_MAX_ROWS} rows, got {n}")
    atoms = ceil_div(cols, ATOM_COLS)
    _, best = _best(n, sum(row_blocks), sms, atoms, shapes(limits), limits)
    segments = best.k_ctas
    launches = []
    nobody = tuple(TierTiles(0) for _ in row_blocks)
    left = sms

    @functools.cache
    def local(sms: int) -> tuple[float, Shape]:
        options = (shape for shape in shapes(limits) if shape.k_ctas == segments)
        return _best(n, row_blocks[0], sms, atoms, options, limits)

    if any(row_blocks[1:]) and all(access == TierAccess() for access in tiers[1:]):
        launches.append(_without_limits(n, row_blocks, segments, sms, atoms, limits))
    elif any(row_blocks[1:]):
        remote = Remote(n, tuple(row_blocks[1:]), tuple(tiers[1:]), atoms, segments, limits)
        rest = (lambda sms: local(sms)[0]) if row_blocks[0] else None
        launches.append(remote.launch(sms, rest, multicast=multicast))
        left -= launches[0].ctas
    if row_blocks[0]:
        _, shape = local(left)
        tier = local_tier(n, row_blocks[0], shape, left, atoms, limits, window=tiers[0])
        stages = shape.stages(limits, tier.tile_row_blocks)
        launches.append(Launch(shape, stages, (tier, *nobody[1:])).with_most_blocks(limits))
    return TiledConfig(tuple(launches))


def _without_limits(
    n: int, row_blocks: Sequence[int], segments: int, sms: int, atoms: int, limits: Limits
) -> Launch:
    """All tiers but the first one, each on as many of all SMs as its share of them asks for."""
    total = sum(row_blocks[1:])
    options = (shape for shape in shapes(limits) if shape.k_ctas == segments)
    _, shape = _best(n, total, sms, atoms, options, limits)
    clusters = limits.most_clusters(sms, shape.ctas)
    given = _at_most([max(1, clusters * count // total) for count in row_blocks[1:]], clusters)
    tiers = [
        local_tier(n, count, shape, own * shape.ctas, atoms, limits) if count else TierTiles(0)
        for count, own in zip(row_blocks[1:], given, strict=True)
    ]
    stages = shape.stages(limits, *(tier.tile_row_blocks for tier in tiers if tier.clusters))
    return Launch(shape, stages, (TierTiles(0), *tiers)).with_most_blocks(limits)


def _at_most(counts: list[int], most: int) -> list[int]:
    """The counts, the largest of them made smaller until all together are `most`."""
    counts = list(counts)
    while sum(counts) > most and max(counts) > 1:
        counts[counts.index(max(counts))] -= 1
    return counts


def shapes(limits: Limits) -> Iterator[Shape]:
    """All that local tiers are computed in."""
    sharing = [(1, segments) for segments in SEGMENTS] + [(2, 1)]
    for x_tiles, row_groups, (w_ctas, k_ctas) in itertools.product(
        limits.x_tiles, range(1, WARPGROUPS + 1), sharing
    ):
        shape = Shape(x_tiles, row_groups, w_ctas, 1, k_ctas)
        if shape.fits(limits):
            yield shape
    for tiles, (w_ctas, k_ctas) in itertools.product(limits.wide_tiles, sharing):
        shape = Shape(tiles, 1, w_ctas, 1, k_ctas, wide=True)
        if shape.fits(limits):
            yield shape


def local_tier(
    n: int,
    row_blocks: int,
    shape: Shape,
    sms: int,
    atoms: int,
    limits: Limits,
    *,
    even: bool | None = None,
    window: TierAccess | None = None,
) -> TierTiles:
    """A tier that is computed on `sms`; with `even` as given, or where that is faster."""
    clusters, access = limits.most_clusters(sms, shape.ctas), window or TierAccess()
    options = list(_options(n, row_blocks, sms, atoms, shape, limits))
    _, tile_row_blocks, chosen = min(
        [option for option in options if even is None or option[2] == even] or options
    )
    stages = shape.stages(limits, tile_row_blocks)
    return tier_tiles(n, row_blocks, shape, clusters, access, stages, tile_row_blocks, even=chosen)


def _best(
    n: int, row_blocks: int, sms: int, atoms: int, options: Iterator[Shape], limits: Limits
) -> tuple[float, Shape]:
    """The fastest of those that `sms` have room for, and its cycles."""
    found = (
        (min(_options(n, row_blocks, sms, atoms, shape, limits))[0], number, shape)
        for number, shape in enumerate(options)
        if shape.ctas <= sms
    )
    cycles, _, shape = min(found)
    return cycles, shape


def _options(
    n: int, row_blocks: int, sms: int, atoms: int, shape: Shape, limits: Limits
) -> Iterator[tuple[float, int, bool]]:
    """Cycles of a launch, row blocks of a CTA's tile, and whether clusters share the last tiles.

    Smaller tiles that make no more waves read W with more SMs, which counts where X has few rows;
    whole ones read less of X.
    """
    clusters = limits.most_clusters(sms, shape.ctas)
    small = even_tile(n, row_blocks, clusters, shape) if n <= SMALL_TILE_ROWS else shape.row_blocks
    for tile_row_blocks, even in ((small, False), (shape.row_blocks, True)):
        tiles = tile_count(n, row_blocks, tile_row_blocks, shape)
        if even and not (shape.k_ctas == 1 and shares(tiles, clusters)):
            continue
        cycles = tiles_cycles(
            n, row_blocks, sms, atoms, shape, limits, tile_row_blocks, tiles / clusters, even=even
        )
        yield LAUNCH_CYCLES + cycles, tile_row_blocks, even
