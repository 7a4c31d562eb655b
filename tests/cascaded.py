"""Decode attention of rows that share prefixes: operands, where only one row has what is shared."""

from collections.abc import Sequence

import torch
from attended import Case

from dakrun.geometry import KV_BLOCK
from dakrun.hardware import Card
from dakrun.kernels.attention import PrefixAttention, RowGroup


def check_cascade(
    lengths: Sequence[int],
    groups: Sequence[tuple[int, int, int]],
    kv_heads: int,
    group: int,
    dim: int,
    dtype: torch.dtype,
    allowed: float,
    *,
    rope: bool = False,
    remote: bool = False,
    device: torch.device | None = None,
    sms: int = 5,
    card: Card | None = None,
) -> None:
    """Rows of `lengths`; each of `groups` (first row, rows, blocks) shares its first blocks.

    The shared blocks of all rows but the group's first are NaN while attention runs, so that no
    kernel may read them.
    """
    case = Case(lengths, kv_heads, group, dim, dtype, rope, device or torch.device("cpu"))

    def others(first: int, rows: int) -> list[int]:
        return [n for n in range(first + 1, first + rows) if lengths[n] >= 0]

    for first, rows, blocks in groups:
        shared = blocks * KV_BLOCK
        for number in others(first, rows):
            for own, common in zip(case.cached[number], case.cached[first], strict=True):
                own[:, :shared] = common[:, :shared]
    slots = case.slots()
    kept = [slot.clone() for slot in slots]
    shape = case.shape

    def blocks_of(slot: torch.Tensor, count: int) -> torch.Tensor:
        return slot.view(kv_heads, shape.blocks, -1)[:, :count]

    prefixes = PrefixAttention(len(lengths), shape, group, case.device, remote=remote)
    prefixes.results.fill_(torch.nan)
    taken = []
    for first, rows, blocks in groups:
        for number in others(first, rows):
            blocks_of(slots[number], blocks).fill_(0xFF)
        start = slots[first].data_ptr()
        own = [start + block * shape.head_bytes for block in range(blocks)]
        if remote:  # heads of a block lie side by side there
            parts = blocks_of(slots[first], blocks).transpose(0, 1).contiguous()
            kept.append(parts)
            own = [part.data_ptr() for part in parts]
        taken.append(RowGroup(first, rows, own, remote))
    prefixes.assign(taken)
    head_bytes = shape.head_bytes * (1 if remote else shape.blocks)
    cached = torch.tensor(lengths, dtype=torch.int32, device=case.device)
    for _ in range(2):  # launches leave no trace
        prefixes.launch(
            case.q, cached, scale=dim**-0.5, layer=0, rotations=case.turns, head_bytes=head_bytes
        )
        out = case.run(case.config(sms=sms, card=card), slots, prefixes)
    for first, rows, blocks in groups:
        for number in others(first, rows):
            blocks_of(slots[number], blocks).copy_(blocks_of(kept[number], blocks))
    case.check(out, slots, allowed)
