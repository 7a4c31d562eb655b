"""Launches of products with experts: pure functions of shapes, row blocks per tier and the card."""

import itertools
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
    SPLITK_UNITS_MAX_ROWS,
    SPLITK_X_TILES,
    TILED_MAX_ROWS,
    UNIT_COLS,
    WARPGROUPS,
    unit_atoms,
)
from dakrun.hardware import Card
from dakrun.launches.grouped_tiled import grouped_shape
from dakrun.launches.tiers import TierAccess, is_aligned
from dakrun.units import ceil_div

MAX_EXPERTS = 512  # of a layer
STAGE_ATOMS = 2  # along K of a stage, at most, for up to two tiles of X; else the least
STAGE_BYTES = 20 * 1024  # of W in a stage, at most, unless its least atoms have more
# Of an item, at most, if K is one unit; and bytes of a stage, unless a group has more.
ONE_UNIT_ROW_BLOCKS, ONE_UNIT_BYTES = 64, 36 * 1024
X_PADDING = 16  # bytes of a row of X in a stage
LIST_BYTES = 8  # of an expert in the list of those that were chosen
ALIGN = 128  # bytes, of W and of X in a stage
# A CTA of the router has logits of ROUTER_EXPERTS experts from ROUTER_COLS columns, for up to
# ROUTER_MAX_ROWS rows of X in tiles of ROUTER_TILE_ROWS.
ROUTER_EXPERTS, ROUTER_COLS, ROUTER_TILE_ROWS, ROUTER_MAX_ROWS = 16, 512, 8, 64
ROUTER_LOGITS = (128, 256, MAX_EXPERTS)  # of a row, and variants: up to so many experts
EXPERT_CHUNK_ROWS = 64  # rows of X in one launch of SplitK_GEMM
# Rows that experts have in the mean, up to which SplitK_GEMM multiplies them: those of 16 bits, and
# of fewer, of which it takes 16 rows at a time. On an H100 it reads experts of 16 bits at 2.84 TB/s
# if they have 4 rows each, but at 1.19 if 16; the grouped tiled GEMM at 2.78 if they have 32.
FEW_ROWS_OF_EXPERT, FEW_ROWS_OF_UNITS = 4, 8
# Rows that an expert may have in one pass over its W, as a multiple of their mean. A second pass
# reads W from L2, but once more over the link if it is remote.
SPREAD = 4


@dataclass(frozen=True)
class GroupedConfig:
    """Launch of the grouped SplitK_GEMM. The result's bits depend on `x_tiles` alone.

    An item has up to `x_tiles` tiles of 8 rows of X. Each tier has `tier_ctas` CTAs, and a window
    of `windows` stages; local CTAs read the tiers without any. `ctas` includes idle ones. A stage
    has up to `stage_row_blocks` row blocks times atoms.
    """

    ctas: int
    x_tiles: int
    stages: int
    stage_row_blocks: int
    shared_bytes: int
    tier_ctas: tuple[int, ...]
    windows: tuple[int, ...]


def expert_splits(
    row_blocks: Sequence[int],
    *,
    expert_row_blocks: int,
    top_k: int,
    card: Card,
    atom_bytes: int = ATOM_BYTES,
) -> tuple[Split, ...]:
    """How the `row_blocks` of each tier are stored: expert after expert, in groups of its own.

    An expert lies in one piece of memory, stored alike in every tier, unless it is cut between two.
    Groups divide its row blocks if there are such of half the largest size; a step of one row, of
    `top_k` experts, is then as even as can be. If there are remote tiers, copies of groups begin
    with whole lines if they can. An atom has `atom_bytes`.
    """
    most, height = MAX_GROUP_ROW_BLOCKS, expert_row_blocks
    sizes = [g for g in range(most, most // 2 - 1, -1) if height % g == 0]
    sizes = sizes or [ceil_div(height, ceil_div(height, most))]
    if any(row_blocks[1:]):
        unit = atom_bytes * unit_atoms(atom_bytes)
        sizes = [group for group in sizes if is_aligned(unit * group)] or sizes
    group = min(sizes, key=lambda g: g * ceil_div(ceil_div(top_k * height, g), card.sms))
    before = [0, *itertools.accumulate(row_blocks)]
    return tuple(
        Split(count, 1, group, UNIT_COLS, height=height, cut=first % height)
        for first, count in zip(before, row_blocks, strict=False)
    )


def few_expert_rows(*, experts: int, top_k: int, card: Card, atom_bytes: int = ATOM_BYTES) -> int:
    """Rows of X up to which SplitK_GEMM multiplies them with `top_k` of `experts` each.

    A launch of more is the grouped tiled GEMM's, if the card has room for its rings.
    """
    if not grouped_shape(card, atom_bytes):
        return EXPERT_CHUNK_ROWS
    units = unit_atoms(atom_bytes) > 1
    return _few_rows(experts, top_k, FEW_ROWS_OF_UNITS if units else FEW_ROWS_OF_EXPERT)


def _few_rows(experts: int, top_k: int, mean: int) -> int:
    """Rows of X with which experts have up to `mean` rows each in the mean, within a launch."""
    return max(1, min(EXPERT_CHUNK_ROWS, mean * experts // top_k))


def expert_chunks(
    rows: int, *, experts: int, top_k: int, card: Card, atom_bytes: int = ATOM_BYTES
) -> list[slice]:
    """The rows of X that launches of products with experts take in turns, of `rows` in all."""
    few = few_expert_rows(experts=experts, top_k=top_k, card=card, atom_bytes=atom_bytes)
    many = rows > few and grouped_shape(card, atom_bytes)
    step = TILED_MAX_ROWS if many else few
    return [slice(first, min(first + step, rows)) for first in range(0, rows, step)]


def expert_buffer_bytes(
    rows: int, *, experts: int, top_k: int, hidden: int, ffn: int, quantized: bool = False
) -> int:
    """Bytes of what kernels keep of passes of up to `rows` rows through experts of size `ffn`.

    That are gated rows, the router's choices with what it needs meanwhile, weighted products, and
    for many rows copies of them. Experts of a `quantized` model may have 16 bits or fewer.
    """
    logits, counts = ceil_div(hidden, ROUTER_COLS) * router_logits(experts), ceil_div(experts, 8)
    gated, chosen = 2 * top_k * ffn, 4 * (5 * top_k + logits + counts)
    # Of fewer bits SplitK_GEMM takes more rows, and all where the card has no room for tiles.
    fews = [_few_rows(experts, top_k, FEW_ROWS_OF_EXPERT)]
    if quantized:
        fews += [_few_rows(experts, top_k, FEW_ROWS_OF_UNITS), EXPERT_CHUNK_ROWS]
    most = 0
    for few in fews:
        sums = min(rows, few) * 4 * (top_k * hidden + hidden // ROWS_PER_BLOCK)
        copies = min(rows, TILED_MAX_ROWS) if rows > few else 0
        most = max(most, sums + copies * 2 * top_k * hidden)
    return rows * (gated + chosen) + most


def router_logits(experts: int) -> int:
    """Logits that the router keeps of a row, those of no expert included."""
    return next((count for count in ROUTER_LOGITS if count >= experts), experts)


def router_ctas(experts: int, hidden: int) -> int:
    """CTAs of the router that multiply the same rows of X; others choose their experts."""
    return ceil_div(experts, ROUTER_EXPERTS) * ceil_div(hidden, ROUTER_COLS)


def router_rows(rows: int, *, experts: int, hidden: int, card: Card) -> int:
    """Rows of X of a CTA of the router, of `rows` in all: so that an SM has one CTA, if it can be.

    Another CTA chooses their experts.
    """
    at_once = max(1, card.sms // (router_ctas(experts, hidden) + 1))
    tiles = ceil_div(ceil_div(rows, ROUTER_TILE_ROWS), at_once)
    return min(ROUTER_MAX_ROWS, ROUTER_TILE_ROWS * tiles)


def grouped_tiles(
    rows: int, *, experts: int, top_k: int, atom_bytes: int = ATOM_BYTES, spread: int = SPREAD
) -> int:
    """Tiles of 8 rows of X of an item, for `rows` rows that choose `top_k` of `experts` each.

    An expert that has more rows multiplies its W again; `spread` is 1 if all have as many. The
    choice does not depend on where W lies, so that no bit does.
    """
    most = SPLITK_UNITS_MAX_ROWS if unit_atoms(atom_bytes) > 1 else SPLITK_MAX_ROWS
    wanted = min(most, rows, spread * ceil_div(rows * top_k, experts))
    return next(tiles for tiles in SPLITK_X_TILES if 8 * tiles >= wanted)


def grouped_config(
    rows: int,
    splits: Sequence[Split],
    tiers: Sequence[TierAccess],
    *,
    experts: int,
    top_k: int,
    card: Card,
    atom_bytes: int = ATOM_BYTES,
    spread: int = SPREAD,
    one_unit: bool = False,
) -> GroupedConfig:
    """Choose the launch for `rows` rows of X and experts stored as `splits` in `tiers`.

    `spread` is as in grouped_tiles(). With `one_unit` W has units, and K is one of them: stages
    have more row blocks.
    """
    x_tiles = grouped_tiles(
        rows, experts=experts, top_k=top_k, atom_bytes=atom_bytes, spread=spread
    )
    x_atoms = STAGE_ATOMS if x_tiles <= 2 else unit_atoms(atom_bytes)
    sizes = [split.group for split in splits]
    if one_unit:  # several stages have to fit
        most = min(ONE_UNIT_ROW_BLOCKS, ONE_UNIT_BYTES // (atom_bytes * unit_atoms(atom_bytes)))
        sizes = [max(split.group, min(split.height, most)) for split in splits]
    group = max(sizes)
    depth = _depth(group, x_atoms, atom_bytes)
    w, x = atom_bytes * group * depth, 8 * x_tiles * (2 * ATOM_COLS * x_atoms + X_PADDING)
    stage = _aligned(w) + _aligned(x)
    # With units the warps exchange sums.
    sums = 2 * WARPGROUPS * 128 * 16 * x_tiles if unit_atoms(atom_bytes) > 1 else 0
    beside = sums + _aligned((experts + 1) * LIST_BYTES)
    stages = min(SPLITK_MAX_STAGES, (card.ring_bytes - beside) // stage)
    remote = [
        0 if tier.mixed or not split.row_blocks else min(tier.sms or card.sms, split.row_blocks)
        for split, tier in zip(splits[1:], tiers[1:], strict=True)
    ]
    local = max(1, card.sms - sum(remote))
    tier_ctas = (local, *remote)
    windows = []
    for size, tier, own in zip(sizes, tiers, tier_ctas, strict=True):
        own_depth = min(depth, _depth(size, x_atoms, atom_bytes))
        in_stage = atom_bytes * size * own_depth * (own or local)
        windows.append(tier.closest(in_stage, stages))
    return GroupedConfig(
        ctas=card.with_idle(sum(tier_ctas)),
        x_tiles=x_tiles,
        stages=stages,
        stage_row_blocks=group * depth,
        shared_bytes=beside + stages * stage,
        tier_ctas=tier_ctas,
        windows=tuple(windows),
    )


def _depth(group: int, x_atoms: int, atom_bytes: int) -> int:
    """Atoms along K of a stage with whole groups: a power of two, with up to STAGE_BYTES."""
    depth = x_atoms
    while depth > unit_atoms(atom_bytes) and group * depth * atom_bytes > STAGE_BYTES:
        depth //= 2
    return depth


def _aligned(nbytes: int) -> int:
    return ALIGN * ceil_div(nbytes, ALIGN)
