"""Launch configurations of the tiled GEMM: pure functions of shapes, row blocks per tier and card.

No shape has a special case. Bits of a result depend on the segments of K alone, which follow from
the matrix's shape, the rows of X and the card, not from where the matrix lies.
"""

import bisect
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from dakrun.geometry import (
    ATOM_BYTES,
    ATOM_COLS,
    ROWS_PER_BLOCK,
    TILE_ROW_BLOCKS,
    TILED_MAX_ROWS,
    TILED_PORTABLE_X_TILES,
    TILED_X_TILES,
    WARPGROUPS,
    unit_atoms,
)
from dakrun.hardware import Card
from dakrun.launches.tiers import TierAccess
from dakrun.launches.tiled_costs import LAUNCH_CYCLES, tiles_cycles
from dakrun.launches.tiled_shapes import (
    Launch,
    Shape,
    TierTiles,
    TiledConfig,
    beside,
    sharing_tiles,
    wide_tiles,
    x_tiles,
)
from dakrun.units import ceil_div

SEGMENTS = (1, 2, 4, 5)  # of K; 3 and 6 gained at most 1% where they were measured
LEAST_TILE_ROWS = ROWS_PER_BLOCK * min(*TILED_X_TILES, *TILED_PORTABLE_X_TILES, TILE_ROW_BLOCKS)
MOST_TILE_ROWS = ROWS_PER_BLOCK * WARPGROUPS * max(*TILED_X_TILES, TILE_ROW_BLOCKS)  # of a CTA
SMALL_TILE_ROWS = 128  # rows of X up to which reading W from HBM takes longer than products
LINK_CYCLES = 6000  # latency of a copy over a link: a host on PCIe 5, under load

# Cycles of a local part, given the number of remote clusters beside it and their CTAs.
Local = Callable[[int, int], float]


def tiled_config(
    n: int,
    row_blocks: Sequence[int],
    tiers: Sequence[TierAccess],
    *,
    cols: int,
    card: Card,
    atom_bytes: int = ATOM_BYTES,
) -> TiledConfig:
    """Choose the launches for `n` rows of X and a W of `cols` columns, `row_blocks` in each tier.

    An atom of W has `atom_bytes`.

    The local tier comes first. If no remote tier has limits, nothing is known of the links: all SMs
    compute the remote tiers in a launch before the local one. Else the remote launch gets the
    fewest SMs with which it ends no later than the local launch beside it.
    Raises ValueError for more rows than TILED_MAX_ROWS, or none.
    """
    if not 1 <= n <= TILED_MAX_ROWS:
        raise ValueError(f"expected 1 to {TILED_MAX_ROWS} rows, got {n}")
    atoms = ceil_div(cols, ATOM_COLS)
    _, best = _best(n, sum(row_blocks), atoms, shapes(card, atom_bytes=atom_bytes), card)
    segments, room = best.k_ctas, card
    options = shapes(card, segments, atom_bytes)
    launches = []

    @functools.cache
    def local(clusters: int, ctas: int) -> float:
        return _best(n, row_blocks[0], atoms, options, beside(card, clusters, ctas))[0]

    if any(row_blocks[1:]) and all(access == TierAccess() for access in tiers[1:]):
        launches.append(_remote_on_all_sms(n, row_blocks, atoms, options, card))
    elif any(row_blocks[1:]):
        remote = RemotePart(
            n, tuple(row_blocks[1:]), tuple(tiers[1:]), atoms, segments, card, atom_bytes
        )
        launches.append(remote.launch(local if row_blocks[0] else None))
        room = beside(card, launches[0].clusters, launches[0].shape.ctas)
    if row_blocks[0]:
        _, shape = _best(n, row_blocks[0], atoms, options, room)
        room = shape.places(room)
        tier = local_tier(n, row_blocks[0], shape, atoms, room, access=tiers[0])
        stages = shape.stages(room, tier.tile_row_blocks)
        others = [TierTiles(0) for _ in row_blocks[1:]]
        launches.append(Launch(shape, stages, (tier, *others)).with_max_blocks(room))
    return TiledConfig(tuple(launches))


def most_rows_like(n: int) -> int:
    """The most rows of X for which tiled_config chooses the same as for `n`.

    It counts tiles of 8 rows within the tile of a CTA, and CTAs' tiles, all of a multiple of 64
    rows, beyond the largest. Passes of prompts seldom have the same number of rows twice, and a
    choice takes a millisecond: kept under this number, it is made once for all that share it.
    """
    step = ROWS_PER_BLOCK if n <= MOST_TILE_ROWS else LEAST_TILE_ROWS
    return ceil_div(n, step) * step


@functools.cache
def shapes(
    card: Card, segments: int | None = None, atom_bytes: int = ATOM_BYTES
) -> tuple[Shape, ...]:
    """Shapes for tiers on all SMs; with `segments` only those with as many segments of K."""
    sharing = [(1, segments) for segments in SEGMENTS] + [(2, 1)]
    plain = itertools.product(x_tiles(wgmma=card.has_wgmma), range(1, WARPGROUPS + 1), sharing)
    units = unit_atoms(atom_bytes) > 1
    sharing_sms = itertools.product(
        sharing_tiles(wgmma=card.has_wgmma, units=units), range(1, WARPGROUPS + 1), sharing
    )
    wide = itertools.product(wide_tiles(wgmma=card.has_wgmma, units=units), sharing)
    every = itertools.chain(
        (Shape(tiles, groups, w_ctas, 1, k_ctas) for tiles, groups, (w_ctas, k_ctas) in plain),
        (Shape(tiles, 1, w_ctas, 1, k_ctas, wide=True) for tiles, (w_ctas, k_ctas) in wide),
        (
            Shape(tiles, groups, w_ctas, 1, k_ctas, ctas_per_sm=2)
            for tiles, groups, (w_ctas, k_ctas) in sharing_sms
        ),
    )
    found = (replace(shape, atom_bytes=atom_bytes) for shape in every)
    return tuple(
        shape
        for shape in found
        if shape.fits(shape.places(card)) and segments in (None, shape.k_ctas)
    )


def local_tier(
    n: int,
    row_blocks: int,
    shape: Shape,
    atoms: int,
    card: Card,
    *,
    stream_k: bool | None = None,
    access: TierAccess | None = None,
) -> TierTiles:
    """Tiles of a tier that is computed on `card`; Stream-K as given, or where it is faster.

    The tier's `access` limits the bytes in flight.
    """
    clusters, access = card.max_clusters(shape.ctas), access or TierAccess()
    options = list(_tile_options(n, row_blocks, atoms, shape, card))
    wanted = [option for option in options if stream_k in (None, option[2])]
    _, size, chosen = min(wanted or options)
    if not card.even_waves:
        size, chosen = shape.row_blocks, False
    stages = shape.stages(card, size)
    return _tier_tiles(n, row_blocks, shape, clusters, access, stages, size, stream_k=chosen)


@dataclass(frozen=True)
class RemotePart:
    """The remote part of a product of `n` rows of X: `row_blocks` of W in each of `tiers`.

    A link is slow, so a row block crosses it once if a cluster can hold all rows of X. The remote
    launch takes SMs from the local launch. Both are to end at the same time.
    """

    n: int
    row_blocks: tuple[int, ...]
    tiers: tuple[TierAccess, ...]
    atoms: int  # of 64 columns
    segments: int  # of K
    card: Card
    atom_bytes: int = ATOM_BYTES  # of W

    def launch(self, local: Local | None) -> Launch:
        """Choose the launch, beside a local part if there is one."""
        parts = sum(count > 0 for count in self.row_blocks)
        shapes = [shape for shape in self._shapes() if self._max_clusters(shape, local) >= parts]
        rows = min(self.n, max(shape.rows for shape in shapes))
        return min(
            (self._launch(shape, local) for shape in shapes if shape.rows >= rows),
            key=lambda launch: self._key(launch, local),
        )

    def _shapes(self) -> Iterator[Shape]:
        """Shapes whose clusters hold all rows of X, or as many as they can."""
        card = self.card
        limit = 1 << (card.max_cluster // self.segments).bit_length() - 1 if card.multicast else 1
        every = x_tiles(wgmma=card.has_wgmma)
        for tiles, groups in itertools.product(every, range(1, WARPGROUPS + 1)):
            shape = Shape(tiles, groups, k_ctas=self.segments, atom_bytes=self.atom_bytes)
            x_ctas = 1 << (ceil_div(self.n, shape.rows) - 1).bit_length()
            if shape.fits(card):
                yield from (replace(shape, x_ctas=count) for count in {1, min(limit, x_ctas)})

    def _max_clusters(self, shape: Shape, local: Local | None) -> int:
        """Most clusters that leave SMs, and room for a cluster, for a local part."""
        card = self.card
        if local is None:
            return card.max_clusters(shape.ctas)
        most = replace(card, sms=card.sms - self.segments).max_clusters(shape.ctas)
        if self.segments == 1:
            return most
        places = card.clusters[self.segments - 2] - 1
        return min(most, places // ceil_div(shape.ctas, self.segments))

    def _launch(self, shape: Shape, local: Local | None) -> Launch:
        """A launch that gives every part the fewest clusters that suffice.

        They suffice if the part ends no later than the local one, or if only its link limits it.
        """
        clusters = [int(count > 0) for count in self.row_blocks]
        parts = [tier for tier, count in enumerate(self.row_blocks) if count]
        for tier in parts * min(2, len(parts)):  # the second time with the others' clusters known
            others = sum(clusters) - clusters[tier]
            limit = min(self._max_clusters(shape, local) - others, self._useful(shape, tier))

            def ends(count: int, tier: int = tier, others: int = others) -> bool:
                if local is None:
                    return False
                rest = local(others + count, shape.ctas)
                found = self._tiles(shape, tier, count)
                products, link = self._cycles(shape, tier, found)
                window_is_full = found.window < shape.copies(self._stages(shape))
                return products <= max(rest, link) and (link <= rest or window_is_full)

            counts = range(1, max(1, limit))
            clusters[tier] = 1 + bisect.bisect_left(counts, True, key=ends)
        tiles = tuple(
            self._tiles(shape, tier, count) if count else TierTiles(0)
            for tier, count in enumerate(clusters)
        )
        launch = Launch(shape, self._stages(shape), (TierTiles(0), *tiles))
        return launch.with_max_blocks(self.card)

    def _stages(self, shape: Shape) -> int:
        """Stages of all tiers' rings: as many as the largest tile leaves room for."""
        return shape.stages(self.card, shape.row_blocks)

    def _useful(self, shape: Shape, tier: int) -> int:
        """The most clusters for which each has a tile, and room in the window for a stage."""
        count = shape.tile_count(self.n, self.row_blocks[tier], shape.row_blocks)
        window = self.tiers[tier].window_bytes
        if window is not None:
            count = min(count, window // (shape.copy_bytes * shape.row_blocks * shape.k_ctas))
        return count

    def _tiles(self, shape: Shape, tier: int, clusters: int) -> TierTiles:
        """Whole tiles if Stream-K can share the last ones, else tiles that make even waves.

        Whole tiles in uneven waves if the card's launches have no even ones.
        """
        row_blocks, access = self.row_blocks[tier], self.tiers[tier]
        stream_k = self.card.even_waves and _can_stream_k(
            self.n, row_blocks, shape, clusters, shape.row_blocks
        )
        size = shape.row_blocks
        if self.card.even_waves and not stream_k:
            size = shape.smallest_tile(self.n, row_blocks, clusters)
        stages = self._stages(shape)
        return _tier_tiles(
            self.n, row_blocks, shape, clusters, access, stages, size, stream_k=stream_k
        )

    def _cycles(self, shape: Shape, tier: int, tiles: TierTiles) -> tuple[float, float]:
        """Cycles of products, and of the link at the speed that the bytes in flight allow."""
        n, row_blocks, size = self.n, self.row_blocks[tier], tiles.tile_row_blocks
        waves = shape.tile_count(n, row_blocks, size) / tiles.clusters
        products = tiles_cycles(
            n, row_blocks, self.atoms, shape, replace(self.card, sms=tiles.clusters * shape.ctas),
            size, waves, stream_k=tiles.stream_k,
        )  # fmt: skip
        if self.tiers[tier].window_bytes is None:
            return products, 0.0
        cycles: float = LINK_CYCLES
        copies = shape.copies(self._stages(shape))
        if tiles.window == copies:  # a stage is filled again after its products
            cycles += products / (ceil_div(self.atoms, shape.k_ctas) * max(1.0, waves))
        in_flight = tiles.clusters * shape.k_ctas * tiles.window * size  # row blocks of a copy
        in_flight *= shape.copy_bytes // shape.atom_bytes
        return products, cycles * self.atoms * row_blocks * ceil_div(n, shape.rows) / in_flight

    def _key(self, launch: Launch, local: Local | None) -> tuple[float, ...]:
        """Cycles until the last part ends; then, for ties, the sizes of tiles and clusters."""
        shape = launch.shape
        parts = [local(launch.clusters, shape.ctas)] if local else []
        for tier, tiles in enumerate(launch.tiers[1:]):
            if tiles.clusters:
                parts += self._cycles(shape, tier, tiles)
        return max(parts), shape.row_blocks, launch.ctas, shape.x_ctas, shape.tiles


def _remote_on_all_sms(
    n: int, row_blocks: Sequence[int], atoms: int, options: Sequence[Shape], card: Card
) -> Launch:
    """A launch for all remote tiers, each on SMs in proportion to its row blocks."""
    total = sum(row_blocks[1:])
    _, shape = _best(n, total, atoms, options, card)
    card = shape.places(card)
    limit = card.max_clusters(shape.ctas)
    clusters = [max(1, limit * count // total) for count in row_blocks[1:]]
    while sum(clusters) > limit and max(clusters) > 1:
        clusters[clusters.index(max(clusters))] -= 1
    tiers = [
        local_tier(n, count, shape, atoms, replace(card, sms=own * shape.ctas))
        if count
        else TierTiles(0)
        for count, own in zip(row_blocks[1:], clusters, strict=True)
    ]
    stages = shape.stages(card, *(tier.tile_row_blocks for tier in tiers if tier.clusters))
    return Launch(shape, stages, (TierTiles(0), *tiers)).with_max_blocks(card)


def _best(
    n: int, row_blocks: int, atoms: int, options: Iterable[Shape], card: Card
) -> tuple[float, Shape]:
    """Cycles and shape of the fastest of `options` that fit on `card`."""
    cycles, _, shape = min(
        (min(_tile_options(n, row_blocks, atoms, shape, shape.places(card)))[0], number, shape)
        for number, shape in enumerate(options)
        if shape.ctas <= card.sms
    )
    return cycles, shape


def _tile_options(
    n: int, row_blocks: int, atoms: int, shape: Shape, card: Card
) -> Iterator[tuple[float, int, bool]]:
    """Options of a launch: cycles, row blocks of a CTA's tile, Stream-K.

    Smaller tiles that make no more waves read W with more SMs, which is faster for few rows of X.
    Whole tiles read X less often.
    """
    clusters, whole = card.max_clusters(shape.ctas), shape.row_blocks
    small = shape.smallest_tile(n, row_blocks, clusters) if n <= SMALL_TILE_ROWS else whole
    for size, stream_k in ((small, False), (whole, True)):
        if stream_k and not _can_stream_k(n, row_blocks, shape, clusters, size):
            continue
        waves = shape.tile_count(n, row_blocks, size) / clusters
        cycles = tiles_cycles(n, row_blocks, atoms, shape, card, size, waves, stream_k=stream_k)
        yield LAUNCH_CYCLES + cycles, size, stream_k


def _can_stream_k(n: int, row_blocks: int, shape: Shape, clusters: int, size: int) -> bool:
    """Whether whole waves of tiles of `size` leave tiles over, which `clusters` can share."""
    tiles = shape.tile_count(n, row_blocks, size)
    return shape.k_ctas == 1 and tiles > clusters and tiles % clusters > 0


def _tier_tiles(
    n: int,
    row_blocks: int,
    shape: Shape,
    clusters: int,
    access: TierAccess,
    stages: int,
    size: int,
    *,
    stream_k: bool,
) -> TierTiles:
    """Tiles of `size` row blocks per CTA for up to `clusters`; `access` limits the bytes in flight.

    Uses Stream-K if it is wanted and possible.
    """
    stream_k = stream_k and _can_stream_k(n, row_blocks, shape, clusters, size)
    clusters = min(clusters, shape.tile_count(n, row_blocks, size))
    window = shape.copies(stages)
    if access.window_bytes is not None:
        rings = clusters * shape.w_ctas * shape.k_ctas
        window = max(1, min(window, access.window_bytes // (shape.copy_bytes * size * rings)))
    # Blocks of tiles along X with which a wave reads the fewest rows of W and X.
    x_tiles, w_rows = ceil_div(n, shape.rows), ROWS_PER_BLOCK * size * shape.w_ctas
    best = max(1, min(x_tiles, round(math.sqrt(clusters * w_rows / shape.rows))))
    return TierTiles(clusters, size, ceil_div(x_tiles, ceil_div(x_tiles, best)), stream_k, window)
