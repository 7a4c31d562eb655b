"""How a kernel is run: pure choices from shapes, octets per tier and a few figures of the machine.

Needs no GPU. No shape is special.
"""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

from dakrun.kernels.packing import (
    ATOM_COLS,
    MAX_GROUP,
    OCTET_ROWS,
    PADDED_COLS,
    Split,
    padded_cols,
)
from dakrun.units import ceil_div

MAX_ROWS = 64  # of X in one launch
X_TILES = (1, 2, 4, 8)
MAX_STAGES = 16
STEP_BYTES = 16 * 1024  # of a group that lie together
COPY_BYTES = 12 * 1024  # of W for a stage, at least, where that leaves
STAGES = 3  # or more; a copy takes time to issue, however small it is
EXCHANGE_BYTES = 16 * 1024  # by which warps hand each other sums: Exchange of the kernel
SHARE_OF_X = 0.25  # what reading X for a group costs, in octets
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
class GemmConfig:
    """How a skinny GEMM is launched. No choice here changes a bit of the result but `x_tiles`.

    `x_tiles` are tiles of 8 rows of X; a stage holds `stage_blocks` blocks of columns of
    `stage_octets` of W, and of X; `windows` are the stages of W that a CTA of each tier may have in
    flight. Where the splits have fewer CTAs than there are SMs, others without work make it `ctas`:
    else two of the next launch might come to share an SM.
    """

    ctas: int
    x_tiles: int
    stages: int
    stage_blocks: int
    stage_octets: int
    stage_bytes: int
    shared_bytes: int
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

    Remote tiers get the SMs that they are read by, the local one the rest. With `aligned` the size
    of a tier's groups is chosen for even waves, else it is MAX_GROUP.
    """
    remote = [
        min(sms if tier.sms is None else tier.sms, count)
        for tier, count in zip(tiers[1:], octets[1:], strict=True)
    ]
    ctas = [min(max(1, sms - sum(remote)), octets[0]), *remote]
    return tuple(
        _split(count, of, even_group(count, of) if aligned else MAX_GROUP)
        for count, of in zip(octets, ctas, strict=True)
    )


def even_group(octets: int, ctas: int) -> int:
    """The group with which the busiest of `ctas` has least to do.

    That is its octets, and for each group of them an X to read.
    """

    def work(group: int) -> float:
        groups = ceil_div(ceil_div(octets, group), ctas)
        return groups * (group + SHARE_OF_X)

    return min(range(MAX_GROUP, 0, -1), key=work) if octets else 1


def _split(octets: int, ctas: int, group: int) -> Split:
    """Steps of about STEP_BYTES: short ones make for many copies, long ones for a jerky ring."""
    steps = max(1, STEP_BYTES // (2 * OCTET_ROWS * PADDED_COLS * group))
    return Split(octets, min(ctas, ceil_div(octets, group)), group, PADDED_COLS * steps)


def gemm_config(
    cols: int, n: int, splits: Sequence[Split], tiers: Sequence[TierAccess], *, sms: int
) -> GemmConfig:
    """Choose for a W of `cols` columns dealt out as `splits` to `tiers`, and an X of `n` rows.

    `sms` are those of the GPU.
    """
    x_tiles = tiles_for(n)
    used = [split for split in splits if split.octets]
    octets = max(split.group for split in used)
    most = min(padded_cols(cols), *(split.step_cols for split in used)) // block_cols(x_tiles)
    options = [
        blocks
        for blocks in (1, 2, 4, 8)
        if blocks <= most
        and all(split.step_cols % (blocks * block_cols(x_tiles)) == 0 for split in used)
        and (blocks == 1 or _stages(octets, x_tiles, blocks) >= STAGES)
    ]
    copies = [2 * OCTET_ROWS * block_cols(x_tiles) * blocks * octets for blocks in options]
    blocks = options[min(bisect.bisect_left(copies, COPY_BYTES), len(options) - 1)]
    return launch(octets, x_tiles, blocks, splits, tiers, sms=sms)


def launch(
    octets: int,
    x_tiles: int,
    blocks: int,
    splits: Sequence[Split],
    tiers: Sequence[TierAccess],
    *,
    sms: int,
) -> GemmConfig:
    """With stages of `blocks` blocks of up to `octets`: as many as fit, or as the window allows."""
    stages = _stages(octets, x_tiles, blocks)
    bytes_w = 2 * OCTET_ROWS * block_cols(x_tiles) * blocks * octets
    windows = [
        stages
        if tier.window_bytes is None or not split.ctas
        else max(1, min(stages, tier.window_bytes // (bytes_w * split.ctas)))
        for tier, split in zip(tiers, splits, strict=True)
    ]
    stage_bytes = stage_size(octets, x_tiles, blocks)
    return GemmConfig(
        ctas=max(sms, sum(split.ctas for split in splits)),
        x_tiles=x_tiles,
        stages=stages,
        stage_blocks=blocks,
        stage_octets=octets,
        stage_bytes=stage_bytes,
        shared_bytes=stages * stage_bytes + EXCHANGE_BYTES,
        splits=tuple(splits),
        windows=tuple(windows),
    )


def stage_size(octets: int, x_tiles: int, blocks: int) -> int:
    """Bytes of a stage: W and X."""
    return 2 * OCTET_ROWS * block_cols(x_tiles) * blocks * (octets + x_tiles)


def block_cols(x_tiles: int) -> int:
    """Columns that a team of warps takes at a time; for few rows of X they are shared by warps."""
    return ATOM_COLS if x_tiles == 8 else 2 * ATOM_COLS


def _stages(octets: int, x_tiles: int, blocks: int) -> int:
    """Stages that fit beside what the exchange of sums needs.

    Teams of warps that take stages of one block in turns need an even number: a team that came to a
    stage whose bytes for the other have yet to land would take their phase for its own.
    """
    room = SHARED_BYTES - EXCHANGE_BYTES
    stages = min(MAX_STAGES, room // stage_size(octets, x_tiles, blocks))
    return stages // 2 * 2 if blocks == 1 else stages
