"""Keys of config.json for attention: causal or not, chunks, sliding windows."""

from dakrun.config import FamilyName
from dakrun.errors import CannotRun
from dakrun.models.hf_fields import Fields

_SLIDING = "sliding_attention"
_KINDS = ("full_attention", "attention", _SLIDING)
_BY_LAYER = ("mistral", "qwen2", "qwen3")  # families that read layer_types
_BY_FLAG = ("qwen2", "qwen3", "qwen3_moe")  # families that read use_sliding_window


def check_attention(fields: Fields, name: str) -> None:
    """Raise CannotRun unless each token attends to those before it, alike in all layers."""
    if not fields.flag("is_causal", True):
        raise CannotRun(
            f"{name}: attention to later tokens is not supported",
            hint="is_causal in config.json is false, as in models that embed texts",
        )
    if fields.has("attention_chunk_size"):
        raise CannotRun(
            f"{name}: attention within chunks (attention_chunk_size) is not supported",
            hint="use a checkpoint without, such as one of Llama 3",
        )
    if fields.raw.get("per_layer_config"):
        raise CannotRun(
            f"{name}: layers that differ from each other (per_layer_config) are not supported",
            hint="use a checkpoint whose layers are all alike",
        )


def window_of(fields: Fields, family: FamilyName, name: str, default: int | None) -> int | None:
    """Positions to which a layer with a sliding window attends; None if no layer has one.

    `default` is the window if the key is absent. A window also counts in families whose attention
    has none: there transformers drops older keys and values from its cache after the prompt.
    """
    key = "sliding_window"
    if family in _BY_LAYER and fields.has("layer_types"):
        return fields.count(key, default) if _SLIDING in _kinds(fields, name) else None
    if family in _BY_FLAG and not fields.flag("use_sliding_window", False):
        return None
    if not fields.has(key) and (default is None or key in fields.raw):
        return None
    if family in _BY_LAYER and family in _BY_FLAG:
        first = "max_window_layers"  # the first layer with a window
        none = fields.raw.get(first) == 0
        at = 0 if none else fields.count(first) if fields.has(first) else 28
        if at >= fields.count("num_hidden_layers"):
            return None
    return fields.count(key, default)


def _kinds(fields: Fields, name: str) -> list[str]:
    """The kind of attention of each layer, by layer_types."""
    key, layers = "layer_types", fields.count("num_hidden_layers")
    kinds = fields.raw[key]
    if not isinstance(kinds, list) or len(kinds) != layers:
        fields.refuse(key, kinds, f"a list of {layers} kinds")
    if other := next((kind for kind in kinds if kind not in _KINDS), None):
        raise CannotRun(
            f"{name}: layers of the kind {other!r} are not supported",
            hint=f"supported are full_attention and {_SLIDING}",
        )
    return kinds
