"""Launch configurations of SplitK_GEMM: pure functions of shapes, row blocks per tier and the card.

No shape has a special case. SplitK_GEMM divides W over CTAs by rows. Where X is the larger operand,
two CTAs may also take one half of K each.
"""

import bisect
import functools
from collections.abc import Sequence
from dataclasses import dataclass

from dakrun.formats import Split
from dakrun.geometry import (
    ATOM_BYTES,
    ATOM_COLS,
    MAX_GROUP_ROW_BLOCKS,
    ROWS_PER_BLOCK,
    SPLITK_MAX_ROWS,
    SPLITK_MAX_STAGES,
    SPLITK_X_TILES,
    TILE_ROW_BLOCKS,
    WARPGROUPS,
    even_group,
    group_count,
    unit_atoms,
)
from dakrun.hardware import Card
from dakrun.launches.tiers import TierAccess, is_aligned
from dakrun.units import ceil_div

PAIRED_TILES = 8  # x_tiles for which a stage may have two groups
STEP_BYTES = 16 * 1024  # maximum bytes of a step: a group's columns that lie together
STEP_ATOMS = 8  # maximum atoms along K of a step; a half of K begins with a step
COPY_BYTES = 8 * 1024  # of W in a stage, at least: a copy takes time to issue, however small it is
MIN_STAGES = 5  # wanted in a ring: if stages with COPY_BYTES of W are fewer, stages are smaller
MIN_WINDOW_STAGES = 3  # if only so few leave copies aligned
L2_SPEED = 1.6  # rate at which an SM reads L2, as a multiple of its share of HBM's bandwidth
X_ALIGN = 1024  # bytes: X's swizzle
K_SHARES = 4  # of units along K: each of a warpgroup's warps takes one
MANY_K_SHARES = 8  # each of a CTA's warps takes one
COMBINE_BYTES = 60 * 1024  # bytes an SM could read from HBM while the last halves combine


@dataclass(frozen=True)
class Ring:
    """The ring of shared-memory stages of a tier's CTA, which hold W and X.

    A stage has 64 * `atoms` columns of W's row blocks in one group, or in two if `groups` is 2, and
    of X. The congestion window is `window` stages of W in flight.
    """

    atoms: int
    stages: int
    window: int
    groups: int = 1


@dataclass(frozen=True)
class GemmConfig:
    """Launch of SplitK_GEMM. Its bits depend on `x_tiles`, `half_cols` and `k_shares` alone.

    X has up to `x_tiles` tiles of 8 rows. The halves of K are the first `half_cols` columns and the
    rest; with 0 each CTA takes all of K. A CTA's warps divide units along K in `k_shares`. Each
    tier has a split and a ring. With `mixes` the local CTAs take the groups of the mixed split.
    `ctas` includes idle ones (Card.with_idle).
    """

    ctas: int
    x_tiles: int
    half_cols: int
    k_shares: int
    shared_bytes: int
    splits: tuple[Split, ...]
    rings: tuple[Ring, ...]
    mixes: bool = False


def tiles_for(n: int) -> int:
    """Tiles of 8 rows of the smallest kernel variant for `n` rows of X.

    Raises ValueError for more than SPLITK_MAX_ROWS, or none.
    """
    if not 1 <= n <= SPLITK_MAX_ROWS:
        raise ValueError(f"expected 1 to {SPLITK_MAX_ROWS} rows, got {n}")
    return SPLITK_X_TILES[bisect.bisect_left(SPLITK_X_TILES, ceil_div(n, 8))]


def can_mix(x_tiles: int) -> bool:
    """Whether local CTAs can take a mixed tier's groups; else that tier has CTAs of its own."""
    return x_tiles != PAIRED_TILES


def split_row_blocks(
    row_blocks: Sequence[int],
    tiers: Sequence[TierAccess],
    *,
    card: Card,
    atom_bytes: int = ATOM_BYTES,
) -> tuple[Split, ...]:
    """Assign `row_blocks` of each tier (the local one first) to the card's SMs, one CTA each.

    A remote tier gets the SMs of its limit, the local tier the rest. Local CTAs also take the
    groups of the first mixed tier. An atom of W has `atom_bytes`.
    """
    sms = card.sms
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
            ctas, assigned = local, (row_blocks[0], local, others)
        else:
            ctas = remote[number - 1]
            assigned = (count, ctas, 0)
        far = bool(others if number in (0, mixed) else number)
        sizes = group_sizes(sum(row_blocks), card, atom_bytes, far=far)
        group = even_group(*assigned, sizes) if card.even_waves else max(sizes)
        ctas = min(ctas, group_count(group, count, 0 if number else others))
        cols = _step_cols(group, atom_bytes)
        splits.append(Split(count, ctas, group, cols, mixed=0 < number == mixed))
    return tuple(splits)


@functools.cache
def group_sizes(row_blocks: int, card: Card, atom_bytes: int, *, far: bool) -> tuple[int, ...]:
    """Sizes that a group of a W with `row_blocks` may have, in row blocks.

    They are at most TILE_ROW_BLOCKS if warps may divide K in MANY_K_SHARES. Of a tier that is
    `far`, behind a link, a group's steps are whole lines, see is_aligned().
    """
    many = k_shares(row_blocks, 1, card, atom_bytes) == MANY_K_SHARES
    most = TILE_ROW_BLOCKS if many else MAX_GROUP_ROW_BLOCKS
    step = {group: _step_cols(group, atom_bytes) // ATOM_COLS for group in range(1, most + 1)}
    return tuple(
        group for group, atoms in step.items() if not far or is_aligned(atom_bytes * atoms * group)
    )


def _mixed_tier(row_blocks: Sequence[int], tiers: Sequence[TierAccess]) -> int:
    """Number of the remote tier whose groups the local CTAs take, or 0."""
    options = (
        number
        for number, (count, tier) in enumerate(zip(row_blocks, tiers, strict=True))
        if number and count and row_blocks[0] and tier.mixed
    )
    return next(options, 0)


def _step_cols(group: int, atom_bytes: int) -> int:
    """Columns of a step of up to STEP_BYTES: a power of two, so that stages divide it."""
    least = unit_atoms(atom_bytes)
    atoms = max(least, min(STEP_ATOMS, STEP_BYTES // (atom_bytes * group)))
    return ATOM_COLS << (atoms.bit_length() - 1)


def gemm_config(
    n: int,
    splits: Sequence[Split],
    tiers: Sequence[TierAccess],
    *,
    card: Card,
    cols: int = 0,
    atom_bytes: int = ATOM_BYTES,
) -> GemmConfig:
    """Choose the launch for `n` rows of X and a W assigned as `splits` to `tiers`.

    Halves of K are considered only if W's columns are given as `cols`. An atom of W, 64 columns of
    a row block, has `atom_bytes`.
    """
    x_tiles, row_blocks = tiles_for(n), sum(split.row_blocks for split in splits)
    half_cols = half_columns(row_blocks, cols, x_tiles, card, atom_bytes)
    mixes = can_mix(x_tiles) and any(split.mixed for split in splits)
    rings = [
        ring(
            split, tiers[0] if mixes and split.mixed else tier, x_tiles, card, half_cols > 0,
            atom_bytes,
        )
        for split, tier in zip(splits, tiers, strict=True)
    ]  # fmt: skip
    return GemmConfig(
        half_cols=half_cols,
        k_shares=k_shares(row_blocks, x_tiles, card, atom_bytes),
        ctas=card.with_idle(sum(s.ctas for s in splits if not (mixes and s.mixed))),
        x_tiles=x_tiles,
        shared_bytes=max(
            ring_bytes(split, ring, x_tiles, atom_bytes)
            for split, ring in zip(splits, rings, strict=True)
            if split.row_blocks
        ),
        splits=tuple(splits),
        rings=tuple(rings),
        mixes=mixes,
    )


def half_columns(
    row_blocks: int, cols: int, x_tiles: int, card: Card, atom_bytes: int = ATOM_BYTES
) -> int:
    """Columns of the first half of K, or 0 if not dividing K is faster.

    Two CTAs that take one half of K each, for the groups of both, read half as much of X, but store
    and load partial sums. Depends on W's `row_blocks` and `cols` alone, not on its tiers, so that
    tiers change no bit.
    """
    group, atoms = even_group(row_blocks, card.sms), ceil_div(cols, ATOM_COLS)
    if x_tiles != PAIRED_TILES or group > TILE_ROW_BLOCKS:
        return 0
    if row_blocks > card.sms * group:  # two waves at a time read X half as often, too
        return 0
    w, x = atom_bytes * atoms * group, ATOM_BYTES * atoms * x_tiles
    partials = 4 * ROWS_PER_BLOCK**2 * x_tiles * 2 * group  # of both groups, float32
    whole = max(w, (w + x) / L2_SPEED)
    halves = max(w, (w + x / 2 + 1.5 * partials) / L2_SPEED) + COMBINE_BYTES
    return ATOM_COLS * STEP_ATOMS * ceil_div(atoms, 2 * STEP_ATOMS) if halves < whole else 0


def k_shares(row_blocks: int, x_tiles: int, card: Card, atom_bytes: int) -> int:
    """Shares of K that a CTA's warps take: MANY_K_SHARES if groups have up to TILE_ROW_BLOCKS.

    With K_SHARES a warp has half of a group's row blocks: too few of a small group to hide
    latencies. With MANY_K_SHARES it has all of them. Depends on W's `row_blocks` and the card
    alone, not on W's tiers, so that tiers change no bit. Elements of 16 bits always have K_SHARES,
    and codes of 8 bits with more than one tile of X, which are 1 to 5% faster so.
    """
    units, bytes_of_code = unit_atoms(atom_bytes) > 1, 2 * atom_bytes >= ATOM_BYTES
    if not units or (x_tiles > 1 and bytes_of_code) or not card.even_waves:
        return K_SHARES
    return K_SHARES if even_group(row_blocks, card.sms) > TILE_ROW_BLOCKS else MANY_K_SHARES


def ring(
    split: Split,
    tier: TierAccess,
    x_tiles: int,
    card: Card,
    halves: bool = False,
    atom_bytes: int = ATOM_BYTES,
) -> Ring:
    """Choose stages with large enough copies, if that leaves MIN_STAGES, and as many as fit.

    With many rows of X a stage may have two groups, so that X is read half as often: the groups of
    two waves, if the number of waves is even, or with `halves` those of two CTAs. Each group must
    fit one warpgroup, and the tier must have no window: reads through a window wait for the link,
    so that reading less of X gains nothing.
    """

    def stages_of(atoms: int) -> int:
        """Stages that fit."""
        room = card.ring_bytes - _beside_bytes(row_blocks, atoms, x_tiles, atom_bytes)
        stage = _stage_bytes(row_blocks, atoms, x_tiles, atom_bytes)
        return min(SPLITK_MAX_STAGES, room // stage)

    step = split.step_cols // ATOM_COLS
    pairs = x_tiles == PAIRED_TILES and split.group <= TILE_ROW_BLOCKS
    waves = ceil_div(split.row_blocks, split.wave)
    two = split.ctas > 1 if halves else waves > 0 and waves % 2 == 0
    groups = 2 if pairs and two and tier.window_bytes is None else 1
    row_blocks = groups * split.group
    least = unit_atoms(atom_bytes)
    divisors = [atoms for atoms in range(least, step + 1, least) if step % atoms == 0]
    options = [atoms for atoms in divisors if atoms == least or stages_of(atoms) >= MIN_STAGES]
    # Each group of a stage is a copy. A window needs few stages.
    aligned = [atoms for atoms in divisors if is_aligned(atom_bytes * atoms * split.group)]
    few = 0 if tier.window_bytes is None else MIN_WINDOW_STAGES
    options = (
        [atoms for atoms in options if atoms in aligned]
        or [atoms for atoms in aligned if few and stages_of(atoms) >= few]
        or options
    )
    copies = [atom_bytes * atoms * row_blocks for atoms in options]
    chosen = min(bisect.bisect_left(copies, COPY_BYTES), len(options) - 1)
    stages = stages_of(options[chosen])
    window = tier.closest(copies[chosen] * split.ctas, stages)
    return Ring(options[chosen], stages, window, groups)


def ring_bytes(split: Split, ring: Ring, x_tiles: int, atom_bytes: int = ATOM_BYTES) -> int:
    """Shared memory of a CTA: the stages, and what lies beside them."""
    stage = _stage_bytes(ring.groups * split.group, ring.atoms, x_tiles, atom_bytes)
    return ring.stages * stage + _beside_bytes(split.group, ring.atoms, x_tiles, atom_bytes)


def _stage_bytes(row_blocks: int, atoms: int, x_tiles: int, atom_bytes: int) -> int:
    """Bytes of W, with padding up to X, and of X."""
    w = X_ALIGN * ceil_div(atom_bytes * atoms * row_blocks, X_ALIGN)
    return w + ATOM_BYTES * atoms * x_tiles


def _beside_bytes(row_blocks: int, atoms: int, x_tiles: int, atom_bytes: int) -> int:
    """Bytes that a CTA needs beside the stages.

    With units the warps exchange sums there. Else a warpgroup reads 64 rows of W also where a group
    has fewer; behind these, a stage has X, and the last one these bytes.
    """
    if unit_atoms(atom_bytes) > 1:
        return 2 * WARPGROUPS * 128 * 16 * x_tiles
    return max(0, atom_bytes * (-row_blocks % TILE_ROW_BLOCKS) - ATOM_BYTES * atoms * x_tiles)
