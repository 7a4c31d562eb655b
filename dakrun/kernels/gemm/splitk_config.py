"""Launch configurations of SplitK_GEMM: pure functions of shapes, row blocks per tier and the GPU.

Needs no GPU. No shape is special.
"""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

from dakrun.geometry import (
    ATOM_BYTES,
    ATOM_COLS,
    MAX_GROUP_ROW_BLOCKS,
    ROWS_PER_BLOCK,
    SHARED_BYTES_PAIRED,
    SPLITK_MAX_ROWS,
    SPLITK_MAX_STAGES,
    SPLITK_X_TILES,
    TILE_ROW_BLOCKS,
    even_group,
    group_count,
)
from dakrun.kernels.gemm.packing import Split
from dakrun.units import ceil_div

PAIRED_TILES = 8  # of X that two groups are multiplied at once for
STEP_BYTES = 16 * 1024  # of a group that lie together, at most
STEP_ATOMS = 8  # of them, at most: halves of sums begin with one
COPY_BYTES = 8 * 1024  # of W for a stage, at least, where that leaves
STAGES = 5  # or more; a copy takes time to issue, however small it is
L2_SHARE = 1.6  # bytes that an SM has from L2 in the time of one from HBM
# Of W and X for a CTA of SplitK_GEMM, up to which the tiled GEMM is slower for more than FEW_ROWS:
# decode steps of 64 requests take 9% less for OPT-125m, 11% for OPT-350m. The 320 KiB of 2048x2048
# take 6.2 us of 7.6 in a chain, but make OPT-1.3b's step, where norms keep them apart, 7% slower.
LITTLE_BYTES = 256 * 1024
JOIN_BYTES = 60 * 1024  # that an SM could read from HBM while the halves of the last sums meet


@dataclass(frozen=True)
class TierAccess:
    """How a tier is read: by how many SMs, and with how many bytes in flight over all of them.

    None stands for no limit. A remote tier that is `mixed` is read by the local tier's SMs, among
    their own row blocks or slots: no SM waits for its link alone. Limits are then for launches that
    cannot do that, those of many rows.
    """

    sms: int | None = None
    window_bytes: int | None = None
    mixed: bool = False

    def __post_init__(self) -> None:
        for name in ("sms", "window_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}, must be None or at least 1")


@dataclass(frozen=True)
class Ring:
    """What a CTA of a tier keeps in shared memory: stages of W, and of X.

    A stage is `atoms` of 64 columns of a group, or, with 2 `groups`, of two that the CTA multiplies
    at once; `window` are the stages of W that may be in flight.
    """

    atoms: int
    stages: int
    window: int
    groups: int = 1


@dataclass(frozen=True)
class GemmConfig:
    """How a skinny GEMM is launched. Bits of the result depend on `x_tiles` and `half_cols` alone.

    `x_tiles` are tiles of 8 rows of X; sums are made of two halves, of the first `half_cols`
    columns and the others, or whole where it is 0; each tier has a split and a ring. With `mixes`
    the groups of the split that is mixed are the local CTAs'. Where the splits have fewer CTAs than
    there are SMs, others without work make it `ctas`: else two of the next launch might come to
    share an SM.
    """

    ctas: int
    x_tiles: int
    half_cols: int
    shared_bytes: int
    splits: tuple[Split, ...]
    rings: tuple[Ring, ...]
    mixes: bool = False


def tiles_for(n: int) -> int:
    """Tiles of 8 rows for an X of `n` rows, of those that there are kernels for."""
    if not 1 <= n <= SPLITK_MAX_ROWS:
        raise ValueError(f"expected 1 to {SPLITK_MAX_ROWS} rows, got {n}")
    return SPLITK_X_TILES[bisect.bisect_left(SPLITK_X_TILES, ceil_div(n, 8))]


def can_mix(x_tiles: int) -> bool:
    """Whether the local CTAs can take groups of a mixed tier; else it has CTAs of its own."""
    return x_tiles != PAIRED_TILES


def reads_little(n: int, row_blocks: int, cols: int, *, sms: int) -> bool:
    """Whether SplitK_GEMM is the faster for `n` rows of X, more than FEW_ROWS.

    W is of `row_blocks` with `cols` columns, X and W of 16 bits; each of `sms` reads its share of W
    and X once. The tiled GEMM, made for many rows, takes longer to begin and to end.
    """
    x_rows, w_rows = 8 * tiles_for(n), ROWS_PER_BLOCK * ceil_div(row_blocks, sms)
    return 2 * cols * (x_rows + w_rows) <= LITTLE_BYTES


def split_row_blocks(
    row_blocks: Sequence[int], tiers: Sequence[TierAccess], *, sms: int, aligned: bool = True
) -> tuple[Split, ...]:
    """Deal `row_blocks` per tier (the local one first) to the `sms` of a GPU, one CTA each.

    Remote tiers get the SMs that they are read by, the local one the rest, and with them the groups
    of the first tier that is mixed. With `aligned` the size of a tier's groups is chosen for even
    waves, else it is MAX_GROUP_ROW_BLOCKS.
    """
    mixed = _mixed_tier(row_blocks, tiers)
    others = row_blocks[mixed] if mixed else 0
    remote = [
        min(sms if tier.sms is None else tier.sms, count) if number != mixed else 0
        for number, (tier, count) in enumerate(zip(tiers, row_blocks, strict=True))
        if number > 0
    ]
    local = min(max(1, sms - sum(remote)), row_blocks[0] + others)
    splits = []
    for number, count in enumerate(row_blocks):
        if number in (0, mixed):
            ctas, dealt = local, (row_blocks[0], local, others)
        else:
            ctas = remote[number - 1]
            dealt = (count, ctas, 0)
        group = even_group(*dealt) if aligned else MAX_GROUP_ROW_BLOCKS
        ctas = min(ctas, group_count(group, count, 0 if number else others))
        splits.append(Split(count, ctas, group, _step_cols(group), mixed=0 < number == mixed))
    return tuple(splits)


def _mixed_tier(row_blocks: Sequence[int], tiers: Sequence[TierAccess]) -> int:
    """The remote tier whose groups the local CTAs take among their own, or 0."""
    options = (
        number
        for number, (count, tier) in enumerate(zip(row_blocks, tiers, strict=True))
        if number and count and row_blocks[0] and tier.mixed
    )
    return next(options, 0)


def _step_cols(group: int) -> int:
    """Columns of steps of up to STEP_BYTES, a power of two, so that stages can be parts of them."""
    atoms = max(1, min(STEP_ATOMS, STEP_BYTES // (ATOM_BYTES * group)))
    return ATOM_COLS << (atoms.bit_length() - 1)


def gemm_config(
    n: int,
    splits: Sequence[Split],
    tiers: Sequence[TierAccess],
    *,
    sms: int,
    cols: int = 0,
) -> GemmConfig:
    """Choose for a W that is dealt out as `splits` to `tiers`, and an X of `n` rows.

    `sms` are those of the GPU. Where W's columns are given as `cols`, sums may be made of halves.
    """
    x_tiles = tiles_for(n)
    half_cols = half_columns(sum(split.row_blocks for split in splits), cols, x_tiles, sms)
    mixes = can_mix(x_tiles) and any(split.mixed for split in splits)
    rings = [
        ring(split, tiers[0] if mixes and split.mixed else tier, x_tiles, halves=half_cols > 0)
        for split, tier in zip(splits, tiers, strict=True)
    ]
    return GemmConfig(
        half_cols=half_cols,
        ctas=max(sms, sum(split.ctas for split in splits if not (mixes and split.mixed))),
        x_tiles=x_tiles,
        shared_bytes=max(
            ring_bytes(split, ring, x_tiles)
            for split, ring in zip(splits, rings, strict=True)
            if split.row_blocks
        ),
        splits=tuple(splits),
        rings=tuple(rings),
        mixes=mixes,
    )


def half_columns(row_blocks: int, cols: int, x_tiles: int, sms: int) -> int:
    """The columns of the first half of each sum, or 0 where sums had better be whole.

    Two CTAs that take half of each other's sums read half as much of X, and then leave and read
    sums. Where a W of `row_blocks` lies does not count, so that it changes no bits.
    """
    group, atoms = even_group(row_blocks, sms), ceil_div(cols, ATOM_COLS)
    if x_tiles != PAIRED_TILES or group > TILE_ROW_BLOCKS:
        return 0
    if row_blocks > sms * group:  # of two waves at once X is read half as often, too
        return 0
    w, x = ATOM_BYTES * atoms * group, ATOM_BYTES * atoms * x_tiles
    sums = 4 * ROWS_PER_BLOCK**2 * x_tiles * 2 * group  # both groups' halves, in float32
    whole = max(w, (w + x) / L2_SHARE)
    halves = max(w, (w + x / 2 + 1.5 * sums) / L2_SHARE) + JOIN_BYTES
    return ATOM_COLS * STEP_ATOMS * ceil_div(atoms, 2 * STEP_ATOMS) if halves < whole else 0


def ring(split: Split, tier: TierAccess, x_tiles: int, *, halves: bool = False) -> Ring:
    """Stages with copies that are large enough, where that leaves some; as many as have room.

    Two groups at once halve how often many rows of X are read: those of two waves, where none is
    left over, or, with `halves`, of two CTAs. They must be a warpgroup's each, and a tier with a
    window waits for its link, not for X.
    """
    step, window = split.step_cols // ATOM_COLS, tier.window_bytes
    pairs = x_tiles == PAIRED_TILES and split.group <= TILE_ROW_BLOCKS
    waves = ceil_div(split.row_blocks, split.wave)
    others = split.ctas > 1 if halves else waves > 0 and waves % 2 == 0
    groups = 2 if pairs and others and window is None else 1
    row_blocks = groups * split.group
    options = [
        atoms
        for atoms in range(1, step + 1)
        if step % atoms == 0 and (atoms == 1 or _stages(row_blocks, atoms, x_tiles) >= STAGES)
    ]
    copies = [ATOM_BYTES * atoms * row_blocks for atoms in options]
    chosen = min(bisect.bisect_left(copies, COPY_BYTES), len(options) - 1)
    stages = _stages(row_blocks, options[chosen], x_tiles)
    if window is None or not split.ctas:
        window = stages
    else:
        window = max(1, min(stages, window // (copies[chosen] * split.ctas)))
    return Ring(options[chosen], stages, window, groups)


def ring_bytes(split: Split, ring: Ring, x_tiles: int) -> int:
    """Shared memory of a CTA: the stages, and what is read behind the last group's row blocks."""
    stage = ATOM_BYTES * ring.atoms * (ring.groups * split.group + x_tiles)
    behind = ATOM_BYTES * (-split.group % TILE_ROW_BLOCKS - ring.atoms * x_tiles)
    return ring.stages * stage + max(0, behind)


def _stages(row_blocks: int, atoms: int, x_tiles: int) -> int:
    room = SHARED_BYTES_PAIRED - ATOM_BYTES * max(
        0, -row_blocks % TILE_ROW_BLOCKS - atoms * x_tiles
    )
    return min(SPLITK_MAX_STAGES, room // (ATOM_BYTES * atoms * (row_blocks + x_tiles)))
