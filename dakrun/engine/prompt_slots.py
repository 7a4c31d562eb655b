"""Where keys and values of prompts go: into local slots at once, into remote ones by copies.

Knows segments of slots, and tokens in the same order; a kernel rotates and packs them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dakrun.engine.packed_cache import PackedKVCache
from dakrun.geometry import KV_BLOCK
from dakrun.kernels.runtime.copy_engine import CopyStream
from dakrun.kernels.store_kv import store_kv
from dakrun.memory.device import upload
from dakrun.plan.segments import Segment
from dakrun.units import ceil_div


@dataclass(frozen=True)
class _Copy:
    """Blocks of a slot: [heads, bytes] of HBM, and where they go, [layers, heads, bytes]."""

    packed: torch.Tensor
    to: torch.Tensor


class PromptSlots:
    """The slots of `cache`, as passes fill them.

    What remote slots take is packed in `room`, uint8 in HBM, and copied while the layer's other ops
    run. What finds no room there, and what fills a block up, is stored where it lies.
    """

    def __init__(self, cache: PackedKVCache, room: torch.Tensor) -> None:
        self._cache, self._room = cache, room
        self._stream = CopyStream(room.device)
        self._copies: list[_Copy] = []
        self._places = torch.empty(0, 3, dtype=torch.int64)

    def begin(self, segments: Sequence[Segment]) -> None:
        """Say which tokens a pass stores: those of `segments`, one after the other."""
        shape, used = self._cache.shape, 0
        places = []
        self._copies = []
        for s in segments:
            end = s.start + s.length
            first = ceil_div(s.start, KV_BLOCK)
            count = ceil_div(end, KV_BLOCK) - first  # of blocks that nothing is in yet
            size = shape.kv_heads * count * shape.block_bytes
            remote = s.slot >= self._cache.counts[0]
            staged = remote and 0 < size <= self._room.numel() - used
            split = first * KV_BLOCK if staged else end
            slot = self._cache.slot(s.slot)[0]
            head_bytes = shape.blocks * shape.block_bytes
            places.append(self._rows(range(s.start, split), slot, shape.slot_bytes, head_bytes))
            if staged:
                packed = self._room[used : used + size]
                places.append(self._rows(range(end - split), packed, 0, count * shape.block_bytes))
                packed = packed.view(shape.kv_heads, -1)
                heads = self._cache.slot(s.slot).unflatten(1, (shape.kv_heads, -1))
                start = first * shape.block_bytes
                to = heads[:, :, start : start + packed.shape[1]]
                self._copies.append(_Copy(packed, to))
                used += size
        self._places = upload(torch.cat(places), self._room.device)

    def store(
        self, layer: int, qkv: torch.Tensor, positions: torch.Tensor, rotations: torch.Tensor | None
    ) -> None:
        """Store keys and values of qkv [T, Hq + 2 Hkv, D], rotated as store_kv says."""
        heads = self._cache.shape.kv_heads
        if self._copies:
            self._stream.join()  # those of the layer before
        store_kv(qkv, positions, self._places, layer, kv_heads=heads, rotations=rotations)
        if self._copies:
            self._stream.follow()
            self._stream.copy(*((copy.to[layer], copy.packed) for copy in self._copies))

    def end(self) -> None:
        """Let what is launched next wait until all is stored."""
        self._stream.join()

    def _rows(
        self, positions: range, base: torch.Tensor, layer_bytes: int, head_bytes: int
    ) -> torch.Tensor:
        """store_kv's places of `positions`, counted from the first block at `base`."""
        row_bytes = self._cache.shape.head_dim * 2
        at = torch.arange(positions.start, positions.stop)
        rows = at // KV_BLOCK * 2 * KV_BLOCK + at % KV_BLOCK
        further = [torch.full_like(at, size) for size in (layer_bytes, head_bytes)]
        return torch.stack((base.data_ptr() + rows * row_bytes, *further), 1)
