"""The KV cache of the GPU's kernels: packed slots in the tiers that the plan gives them.

Knows slots, layers and positions, not requests.
"""

from collections.abc import Mapping

import torch

from dakrun.kernels.attention import kv_blocks
from dakrun.kernels.attention.kv_blocks import KVShape
from dakrun.memory.device import device_view
from dakrun.memory.tiers import Tier
from dakrun.plan.ops import kv_positions
from dakrun.plan.planner import Plan


class PackedKVCache:
    """Packed keys and values of every slot; slots are numbered tier after tier as in the plan.

    `counts` are the slots of each tier and `addresses` int64 [layers, slots] on `device`, where
    they begin.
    """

    def __init__(
        self, plan: Plan, tiers: Mapping[str, Tier], dtype: torch.dtype, device: torch.device
    ) -> None:
        model = plan.model
        self.shape = KVShape(model.num_kv_heads, model.head_dim, kv_positions(plan.workload))
        self.counts = tuple(count for _, count in plan.placement("attention"))
        self._dtype, self._device = dtype, device
        self._slots: list[torch.Tensor] = []  # uint8 [layers, bytes]
        for tier, count in plan.placement("attention"):
            if count:
                size = (count, model.num_layers, self.shape.slot_bytes)
                self._slots += tiers[tier].allocate(size, torch.uint8).unbind()
        self._views = [device_view(slot, device) for slot in self._slots]
        starts = [[slot[i].data_ptr() for slot in self._slots] for i in range(model.num_layers)]
        self.addresses = torch.tensor(starts, device=device)

    @property
    def slots(self) -> int:
        """Number of slots in all tiers."""
        return len(self._slots)

    def slot(self, number: int) -> torch.Tensor:
        """The bytes of a slot, uint8 [layers, bytes], in its tier."""
        return self._slots[number]

    def read(self, layer: int, slot: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [Hkv, end, D] of the first `end` positions, on the cache's device."""
        packed = self._views[slot][layer].to(self._device)  # a peer's, by way of its copy engine
        return kv_blocks.read(packed, end, self._dtype, self.shape)
