"""Which plans run on the project's kernels, and which on plain torch."""

import torch

from dakrun.kernels.attention import MAX_GROUP
from dakrun.kernels.kv_blocks import HEAD_DIMS
from dakrun.loading import can_pack
from dakrun.plan.plan import Plan

LEAST_CAPABILITY = 9  # of a GPU with a tensor memory accelerator


def runs_on_kernels(plan: Plan, device: torch.device) -> bool:
    """Whether `device` has kernels for all ops of the plan's model."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] < LEAST_CAPABILITY:
        return False
    model = plan.model
    group = model.num_heads // model.num_kv_heads
    return can_pack(plan) and model.head_dim in HEAD_DIMS and group <= MAX_GROUP
