"""What the tiled GEMM can be launched with: shapes of tiles, rings, tiers, and what a GPU sets.

Needs no GPU, and chooses nothing.
"""

from dataclasses import dataclass, replace

from dakrun.geometry import (
    ATOM_BYTES,
    ROWS_PER_BLOCK,
    TILE_ROW_BLOCKS,
    TILED_MAX_STAGES,
    TILED_MIN_OUTPUT_BLOCKS,
    TILED_PASS_TILES,
    TILED_WIDE_TILES,
    TILED_X_TILES,
    WARPGROUPS,
)
from dakrun.units import ceil_div

MAX_CLUSTER = 8  # CTAs
BLOCKS_BYTES = (
    WARPGROUPS * TILED_PASS_TILES * ROWS_PER_BLOCK * TILE_ROW_BLOCKS * ROWS_PER_BLOCK * 2
)  # one a warp
MAX_BLOCKS = 8  # of a warp
SUM_BYTES = (
    4 * ROWS_PER_BLOCK * WARPGROUPS * TILE_ROW_BLOCKS * ROWS_PER_BLOCK
)  # a CTA's, of a tile of X
BARRIER_BYTES = 1024  # of a CTA's shared memory


@dataclass(frozen=True)
class Limits:
    """What a GPU sets: bytes of shared memory of a CTA, and the `x_tiles` that there are.

    Of clusters of 2, 3, ... CTAs, one a SM, `clusters` run at a time: SMs go by groups, which
    larger ones do not fill.
    """

    shared_bytes: int = 227 * 1024
    x_tiles: tuple[int, ...] = TILED_X_TILES
    clusters: tuple[int, ...] = (66, 39, 30, 22, 17, 15, 15)

    @property
    def wide_tiles(self) -> tuple[int, ...]:
        """Of W, that a warpgroup multiplies with wgmma where shapes are wide."""
        return TILED_WIDE_TILES if self.x_tiles == TILED_X_TILES else ()

    def most_clusters(self, sms: int, ctas: int) -> int:
        """That run at a time on `sms`, of `ctas` CTAs."""
        return sms if ctas == 1 else min(sms // ctas, self.clusters[ctas - 2])


H200 = Limits()


@dataclass(frozen=True)
class Shape:
    """What a cluster of CTAs multiplies: a warpgroup `tiles` x 8 rows of X and 64 of W.

    If it is `wide`, `tiles` x 8 rows of W and 64 of X. The two warpgroups of a CTA have rows beside
    each other of W, with 2 `row_groups`, or of X. So have `w_ctas` or `x_ctas`, of which one is 1
    and the other a power of two: they bring what they share once. Each of `k_ctas` sums a segment
    of K.
    """

    tiles: int
    row_groups: int
    w_ctas: int = 1
    x_ctas: int = 1
    k_ctas: int = 1
    wide: bool = False

    @property
    def ctas(self) -> int:
        """Those of a cluster."""
        return self.w_ctas * self.x_ctas * self.k_ctas

    @property
    def row_blocks(self) -> int:
        """Of W in a CTA's tile, at most."""
        return self.row_groups * self.group_row_blocks

    @property
    def group_row_blocks(self) -> int:
        """Of W, that a warpgroup multiplies."""
        return self.tiles if self.wide else TILE_ROW_BLOCKS

    @property
    def across(self) -> int:
        """Tiles of 8 rows of X of a CTA."""
        return self.x_tiles * WARPGROUPS // self.row_groups

    @property
    def x_tiles(self) -> int:
        """Of 8 rows of X, that a warpgroup multiplies."""
        return TILE_ROW_BLOCKS if self.wide else self.tiles

    @property
    def rows(self) -> int:
        """Of X in a cluster's tile."""
        return ROWS_PER_BLOCK * self.across * self.x_ctas

    @property
    def output_box(self) -> tuple[int, int]:
        """Rows and columns of Y that a warp writes at a time."""
        rows, cols = (2, TILED_PASS_TILES) if self.wide else (TILED_PASS_TILES, 2)
        return ROWS_PER_BLOCK * rows, ROWS_PER_BLOCK * cols

    def stage_bytes(self, row_blocks: int) -> int:
        """Of a stage: 64 columns of `row_blocks` of W, and of X."""
        return ATOM_BYTES * (row_blocks + self.across)

    def bytes_behind(self, row_blocks: int) -> int:
        """Bytes read behind a stage with `row_blocks` of W: a warpgroup multiplies whole groups."""
        whole = ceil_div(row_blocks, self.group_row_blocks) * self.group_row_blocks
        return ATOM_BYTES * max(0, whole - row_blocks - self.across)

    @property
    def sums_bytes(self) -> int:
        """Where segments of sums meet in shared memory, instead of stages."""
        own = ceil_div(self.tiles, TILED_PASS_TILES * self.k_ctas) * TILED_PASS_TILES
        return own * self.k_ctas * SUM_BYTES if self.k_ctas > 1 else 0

    def fits(self, limits: Limits) -> bool:
        """Whether a GPU with `limits` can run it."""
        room = limits.shared_bytes - BARRIER_BYTES - TILED_MIN_OUTPUT_BLOCKS * BLOCKS_BYTES
        return self.stages(limits, self.row_blocks) >= 2 and self.sums_bytes <= room

    def stages(self, limits: Limits, *row_blocks: int) -> int:
        """That there is room for, where tiles have so many `row_blocks` of W."""
        room = limits.shared_bytes - BARRIER_BYTES - TILED_MIN_OUTPUT_BLOCKS * BLOCKS_BYTES
        room -= self.bytes_behind(min(row_blocks))
        return min(TILED_MAX_STAGES, room // self.stage_bytes(max(row_blocks)))


@dataclass(frozen=True)
class TierTiles:
    """How a launch computes a tier: `clusters`, each CTA taking tiles of `tile_row_blocks` of W.

    `block_tiles` tiles along X are beside each other in the order in which clusters take them. With
    `even` clusters share the last tiles, so that all have as much to do. Of the stages of W that
    CTAs share `window` may be in flight. A launch has no clusters for the tiers of another one.
    """

    clusters: int
    tile_row_blocks: int = 1
    block_tiles: int = 1
    even: bool = False
    window: int = 1


@dataclass(frozen=True)
class Launch:
    """A launch for some tiers: what its clusters multiply, through a ring of `stages`.

    Outputs are on their way to Y, and residuals from there, in `blocks` of each warp.
    """

    shape: Shape
    stages: int
    tiers: tuple[TierTiles, ...]
    blocks: int = TILED_MIN_OUTPUT_BLOCKS

    def with_most_blocks(self, limits: Limits) -> "Launch":
        """The same with as many blocks as there is room for beside the stages."""
        room = limits.shared_bytes - BARRIER_BYTES - self._ring_bytes
        blocks = min(MAX_BLOCKS, room // BLOCKS_BYTES)
        assert blocks >= TILED_MIN_OUTPUT_BLOCKS, (
            f"room for {blocks} blocks beside {self.stages} stages"
        )
        return replace(self, blocks=blocks)

    @property
    def ctas(self) -> int:
        """Those of all tiers."""
        return self.shape.ctas * sum(tier.clusters for tier in self.tiers)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a CTA: outputs on their way, and the stages."""
        return self.blocks * BLOCKS_BYTES + self._ring_bytes

    @property
    def _ring_bytes(self) -> int:
        stages = self.stages * self.shape.stage_bytes(self.tile_row_blocks)
        stages += self.shape.bytes_behind(min(self._tile_sizes))
        return max(stages, self.shape.sums_bytes)

    @property
    def tile_row_blocks(self) -> int:
        """Row blocks of W in a CTA's tile, of the tier that has the largest."""
        return max(self._tile_sizes)

    @property
    def _tile_sizes(self) -> list[int]:
        return [tier.tile_row_blocks for tier in self.tiers if tier.clusters] or [1]

    @property
    def carriers(self) -> int:
        """CTAs that may leave sums for others."""
        return self.ctas if any(tier.even for tier in self.tiers) else 0

    @property
    def carried(self) -> int:
        """Bytes of these sums."""
        return self.carriers * self.shape.tiles * SUM_BYTES


@dataclass(frozen=True)
class TiledConfig:
    """How a tiled GEMM is launched: once, or first for remote tiers and then for the local one."""

    launches: tuple[Launch, ...]

    @property
    def carriers(self) -> int:
        """CTAs that may leave sums for others."""
        return sum(launch.carriers for launch in self.launches)

    @property
    def carried(self) -> int:
        """Bytes of these sums."""
        return sum(launch.carried for launch in self.launches)
