"""How the tiled GEMM is run: pure choices from shapes, octets per tier and figures of the GPU.

Needs no GPU. No shape is special. Bits of the result depend on the segments of sums alone, which
are chosen from a matrix's shape, rows of X and the GPU, not from where the matrix lies.
"""

import bisect
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from dakrun.kernels.heuristics import ATOM_BYTES, TierAccess
from dakrun.kernels.packing import ATOM_COLS
from dakrun.kernels.tiled_shapes import (
    H200,
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

MAX_CLUSTER = 8  # CTAs
SEGMENTS = (1, 2)  # of sums: clusters of 4 do not fill an H200, and took twice as long
# Cycles of an SM. Of a stage: for 8 rows of X a warpgroup, what it takes to issue it, at least, and
# until it has landed; the bytes that HBM and L2 give each of all SMs in a cycle, and that an SM
# takes; and what taking them adds though it is beside products.
ATOM_CYCLES = 32
STAGE_CYCLES = 220
LANDING_CYCLES = 1500
HBM_BYTES = 20
L2_BYTES = 42
SM_BYTES = 60
SHARE_OF_READS = 0.1
# Of a tile, when nothing is multiplied: before it, and for 8 rows of X a warpgroup outputs, sums
# left and taken, and segments added.
START_CYCLES = 1500
STORE_CYCLES = 100
CARRY_CYCLES = 540
MEET_CYCLES = 1500
ADD_CYCLES = 130


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
        remote = _at_most(remote, (sms - bool(octets[0]) * segments) // shape.ctas)
        chosen = [
            _tier(n, count, shape, clusters, access, shape.stages(limits), even=True)
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
    clusters = _clusters(sms, shape.ctas)
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
    clusters = _clusters(sms, shape.ctas)
    if even is None:
        cycles = functools.partial(_cycles, n, octets, sms, atoms, shape, limits)
        even = cycles(even=True) < cycles(even=False)
    return _tier(
        n, octets, shape, clusters, window or TierAccess(), shape.stages(limits), even=even
    )


def _best(
    n: int, octets: int, sms: int, atoms: int, options: Iterator[Shape], limits: Limits
) -> Shape:
    return min(
        (shape for shape in options if shape.ctas <= sms),
        key=lambda shape: min(
            _cycles(n, octets, sms, atoms, shape, limits, even=even) for even in (False, True)
        ),
    )


def _cycles(
    n: int, octets: int, sms: int, atoms: int, shape: Shape, limits: Limits, *, even: bool
) -> float:
    """What the busiest cluster takes: its tiles' products, or what it reads for them from L2."""
    clusters = _clusters(sms, shape.ctas)
    tile_octets = shape.octets if even else even_tile(n, octets, clusters, shape)
    tiles = ceil_div(octets, tile_octets * shape.w_ctas) * ceil_div(n, shape.rows)
    even = even and shares(tiles, clusters)
    busy = min(1.0, tiles / clusters)
    reads = ATOM_BYTES * (tile_octets + shape.across / shape.w_ctas) * busy / L2_BYTES
    takes = ATOM_BYTES * (tile_octets + shape.across) / SM_BYTES
    lands = LANDING_CYCLES / (shape.stages(limits) - 1)
    stage = max(STAGE_CYCLES, ATOM_CYCLES * shape.x_tiles, reads, takes, lands)
    stage += SHARE_OF_READS * (reads + takes)
    per_tile = START_CYCLES + STORE_CYCLES * shape.x_tiles
    if shape.k_ctas > 1:
        per_tile += MEET_CYCLES + ADD_CYCLES * shape.x_tiles
    waves = ceil_div(tiles, clusters)
    products = ceil_div(atoms, shape.k_ctas) * stage
    fetched = ATOM_BYTES * atoms * octets / (HBM_BYTES * sms)
    if even:
        cycles = max(tiles / clusters * products, fetched)
        return cycles + waves * per_tile + CARRY_CYCLES * shape.x_tiles
    return max(waves * products, fetched) + waves * per_tile


def shares(tiles: int, clusters: int) -> bool:
    """Whether `clusters` can share the last of `tiles`."""
    return tiles > clusters and tiles % clusters > 0


def even_tile(n: int, octets: int, clusters: int, shape: Shape) -> int:
    """The octets of a CTA's tile: as few as do not make more waves than the most would."""
    across = ceil_div(n, shape.rows)

    def waves(tile_octets: int) -> int:
        return ceil_div(ceil_div(octets, tile_octets * shape.w_ctas) * across, clusters)

    sizes = range(1, shape.octets + 1)
    return sizes[bisect.bisect_left(sizes, -waves(shape.octets), key=lambda size: -waves(size))]


def _clusters(sms: int, ctas: int) -> int:
    """That run at a time: SMs go by groups of 16 or 18, which larger clusters do not fill."""
    return sms // ctas if ctas <= 2 or sms < 16 else sms // 16 * 16 // ctas


def _remote_shape(n: int, segments: int, limits: Limits, *, multicast: bool) -> Shape:
    """64 rows of W, and all of X, or as much as a cluster can have."""
    options = [Shape(x_tiles, 1, k_ctas=segments) for x_tiles in limits.x_tiles]
    options = [shape for shape in options if shape.fits(limits)]
    shape = next((shape for shape in options if shape.rows >= n), options[-1])
    if not multicast:
        return shape
    most = MAX_CLUSTER // segments
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


def _tier(
    n: int,
    octets: int,
    shape: Shape,
    clusters: int,
    access: TierAccess,
    stages: int,
    *,
    even: bool,
) -> TierTiles:
    if not octets:
        return TierTiles(0)
    across = ceil_div(n, shape.rows)
    tiles = ceil_div(octets, shape.octets * shape.w_ctas) * across
    even = even and shape.k_ctas == 1 and shares(tiles, clusters)
    tile_octets = shape.octets if even else even_tile(n, octets, clusters, shape)
    clusters = min(clusters, ceil_div(octets, tile_octets * shape.w_ctas) * across)
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
