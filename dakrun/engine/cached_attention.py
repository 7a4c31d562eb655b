"""Attention of prompts that go on after cached positions, over KV blocks in any tier.

Knows parts of prompts, slots and blocks; which tokens share a pass is prefill.py's.
"""

from collections.abc import Sequence

import torch

from dakrun.config import ModelConfig
from dakrun.engine.kv_cache import KVCache
from dakrun.engine.step import Row
from dakrun.geometry import KV_BLOCK
from dakrun.kernels.attention import (
    BlockTables,
    KVShape,
    PromptSegment,
    PromptWork,
    prompt_attn,
)
from dakrun.memory.device import upload

BlockAddresses = list[tuple[int, int]]  # of blocks: address in layer 0, bytes from layer to layer


class CachedAttention:
    """Attention of parts of prompts that follow earlier ones, over all KV blocks of their slots.

    Blocks are read where they lie. Remote blocks would be read many times: full ones are first
    copied to HBM, each once and up to as many as a slot may have, and new ones are read where they
    wait to be copied to their tier.
    """

    def __init__(
        self,
        config: ModelConfig,
        cache: KVCache,
        shape: KVShape,
        rows: Sequence[Row],
        written: Sequence[BlockAddresses],
    ) -> None:
        """`written` are the blocks of each row's own tokens, as KVWriter.begin() gives them."""
        self._cache, self._scale, device = cache, config.head_dim**-0.5, cache.device
        # Slots, the number of a full block, and room for this one and those after it.
        self._gathers: list[tuple[int, int, torch.Tensor]] = []
        copies: dict[int, int] = {}  # addresses in room, by those of full blocks
        parts: list[tuple[PromptSegment, int]] = []  # and their slots
        moved: list[tuple[int, int, int]] = []  # of a part: block and address, where not the slot's
        first = 0
        for row, addresses in zip(rows, written, strict=True):
            if row.start:
                full, number = row.start // KV_BLOCK, len(parts)
                if remote := min(full, cache.remote_blocks(row.slot)):
                    lie = [cache.address(row.slot, block) for block in range(remote)]
                    known = next((i for i, at in enumerate(lie) if at not in copies), remote)
                    if known < remote and len(copies) + remote - known <= shape.blocks:
                        size = (remote - known, shape.layer_bytes)
                        room = torch.empty(size, dtype=torch.uint8, device=device)
                        self._gathers.append((row.slot, known, room))
                        copies |= {
                            at: copy.data_ptr() for at, copy in zip(lie[known:], room, strict=True)
                        }
                    moved += [
                        (number, block, copies[at]) for block, at in enumerate(lie) if at in copies
                    ]
                moved += [
                    (number, block, address)
                    for block, (address, layer_bytes) in enumerate(addresses, full)
                    if not layer_bytes
                ]
                parts.append((PromptSegment(first, number, row.start, row.length), row.slot))
            first += row.length
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
        self._head_bytes = shape.head_bytes

    def __call__(self, layer: int, q: torch.Tensor, heads: torch.Tensor) -> None:
        """Write the heads [n, Hq * D] of these parts' queries, rows of q [n, Hq, D]."""
        if self._work is None:
            return
        for slot, first, room in self._gathers:
            room.copy_(self._cache.gather(layer, slot, first + len(room), first))
        tables = BlockTables(self._tables[layer], self._head_bytes)
        prompt_attn(q, tables, self._work, heads, scale=self._scale)
