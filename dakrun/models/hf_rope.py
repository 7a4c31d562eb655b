"""What a config.json says of rotary embeddings, in the keys of transformers 4 and 5."""

import math

from dakrun.config import LinearRope, Llama3Rope, LongRope, RopeScaling, YarnRope
from dakrun.errors import CannotRun
from dakrun.models.hf_fields import Fields

_ORIGINAL = "original_max_position_embeddings"
_ROPE_HINT = "supported are default, linear, dynamic, llama3, yarn and longrope"


def rotary_factor(fields: Fields, default: float, name: str) -> float:
    """The part of each head that RoPE rotates, from its first column on."""
    key = "partial_rotary_factor"
    parts = (fields, fields.part("rope_scaling"), fields.part("rope_parameters"))
    found = next((part.number(key) for part in parts if part and part.has(key)), default)
    if found != 1 and default == 1:
        raise CannotRun(
            f"{name}: rotary embeddings of a part of each head are not supported",
            hint=f"{key} in config.json is not 1",
        )
    return found


def rope_of(
    fields: Fields, theta: float, name: str, positions: int
) -> tuple[float, RopeScaling | None]:
    """Base (`theta` by default) and scaling of RoPE of a model with as many `positions`.

    transformers 5 writes rope_parameters; like it, prefer rope_scaling if both are there. Up to the
    model's positions `dynamic` is plain RoPE.
    """
    rope = fields.part("rope_scaling") or fields.part("rope_parameters") or Fields({}, "")
    owner = rope if rope.has("rope_theta") else fields
    theta = owner.number("rope_theta") if owner.has("rope_theta") else theta
    kind = rope.raw.get("rope_type") or rope.raw.get("type") or "default"
    if kind in ("default", "dynamic"):
        return theta, None
    if kind == "linear":
        return theta, LinearRope(rope.number("factor"))
    if kind == "yarn":
        return theta, _yarn(rope, fields, positions)
    if kind in ("longrope", "su"):
        return theta, _longrope(rope, fields, positions)
    if kind != "llama3":
        raise CannotRun(f"{name}: rope type {kind!r} is not supported", hint=_ROPE_HINT)
    return theta, Llama3Rope(
        factor=rope.number("factor"),
        low_freq_factor=rope.number("low_freq_factor"),
        high_freq_factor=rope.number("high_freq_factor"),
        original_max_positions=original_positions(fields, positions),
    )


def original_positions(fields: Fields, positions: int) -> int:
    """Positions before RoPE's scaling: of the model, or of its rope's parameters."""
    for part in (fields, fields.part("rope_scaling"), fields.part("rope_parameters")):
        if part is not None and part.has(_ORIGINAL):
            return part.count(_ORIGINAL)
    return positions


def _yarn(rope: Fields, fields: Fields, positions: int) -> YarnRope:
    """YaRN's parameters, with those of its paper where they are absent."""
    original = original_positions(fields, positions)
    factor = rope.number("factor") if rope.has("factor") else positions / original

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if rope.has("attention_factor"):
        attention = rope.number("attention_factor")
    elif rope.has("mscale") and rope.has("mscale_all_dim"):
        attention = scale(rope.number("mscale")) / scale(rope.number("mscale_all_dim"))
    else:
        attention = scale(1.0)
    return YarnRope(
        factor=factor,
        original_max_positions=original,
        attention_factor=attention,
        beta_fast=rope.number("beta_fast") if rope.has("beta_fast") else 32.0,
        beta_slow=rope.number("beta_slow") if rope.has("beta_slow") else 1.0,
        truncate=rope.flag("truncate", True),
    )


def _longrope(rope: Fields, fields: Fields, positions: int) -> LongRope:
    """LongRoPE's short factors, and the factor of attention of a model of that many positions."""
    factors = rope.raw.get("short_factor")
    numbers = isinstance(factors, list) and all(type(f) in (int, float) for f in factors)
    if not numbers or not factors:
        rope.refuse("short_factor", factors, "a list of numbers")
    original = original_positions(fields, positions)
    factor = rope.number("factor") if rope.has("factor") else positions / original
    if rope.has("attention_factor"):
        attention = rope.number("attention_factor")
    else:
        attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return LongRope(tuple(map(float, factors)), attention)
