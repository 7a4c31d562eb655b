"""What a config.json says of rotary embeddings, in the keys of transformers 4 and 5."""

import math

from dakrun.config import FamilyName, LinearRope, Llama3Rope, LongRope, RopeScaling, YarnRope
from dakrun.errors import CannotRun
from dakrun.models.hf_fields import Fields

_ORIGINAL = "original_max_position_embeddings"
_ROPE_HINT = "supported are default, linear, dynamic, llama3, yarn and longrope"
# Phi-3's code knows no other types; its first files call longrope "su" or "yarn".
_OF_PHI3 = ("default", "longrope", "su", "yarn")


def rotary_factor(fields: Fields, default: float, name: str) -> float:
    """The part of each head that RoPE rotates, from its first column on."""
    key = "partial_rotary_factor"
    parts = (_parameters(fields), fields)
    found = next((part.number(key) for part in parts if part.has(key)), default)
    if found != 1 and default == 1:
        raise CannotRun(
            f"{name}: rotary embeddings of a part of each head are not supported",
            hint=f"{key} in config.json is not 1",
        )
    return found


def rope_of(
    fields: Fields, family: FamilyName, theta: float, name: str, positions: int
) -> tuple[float, RopeScaling | None]:
    """Base (`theta` by default) and scaling of RoPE of a model with `positions` positions.

    Up to the model's positions `dynamic` is plain RoPE.
    """
    rope = _parameters(fields)
    if nested := next((key for key, value in rope.raw.items() if isinstance(value, dict)), None):
        raise CannotRun(
            f"{name}: RoPE that differs between layers is not supported",
            hint=f"the RoPE parameters in config.json have an object for {nested!r}",
        )
    owner = rope if rope.has("rope_theta") else fields
    theta = owner.number("rope_theta") if owner.has("rope_theta") else theta
    kind = rope.raw.get("rope_type") or rope.raw.get("type") or "default"
    if family == "phi3" and kind not in _OF_PHI3:
        raise CannotRun(
            f"{name}: rope type {kind!r} of Phi-3 is not supported",
            hint="published Phi-3 models have longrope, or none",
        )
    if kind in ("default", "dynamic"):
        return theta, None
    if kind in ("longrope", "su") or family == "phi3":
        return theta, _longrope(rope, fields, family, positions)
    if kind == "linear":
        return theta, LinearRope(rope.number("factor"))
    if kind == "yarn":
        return theta, _yarn(rope, fields, family, positions)
    if kind != "llama3":
        raise CannotRun(f"{name}: rope type {kind!r} is not supported", hint=_ROPE_HINT)
    return theta, Llama3Rope(
        factor=rope.number("factor"),
        low_freq_factor=rope.number("low_freq_factor"),
        high_freq_factor=rope.number("high_freq_factor"),
        original_max_positions=original_positions(fields, family, positions),
    )


def original_positions(fields: Fields, family: FamilyName, positions: int) -> int:
    """Positions before RoPE's scaling: of the model, or of its rope's parameters."""
    if family == "phi3" and not fields.has(_ORIGINAL):
        return 4096  # whatever its rope's parameters say
    owners = (part for part in (fields, _parameters(fields)) if part.has(_ORIGINAL))
    return next((part.whole(_ORIGINAL) for part in owners), positions)


def _parameters(fields: Fields) -> Fields:
    """The parameters of RoPE, empty if there are none.

    transformers 5 writes rope_parameters; like it, prefer rope_scaling if both are there.
    """
    return fields.part("rope_scaling") or fields.part("rope_parameters") or Fields({}, "")


def _yarn(rope: Fields, fields: Fields, family: FamilyName, positions: int) -> YarnRope:
    """YaRN's parameters, with those of its paper where they are absent, null or 0.

    `truncate` is true where it is absent, and false where it is null, as in transformers.
    """
    original = original_positions(fields, family, positions)
    factor = rope.number("factor") if rope.has("factor") else positions / original

    def number(key: str, default: float = 0.0) -> float:
        return rope.number(key) if rope.raw.get(key) else default

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if rope.has("attention_factor"):
        attention = rope.number("attention_factor")
    elif (mscale := number("mscale")) and (all_dim := number("mscale_all_dim")):
        attention = scale(mscale) / scale(all_dim)
    else:
        attention = scale(1.0)
    return YarnRope(
        factor=factor,
        original_max_positions=original,
        attention_factor=attention,
        beta_fast=number("beta_fast", 32.0),
        beta_slow=number("beta_slow", 1.0),
        truncate=rope.raw.get("truncate", True) is not None and rope.flag("truncate", True),
    )


def _longrope(rope: Fields, fields: Fields, family: FamilyName, positions: int) -> LongRope:
    """LongRoPE's short factors, and the factor of attention of a model of that many positions."""
    factors = rope.raw.get("short_factor")
    numbers = isinstance(factors, list) and all(type(f) in (int, float) for f in factors)
    if not numbers or not factors:
        rope.refuse("short_factor", factors, "a list of numbers")
    original = original_positions(fields, family, positions)
    factor = rope.number("factor") if rope.has("factor") else positions / original
    if rope.has("attention_factor"):
        attention = rope.number("attention_factor")
    else:
        attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return LongRope(tuple(map(float, factors)), attention)
