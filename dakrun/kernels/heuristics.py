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
X_TILES = (1, 2, 3, 4, 6, 8)
MAX_STAGES = 16
STEP_BYTES = 16 * 1024  # of a group that lie together
SHARE_OF_X = 0.25
STAGES = 5  # at least, where smaller ones can be had
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
    `stage_octets` of W; `windows` are the stages of W that a CTA of each tier may have in flight.
    Where the splits have fewer CTAs than `sms`, others without work fill up the SMs: else two of
    the next launch might come to share one.
    """

    sms: int
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

    That is its octets, and for each group of them an X to read, which counts like SHARE_OF_X of an
    octet.
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
    stage_octets = max((split.group for split in splits if split.octets), default=1)
    step = min(split.step_cols for split in splits if split.octets)
    block = block_cols(x_tiles)
    most = min(step, padded_cols(cols)) // block
    options = [
        n for n in (1, 2, 4, 8) if n <= most and all(s.step_cols % (n * block) == 0 for s in splits)
    ]
    blocks = max(
        (n for n in options if _stages(stage_octets, x_tiles, n) >= STAGES), default=options[0]
    )
    stage_bytes = stage_size(stage_octets, x_tiles, blocks)
    stages = _stages(stage_octets, x_tiles, blocks)
    bytes_w = 2 * OCTET_ROWS * block * blocks * stage_octets
    windows = [
        stages
        if tier.window_bytes is None or not split.ctas
        else max(1, min(stages, tier.window_bytes // (bytes_w * split.ctas)))
        for tier, split in zip(tiers, splits, strict=True)
    ]
    return GemmConfig(
        sms, x_tiles, stages, blocks, stage_octets, stage_bytes, tuple(splits), tuple(windows)
    )


def stage_size(octets: int, x_tiles: int, blocks: int) -> int:
    """Bytes of a stage: W and X, or more where the exchange of sums or the reads need it."""
    cols = blocks * block_cols(x_tiles)
    return max(
        2 * OCTET_ROWS * cols * (octets + x_tiles),
        scratch_bytes(octets, x_tiles),
        read_bytes(octets, cols // ATOM_COLS),
    )


def _stages(octets: int, x_tiles: int, blocks: int) -> int:
    """Stages that fit; teams that take them in turns need an even number."""
    stages = min(MAX_STAGES, SHARED_BYTES // stage_size(octets, x_tiles, blocks))
    return stages // 2 * 2 if blocks == 1 else stages


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
