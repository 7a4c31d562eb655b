"""How a kernel is run: pure choices from shapes, octets per tier and a few figures of the machine.

Needs no GPU. No shape is special.
"""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

from dakrun.kernels.packing import ATOM_COLS, MAX_GROUP, OCTET_ROWS, padded_cols
from dakrun.units import ceil_div

MAX_ROWS = 64  # of X in one launch
X_TILES = (1, 2, 3, 4, 6, 8)
MAX_STAGES = 16
MAX_BLOCKS = 8  # of a stage
MIN_BUSY = 0.85  # of a tier's SMs: those saturate HBM as well as all, and larger groups read less X
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
class Split:
    """How a tier's octets are dealt out: `cta_octets` to each of `ctas`, in groups of `group`.

    The last CTA and the last group may have fewer.
    """

    octets: int
    ctas: int
    cta_octets: int
    group: int


@dataclass(frozen=True)
class GemmConfig:
    """How a skinny GEMM is launched. No choice here changes a bit of the result but `x_tiles`.

    `x_tiles` are tiles of 8 rows of X; a stage holds `stage_blocks` blocks of columns of
    `stage_octets` of W; `windows` are the stages of W that a CTA of each tier may have in flight.
    """

    x_tiles: int
    stages: int
    stage_blocks: int
    stage_octets: int
    stage_bytes: int
    splits: tuple[Split, ...]
    windows: tuple[int, ...]


def tiles_for(n: int) -> int:
    """Tiles of 8 rows for an X of `n` rows, of those that there are kernels for."""
    if not 1 <= n <= MAX_ROWS:
        raise ValueError(f"expected 1 to {MAX_ROWS} rows, got {n}")
    return X_TILES[bisect.bisect_left(X_TILES, ceil_div(n, 8))]


def split_octets(
    octets: Sequence[int], tiers: Sequence[TierAccess], *, sms: int, aligned: bool = True
) -> tuple[Split, ...]:
    """Deal `octets` per tier (the local one first) to the `sms` of a GPU, one CTA each.

    Remote tiers get the SMs that they are read by, the local one the rest. With `aligned` all CTAs
    of a tier end together: they have equally many octets, as large groups as leave MIN_BUSY of the
    SMs with work. Otherwise every SM gets work, in whole groups of MAX_GROUP.
    """
    remote = [
        min(sms if tier.sms is None else tier.sms, count)
        for tier, count in zip(tiers[1:], octets[1:], strict=True)
    ]
    ctas = [min(max(1, sms - sum(remote)), octets[0]), *remote]
    deal = _even_split if aligned else _full_groups
    return tuple(deal(count, of) for count, of in zip(octets, ctas, strict=True))


def _even_split(octets: int, ctas: int) -> Split:
    if not octets:
        return Split(0, 0, 1, 1)
    least = ceil_div(octets, ctas)
    loads = {group: ceil_div(least, group) * group for group in range(MAX_GROUP, 0, -1)}
    busy = [group for group, load in loads.items() if ceil_div(octets, load) >= MIN_BUSY * ctas]
    group = busy[0] if busy else min(loads, key=lambda group: loads[group])
    return Split(octets, ceil_div(octets, loads[group]), loads[group], group)


def _full_groups(octets: int, ctas: int) -> Split:
    if not octets:
        return Split(0, 0, 1, 1)
    load = ceil_div(ceil_div(octets, MAX_GROUP), ctas) * MAX_GROUP
    return Split(octets, ceil_div(octets, load), load, MAX_GROUP)


def gemm_config(
    cols: int, n: int, splits: Sequence[Split], tiers: Sequence[TierAccess]
) -> GemmConfig:
    """Choose for a W of `cols` columns dealt out as `splits` to `tiers`, and an X of `n` rows."""
    x_tiles = tiles_for(n)
    stage_octets = max(split.group for split in splits)
    block_bytes = 2 * OCTET_ROWS * block_cols(x_tiles) * (stage_octets + x_tiles)
    blocks = choose_stage_blocks(block_bytes, padded_cols(cols) // block_cols(x_tiles))
    stage_bytes = max(
        blocks * block_bytes,
        scratch_bytes(stage_octets, x_tiles),
        read_bytes(stage_octets, blocks * block_cols(x_tiles) // ATOM_COLS),
    )
    stages = min(MAX_STAGES, SHARED_BYTES // stage_bytes)
    if blocks == 1:
        stages = stages // 2 * 2
    bytes_w = 2 * OCTET_ROWS * block_cols(x_tiles) * blocks * stage_octets
    windows = [
        stages
        if tier.window_bytes is None or not split.ctas
        else max(1, min(stages, tier.window_bytes // (bytes_w * split.ctas)))
        for tier, split in zip(tiers, splits, strict=True)
    ]
    return GemmConfig(
        x_tiles, stages, blocks, stage_octets, stage_bytes, tuple(splits), tuple(windows)
    )


def scratch_bytes(octets: int, x_tiles: int) -> int:
    """Bytes in which the warps exchange the sums of a group: finish() of the kernel."""
    if x_tiles <= 2:
        return 2048 * octets
    row_tiles = ceil_div(x_tiles, 2)
    row_warps = 2 if row_tiles == 4 else 1
    return 2048 * row_tiles // row_warps * ceil_div(octets, 4 // row_warps)


def read_bytes(octets: int, atoms: int) -> int:
    """Bytes of a stage up to where its warps read, which take four octets at a time."""
    return 1024 * ((atoms - 1) * octets + ceil_div(octets, 4) * 4)


def block_cols(x_tiles: int) -> int:
    """Columns that a team of warps takes at a time; for few rows of X they are shared by warps."""
    return 2 * ATOM_COLS if x_tiles <= 2 else ATOM_COLS


def choose_stage_blocks(block_bytes: int, most: int) -> int:
    """Blocks of a stage, each of `block_bytes`, `most` being all: so many that STAGES stages fit.

    One, which the teams of warps take in turns, or an even number, which they share.
    """
    blocks = min(SHARED_BYTES // STAGES // block_bytes, MAX_BLOCKS, most)
    return max(1, blocks // 2 * 2)
