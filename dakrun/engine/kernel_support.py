"""Which models run on the project's kernels, and which on plain torch."""

import torch

from dakrun.config import ModelConfig
from dakrun.kernels.attention import MAX_GROUP
from dakrun.kernels.kv_blocks import HEAD_DIMS
from dakrun.kernels.packing import CHUNK

LEAST_CAPABILITY = 9  # of a GPU with a tensor memory accelerator


def runs_on_kernels(config: ModelConfig, device: torch.device) -> bool:
    """Whether `device` has kernels for all ops of the model."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] < LEAST_CAPABILITY:
        return False
    return fits_kernels(config)


def fits_kernels(config: ModelConfig) -> bool:
    """Whether there are kernels for all ops of the model: in 16 bits, of sizes in eights."""
    widths = (config.hidden_size, config.ffn_size, config.q_size, config.embed_size)
    return (
        config.dtype != "float32"
        and config.head_dim in HEAD_DIMS
        and config.num_heads // config.num_kv_heads <= MAX_GROUP
        and all(width % CHUNK == 0 for width in widths)
    )
