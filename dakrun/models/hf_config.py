"""Hugging Face's config.json, read and translated into a ModelConfig.

Knows its keys, old and new, and which models dakrun runs; a model's sizes are checked in config.py.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dakrun.config import DTYPE_BYTES, Dtype, Llama3Rope, ModelConfig
from dakrun.errors import CannotRun, UsageError
from dakrun.models.files import read_json_object, stored_dtype

FAMILIES = {"OPTForCausalLM": "opt", "LlamaForCausalLM": "llama"}  # by architecture


def read_model_config(directory: Path) -> ModelConfig:
    """Read `config.json` (and the EOS ids of `generation_config.json`) of a checkpoint.

    A config.json that does not name a dtype has the weights', if there are some.
    Raises UsageError where the folder or the JSON is wrong, CannotRun where the architecture is
    not supported or the weights' file, asked for the dtype, is damaged.
    """
    if not directory.is_dir():
        raise UsageError(
            f"{directory}: no such model directory",
            hint="give a folder with config.json and safetensors files, or a hub id",
        )
    raw = read_json_object(directory / "config.json")
    if not (raw.get("dtype") or raw.get("torch_dtype")):
        raw["dtype"] = stored_dtype(directory)
    config = parse_model_config(raw, name=directory.resolve().name)
    generation = directory / "generation_config.json"
    if generation.is_file():
        eos = read_json_object(generation).get("eos_token_id")
        if eos is not None:
            return replace(config, eos_token_ids=_eos(eos, str(generation)))
    return config


def parse_model_config(raw: Mapping[str, Any], *, name: str) -> ModelConfig:
    """The model that `raw`, the contents of a config.json, describes.

    Raises UsageError where it describes none, CannotRun where it is not supported.
    """
    if raw.get("quantization_config"):
        method = raw["quantization_config"]
        method = method.get("quant_method", "unknown") if isinstance(method, dict) else method
        raise CannotRun(
            f"{name}: the checkpoint is quantised ({method})",
            hint="use the float16, bfloat16 or float32 checkpoint that it was made from",
        )
    listed = raw.get("architectures")
    architecture = str(listed[0]) if isinstance(listed, list) and listed else None
    model_type = raw.get("model_type")
    family = model_type or FAMILIES.get(architecture or "")
    try:
        if family == "opt":
            return _from_opt(raw, name)
        if family == "llama":
            return _from_llama(raw, name)
    except KeyError as missing:
        raise UsageError(
            f"{name}: config.json has no {missing.args[0]!r}",
            hint="take config.json from the place where the model was published",
        ) from None
    except (TypeError, ValueError, AttributeError, OverflowError) as problem:
        raise UsageError(
            f"{name}: config.json does not describe a model ({problem})",
            hint="take config.json from the place where the model was published",
        ) from None
    named = model_type if architecture in FAMILIES else architecture or model_type
    raise CannotRun(
        f"{name}: architecture {named or '(none named)'} is not supported",
        hint=f"dakrun runs {' and '.join(FAMILIES)}",
    )


def _from_opt(raw: Mapping[str, Any], name: str) -> ModelConfig:
    if raw.get("activation_function", "relu") != "relu":
        raise CannotRun(
            f"{name}: OPT with activation {raw['activation_function']!r} is not supported",
            hint="published OPT models use relu",
        )
    heads, hidden = raw["num_attention_heads"], raw["hidden_size"]
    pre_norm = raw.get("do_layer_norm_before", True)
    bias = raw.get("enable_bias", True)
    return ModelConfig(
        name=name,
        family="opt",
        vocab_size=raw["vocab_size"],
        hidden_size=hidden,
        ffn_size=raw["ffn_dim"],
        num_layers=raw["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=_divide(hidden, heads, name),
        max_positions=raw["max_position_embeddings"],
        embed_size=raw.get("word_embed_proj_dim") or hidden,
        tied_embeddings=raw.get("tie_word_embeddings", True),
        dtype=_dtype(raw, name),
        attention_bias=bias,
        mlp_bias=bias,
        pre_norm=pre_norm,
        final_norm=pre_norm and not raw.get("_remove_final_layer_norm", False),
        norm_affine=raw.get("layer_norm_elementwise_affine", True),
        eos_token_ids=_eos(raw.get("eos_token_id", 2), f"{name}: config.json"),
    )


def _from_llama(raw: Mapping[str, Any], name: str) -> ModelConfig:
    if raw.get("hidden_act", "silu") != "silu":
        raise CannotRun(
            f"{name}: Llama with activation {raw['hidden_act']!r} is not supported",
            hint="published Llama models use silu",
        )
    heads, hidden = raw["num_attention_heads"], raw["hidden_size"]
    theta, scaling = _rope(raw, name)
    return ModelConfig(
        name=name,
        family="llama",
        vocab_size=raw["vocab_size"],
        hidden_size=hidden,
        ffn_size=raw["intermediate_size"],
        num_layers=raw["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or _divide(hidden, heads, name),
        max_positions=raw.get("max_position_embeddings", 2048),
        embed_size=hidden,
        tied_embeddings=raw.get("tie_word_embeddings", False),
        dtype=_dtype(raw, name),
        attention_bias=raw.get("attention_bias", False),
        mlp_bias=raw.get("mlp_bias", False),
        norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope_theta=theta,
        rope_scaling=scaling,
        eos_token_ids=_eos(raw.get("eos_token_id", 2), f"{name}: config.json"),
    )


def _rope(raw: Mapping[str, Any], name: str) -> tuple[float, Llama3Rope | None]:
    """RoPE base and scaling; transformers 5 writes rope_parameters, but prefers rope_scaling."""
    rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    theta = float(_first(rope.get("rope_theta"), raw.get("rope_theta"), 10_000.0))
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise CannotRun(
            f"{name}: rope type {kind!r} is not supported",
            hint="dakrun knows plain rotary embeddings and llama3 scaling",
        )
    original = _first(
        rope.get("original_max_position_embeddings"), raw.get("max_position_embeddings", 2048)
    )
    return theta, Llama3Rope(
        factor=float(rope["factor"]),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_max_positions=int(original),
    )


def _first(*values: Any) -> Any:
    """The first that is not None."""
    return next((value for value in values if value is not None), None)


def _dtype(raw: Mapping[str, Any], name: str) -> Dtype:
    dtype = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    if dtype not in DTYPE_BYTES:
        raise CannotRun(
            f"{name}: dtype {dtype!r} is not supported",
            hint="float32, float16 and bfloat16 checkpoints are",
        )
    return dtype


def _eos(value: Any, source: str) -> tuple[int, ...]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token) is int for token in ids):
        raise UsageError(
            f"{source}: eos_token_id is {value!r}, not a token id or a list of them",
            hint="check it against the file that the model was published with",
        )
    return tuple(ids)


def _divide(hidden: int, heads: int, name: str) -> int:
    if not isinstance(heads, int) or heads < 1 or hidden % heads:
        raise UsageError(
            f"{name}: hidden_size {hidden} is not a multiple of {heads} attention heads",
            hint="check config.json against the one that the model was published with",
        )
    return hidden // heads
