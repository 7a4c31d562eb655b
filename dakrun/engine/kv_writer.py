"""Keys and values of prompts, on their way from a pass to the KV blocks of several tiers.

A kernel rotates and packs them; copies take packed blocks to remote slots beside other ops. Knows
parts of prompts, slots and blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dakrun.engine.kv_cache import KVCache
from dakrun.engine.prompt_attention import BlockAddresses
from dakrun.engine.step import Row
from dakrun.geometry import KV_BLOCK
from dakrun.kernels import store_kv
from dakrun.kernels.attention import KVShape
from dakrun.kernels.runtime import CopyStream
from dakrun.units import ceil_div


@dataclass(frozen=True)
class _Copy:
    """Blocks: `packed` [blocks, bytes] in HBM, copied to `to` [blocks, layers, bytes]."""

    packed: torch.Tensor
    to: torch.Tensor


class KVWriter:
    """Stores keys and values of parts of prompts in the slots of `cache`.

    Whole blocks in remote tiers are packed in `room`, uint8 in HBM, and copied while the layer's
    other ops run. Other positions are stored in place: those of a partly filled block, and of
    slots for which `room` is full.
    """

    def __init__(self, cache: KVCache, shape: KVShape, room: torch.Tensor) -> None:
        self._cache, self._shape, self._room = cache, shape, room
        self._stream = CopyStream(room.device)
        self._copies: list[_Copy] = []

    def begin(self, parts: Sequence[Row]) -> list[BlockAddresses]:
        """Start a pass over `parts`: choose where each of their tokens goes.

        Returns the addresses of each part's blocks, in the cache or in `room`.
        """
        cache, size = self._cache, self._shape.layer_bytes
        blocks: list[BlockAddresses] = []
        used = 0
        self._copies = []
        for row in parts:
            end = ceil_div(row.start + row.length, KV_BLOCK)
            first = row.start // KV_BLOCK
            addresses = [(cache.address(row.slot, number), size) for number in range(first, end)]
            empty = ceil_div(row.start, KV_BLOCK)  # the first block that is empty before the pass
            stop = min(end, cache.remote_blocks(row.slot))
            if 0 < (stop - empty) * size <= self._room.numel() - used:
                for number, to in cache.runs(row.slot, empty, stop):
                    packed = self._room[used : used + len(to) * size].view(-1, size)
                    self._copies.append(_Copy(packed, to))
                    for block, copied in enumerate(packed, number - first):
                        addresses[block] = (copied.data_ptr(), 0)
                    used += packed.numel()
            blocks.append(addresses)
        return blocks

    def store(
        self,
        layer: int,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        addresses: torch.Tensor,
        rotations: torch.Tensor | None,
    ) -> None:
        """Store keys and values of qkv [T, Hq + 2 Hkv, D], rotated (see store_kv)."""
        heads = self._shape.kv_heads
        if self._copies:
            self._stream.join()  # copies of the previous layer still read `room`
        store_kv(qkv, positions, addresses, layer, kv_heads=heads, rotations=rotations)
        if self._copies:
            self._stream.follow()
            self._stream.copy(*((copy.to[:, layer], copy.packed) for copy in self._copies))

    def end(self) -> None:
        """Make later launches wait until all keys and values are stored."""
        self._stream.join()

    def addresses(self, parts: Sequence[Row], blocks: Sequence[BlockAddresses]) -> torch.Tensor:
        """Addresses of the parts' tokens for store_kv, int64 [n, 3], from what `begin` gives."""
        rows = []
        for row, addresses in zip(parts, blocks, strict=True):
            at = torch.arange(row.start, row.start + row.length)
            block = torch.tensor(addresses)[at // KV_BLOCK - row.start // KV_BLOCK]
            start = block[:, 0] + at % KV_BLOCK * self._shape.layout.row_bytes
            head_bytes = torch.full_like(at, self._shape.head_bytes)
            rows.append(torch.stack((start, block[:, 1], head_bytes), 1))
        return torch.cat(rows)
