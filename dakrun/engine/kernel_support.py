"""Which plans run on the project's kernels, and which on plain torch."""

import torch

from dakrun.geometry import HEAD_DIMS, MAX_GROUP_HEADS
from dakrun.kernels.runtime.jit import has_kernels
from dakrun.plan.plan import Plan
from dakrun.weights.loading import can_pack


def runs_on_kernels(plan: Plan, device: torch.device) -> bool:
    """Whether `device` has kernels for all ops of the plan's model."""
    model = plan.model
    group = model.num_heads // model.num_kv_heads
    fits = can_pack(plan) and model.head_dim in HEAD_DIMS and group <= MAX_GROUP_HEADS
    return fits and has_kernels(device)
