"""How SplitK_FlashAttn is run: pure choices from slots per tier and a few figures of the machine.

Needs no GPU. Chunks depend on what there is room for, so no bit of a result depends on tiers or on
the slots of a launch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from dakrun.geometry import (
    ATTENTION_MAX_STAGES,
    ATTENTION_MAX_UNITS,
    ATTENTION_WARPS,
    SHARED_BYTES_PAIRED,
)
from dakrun.kernels.attention.kv_blocks import KVShape
from dakrun.kernels.gemm.splitk_config import TierAccess
from dakrun.units import ceil_div

PART_BLOCKS = (32, 16, 8, 4)  # of an item; short ones make for much to add up
ITEMS = 512  # or more, where parts can be that short: about four for each SM of a large GPU
UNITS = 128  # about one for each SM of a large GPU
FULL = 0.85  # the share of them from which on one for each SM is better than many
MAX_WINDOW = 4  # stages, where not all may be in flight: the kernel keeps no account of more
LONE_BYTES = SHARED_BYTES_PAIRED + 1024  # of shared memory, that an SM has not got twice


@dataclass(frozen=True)
class AttentionConfig:
    """How decode attention is launched: `ctas` and `windows` (stages a CTA) for some `slots` each.

    These are a tier's, the first ones also of tiers that are mixed with the local one; they are
    then `spread`: CTAs go through them head by head, so that each has its share of every tier. A
    stage is the keys, or the values, of a block. A KV head of a slot is cut into as few units as
    have at most `unit_blocks`, each of them a CTA's, and units into parts of `part_blocks`, each of
    them a warp's, or into longer ones where there are not as many warps. A unit without parts is a
    warp's, with others behind it of the same head, at most `item_units`: no bit depends on how
    many. Where a CTA is to be `alone`, an SM has room for no other. There are `idle` CTAs more, so
    that there is one for each SM: else two of the next launch might come to share one.
    """

    shape: KVShape
    slots: tuple[int, ...]
    ctas: tuple[int, ...]
    windows: tuple[int, ...]
    stages: int
    unit_blocks: int
    part_blocks: int
    item_units: int
    alone: bool = False
    spread: bool = False
    idle: int = 0

    @property
    def max_units(self) -> int:
        """Units of a KV head of the longest slot."""
        return ceil_div(self.shape.blocks, self.unit_blocks)

    @property
    def max_parts(self) -> int:
        """Parts of the longest unit."""
        longest = min(self.shape.blocks, self.unit_blocks)
        return min(ATTENTION_WARPS, ceil_div(longest, self.part_blocks))

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a CTA."""
        stages = self.stages * stage_bytes(self.shape)
        return max(stages, LONE_BYTES) if self.alone else stages


def stage_bytes(shape: KVShape) -> int:
    """Bytes of a block's keys, or of its values, of one KV head."""
    return shape.slot_bytes // (2 * shape.kv_heads * shape.blocks)


def attention_config(
    shape: KVShape,
    slots: Sequence[int],
    tiers: Sequence[TierAccess],
    *,
    sms: int,
    capacity: int | None = None,
    alone: bool = False,
) -> AttentionConfig:
    """Choose for `slots` of each tier (the local one first), read as `tiers` says by `sms`.

    Remote tiers get the SMs that they are read by, the local one the rest, one CTA each; or fewer,
    if they can have as much in flight and the local CTAs then have less to do. Those that are mixed
    with it are read by its CTAs, unless there are slots of another one between. Results are the
    same to the bit for equal shapes and `capacity`: the slots that a cache has, if launches are for
    some of them. It is to be `alone` behind kernels whose CTAs fill an SM each: of these some end
    before others, and an SM would get two of it that another one has none of.
    """
    mixed = _mixed_count(slots, tiers)
    spread = slots[0] < sum(slots[:mixed]) and slots[0] > 0
    slots, tiers = (sum(slots[:mixed]), *slots[mixed:]), (tiers[0], *tiers[mixed:])
    heads = (capacity or sum(slots)) * shape.kv_heads
    unit, part, items = cut(shape.blocks, heads)
    units = slots[0] * shape.kv_heads * ceil_div(shape.blocks, unit)
    remote = [
        min(sms if tier.sms is None else tier.sms, count * shape.kv_heads)
        for tier, count in zip(tiers[1:], slots[1:], strict=True)
    ]
    stages = min(ATTENTION_MAX_STAGES, SHARED_BYTES_PAIRED // stage_bytes(shape))

    def window(tier: TierAccess, count: int) -> int:
        """Stages of `count` CTAs each."""
        if tier.window_bytes is None or not count:
            return stages
        return _window(stages, tier.window_bytes // (stage_bytes(shape) * count))

    for number, tier in enumerate(tiers[1:]):
        rest = sms - sum(remote) + remote[number]
        remote[number] = _even(units, rest, remote[number], partial(window, tier))
    local = max(1, sms - sum(remote)) if slots[0] else 0
    ctas = (local, *remote)
    windows = tuple(window(tier, count) for tier, count in zip(tiers, ctas, strict=True))
    return AttentionConfig(
        shape, slots, ctas, windows, stages, unit, part, items, alone, spread,
        idle=max(0, sms - sum(ctas)),
    )  # fmt: skip


def _mixed_count(slots: Sequence[int], tiers: Sequence[TierAccess]) -> int:
    """How many of the first tiers the local CTAs read: their slots are to lie behind each other."""
    found = 1
    for number, (count, tier) in enumerate(zip(slots, tiers, strict=True)):
        if number and count:
            if not tier.mixed:
                break
            found = number + 1
    return found


def cut(blocks: int, heads: int) -> tuple[int, int, int]:
    """The blocks of units and of parts, and the units of an item."""
    enough = (part for part in PART_BLOCKS if heads * ceil_div(blocks, part) >= ITEMS)
    part = max(next(enough, PART_BLOCKS[-1]), ceil_div(blocks, ATTENTION_MAX_UNITS))
    units = UNITS // heads
    if units * heads >= FULL * UNITS:
        return max(part, ceil_div(blocks, units)), part, 1
    items = heads * ceil_div(blocks, part)
    return part, part, max(1, min(PART_BLOCKS[0] // part, int(items / (FULL * ITEMS))))


def _even(units: int, sms: int, most: int, window: Callable[[int], int]) -> int:
    """The CTAs for a remote tier, `most` or fewer, with which the local ones have the least to do.

    These have `units`, and what is left of `sms`. `window` tells how many stages each of so many
    CTAs may have in flight: all together are to have no fewer.
    """
    counts = (ctas for ctas in range(most, 0, -1) if ctas * window(ctas) >= most * window(most))
    return min(counts, key=lambda ctas: ceil_div(units, max(1, sms - ctas)), default=most)


def _window(stages: int, wanted: int) -> int:
    return stages if wanted >= stages else max(1, min(MAX_WINDOW, wanted))
