"""Norms and rotary embeddings in plain torch."""

import math

import torch
import torch.nn.functional as F

from dakrun.config import LinearRope, Llama3Rope, LongRope, ModelConfig, YarnRope


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
    """Cosines and sines [positions, D / 2] of rotary embeddings (Su et al., arXiv 2104.09864).

    D is the model's rotary_dim.
    """
    exponents = torch.arange(0, config.rotary_dim, 2, dtype=torch.float32) / config.rotary_dim
    frequencies, factor = _scaled(1.0 / config.rope_theta**exponents, config)
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * frequencies
    return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)


def _scaled(frequencies: torch.Tensor, config: ModelConfig) -> tuple[torch.Tensor, float]:
    """Frequencies [D / 2] of RoPE after the model's scaling, and the factor of its rotations.

    llama3 follows Meta's Llama 3.1 reference: long wavelengths are divided by `factor`, short ones
    kept, those between blended.
    """
    match config.rope_scaling:
        case Llama3Rope() as s:
            turns = s.original_max_positions * frequencies / (2 * torch.pi)
            kept = (turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
            kept = kept.clamp(0, 1)
            return (1 - kept) * frequencies / s.factor + kept * frequencies, 1.0
        case LinearRope() as s:
            return frequencies / s.factor, 1.0
        case LongRope() as s:
            return frequencies / torch.tensor(s.factors, dtype=torch.float32), s.attention_factor
        case YarnRope() as s:
            kept = 1 - _yarn_ramp(s, config)
            blended = (1 - kept) * frequencies / s.factor + kept * frequencies
            return blended, s.attention_factor
    return frequencies, 1.0


def _yarn_ramp(s: YarnRope, config: ModelConfig) -> torch.Tensor:
    """How far each frequency [D / 2] is interpolated, 0 to 1 (section 3.2 of arXiv 2309.00071)."""
    dim = config.rotary_dim

    def dimension(turns: float) -> float:
        """The dimension whose frequency makes as many turns over the original positions."""
        wavelength = s.original_max_positions / (turns * 2 * math.pi)
        return dim * math.log(wavelength) / (2 * math.log(config.rope_theta))

    low, high = dimension(s.beta_fast), dimension(s.beta_slow)
    if s.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low or 0.001
    return ((torch.arange(dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the first D columns of heads [N, H, D or more] by cosines and sines.

    These are [N, 1, D / 2]; pairs are (i, i + D / 2).
    """
    half = cos.shape[-1]
    first, second, rest = x.split((half, half, x.shape[-1] - 2 * half), dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)
