"""Launches of the tiled GEMM: shapes of tiles, rings and tiers. Chooses nothing."""

import bisect
import functools
from dataclasses import dataclass, replace

from dakrun.geometry import (
    ATOM_BYTES,
    ROWS_PER_BLOCK,
    TILE_ROW_BLOCKS,
    TILED_MAX_STAGES,
    TILED_MIN_OUTPUT_BLOCKS,
    TILED_PASS_TILES,
    TILED_PORTABLE_X_TILES,
    TILED_UNIT_STAGES,
    TILED_WIDE_TILES,
    TILED_X_TILES,
    WARPGROUPS,
    unit_atoms,
)
from dakrun.hardware import Card
from dakrun.units import ceil_div

MAX_OUTPUT_BLOCKS = 8  # of a warp
X_ALIGN = 1024  # bytes: X's swizzle
# Shared memory of a CTA for one output block of each of its warps.
OUTPUT_BLOCK_BYTES = (
    WARPGROUPS * TILED_PASS_TILES * ROWS_PER_BLOCK * TILE_ROW_BLOCKS * ROWS_PER_BLOCK * 2
)
# float32 accumulators of a CTA for one of a shape's `tiles`: 64 x 8 of each warpgroup.
PARTIAL_BYTES = 4 * ROWS_PER_BLOCK * WARPGROUPS * TILE_ROW_BLOCKS * ROWS_PER_BLOCK


def x_tiles(*, wgmma: bool) -> tuple[int, ...]:
    """Kernel variants, with wgmma or without, by tiles of 8 rows of X of a warpgroup."""
    return TILED_X_TILES if wgmma else TILED_PORTABLE_X_TILES


def sharing_tiles(*, wgmma: bool, units: bool) -> tuple[int, ...]:
    """Variants of which two CTAs share an SM, by tiles of 8 rows of X of a warpgroup.

    Only if W has `units`. More tiles leave no registers for another CTA.
    """
    return TILED_X_TILES[:1] if wgmma and units else ()


def wide_tiles(*, wgmma: bool, units: bool = False) -> tuple[int, ...]:
    """Variants for wide shapes, by tiles of 8 rows of W of a warpgroup.

    None if W has `units`: tensor cores take them from registers, but here W from shared memory.
    """
    return TILED_WIDE_TILES if wgmma and not units else ()


def beside(card: Card, clusters: int, ctas: int) -> Card:
    """The card that another launch has while `clusters` of `ctas` CTAs run.

    For clusters of n CTAs, each running cluster occupies the room of ceil(ctas / n). Single CTAs
    occupy none: they run on SMs that clusters leave free. One cluster of every size always counts
    as possible: it runs when the others have ended.
    """
    left = card.clusters
    if ctas > 1:
        counts = (count - clusters * ceil_div(ctas, n) for n, count in enumerate(left, 2))
        left = tuple(max(1, count) for count in counts)
    return replace(card, sms=card.sms - clusters * ctas, clusters=left)


@dataclass(frozen=True)
class Shape:
    """Tile of a cluster: a warpgroup multiplies `tiles` x 8 rows of X by 64 rows of W.

    If `wide`, it multiplies `tiles` x 8 rows of W by 64 rows of X. The two warpgroups of a CTA are
    side by side along W with 2 `row_groups`, else along X. `w_ctas` CTAs side by side along W share
    X by multicast, or `x_ctas` CTAs along X share W; one of these numbers is 1, the other a power
    of two. Each of `k_ctas` multiplies a segment of K. An atom of W, 64 columns of a row block, has
    `atom_bytes`. `ctas_per_sm` CTAs of a launch share an SM: expanding units keeps a CTA's warps
    from starting products, and another CTA's run meanwhile. With `room` a CTA's tile has up to so
    many x 8 rows of X, at most `tiles` x 8, and multiplies as many as there are.
    """

    tiles: int
    row_groups: int
    w_ctas: int = 1
    x_ctas: int = 1
    k_ctas: int = 1
    wide: bool = False
    atom_bytes: int = ATOM_BYTES
    ctas_per_sm: int = 1
    room: int = 0

    @property
    def ctas(self) -> int:
        """CTAs of a cluster."""
        return self.w_ctas * self.x_ctas * self.k_ctas

    @property
    def row_blocks(self) -> int:
        """Row blocks of W in a CTA's tile, at most."""
        return self.row_groups * self.group_row_blocks

    @property
    def group_row_blocks(self) -> int:
        """Row blocks of W of a warpgroup, at most."""
        return self.tiles if self.wide else TILE_ROW_BLOCKS

    @property
    def x_tiles(self) -> int:
        """Tiles of 8 rows of X of a warpgroup."""
        return TILE_ROW_BLOCKS if self.wide else self.tiles

    @property
    def cta_x_tiles(self) -> int:
        """Tiles of 8 rows of X of a CTA."""
        return self.room or self.x_tiles * WARPGROUPS // self.row_groups

    @property
    def rows(self) -> int:
        """Rows of X in a cluster's tile."""
        return ROWS_PER_BLOCK * self.cta_x_tiles * self.x_ctas

    @property
    def output_box(self) -> tuple[int, int]:
        """Rows and columns of Y in an output block of a warp."""
        rows, cols = (2, TILED_PASS_TILES) if self.wide else (TILED_PASS_TILES, 2)
        return ROWS_PER_BLOCK * rows, ROWS_PER_BLOCK * cols

    def tile_count(self, n: int, row_blocks: int, tile_row_blocks: int) -> int:
        """Clusters' tiles of `tile_row_blocks` a CTA, for `n` rows of X and `row_blocks` of W."""
        return ceil_div(row_blocks, tile_row_blocks * self.w_ctas) * ceil_div(n, self.rows)

    def smallest_tile(self, n: int, row_blocks: int, clusters: int) -> int:
        """The smallest tile, in row blocks a CTA, that makes no more waves than the largest."""

        def waves(tile_row_blocks: int) -> int:
            return ceil_div(self.tile_count(n, row_blocks, tile_row_blocks), clusters)

        sizes = range(1, self.row_blocks + 1)
        fewest = waves(self.row_blocks)
        return sizes[bisect.bisect_left(sizes, -fewest, key=lambda size: -waves(size))]

    def stage_bytes(self, row_blocks: int) -> int:
        """Bytes of a stage: 64 columns of `row_blocks` of W, without units, and of X."""
        return ATOM_BYTES * ((0 if self.has_units else row_blocks) + self.cta_x_tiles)

    def units_bytes(self, row_blocks: int) -> int:
        """Bytes of the ring of units of a W of fewer bits."""
        if not self.has_units:
            return 0
        return X_ALIGN * ceil_div(TILED_UNIT_STAGES * self.copy_bytes * row_blocks, X_ALIGN)

    @property
    def has_units(self) -> bool:
        """Whether W has fewer than 16 bits."""
        return unit_atoms(self.atom_bytes) > 1

    def places(self, card: Card) -> Card:
        """The card as CTAs see it that share its SMs."""
        return card.shared_by(self.ctas_per_sm)

    @property
    def copy_bytes(self) -> int:
        """Bytes of a row block of W in one copy: an atom, or a unit."""
        return self.atom_bytes * unit_atoms(self.atom_bytes)

    def copies(self, stages: int) -> int:
        """Copies of W in flight, at most: the ring's `stages`, or those of the ring of units."""
        return TILED_UNIT_STAGES if self.has_units else stages

    def overread_bytes(self, row_blocks: int) -> int:
        """Bytes that a warpgroup, which multiplies whole groups, reads behind the last stage."""
        if self.has_units:
            return 0
        whole = ceil_div(row_blocks, self.group_row_blocks) * self.group_row_blocks
        return max(0, ATOM_BYTES * (whole - row_blocks - self.cta_x_tiles))

    @property
    def segments_bytes(self) -> int:
        """Shared memory for the exchange of segments' partial sums, instead of stages."""
        own = ceil_div(self.tiles, TILED_PASS_TILES * self.k_ctas) * TILED_PASS_TILES
        return own * self.k_ctas * PARTIAL_BYTES if self.k_ctas > 1 else 0

    def fits(self, card: Card) -> bool:
        """Whether the card can run it."""
        return (
            self.ctas <= card.max_cluster
            and self.stages(card, self.row_blocks) >= 2
            and self.segments_bytes + self.units_bytes(self.row_blocks) <= _ring_room(card)
        )

    def stages(self, card: Card, *row_blocks: int) -> int:
        """Stages that fit, for tiers whose tiles have `row_blocks` of W."""
        room = _ring_room(card) - self.overread_bytes(min(row_blocks))
        room -= self.units_bytes(max(row_blocks))
        return min(TILED_MAX_STAGES, room // self.stage_bytes(max(row_blocks)))


def _ring_room(card: Card) -> int:
    """Shared memory that barriers and the fewest output blocks leave to a ring."""
    return card.lone_ring_bytes - TILED_MIN_OUTPUT_BLOCKS * OUTPUT_BLOCK_BYTES


@dataclass(frozen=True)
class TierTiles:
    """How a launch computes a tier: `clusters`, each CTA taking tiles of `tile_row_blocks` of W.

    Tiles are numbered in blocks of `block_tiles` along X, so that a wave reads fewer rows. With
    `stream_k` clusters share the tiles of the last whole wave and the rest behind it. The
    congestion window is `window` stages of W in flight. No clusters: another launch computes the
    tier.
    """

    clusters: int
    tile_row_blocks: int = 1
    block_tiles: int = 1
    stream_k: bool = False
    window: int = 1


@dataclass(frozen=True)
class Launch:
    """A launch for some tiers: a shape, a ring of `stages`, and `blocks` for outputs of each warp.

    Outputs and residuals pass through the output blocks on their way to and from memory.
    """

    shape: Shape
    stages: int
    tiers: tuple[TierTiles, ...]
    blocks: int = TILED_MIN_OUTPUT_BLOCKS

    def with_max_blocks(self, card: Card) -> "Launch":
        """The same with as many output blocks as fit beside the stages."""
        room = card.lone_ring_bytes - self._ring_bytes
        blocks = min(MAX_OUTPUT_BLOCKS, room // OUTPUT_BLOCK_BYTES)
        assert blocks >= TILED_MIN_OUTPUT_BLOCKS, f"{self.stages} stages leave {blocks} blocks"
        return replace(self, blocks=blocks)

    @property
    def clusters(self) -> int:
        """Clusters of all tiers."""
        return sum(tier.clusters for tier in self.tiers)

    @property
    def ctas(self) -> int:
        """CTAs of all tiers."""
        return self.shape.ctas * self.clusters

    @functools.cached_property
    def shared_bytes(self) -> int:
        """Shared memory of a CTA: output blocks and stages."""
        return self.blocks * OUTPUT_BLOCK_BYTES + self._ring_bytes

    @property
    def _ring_bytes(self) -> int:
        sizes = [tier.tile_row_blocks for tier in self.tiers if tier.clusters] or [1]
        stages = self.stages * self.shape.stage_bytes(max(sizes))
        room = max(stages + self.shape.overread_bytes(min(sizes)), self.shape.segments_bytes)
        return room + self.shape.units_bytes(max(sizes))

    @property
    def held_bytes(self) -> int:
        """Bytes of W that whole tiles of a CTA can have in flight."""
        return self.shape.copies(self.stages) * self.shape.copy_bytes * self.shape.row_blocks

    @property
    def stream_k_ctas(self) -> int:
        """CTAs that may store partial tiles."""
        return self.ctas if any(tier.stream_k for tier in self.tiers) else 0

    @property
    def partial_bytes(self) -> int:
        """Bytes of the partial tiles that all CTAs may store."""
        return self.stream_k_ctas * self.shape.tiles * PARTIAL_BYTES


@dataclass(frozen=True)
class TiledConfig:
    """A tiled GEMM: one launch, or one for the remote tiers and then one for the local tier."""

    launches: tuple[Launch, ...]

    @property
    def stream_k_ctas(self) -> int:
        """CTAs that may store partial tiles."""
        return sum(launch.stream_k_ctas for launch in self.launches)

    @property
    def partial_bytes(self) -> int:
        """Bytes of the partial tiles that all CTAs may store."""
        return sum(launch.partial_bytes for launch in self.launches)
