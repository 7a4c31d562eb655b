"""How the tiled GEMM computes what lies in remote tiers, beside the local one: pure choices.

Needs no GPU. A link is slow, so rows of W cross it once, if a cluster can have all rows of X; and
what takes SMs from the local part is to end when that does.
"""

import bisect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from dakrun.geometry import ATOM_BYTES, WARPGROUPS
from dakrun.kernels.gemm.splitk_config import TierAccess
from dakrun.kernels.gemm.tiled_shapes import MAX_CLUSTER, Launch, Limits, Shape, TierTiles
from dakrun.kernels.gemm.tiled_tiers import even_tile, shares, tier_tiles, tile_count, tiles_cycles
from dakrun.units import ceil_div

LINK_CYCLES = 6000  # from a copy over a link until it has landed: a host on PCIe 5, under load


@dataclass(frozen=True)
class Remote:
    """The remote part of a product of `n` rows of X: `row_blocks` of W in each of `tiers`."""

    n: int
    row_blocks: tuple[int, ...]
    tiers: tuple[TierAccess, ...]
    atoms: int  # of 64 columns
    segments: int  # of K, that sums are of
    limits: Limits

    def launch(
        self, sms: int, local: Callable[[int], float] | None, *, multicast: bool = True
    ) -> Launch:
        """For a GPU of `sms`, if any is local with the cycles that the rest takes by its SMs."""
        parts = sum(count > 0 for count in self.row_blocks)
        shapes = [
            shape
            for shape in self._shapes(multicast=multicast)
            if self._most(shape, sms, local) >= parts
        ]
        rows = min(self.n, max(shape.rows for shape in shapes))
        return min(
            (self._launch(shape, sms, local) for shape in shapes if shape.rows >= rows),
            key=lambda launch: self._key(launch, sms, local),
        )

    def _shapes(self, *, multicast: bool) -> Iterator[Shape]:
        """Clusters that have all of X, or as much as they can."""
        most = 1 << (MAX_CLUSTER // self.segments).bit_length() - 1 if multicast else 1
        for x_tiles in self.limits.x_tiles:
            for row_groups in range(1, WARPGROUPS + 1):
                shape = Shape(x_tiles, row_groups, k_ctas=self.segments)
                x_ctas = 1 << (ceil_div(self.n, shape.rows) - 1).bit_length()
                if shape.fits(self.limits):
                    yield from (replace(shape, x_ctas=count) for count in {1, min(most, x_ctas)})

    def _most(self, shape: Shape, sms: int, local: Callable[[int], float] | None) -> int:
        """Clusters that leave SMs for the local part."""
        return self.limits.most_clusters(sms - self.segments * (local is not None), shape.ctas)

    def _launch(self, shape: Shape, sms: int, local: Callable[[int], float] | None) -> Launch:
        """As few clusters as end no later than the local part."""
        clusters = [int(count > 0) for count in self.row_blocks]
        parts = [tier for tier, count in enumerate(self.row_blocks) if count]
        for tier in parts * min(2, len(parts)):  # the second time knowing of the others
            others = sum(clusters) - clusters[tier]
            most = min(self._most(shape, sms, local) - others, self._useful(shape, tier))

            def ends(count: int, tier: int = tier, others: int = others) -> bool:
                if local is None:
                    return False
                rest = local(sms - shape.ctas * (others + count))
                found = self._tiles(shape, tier, count)
                products, link = self._cycles(shape, tier, found)
                whole = found.window < self._stages(shape)  # what may be in flight is
                return products <= rest and (link <= rest or whole)

            counts = range(1, max(1, most))
            clusters[tier] = 1 + bisect.bisect_left(counts, True, key=ends)
        tiles = tuple(
            self._tiles(shape, tier, count) if count else TierTiles(0)
            for tier, count in enumerate(clusters)
        )
        launch = Launch(shape, self._stages(shape), (TierTiles(0), *tiles))
        return launch.with_most_blocks(self.limits)

    def _stages(self, shape: Shape) -> int:
        """Of all tiers' rings: as many as the largest tile leaves room for."""
        return shape.stages(self.limits, shape.row_blocks)

    def _useful(self, shape: Shape, tier: int) -> int:
        """Clusters that have tiles, and at least a stage of what may be in flight."""
        count = tile_count(self.n, self.row_blocks[tier], shape.row_blocks, shape)
        window = self.tiers[tier].window_bytes
        if window is not None:
            count = min(count, window // (ATOM_BYTES * shape.row_blocks * shape.k_ctas))
        return count

    def _tiles(self, shape: Shape, tier: int, clusters: int) -> TierTiles:
        """Whole tiles where clusters can share the last ones, else such as make even waves."""
        row_blocks = self.row_blocks[tier]
        even = shape.k_ctas == 1 and shares(
            tile_count(self.n, row_blocks, shape.row_blocks, shape), clusters
        )
        size = shape.row_blocks if even else even_tile(self.n, row_blocks, clusters, shape)
        stages, access = self._stages(shape), self.tiers[tier]
        return tier_tiles(self.n, row_blocks, shape, clusters, access, stages, size, even=even)

    def _cycles(self, shape: Shape, tier: int, tiles: TierTiles) -> tuple[float, float]:
        """What products take, and the link, if it is as fast as what is in flight lets it be."""
        n, row_blocks, size = self.n, self.row_blocks[tier], tiles.tile_row_blocks
        waves = tile_count(n, row_blocks, size, shape) / tiles.clusters
        products = tiles_cycles(
            n, row_blocks, tiles.clusters * shape.ctas, self.atoms, shape, self.limits, size, waves,
            even=tiles.even,
        )  # fmt: skip
        if self.tiers[tier].window_bytes is None:
            return products, 0.0
        cycles: float = LINK_CYCLES
        if tiles.window == self._stages(shape):  # one is filled when it was multiplied
            cycles += products / (ceil_div(self.atoms, shape.k_ctas) * max(1.0, waves))
        flying = tiles.clusters * shape.k_ctas * tiles.window * size
        return products, cycles * self.atoms * row_blocks * ceil_div(n, shape.rows) / flying

    def _key(
        self, launch: Launch, sms: int, local: Callable[[int], float] | None
    ) -> tuple[float, ...]:
        """Cycles of the part that ends last, and what is taken for them."""
        shape = launch.shape
        parts = [local(sms - launch.ctas)] if local else []
        for tier, tiles in enumerate(launch.tiers[1:]):
            if tiles.clusters:
                parts += self._cycles(shape, tier, tiles)
        return max(parts), shape.row_blocks, launch.ctas, shape.x_ctas, shape.tiles
