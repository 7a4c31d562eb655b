"""Norms and rotary embeddings in plain torch."""

import torch
import torch.nn.functional as F

from dakrun.config import ModelConfig


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over the last dimension, in float32, rounded before the weight is applied."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None
) -> torch.Tensor:
    """LayerNorm over the last dimension with torch's default eps, as OPT uses it."""
    return F.layer_norm(x, x.shape[-1:], weight, bias)


def rope_table(
    config: ModelConfig, positions: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [positions, D / 2] of the rotary embedding.

    Frequencies and their llama3 scaling follow Su et al. (arXiv 2104.09864) and Meta's Llama 3.1
    reference: long wavelengths are divided by `factor`, short ones kept, those between blended.
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    if config.rope_scaling is not None:
        s = config.rope_scaling
        turns = s.original_max_positions * frequencies / (2 * torch.pi)
        blend = (turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
        blend = blend.clamp(0, 1)
        frequencies = (1 - blend) * frequencies / s.factor + blend * frequencies
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * frequencies
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate heads [N, H, D] by cosines and sines [N, 1, D / 2]; pairs are (i, i + D / 2)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def split_heads(config: ModelConfig, qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """q [n, Hq, D], k and v [n, Hkv, D] of a fused projection [n, (Hq + 2 Hkv) * D], as views."""
    heads = qkv.view(len(qkv), config.num_heads + 2 * config.num_kv_heads, config.head_dim)
    return heads.split((config.num_heads, config.num_kv_heads, config.num_kv_heads), dim=1)
