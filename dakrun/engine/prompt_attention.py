"""Attention of prompts in a pass, over KV blocks in any tier.

Knows parts of prompts, slots and blocks; which tokens share a pass is prefill.py's.
"""

import copy
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

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


class PromptAttention:
    """Attention of parts of prompts over all KV blocks of their slots, the parts' own included.

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
        moved: list[tuple[int, int, int]] = []  # of a row: block and address, where not the slot's
        for number, (row, addresses) in enumerate(zip(rows, written, strict=True)):
            full = row.start // KV_BLOCK
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
        slots = range(len(rows)) if moved else [row.slot for row in rows]  # numbers of tables
        firsts = accumulate((row.length for row in rows), initial=0)
        self.work = PromptWork.of(
            [
                PromptSegment(first, slot, row.start, row.length)
                for first, slot, row in zip(firsts, slots, rows, strict=False)
            ],
            kv_heads=config.num_kv_heads, group=config.num_heads // config.num_kv_heads,
            head_dim=config.head_dim, device=device,
        )  # fmt: skip
        self._tables: torch.Tensor | None = None  # of the rows, by layer, where blocks have moved
        if moved:
            own = upload(torch.tensor([row.slot for row in rows]), device)
            layers = torch.arange(config.num_layers, device=device)[:, None, None]
            self._tables = cache.tables.addresses[own] + layers * shape.layer_bytes
            numbers, blocks, addresses = upload(torch.tensor(moved).T.contiguous(), device)
            self._tables[:, numbers, blocks] = addresses
        self._head_bytes = shape.head_bytes

    @property
    def is_plain(self) -> bool:
        """Whether it reads all blocks where they lie, without copies or partial results."""
        return self._tables is None and not self._gathers and not self.work.arrivals.numel()

    def reading(self, tiles: torch.Tensor, count: torch.Tensor) -> "PromptAttention":
        """The same for other work, which is in `tiles` and `count` when it is launched."""
        found = copy.copy(self)
        found.work = replace(self.work, tiles=tiles, count=count)
        return found

    def __call__(self, layer: int, q: torch.Tensor, heads: torch.Tensor) -> None:
        """Write the heads [n, Hq * D] of the parts' queries, rows of q [n, Hq, D]."""
        for slot, first, room in self._gathers:
            room.copy_(self._cache.gather(layer, slot, first + len(room), first))
        if self._tables is None:
            tables, layer_of = self._cache.tables, layer
        else:
            tables, layer_of = BlockTables(self._tables[layer], self._head_bytes), 0
        prompt_attn(q, tables, self.work, heads, scale=self._scale, layer=layer_of)
