"""Hugging Face's config.json, read and translated into a ModelConfig.

Knows its keys, old and new, and the supported model families; config.py checks the sizes.
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

    If config.json names no dtype, that of the stored weights is taken. Raises UsageError if the
    folder or the JSON is malformed, CannotRun if the architecture is not supported or the weight
    file that is read for the dtype is damaged.
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
    """Translate `raw`, the contents of a config.json, for a model called `name`.

    Raises UsageError if fields are missing or malformed, CannotRun if the model is not supported.
    """
    if raw.get("quantization_config"):
        method = raw["quantization_config"]
        method = method.get("quant_method", "unknown") if isinstance(method, dict) else method
        raise CannotRun(
            f"{name}: the checkpoint is quantized ({method}), which is not supported",
            hint="use the original float16, bfloat16 or float32 checkpoint",
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
            hint="copy config.json again from where the model was published",
        ) from None
    except (TypeError, ValueError, AttributeError, OverflowError) as problem:
        raise UsageError(
            f"{name}: config.json has malformed fields ({problem})",
            hint="copy config.json again from where the model was published",
        ) from None
    named = model_type if architecture in FAMILIES else architecture or model_type
    raise CannotRun(
        f"{name}: architecture {named or '(none named)'} is not supported",
        hint=f"supported are {' and '.join(FAMILIES)}",
    )


def _from_opt(raw: Mapping[str, Any], name: str) -> ModelConfig:
    if raw.get("activation_function", "relu") != "relu":
        raise CannotRun(
            f"{name}: OPT with activation {raw['activation_function']!r} is not supported",
            hint="published OPT models use relu",
        )
    pre_norm = raw.get("do_layer_norm_before", True)
    bias = raw.get("enable_bias", True)
    return ModelConfig(
        family="opt",
        ffn_size=raw["ffn_dim"],
        num_kv_heads=raw["num_attention_heads"],
        head_dim=_head_dim(raw, name),
        max_positions=raw["max_position_embeddings"],
        embed_size=raw.get("word_embed_proj_dim") or raw["hidden_size"],
        tied_embeddings=raw.get("tie_word_embeddings", True),
        attention_bias=bias,
        mlp_bias=bias,
        pre_norm=pre_norm,
        final_norm=pre_norm and not raw.get("_remove_final_layer_norm", False),
        norm_affine=raw.get("layer_norm_elementwise_affine", True),
        **_shared_fields(raw, name),
    )


def _from_llama(raw: Mapping[str, Any], name: str) -> ModelConfig:
    if raw.get("hidden_act", "silu") != "silu":
        raise CannotRun(
            f"{name}: Llama with activation {raw['hidden_act']!r} is not supported",
            hint="published Llama models use silu",
        )
    theta, scaling = _rope(raw, name)
    return ModelConfig(
        family="llama",
        ffn_size=raw["intermediate_size"],
        num_kv_heads=raw.get("num_key_value_heads") or raw["num_attention_heads"],
        head_dim=raw.get("head_dim") or _head_dim(raw, name),
        max_positions=raw.get("max_position_embeddings", 2048),
        embed_size=raw["hidden_size"],
        tied_embeddings=raw.get("tie_word_embeddings", False),
        attention_bias=raw.get("attention_bias", False),
        mlp_bias=raw.get("mlp_bias", False),
        norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope_theta=theta,
        rope_scaling=scaling,
        **_shared_fields(raw, name),
    )


def _shared_fields(raw: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The fields of ModelConfig whose keys all families share."""
    return {
        "name": name,
        "vocab_size": raw["vocab_size"],
        "hidden_size": raw["hidden_size"],
        "num_layers": raw["num_hidden_layers"],
        "num_heads": raw["num_attention_heads"],
        "dtype": _dtype(raw, name),
        "eos_token_ids": _eos(raw.get("eos_token_id", 2), f"{name}: config.json"),
    }


def _rope(raw: Mapping[str, Any], name: str) -> tuple[float, Llama3Rope | None]:
    """Base and scaling of RoPE.

    transformers 5 writes rope_parameters; like it, prefer rope_scaling if both are there.
    """
    rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    theta = float(_first(rope.get("rope_theta"), raw.get("rope_theta"), 10_000.0))
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise CannotRun(
            f"{name}: rope type {kind!r} is not supported",
            hint="supported are plain rotary embeddings and llama3 scaling",
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
    """The first value that is not None."""
    return next((value for value in values if value is not None), None)


def _dtype(raw: Mapping[str, Any], name: str) -> Dtype:
    dtype = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    if dtype not in DTYPE_BYTES:
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


def _head_dim(raw: Mapping[str, Any], name: str) -> int:
    """The head size that follows from the hidden size and the number of heads."""
    hidden, heads = raw["hidden_size"], raw["num_attention_heads"]
    if not isinstance(heads, int) or heads < 1 or hidden % heads:
        raise UsageError(
            f"{name}: hidden_size {hidden} is not a multiple of {heads} attention heads",
            hint="compare config.json with the published one",
        )
    return int(hidden // heads)
