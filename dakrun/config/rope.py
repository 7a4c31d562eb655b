"""Scalings of rotary positions (RoPE) beyond the positions that a model was first trained on.

Frozen dataclasses, validated on construction; models/functional.py computes the rotations.
"""

import math
from dataclasses import dataclass

from dakrun.errors import UsageError


@dataclass(frozen=True)
class Llama3Rope:
    """Frequency scaling of Llama 3.1's RoPE (`rope_type: llama3` in config.json)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int

    def __post_init__(self) -> None:
        ascending = 0 < self.low_freq_factor < self.high_freq_factor < math.inf
        if not (1 <= self.factor < math.inf and ascending and self.original_max_positions > 0):
            raise UsageError(
                f"invalid llama3 rope scaling: factor {self.factor}, low_freq_factor "
                f"{self.low_freq_factor}, high_freq_factor {self.high_freq_factor}, "
                f"original_max_position_embeddings {self.original_max_positions}",
                hint="config.json needs factor >= 1, high_freq_factor > low_freq_factor > 0 and "
                "original_max_position_embeddings > 0",
            )


@dataclass(frozen=True)
class LinearRope:
    """Positions divided by `factor` before they are rotated (`rope_type: linear`)."""

    factor: float

    def __post_init__(self) -> None:
        _check_rope("linear", positive=(self.factor,))


@dataclass(frozen=True)
class YarnRope:
    """Frequencies divided by `factor` below `beta_slow` turns in the original positions, kept above
    `beta_fast`, blended between (YaRN, arXiv 2309.00071; `rope_type: yarn`).

    Cosines and sines are multiplied by `attention_factor`. With `truncate` the range in which they
    are blended begins and ends at whole dimensions.
    """

    factor: float
    original_max_positions: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def __post_init__(self) -> None:
        ascending = self.beta_fast - self.beta_slow
        positive = (self.factor, self.original_max_positions, self.attention_factor, ascending)
        _check_rope("yarn", positive=(*positive, self.beta_slow))


@dataclass(frozen=True)
class LongRope:
    """Each frequency divided by its own of `factors` (LongRoPE, arXiv 2402.13753).

    They are the `short_factor` of `rope_type: longrope`, for up to the original positions. Cosines
    and sines are multiplied by `attention_factor`.
    """

    factors: tuple[float, ...]
    attention_factor: float

    def __post_init__(self) -> None:
        _check_rope("longrope", positive=(*self.factors, self.attention_factor))


def _check_rope(kind: str, *, positive: tuple[float, ...]) -> None:
    if not all(0 < number < math.inf for number in positive):
        raise UsageError(
            f"invalid {kind} rope scaling: its numbers are not positive and in order",
            hint="compare config.json with the published one",
        )


RopeScaling = LinearRope | YarnRope | LongRope | Llama3Rope
