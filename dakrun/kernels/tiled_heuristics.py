"""How the tiled GEMM is run: pure choices from shapes, octets per tier and figures of the GPU.

Needs no GPU. No shape is special. Bits of the result depend on the segments of sums alone, which
are chosen from a matrix's shape, rows of X and the GPU, not from where the matrix lies.
"""

import bisect
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from dakrun.kernels.heuristics import ATOM_BYTES, TILE_OCTETS, TierAccess
from dakrun.kernels.packing import ATOM_COLS
from dakrun.kernels.tiled_shapes import (
    H200,
    MAX_CLUSTER,
    MAX_ROWS,
    WARPGROUPS,
    Launch,
    Limits,
    Shape,
    TierTiles,
    TiledConfig,
)
from dakrun.octets import OCTET_ROWS
from dakrun.units import ceil_div

SEGMENTS = (1, 2, 4)  # of sums
# Cycles of an SM, at 1.75 GHz. Of a stage: for 8 rows of X a warpgroup multiplies, what it takes to
# issue it, at least, and until it has landed; for 1 KiB that goes to or from shared memory; where
# CTAs wait for each other; the bytes that HBM and L2 give each of all SMs in a cycle, of which
# those of W, often on their way from HBM, count more; and what taking them adds to products.
ATOM_CYCLES = 36
STAGE_CYCLES = 290
LANDING_CYCLES = 1800
SHARED_CYCLES = 6.95
SHARING_CYCLES = 43
HBM_BYTES = 19.8
L2_BYTES = 68
READS_OF_W = 6
SHARE_OF_READS = 0.192
EVEN_READS = 1.24  # where clusters share the last tiles, and others are at other columns
# Of a tile, when nothing is multiplied: before it, and for 8 rows of X a warpgroup outputs, sums
# left and taken, and segments added. Of a launch, before it waits for others: CTAs that share.
START_CYCLES = 1500
STORE_CYCLES = 195
CARRY_CYCLES = 630
MEET_CYCLES = 2200
ADD_CYCLES = 110
JOIN_CYCLES = 800
# Of a launch, from the end of the one before until something is multiplied, beyond a tile's start.
LAUNCH_CYCLES = 6000
SMALL_TILE_ROWS = 128  # of X, for which HBM has to give W faster than most of it is multiplied


def tiled_config(
    n: int,
    octets: Sequence[int],
    tiers: Sequence[TierAccess],
    *,
    cols: int,
    sms: int,
    limits: Limits = H200,
    multicast: bool = True,
) -> TiledConfig:
    """Choose for a W of `cols` columns with `octets` in each of `tiers`, and an X of `n` rows.

    The local tier comes first, and one without limits is in local memory, too: all SMs compute it,
    before what comes first. `sms` are those of the GPU, `limits` an H200's where none are given.
    Without `multicast` a remote octet crosses the link once for each 512 rows of X.
    """
    if not 1 <= n <= MAX_ROWS:
        raise ValueError(f"expected 1 to {MAX_ROWS} rows, got {n}")
    atoms = ceil_div(cols, ATOM_COLS)
    segments = _best(n, sum(octets), sms, atoms, shapes(limits), limits).k_ctas
    launches = []
    nobody = tuple(TierTiles(0) for _ in octets)
    left = sms
    if any(octets[1:]) and all(access == TierAccess() for access in tiers[1:]):
        launches.append(_local_too(n, octets, segments, sms, atoms, limits))
    elif any(octets[1:]):
        shape = _remote_shape(n, segments, limits, multicast=multicast)
        remote = [
            _remote_clusters(count, sum(octets), access, shape, sms) if count else 0
            for count, access in zip(octets[1:], tiers[1:], strict=True)
        ]
        remote = _at_most(
            remote, limits.most_clusters(sms - bool(octets[0]) * segments, shape.ctas)
        )
        chosen = [
            _remote_tier(n, count, shape, clusters, access, shape.stages(limits))
            if count
            else nobody[0]
            for count, clusters, access in zip(octets[1:], remote, tiers[1:], strict=True)
        ]
        launches.append(Launch(shape, shape.stages(limits), (nobody[0], *chosen)))
        left -= shape.ctas * sum(remote)
    if octets[0]:
        options = (shape for shape in shapes(limits) if shape.k_ctas == segments)
        shape = _best(n, octets[0], left, atoms, options, limits)
        tier = local_tier(n, octets[0], shape, left, atoms, limits, window=tiers[0])
        launches.append(Launch(shape, shape.stages(limits), (tier, *nobody[1:])))
    return TiledConfig(tuple(launches))


def _local_too(
    n: int, octets: Sequence[int], segments: int, sms: int, atoms: int, limits: Limits
) -> Launch:
    """All tiers but the first one, each on as many of all SMs as its share of them asks for."""
    total = sum(octets[1:])
    options = (shape for shape in shapes(limits) if shape.k_ctas == segments)
    shape = _best(n, total, sms, atoms, options, limits)
    clusters = limits.most_clusters(sms, shape.ctas)
    given = _at_most([max(1, clusters * count // total) for count in octets[1:]], clusters)
    tiers = [
        local_tier(n, count, shape, own * shape.ctas, atoms, limits) if count else TierTiles(0)
        for count, own in zip(octets[1:], given, strict=True)
    ]
    return Launch(shape, shape.stages(limits), (TierTiles(0), *tiers))


def shapes(limits: Limits) -> Iterator[Shape]:
    """All that local tiers are computed in."""
    sharing = [(1, segments) for segments in SEGMENTS] + [(2, 1)]
    for x_tiles, row_groups, (w_ctas, k_ctas) in itertools.product(
        limits.x_tiles, range(1, WARPGROUPS + 1), sharing
    ):
        shape = Shape(x_tiles, row_groups, w_ctas, 1, k_ctas)
        if shape.fits(limits):
            yield shape


def local_tier(
    n: int,
    octets: int,
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
    options = list(_options(n, octets, sms, atoms, shape, limits))
    _, tile_octets, chosen = min(
        [option for option in options if even is None or option[2] == even] or options
    )
    stages = shape.stages(limits)
    return _tier(n, octets, shape, clusters, access, stages, tile_octets, even=chosen)


def _best(
    n: int, octets: int, sms: int, atoms: int, options: Iterator[Shape], limits: Limits
) -> Shape:
    return min(
        (shape for shape in options if shape.ctas <= sms),
        key=lambda shape: min(_options(n, octets, sms, atoms, shape, limits)),
    )


def _options(
    n: int, octets: int, sms: int, atoms: int, shape: Shape, limits: Limits
) -> Iterator[tuple[float, int, bool]]:
    """Cycles of a launch, octets of a CTA's tile, and whether clusters share the last tiles.

    Smaller tiles that make no more waves read W with more SMs, which counts where X has few rows;
    whole ones read less of X.
    """
    clusters = limits.most_clusters(sms, shape.ctas)
    small = even_tile(n, octets, clusters, shape) if n <= SMALL_TILE_ROWS else shape.octets
    for tile_octets, even in ((small, False), (shape.octets, True)):
        tiles = _tiles(n, octets, tile_octets, shape)
        if even and not (shape.k_ctas == 1 and shares(tiles, clusters)):
            continue
        cycles = _tiles_cycles(
            n, octets, sms, atoms, shape, limits, tile_octets, tiles / clusters, even=even
        )
        yield LAUNCH_CYCLES + cycles, tile_octets, even


def _tiles_cycles(
    n: int,
    octets: int,
    sms: int,
    atoms: int,
    shape: Shape,
    limits: Limits,
    tile_octets: int,
    waves: float,
    *,
    even: bool,
) -> float:
    """What the busiest cluster takes where there are `waves` of tiles.

    With `even` clusters share the last ones. That is products, or the copies that they wait for.
    """
    groups = ceil_div(tile_octets, TILE_OCTETS) * WARPGROUPS // shape.row_groups
    landed = tile_octets + shape.across
    shared = SHARED_CYCLES * (landed + groups * (TILE_OCTETS + shape.x_tiles))
    lands = LANDING_CYCLES / (shape.stages(limits) - 1)
    stage = max(STAGE_CYCLES, ATOM_CYCLES * shape.x_tiles * groups / WARPGROUPS, shared, lands)
    reads = ATOM_BYTES * (READS_OF_W * tile_octets + shape.across / shape.w_ctas) / L2_BYTES
    stage += SHARE_OF_READS * min(1.0, waves) * reads * (EVEN_READS if even else 1)
    stage += SHARING_CYCLES if shape.w_ctas > 1 else 0
    per_tile = START_CYCLES + STORE_CYCLES * shape.x_tiles
    if shape.k_ctas > 1:
        per_tile += MEET_CYCLES + ADD_CYCLES * shape.x_tiles
    products = ceil_div(atoms, shape.k_ctas) * stage
    fetched = ATOM_BYTES * atoms * octets / (HBM_BYTES * sms)
    rest = math.ceil(waves) * per_tile + (JOIN_CYCLES if shape.w_ctas > 1 else 0)
    if shape.k_ctas > 1:  # sums meet where the next tile's stages would land
        rest += (math.ceil(waves) - 1) * LANDING_CYCLES
    if even:  # tiles beside each other are at other columns, so that L2 does not have W for them
        fetched *= ceil_div(n, shape.rows)
        return max(waves * products, fetched) + rest + CARRY_CYCLES * shape.x_tiles
    return max(math.ceil(waves) * products, fetched) + rest


def _tiles(n: int, octets: int, tile_octets: int, shape: Shape) -> int:
    """Tiles of clusters."""
    return ceil_div(octets, tile_octets * shape.w_ctas) * ceil_div(n, shape.rows)


def shares(tiles: int, clusters: int) -> bool:
    """Whether `clusters` can share the last of `tiles`."""
    return tiles > clusters and tiles % clusters > 0


def even_tile(n: int, octets: int, clusters: int, shape: Shape) -> int:
    """The octets of a CTA's tile: as few as do not make more waves than the most would."""

    def waves(tile_octets: int) -> int:
        return ceil_div(_tiles(n, octets, tile_octets, shape), clusters)

    sizes = range(1, shape.octets + 1)
    return sizes[bisect.bisect_left(sizes, -waves(shape.octets), key=lambda size: -waves(size))]


def _remote_shape(n: int, segments: int, limits: Limits, *, multicast: bool) -> Shape:
    """64 rows of W, and all of X, or as much as a cluster can have."""
    options = [Shape(x_tiles, 1, k_ctas=segments) for x_tiles in limits.x_tiles]
    options = [shape for shape in options if shape.fits(limits)]
    shape = next((shape for shape in options if shape.rows >= n), options[-1])
    if not multicast:
        return shape
    most = 1 << (MAX_CLUSTER // segments).bit_length() - 1
    return replace(shape, x_ctas=min(most, 1 << (ceil_div(n, shape.rows) - 1).bit_length()))


def _remote_clusters(
    octets: int, all_octets: int, access: TierAccess, shape: Shape, sms: int
) -> int:
    """As many as the tier's share of the products asks for, and the link, where they have room."""
    clusters = max(ceil_div(octets * sms, all_octets * shape.ctas), (access.sms or 0) // shape.ctas)
    if access.window_bytes is not None:
        clusters = min(clusters, access.window_bytes // (ATOM_BYTES * shape.octets * shape.k_ctas))
    return max(1, min(clusters, ceil_div(octets, shape.octets)))


def _at_most(counts: list[int], most: int) -> list[int]:
    """The counts, the largest of them made smaller until all together are `most`."""
    counts = list(counts)
    while sum(counts) > most and max(counts) > 1:
        counts[counts.index(max(counts))] -= 1
    return counts


def _remote_tier(
    n: int, octets: int, shape: Shape, clusters: int, access: TierAccess, stages: int
) -> TierTiles:
    """Whole tiles where clusters can share the last ones, else such as make even waves."""
    even = shape.k_ctas == 1 and shares(_tiles(n, octets, shape.octets, shape), clusters)
    tile_octets = shape.octets if even else even_tile(n, octets, clusters, shape)
    return _tier(n, octets, shape, clusters, access, stages, tile_octets, even=even)


def _tier(
    n: int,
    octets: int,
    shape: Shape,
    clusters: int,
    access: TierAccess,
    stages: int,
    tile_octets: int,
    *,
    even: bool,
) -> TierTiles:
    across = ceil_div(n, shape.rows)
    even = even and shape.k_ctas == 1 and shares(_tiles(n, octets, tile_octets, shape), clusters)
    clusters = min(clusters, _tiles(n, octets, tile_octets, shape))
    window = stages
    if access.window_bytes is not None:
        rings = clusters * shape.w_ctas * shape.k_ctas
        window = access.window_bytes // (ATOM_BYTES * tile_octets * rings)
        window = max(1, min(stages, window))
    w_rows = OCTET_ROWS * tile_octets * shape.w_ctas
    block = _block_tiles(across, clusters, w_rows, shape.rows)
    return TierTiles(clusters, tile_octets, block, even, window)


def _block_tiles(across: int, clusters: int, w_rows: int, x_rows: int) -> int:
    """Tiles along X, of `across`, with which those of a wave read the fewest rows of W and X."""
    best = max(1, min(across, round(math.sqrt(clusters * w_rows / x_rows))))
    return ceil_div(across, ceil_div(across, best))
