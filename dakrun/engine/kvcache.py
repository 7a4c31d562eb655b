"""The KV cache: whole slots in the tier that the plan gives them.

Knows slots and positions, not requests; kernels read and write the views it hands out.
"""

from collections.abc import Mapping

import torch

from dakrun.memory.tiers import Tier
from dakrun.plan.ops import kv_positions
from dakrun.plan.planner import Plan


class KVCache:
    """Keys and values of every slot; slots are numbered tier after tier in the plan's order."""

    def __init__(self, plan: Plan, tiers: Mapping[str, Tier], dtype: torch.dtype) -> None:
        model = plan.model
        size = (model.num_kv_heads, kv_positions(plan.workload), model.head_dim)
        self._views: list[torch.Tensor] = []
        for tier, slots in plan.placement("attention"):
            if slots:
                block = tiers[tier].allocate((slots, model.num_layers, 2, *size), dtype)
                self._views += block.unbind()

    @property
    def slots(self) -> int:
        """Number of slots in all tiers."""
        return len(self._views)

    def keys_values(self, layer: int, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [Hkv, P, D] of one layer and slot, for reading and writing."""
        keys, values = self._views[slot][layer]
        return keys, values
