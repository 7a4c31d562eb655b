"""Launch configurations of SplitK_FlashAttn: pure functions of slots per tier, capacity and card.

Needs no GPU. The sizes of splits and chunks depend on the capacity of the cache alone, so no bit of
a result depends on tiers or on the slots of a launch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from dakrun.geometry import (
    ATTENTION_LONG_BLOCKS,
    ATTENTION_MAX_SPLITS,
    ATTENTION_MAX_STAGES,
    ATTENTION_WARPS,
    KV_BLOCK,
)
from dakrun.hardware import Card
from dakrun.kernels.attention.kv_blocks import KVShape
from dakrun.launches import TierAccess
from dakrun.units import ceil_div

CHUNK_BLOCKS = (32, 16, 8, 4)  # sizes of a chunk; shorter ones cost more to combine
ITEMS = 512  # work items wanted at least: about four per SM of a large GPU
SPLITS = 128  # of all heads: about one per SM of a large GPU
# With so many KV heads in the cache, a head of up to CHUNK_BLOCKS[0] blocks is one split: an H200
# read 32 slots of 8 heads with 2,048 positions at 91% of HBM's rate, in two splits each at 87%
# (bench --kernel attention --case 32:32/8:2048, 2026-11-29, ahead of 0e7b8e3a; at a51b4f75 at 93%).
WHOLE_HEADS = 256
FULL = 0.85  # fraction of SPLITS from which one long split per SM beats many short ones
LONE_BYTES = 1024  # beyond a ring's shared memory, with which a CTA keeps others off its SM
MAX_SPLIT_BLOCKS = 2**15  # a listed item counts its blocks in 16 bits
MAX_WINDOW = 4  # of a finite window, in stages: two tasks pending per warp, each of keys and values
# A window is measured with whole stages, but the last block of a head is mostly a part of one, and
# CTAs come to such blocks at the same time. So twice as much may be in flight, up to MAX_WINDOW: an
# H200 read 128 slots of 260 positions, 37.5% in host memory, at 97% of the link's rate instead of
# 93%, of 516 at 99% instead of 97% (bench --kernel attention --case 128:56/56:260 --ratio 0.375,
# 2026-11-29, at 8d26f713).
WINDOW_FACTOR = 2
# A CTA takes this many times as long for a byte of host memory (PCIe 5.0, four CTAs) as for one of
# HBM. Where a remote CTA has less to read, HBM limits the launch, and even waves count for more
# than short blocks: with 0.8% of the slots in host memory, attention took 1 to 3% longer with eight
# remote CTAs of four stages than with four.
SLOWER_READS = 3


@dataclass(frozen=True)
class AttentionConfig:
    """Launch of decode attention over the `slots` of each tier, by `ctas` CTAs of each tier.

    A CTA of a tier keeps at most its `windows` stages in flight; a stage is the keys or the values
    of a KV block. The blocks of a KV head are divided into as few splits of at most `split_blocks`
    as possible, each of one CTA, and a split into chunks of `chunk_blocks`, each of one warp, or
    longer ones if it has more chunks than the CTA has warps. A warp may take up to `item_splits`
    splits of one head that have a single chunk; that changes no bit of a result.

    With `reads_spilled`, leading blocks of slots in the first tier may lie in the second one, whose
    CTAs then read them. The first tier includes the tiers mixed with it. With `spread` its slots
    are listed in another order, so that each CTA reads from all of these tiers. `alone` keeps an
    SM to one CTA, by `lone_bytes` of shared memory. `idle` CTAs fill the remaining SMs; without
    them two CTAs of the next launch could share an SM.
    """

    shape: KVShape
    slots: tuple[int, ...]
    ctas: tuple[int, ...]
    windows: tuple[int, ...]
    stages: int
    split_blocks: int
    chunk_blocks: int
    item_splits: int
    lone_bytes: int
    alone: bool = False
    spread: bool = False
    reads_spilled: bool = False
    idle: int = 0

    @property
    def max_splits(self) -> int:
        """Splits of a KV head of a full slot."""
        return ceil_div(self.shape.blocks, self.split_blocks)

    @property
    def max_chunks(self) -> int:
        """Chunks of the longest split."""
        longest = min(self.shape.blocks, self.split_blocks)
        return min(ATTENTION_WARPS, ceil_div(longest, self.chunk_blocks))

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a CTA."""
        stages = self.stages * stage_bytes(self.shape)
        return max(stages, self.lone_bytes) if self.alone else stages


def stage_bytes(shape: KVShape) -> int:
    """Bytes of a stage: the keys or the values of one KV head's block."""
    return KV_BLOCK * shape.layout.row_bytes


def attention_config(
    shape: KVShape,
    slots: Sequence[int],
    tiers: Sequence[TierAccess],
    *,
    card: Card,
    capacity: int | None = None,
    alone: bool = False,
    reads_spilled: bool = False,
) -> AttentionConfig:
    """Choose the launch for `slots` of each tier (the local one first), read by the card's SMs.

    `tiers` limits the SMs and the bytes in flight of each tier. Remote tiers get the SMs of their
    limit. For even waves they get fewer, if these keep as many bytes in flight and the local CTAs
    then have less work. Up to WINDOW_FACTOR times the limit of bytes is in flight, in case that
    blocks are short. The local tier gets the rest of the SMs, one CTA per SM. The local CTAs also
    read the tiers mixed with the local one, up to the first tier with slots that is not.
    Results are bitwise equal for equal `shape` and `capacity`, the slots of the cache (those of the
    launch if not given). Use `alone` after kernels that fill an SM with one CTA each: some of these
    end early, and an SM would get two CTAs of this launch while another gets none. `reads_spilled`:
    leading blocks of slots in the local tier may lie in the first remote one.
    """
    sms = card.sms
    reach = (slots[0], slots[0] + slots[1], *slots[2:]) if reads_spilled else slots
    mixed = _mixed_count(reach, tiers)
    reads_spilled = reads_spilled and mixed == 1
    spread = slots[0] < sum(slots[:mixed]) and slots[0] > 0
    slots, tiers = (sum(slots[:mixed]), *slots[mixed:]), (tiers[0], *tiers[mixed:])
    heads = (capacity or sum(slots)) * shape.kv_heads
    split, chunk, items = split_sizes(shape.blocks, heads)
    splits = slots[0] * shape.kv_heads * ceil_div(shape.blocks, split)
    remote = [
        min(sms if tier.sms is None else tier.sms, count * shape.kv_heads)
        for tier, count in zip(tiers[1:], reach[mixed:], strict=True)
    ]
    in_turn = 2 if sum(slots) * shape.kv_heads >= 2 * sms else 1  # heads that each SM reads
    is_long = in_turn * shape.blocks >= ATTENTION_LONG_BLOCKS
    ring = card.attention_ring_bytes if is_long else card.ring_bytes
    stages = min(ATTENTION_MAX_STAGES, ring // stage_bytes(shape))

    def window(tier: TierAccess, count: int, factor: int = WINDOW_FACTOR) -> int:
        """Stages that each of `count` CTAs of `tier` keeps in flight."""
        if tier.window_bytes is None or not count:
            return stages
        return _window(stages, tier.window_bytes // (stage_bytes(shape) * count), factor)

    for number, (tier, count) in enumerate(zip(tiers[1:], reach[mixed:], strict=True)):
        if not card.even_waves:
            continue
        rest = sms - sum(remote) + remote[number]
        others = count * shape.kv_heads * ceil_div(shape.blocks, split)
        remote[number] = _even(splits, others, rest, remote[number], partial(window, tier))
    local = max(1, sms - sum(remote)) if slots[0] else 0
    ctas = (local, *remote)
    windows = tuple(window(tier, count) for tier, count in zip(tiers, ctas, strict=True))
    lone = min(card.ring_bytes + LONE_BYTES, card.lone_ring_bytes)
    return AttentionConfig(
        shape, slots, ctas, windows, stages, split, chunk, items, lone, alone, spread,
        reads_spilled, idle=card.with_idle(sum(ctas)) - sum(ctas),
    )  # fmt: skip


def _mixed_count(slots: Sequence[int], tiers: Sequence[TierAccess]) -> int:
    """Number of leading tiers that the local CTAs read; their slots are consecutive."""
    found = 1
    for number, (count, tier) in enumerate(zip(slots, tiers, strict=True)):
        if number and count:
            if not tier.mixed:
                break
            found = number + 1
    return found


def split_sizes(blocks: int, heads: int) -> tuple[int, int, int]:
    """Blocks of a split, blocks of a chunk, splits of a work item.

    For KV heads of `blocks` blocks, `heads` of them in the cache.
    """
    if heads >= WHOLE_HEADS and blocks <= CHUNK_BLOCKS[0]:
        return CHUNK_BLOCKS[0], CHUNK_BLOCKS[0], 1
    enough = (chunk for chunk in CHUNK_BLOCKS if heads * ceil_div(blocks, chunk) >= ITEMS)
    chunk = max(next(enough, CHUNK_BLOCKS[-1]), ceil_div(blocks, ATTENTION_MAX_SPLITS))
    splits = SPLITS // heads
    if splits * heads >= FULL * SPLITS:
        return min(MAX_SPLIT_BLOCKS, max(chunk, ceil_div(blocks, splits))), chunk, 1
    items = heads * ceil_div(blocks, chunk)
    return chunk, chunk, max(1, min(CHUNK_BLOCKS[0] // chunk, int(items / (FULL * ITEMS))))


def _even(splits: int, others: int, sms: int, limit: int, window: Callable[[int, int], int]) -> int:
    """CTAs for a remote tier, at most `limit`, that leave the local CTAs the least work.

    The local CTAs compute `splits` in total, on the SMs that the remote tier leaves of `sms`; the
    remote ones compute `others`. `window` gives the stages in flight per CTA for a number of CTAs,
    and a factor of what whole stages need. All CTAs together must keep as many stages in flight as
    `limit` CTAs would; where HBM limits the launch, as many as whole stages need.
    """

    def suffice(ctas: int) -> bool:
        is_limit = SLOWER_READS * others / ctas > splits / max(1, sms - ctas)
        factor = WINDOW_FACTOR if is_limit else 1
        return ctas * window(ctas, factor) >= limit * window(limit, factor)

    counts = filter(suffice, range(limit, 0, -1))
    return min(counts, key=lambda ctas: ceil_div(splits, max(1, sms - ctas)), default=limit)


def _window(stages: int, full: int, factor: int) -> int:
    """Stages in flight of a CTA: `factor` times the `full` ones for which the window has room."""
    return stages if full >= stages else min(stages, MAX_WINDOW, max(1, factor * full))
