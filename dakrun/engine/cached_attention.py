"""Attention of prompts that go on after cached positions, over KV blocks in any tier.

Knows segments, slots and blocks; which tokens share a pass is prefill.py's.
"""

from collections.abc import Sequence

import torch

from dakrun.config import ModelConfig
from dakrun.engine.kv_cache import KVCache
from dakrun.geometry import KV_BLOCK
from dakrun.kernels.attention import (
    BlockTables,
    KVShape,
    PromptSegment,
    PromptWork,
    prompt_attn,
)
from dakrun.memory.device import upload
from dakrun.plan import Segment

BlockPlaces = list[tuple[int, int]]  # of blocks: address in layer 0, bytes from layer to layer


class CachedAttention:
    """Attention of the segments that go on where earlier passes ended, over all their KV blocks.

    Blocks are read where they lie. Those in remote tiers are read many times, so that full ones are
    first copied to HBM, each once and up to as many as a slot may have, and new ones are read where
    they wait to be copied out.
    """

    def __init__(
        self,
        config: ModelConfig,
        cache: KVCache,
        shape: KVShape,
        segments: Sequence[Segment],
        written: Sequence[BlockPlaces],
    ) -> None:
        """`written` are the blocks of each segment's own tokens, as KVWriter.begin() gives them."""
        self._cache, self._scale, device = cache, config.head_dim**-0.5, cache.device
        # Slots, the number of a full block, and room for this one and those after it.
        self._gathers: list[tuple[int, int, torch.Tensor]] = []
        copies: dict[int, int] = {}  # addresses in room, by those of full blocks
        parts: list[tuple[PromptSegment, int]] = []  # and their slots
        moved: list[tuple[int, int, int]] = []  # segment, block and address, of blocks elsewhere
        first = 0
        for s, places in zip(segments, written, strict=True):
            if s.start:
                full, number = s.start // KV_BLOCK, len(parts)
                if remote := min(full, cache.remote_blocks(s.slot)):
                    lie = [cache.address(s.slot, block) for block in range(remote)]
                    known = next((i for i, at in enumerate(lie) if at not in copies), remote)
                    if known < remote and len(copies) + remote - known <= shape.blocks:
                        size = (remote - known, shape.layer_bytes)
                        room = torch.empty(size, dtype=torch.uint8, device=device)
                        self._gathers.append((s.slot, known, room))
                        copies |= {
                            at: row.data_ptr() for at, row in zip(lie[known:], room, strict=True)
                        }
                    moved += [
                        (number, block, copies[at]) for block, at in enumerate(lie) if at in copies
                    ]
                moved += [
                    (number, block, address)
                    for block, (address, layer_bytes) in enumerate(places, full)
                    if not layer_bytes
                ]
                parts.append((PromptSegment(first, number, s.start, s.length), s.slot))
            first += s.length
        self._work: PromptWork | None = None
        if not parts:
            return
        self._work = PromptWork.of(
            [segment for segment, _ in parts], kv_heads=config.num_kv_heads,
            group=config.num_heads // config.num_kv_heads, head_dim=config.head_dim, device=device,
        )  # fmt: skip
        slots = upload(torch.tensor([slot for _, slot in parts]), device)
        layers = torch.arange(config.num_layers, device=device)[:, None, None]
        self._tables = cache.tables.addresses[slots] + layers * shape.layer_bytes
        if moved:
            numbers, blocks, addresses = upload(torch.tensor(moved).T.contiguous(), device)
            self._tables[:, numbers, blocks] = addresses
        self._head_bytes = shape.block_bytes

    def __call__(self, layer: int, q: torch.Tensor, heads: torch.Tensor) -> None:
        """Write the heads [n, Hq * D] of these segments' queries, rows of q [n, Hq, D]."""
        if self._work is None:
            return
        for slot, first, room in self._gathers:
            room.copy_(self._cache.gather(layer, slot, first + len(room), first))
        tables = BlockTables(self._tables[layer], self._head_bytes)
        prompt_attn(q, tables, self._work, heads, scale=self._scale)
