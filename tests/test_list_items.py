"""The work items of SplitK_FlashAttn: each head's splits once, the largest first, for each tier."""

import itertools
from collections import defaultdict
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from cards import H200

from dakrun.geometry import KV_BLOCK
from dakrun.kernels.attention import (
    AttentionConfig,
    AttentionWorkspace,
    KVShape,
    attention_config,
    list_items,
)
from dakrun.launches import TierAccess
from dakrun.units import ceil_div

HEADS = 3
ACCESS = (TierAccess(), TierAccess(sms=2, window_bytes=1 << 18))


def config_of(slots: Sequence[int], positions: int, **options: bool) -> AttentionConfig:
    shape = KVShape(HEADS, 64, positions)
    return attention_config(
        shape, slots, ACCESS[: len(slots)], card=H200, capacity=sum(slots), **options
    )


def listed(
    lengths: Sequence[int],
    config: AttentionConfig,
    device: str,
    spilled: Sequence[int] | None = None,
    prefixes: Sequence[int] | None = None,
) -> list[list[tuple[int, int, int]]]:
    """(slot, KV head, number among the head's items) of each tier's items, in their order.

    A head's items must have consecutive splits and blocks, and without spilled blocks all that
    are behind its prefix.
    """
    workspace = AttentionWorkspace.empty([config], 1, torch.device(device))
    workspace.items.fill_(-1)
    numbers = torch.tensor(lengths, dtype=torch.int32, device=device)
    tables = torch.arange(len(lengths), dtype=torch.int32, device=device).flip(0)
    leading = None if spilled is None else torch.tensor(spilled, dtype=torch.int32, device=device)
    shared: Any = None
    if prefixes is not None:
        blocks = torch.tensor(prefixes, dtype=torch.int32, device=device)
        shared = SimpleNamespace(blocks=blocks)
    list_items(numbers, config, workspace, table_of=tables, spilled=leading, prefixes=shared)
    found, first = [], 0
    for tier, count in enumerate(config.slots):
        items = int(workspace.counts[tier])
        some = workspace.items[first : first + items].cpu()
        before = prefixes or [0] * len(lengths)
        found.append(_numbered(some, lengths, before, whole=spilled is None))
        more = config.slots[0] if config.reads_spilled and tier == 1 else 0
        first += (count + more) * HEADS * config.max_splits
        assert (workspace.items[first - 1] == -1).all() or items == first
    return found


def _numbered(
    items: torch.Tensor, lengths: Sequence[int], before: Sequence[int], *, whole: bool
) -> list[tuple[int, int, int]]:
    by_head = defaultdict(list)
    for slot, table, length, first, head, splits, blocks, together in items.tolist():
        assert table == len(lengths) - 1 - slot and length == lengths[slot]
        assert blocks & 0xFFFF == lengths[slot] // KV_BLOCK + 1 - before[slot]
        assert blocks >> 16 == before[slot]
        by_head[slot, head & 0xFFFF].append((head >> 16, first, splits >> 16, together, blocks))
    for (slot, _), parts in by_head.items():
        parts.sort()
        if whole:
            count = sum(count for _, _, count, _, _ in parts)
            assert parts[0][:2] == (0, before[slot])
            assert count == lengths[slot] // KV_BLOCK + 1 - before[slot]
        assert len({blocks for *_, blocks in parts}) == 1
        for (split, first, count, together, _), after in itertools.pairwise(parts):
            assert after[:2] == (split + together, first + count)
    order = {key: [split for split, *_ in parts] for key, parts in by_head.items()}
    heads = [(slot, head & 0xFFFF, head >> 16) for slot, *_, head, _, _, _ in items.tolist()]
    return [(slot, head, order[slot, head].index(split)) for slot, head, split in heads]


def sizes(lengths: Sequence[int], config: AttentionConfig) -> dict[tuple[int, int, int], int]:
    """Blocks of a split of each item, by (slot, KV head, number)."""
    found = {}
    for slot, length in enumerate(lengths):
        blocks = 0 if length < 0 else length // KV_BLOCK + 1
        splits = ceil_div(blocks, config.split_blocks)
        items = ceil_div(splits, config.item_splits)
        for head in range(HEADS):
            found |= {(slot, head, item): ceil_div(blocks, items) for item in range(items)}
    return found


def test_each_item_once_and_the_largest_first(kernel_device: str) -> None:
    lengths = [700, -1, 0, 63, 64, 3000, 2047, 1, 500, -1, 900, 4000]
    for slots in ((12,), (7, 5), (12, 0), (0, 12)):
        config = config_of(slots, 4096)
        of_each = sizes(lengths, config)
        tiers = listed(lengths, config, kernel_device)
        step = config.split_blocks * config.item_splits / 256  # sizes that are told apart
        for tier, items in enumerate(tiers):
            first = sum(slots[:tier])
            own = {item for item in of_each if first <= item[0] < first + slots[tier]}
            assert len(items) == len(own) and set(items) == own
            found = [of_each[item] for item in items]
            assert all(a >= b - step - 1 for a, b in itertools.pairwise(found))


def test_many_slots(kernel_device: str) -> None:
    """More than threads; some have no request."""
    lengths = [(37 * slot) % 800 - 1 for slot in range(1500)]
    config = config_of((1500,), 1024)
    (items,) = listed(lengths, config, kernel_device)
    of_each = sizes(lengths, config)
    assert len(items) == len(of_each) and set(items) == set(of_each)
    assert of_each[items[0]] == max(of_each.values()) and of_each[items[-1]] == 1


def test_blocks_of_a_prefix_are_in_no_item(kernel_device: str) -> None:
    lengths, prefixes = [3000, 1500, -1, 4000], [20, 0, 3, 62]
    config = config_of((4,), 4096)
    (items,) = listed(lengths, config, kernel_device, prefixes=prefixes)
    assert {slot for slot, _, _ in items} == {0, 1, 3}


def test_nothing_to_list(kernel_device: str) -> None:
    assert listed([-1, -1, -1], config_of((2, 1), 300), kernel_device) == [[], []]


def test_spilled_blocks_are_read_by_the_remote_tier_s_ctas(kernel_device: str) -> None:
    """Each split of a local slot by the tier in which it starts."""
    lengths, spilled = [3000, 1500, 40, 2000], [20, 0, 1, 0]
    config = config_of((3, 1), 4096, reads_spilled=True)
    assert config.reads_spilled and config.slots == (3, 1)
    local, remote = listed(lengths, config, kernel_device, spilled)
    split, item = config.split_blocks, config.item_splits
    for slot, (length, leading) in enumerate(zip(lengths, spilled, strict=True)):
        blocks = length // KV_BLOCK + 1
        splits = ceil_div(blocks, split)
        starts = [i * blocks // splits for i in range(splits)]
        away = splits if slot == 3 else sum(start < leading for start in starts)
        for items, count in ((local, splits - away), (remote, away)):
            own = [entry for entry in items if entry[0] == slot]
            wanted = {(slot, h, i) for h in range(HEADS) for i in range(ceil_div(count, item))}
            assert len(own) == len(wanted) and set(own) == wanted, slot
