"""How a kernel is run: pure choices from shapes, octets per tier and a few figures of the machine.

Needs no GPU. No shape is special.
"""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

from dakrun.kernels.packing import ATOM_COLS, BLOCK_COLS, OCTET_ROWS, octet_count, padded_cols
from dakrun.units import ceil_div

MAX_ROWS = 64  # of X in one launch
X_TILES = (1, 2, 3, 4, 6, 8)
MAX_STAGES = 16
STAGES = 6  # that are aimed at: more make for small copies, fewer for a jerky ring
# What two CTAs, one of this op and one of the next, can have of an SM's 228 KiB: 1 KiB each is the
# driver's, and 1 KiB is for barriers.
SHARED_BYTES = 112 * 1024


@dataclass(frozen=True)
class TierAccess:
    """How a tier is read: by how many SMs, and with how many bytes in flight over all of them.

    None stands for no limit.
    """

    sms: int | None = None
    window_bytes: int | None = None


@dataclass(frozen=True)
class TierShare:
    """A tier's part of a launch: its CTAs, the octets of each and of each group, its window.

    `window` are the stages of W that a CTA may have in flight.
    """

    ctas: int
    cta_octets: int
    group_octets: int
    window: int


@dataclass(frozen=True)
class GemmConfig:
    """How a skinny GEMM is launched. No choice here changes a bit of the result but `x_tiles`.

    `x_tiles` are tiles of 8 rows of X; a stage holds `stage_octets` x `stage_cols` of W.
    """

    x_tiles: int
    stages: int
    stage_cols: int
    stage_octets: int
    tiers: tuple[TierShare, ...]

    @property
    def stage_bytes(self) -> int:
        """Bytes of a stage: W and the same columns of X."""
        return 2 * self.stage_cols * OCTET_ROWS * (self.stage_octets + self.x_tiles)


def tiles_for(n: int) -> int:
    """Tiles of 8 rows for an X of `n` rows, of those that there are kernels for."""
    if not 1 <= n <= MAX_ROWS:
        raise ValueError(f"expected 1 to {MAX_ROWS} rows, got {n}")
    return X_TILES[bisect.bisect_left(X_TILES, ceil_div(n, 8))]


def max_group(x_tiles: int) -> int:
    """Octets that a CTA can compute together: what its registers hold the sums of."""
    return 8 if x_tiles <= 2 else 16


def gemm_config(
    shape: tuple[int, int],
    n: int,
    octets: Sequence[int],
    tiers: Sequence[TierAccess],
    *,
    sms: int,
    aligned: bool = True,
) -> GemmConfig:
    """Choose for W of `shape` [M, K], `octets` of it per tier (the local one first), X of `n` rows.

    `sms` are the GPU's. With `aligned` every CTA of a tier gets the same number of octets, but for
    the last; otherwise the tier's CTAs are as many as can be, and their loads uneven.
    """
    if sum(octets) != octet_count(shape[0]) or len(octets) != len(tiers):
        raise ValueError(f"expected {octet_count(shape[0])} octets, got {octets}")
    x_tiles = tiles_for(n)
    remote = [
        min(sms if tier.sms is None else tier.sms, count)
        for tier, count in zip(tiers[1:], octets[1:], strict=True)
    ]
    ctas = [min(max(1, sms - sum(remote)), octets[0]), *remote]
    loads = [ceil_div(count, of) if of else 0 for count, of in zip(octets, ctas, strict=True)]
    ctas = [ceil_div(count, load) if load else 0 for count, load in zip(octets, loads, strict=True)]
    groups = [even_group(load, max_group(x_tiles)) for load in loads]
    stage_octets = max(groups)
    stage_cols = choose_stage_cols(stage_octets, x_tiles, padded_cols(shape[1]))
    bytes_w = 2 * OCTET_ROWS * stage_cols * stage_octets
    stage = bytes_w + 2 * stage_cols * 8 * x_tiles
    stages = min(MAX_STAGES, SHARED_BYTES // stage)
    return GemmConfig(
        x_tiles,
        stages,
        stage_cols,
        stage_octets,
        tuple(
            TierShare(
                count,
                load,
                group,
                stages
                if tier.window_bytes is None or not count
                else max(1, min(stages, tier.window_bytes // (bytes_w * count))),
            )
            for tier, count, load, group in zip(tiers, ctas, loads, groups, strict=True)
        ),
    )


def even_group(load: int, most: int) -> int:
    """The smallest group, `most` octets at most, that takes `load` octets in as few groups."""
    return ceil_div(load, ceil_div(load, most)) if load else 0


def choose_stage_cols(octets: int, x_tiles: int, cols: int) -> int:
    """Columns of a stage of `octets` and `x_tiles`: whole blocks, about STAGES of them if possible.

    Consumer warps that share a stage's columns need blocks of 128.
    """
    block = BLOCK_COLS if x_tiles <= 2 else ATOM_COLS
    block_bytes = 2 * OCTET_ROWS * block * (octets + x_tiles)
    return min(max(1, SHARED_BYTES // STAGES // block_bytes) * block, cols)
