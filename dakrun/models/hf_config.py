"""Hugging Face's config.json, read and translated into a ModelConfig.

Knows the supported model families, and their keys, old and new; hf_mixture.py has those of experts,
hf_rope.py those of RoPE, hf_window.py those of attention. config.py checks the sizes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dakrun.config import DTYPE_BYTES, MAX_SIZE, Dtype, FamilyName, LongRope, ModelConfig, YarnRope
from dakrun.errors import CannotRun, UsageError
from dakrun.models.files import read_json_object, stored_dtype
from dakrun.models.folders import check_folder
from dakrun.models.hf_fields import Fields
from dakrun.models.hf_mixture import extra_layers, mixture_of
from dakrun.models.hf_rope import original_positions, rope_of, rotary_factor
from dakrun.models.hf_window import check_attention, window_of
from dakrun.models.quantization import (
    parse_quantization,
    settings_beside,
    with_scale_dtypes,
)

FAMILIES: dict[str, FamilyName] = {  # by architecture
    "OPTForCausalLM": "opt",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Phi3ForCausalLM": "phi3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "MixtralForCausalLM": "mixtral",
    "OlmoeForCausalLM": "olmoe",
    "Glm4MoeForCausalLM": "glm4_moe",
}


@dataclass(frozen=True)
class _Defaults:
    """What an absent field of a rotary family's config.json means, as in transformers."""

    max_positions: int
    eos: int | None
    head_dim: int | None = None
    kv_heads: int | None = None
    window: int | None = None
    eps: float = 1e-6
    theta: float = 10_000.0
    rotary_factor: float = 1.0


_DEFAULTS: dict[FamilyName, _Defaults] = {
    "llama": _Defaults(2048, 2),
    "mistral": _Defaults(131_072, 2, kv_heads=8, window=4096),
    "qwen2": _Defaults(32_768, None, kv_heads=32, window=4096),
    "qwen3": _Defaults(32_768, None, head_dim=128, kv_heads=32, window=4096),
    "phi3": _Defaults(4096, 32_000, eps=1e-5),
    "qwen3_moe": _Defaults(32_768, None, kv_heads=4, window=4096),
    "mixtral": _Defaults(131_072, 2, kv_heads=8, eps=1e-5, theta=1e6),
    "olmoe": _Defaults(4096, 50_279, eps=1e-5),
    "glm4_moe": _Defaults(131_072, None, kv_heads=8, eps=1e-5, rotary_factor=0.5),
}
# Families whose layers have no such thing, whatever their config.json says.
_NO_BIAS = ("mistral", "phi3", "mixtral")
_NO_O_BIAS = ("qwen2", "glm4_moe")


def read_model_config(directory: Path) -> ModelConfig:
    """Read `config.json` (and the EOS ids of `generation_config.json`) of a checkpoint.

    If config.json names no dtype, that of the stored weights is taken. Raises UsageError if the
    folder or the JSON is malformed, CannotRun if the architecture is not supported or the weight
    file that is read for the dtype is damaged.
    """
    if not directory.is_dir():
        raise UsageError(
            f"{directory}: no such model directory",
            hint="give a folder with config.json and safetensors files, or a hub id",
        )
    check_folder(directory)
    raw = read_json_object(directory / "config.json")
    if raw.get("quantization_config") in (None, {}):
        raw["quantization_config"] = settings_beside(directory)
    if not _named_dtype(raw):
        raw["dtype"] = stored_dtype(directory)
    config = parse_model_config(raw, name=directory.resolve().name)
    if config.quantization:
        found = with_scale_dtypes(config.quantization, directory)
        config = replace(config, quantization=found)
    generation = directory / "generation_config.json"
    if generation.is_file():
        eos = read_json_object(generation).get("eos_token_id")
        if eos is not None:
            return replace(config, eos_token_ids=_eos(eos, str(generation)))
    return config


def parse_model_config(raw: Mapping[str, Any], *, name: str) -> ModelConfig:
    """Translate `raw`, the contents of a config.json, for a model called `name`.

    Raises UsageError if fields are missing or malformed, CannotRun if the model is not supported.
    """
    listed = raw.get("architectures")
    architecture = str(listed[0]) if isinstance(listed, list) and listed else None
    model_type = raw.get("model_type")
    family: Any = model_type or FAMILIES.get(architecture or "")
    fields = Fields(raw, f"{name}: config.json")
    # A classifier, a reward model or a base model has its family's model_type, and another head.
    is_known = architecture is None or architecture in FAMILIES
    if is_known and family in FAMILIES.values():
        check_attention(fields, name)
        return _from_opt(fields, name) if family == "opt" else _from_rotary(fields, name, family)
    named = model_type if architecture in FAMILIES else architecture or model_type
    raise CannotRun(
        f"{name}: architecture {named or '(none named)'} is not supported",
        hint=f"supported are {', '.join(FAMILIES)}",
    )


def _from_opt(fields: Fields, name: str) -> ModelConfig:
    activation = fields.raw.get("activation_function", "relu")
    if activation != "relu":
        raise CannotRun(
            f"{name}: OPT with activation {activation!r} is not supported",
            hint="published OPT models use relu",
        )
    pre_norm = fields.flag("do_layer_norm_before", True)
    bias = fields.flag("enable_bias", True)
    projected = fields.has("word_embed_proj_dim")
    return ModelConfig(
        family="opt",
        ffn_size=fields.count("ffn_dim"),
        num_kv_heads=fields.count("num_attention_heads"),
        head_dim=_head_dim(fields, name),
        max_positions=fields.count("max_position_embeddings"),
        embed_size=fields.count("word_embed_proj_dim" if projected else "hidden_size"),
        tied_embeddings=fields.flag("tie_word_embeddings", True),
        attention_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        pre_norm=pre_norm,
        final_norm=pre_norm and not fields.flag("_remove_final_layer_norm", False),
        norm_affine=fields.flag("layer_norm_elementwise_affine", True),
        **_shared_fields(fields, name),
    )


def _from_rotary(fields: Fields, name: str, family: FamilyName) -> ModelConfig:
    """Llama or a relative of it."""
    activation, defaults = fields.raw.get("hidden_act", "silu"), _DEFAULTS[family]
    if activation not in ("silu", "swish"):
        raise CannotRun(
            f"{name}: {family} with activation {activation!r} is not supported",
            hint=f"published {family} models use silu",
        )
    count = fields.count("max_position_embeddings", defaults.max_positions)
    theta, scaling = rope_of(fields, family, defaults.theta, name, count)
    stretched = 0
    if isinstance(scaling, YarnRope):  # model cards say to add YaRN and leave the other keys as is
        stretched = int(min(scaling.factor * scaling.original_max_positions, MAX_SIZE))
    positions = [(max(count, stretched), "")]
    if isinstance(scaling, LongRope):
        original = original_positions(fields, family, count)
        positions.append((original, "further ones need longrope's long factors"))
    window = window_of(fields, family, name, defaults.window)
    if window is not None:
        positions.append((window, "its sliding window"))
    most, reason = min(positions, key=lambda limit: limit[0])
    kv_heads = "num_key_value_heads"
    if not fields.has(kv_heads) and (defaults.kv_heads is None or kv_heads in fields.raw):
        kv_heads = "num_attention_heads"
    if fields.has("head_dim"):
        head_dim = fields.count("head_dim")
    else:
        head_dim = defaults.head_dim or _head_dim(fields, name)
    attention_bias = family == "qwen2" or fields.flag("attention_bias", False)
    if family in _NO_BIAS:
        attention_bias = False
    return ModelConfig(
        family=family,
        ffn_size=fields.count("intermediate_size"),
        num_kv_heads=fields.count(kv_heads, defaults.kv_heads),
        head_dim=head_dim,
        max_positions=most,
        limited_by=reason,
        embed_size=fields.count("hidden_size"),
        tied_embeddings=fields.flag("tie_word_embeddings", False),
        attention_bias=attention_bias,
        o_bias=attention_bias and family not in _NO_O_BIAS,
        mlp_bias=family == "llama" and fields.flag("mlp_bias", False),
        norm_eps=fields.number("rms_norm_eps", defaults.eps),
        rope_theta=theta,
        rope_scaling=scaling,
        mixture=mixture_of(fields, family, name),
        rotary_factor=rotary_factor(fields, defaults.rotary_factor, name),
        head_norms=family == "glm4_moe" and fields.flag("use_qk_norm", False),
        extra_layers=extra_layers(fields, family),
        **_shared_fields(fields, name, defaults.eos),
    )


def _shared_fields(fields: Fields, name: str, eos: int | None = 2) -> dict[str, Any]:
    """The fields of ModelConfig whose keys all families share; `eos` is the default."""
    settings = fields.raw.get("quantization_config")
    return {
        "name": name,
        "vocab_size": fields.count("vocab_size"),
        "hidden_size": fields.count("hidden_size"),
        "num_layers": fields.count("num_hidden_layers"),
        "num_heads": fields.count("num_attention_heads"),
        "dtype": (dtype := _dtype(fields.raw, name)),
        "eos_token_ids": _eos(fields.raw.get("eos_token_id", eos), fields.where),
        "quantization": parse_quantization(settings, name=name, dtype=dtype)
        if settings not in (None, {})
        else None,
    }


def _named_dtype(raw: Mapping[str, Any]) -> Any:
    """The dtype that a config.json names, without a leading "torch."; None for "auto" or none."""
    dtype = raw.get("dtype") or raw.get("torch_dtype")
    found = dtype.removeprefix("torch.") if isinstance(dtype, str) else dtype
    return None if found == "auto" else found


def _dtype(raw: Mapping[str, Any], name: str) -> Dtype:
    dtype = _named_dtype(raw) or "float32"
    if dtype not in tuple(DTYPE_BYTES):
        raise CannotRun(
            f"{name}: dtype {dtype!r} is not supported",
            hint="supported are float32, float16 and bfloat16",
        )
    return dtype


def _eos(value: Any, source: str) -> tuple[int, ...]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token) is int for token in ids):
        raise UsageError(
            f"{source}: eos_token_id is {value!r}, not a token id or a list of them",
            hint="compare it with the published file",
        )
    return tuple(ids)


def _head_dim(fields: Fields, name: str) -> int:
    """The head size that follows from the hidden size and the number of heads."""
    hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    if hidden % heads:
        raise UsageError(
            f"{name}: hidden_size {hidden} is not a multiple of {heads} attention heads",
            hint="compare config.json with the published one",
        )
    return hidden // heads
