"""The KV cache: whole slots in several memory tiers.

Knows slots, layers and bytes; how keys and values lie in a slot is the layout's: KVShape's blocks
for the GPU's kernels, RowLayout for plain torch. Knows neither requests nor plans.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from dakrun.kernels.attention.kv_blocks import KVShape
from dakrun.memory.device import device_view
from dakrun.memory.tiers import Tier


@dataclass(frozen=True)
class RowLayout:
    """A slot as keys, then values, [Hkv, positions, D] of any dtype."""

    kv_heads: int
    head_dim: int
    positions: int
    dtype: torch.dtype

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot in one layer."""
        return 2 * self.kv_heads * self.positions * self.head_dim * self.dtype.itemsize

    def views(self, slot: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [Hkv, positions, D] of a slot's bytes, for reading and writing."""
        shape = (2, self.kv_heads, self.positions, self.head_dim)
        keys, values = slot.view(self.dtype).view(shape)
        return keys, values


class KVCache:
    """Keys and values of every slot; slots are numbered tier after tier.

    `counts` are the slots of each tier, `parts` their bytes, uint8 [slots, layers, bytes].
    `addresses`, int64 [layers, slots] on `device`, are where slots begin in each layer.
    """

    def __init__(
        self,
        placement: Sequence[tuple[str, int]],
        layers: int,
        layout: KVShape | RowLayout,
        tiers: Mapping[str, Tier],
        device: torch.device,
    ) -> None:
        """Take the memory; `placement` gives (tier, slots), the local tier first."""
        self.device = device
        self.counts = tuple(count for _, count in placement)
        self.parts = [
            tiers[tier].allocate((count, layers, layout.slot_bytes), torch.uint8)
            for tier, count in placement
        ]
        self._slots = [slot for part in self.parts for slot in part]
        self._on_device = [device_view(slot, device) for slot in self._slots]
        starts = [[slot[i].data_ptr() for slot in self._slots] for i in range(layers)]
        self.addresses = torch.tensor(starts, device=device)

    @property
    def slots(self) -> int:
        """Number of slots in all tiers."""
        return len(self._slots)

    def slot(self, number: int) -> torch.Tensor:
        """The bytes of a slot, uint8 [layers, bytes], in its tier."""
        return self._slots[number]

    def on_device(self, layer: int, slot: int) -> torch.Tensor:
        """The bytes of a slot in one layer, uint8 [bytes], on `device`: a copy of a peer's."""
        return self._on_device[slot][layer].to(self.device)
