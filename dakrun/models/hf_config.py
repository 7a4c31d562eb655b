"""Hugging Face's config.json, read and translated into a ModelConfig.

Knows its keys, old and new, their types, and the supported model families; config.py checks the
sizes.
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from dakrun.config import DTYPE_BYTES, Dtype, Llama3Rope, ModelConfig
from dakrun.errors import CannotRun, UsageError
from dakrun.models.files import read_json_object, stored_dtype

FAMILIES = {"OPTForCausalLM": "opt", "LlamaForCausalLM": "llama"}  # by architecture
_SHOWN = 60  # characters of a malformed value in messages


@dataclass(frozen=True)
class _Fields:
    """The fields of `raw`, by key and type; `where` names it in messages. Raises UsageError.

    A field that is absent has the value `default`; without a default it is an error. null counts
    as absent only in `optional`.
    """

    raw: Mapping[str, Any]
    where: str

    def count(self, key: str, default: int | None = None) -> int:
        """A positive integer."""
        value = self._get(key, default)
        if type(value) is not int or value < 1:
            self._refuse(key, value, "a positive integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number."""
        value = self._get(key, default)
        if type(value) not in (int, float) or not 0 < value <= sys.float_info.max:
            self._refuse(key, value, "a positive number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            self._refuse(key, value, "true or false")
        return value

    def part(self, key: str) -> "_Fields | None":
        """The fields of an object; None if it is absent, null or empty."""
        value = self.raw.get(key)
        if value is None or value == {}:
            return None
        if not isinstance(value, dict):
            self._refuse(key, value, "an object")
        return _Fields(value, f"{self.where}, {key}")

    def has(self, key: str) -> bool:
        """Whether the field is there and not null."""
        return self.raw.get(key) is not None

    def _get(self, key: str, default: Any) -> Any:
        if default is None and key not in self.raw:
            raise UsageError(
                f"{self.where}: has no {key!r}",
                hint="copy config.json again from where the model was published",
            )
        return self.raw.get(key, default)

    def _refuse(self, key: str, value: object, expected: str) -> NoReturn:
        shown = json.dumps(value, default=str)
        if len(shown) > _SHOWN:
            shown = f"{shown[:_SHOWN]}..."
        raise UsageError(
            f"{self.where}: {key} is {shown}, not {expected}",
            hint="compare config.json with the published one",
        )


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
    fields = _Fields(raw, f"{name}: config.json")
    if family == "opt":
        return _from_opt(fields, name)
    if family == "llama":
        return _from_llama(fields, name)
    named = model_type if architecture in FAMILIES else architecture or model_type
    raise CannotRun(
        f"{name}: architecture {named or '(none named)'} is not supported",
        hint=f"supported are {' and '.join(FAMILIES)}",
    )


def _from_opt(fields: _Fields, name: str) -> ModelConfig:
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
        mlp_bias=bias,
        pre_norm=pre_norm,
        final_norm=pre_norm and not fields.flag("_remove_final_layer_norm", False),
        norm_affine=fields.flag("layer_norm_elementwise_affine", True),
        **_shared_fields(fields, name),
    )


def _from_llama(fields: _Fields, name: str) -> ModelConfig:
    activation = fields.raw.get("hidden_act", "silu")
    if activation != "silu":
        raise CannotRun(
            f"{name}: Llama with activation {activation!r} is not supported",
            hint="published Llama models use silu",
        )
    theta, scaling = _rope(fields, name)
    grouped = fields.has("num_key_value_heads")
    return ModelConfig(
        family="llama",
        ffn_size=fields.count("intermediate_size"),
        num_kv_heads=fields.count("num_key_value_heads" if grouped else "num_attention_heads"),
        head_dim=fields.count("head_dim") if fields.has("head_dim") else _head_dim(fields, name),
        max_positions=fields.count("max_position_embeddings", 2048),
        embed_size=fields.count("hidden_size"),
        tied_embeddings=fields.flag("tie_word_embeddings", False),
        attention_bias=fields.flag("attention_bias", False),
        mlp_bias=fields.flag("mlp_bias", False),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        **_shared_fields(fields, name),
    )


def _shared_fields(fields: _Fields, name: str) -> dict[str, Any]:
    """The fields of ModelConfig whose keys all families share."""
    return {
        "name": name,
        "vocab_size": fields.count("vocab_size"),
        "hidden_size": fields.count("hidden_size"),
        "num_layers": fields.count("num_hidden_layers"),
        "num_heads": fields.count("num_attention_heads"),
        "dtype": _dtype(fields.raw, name),
        "eos_token_ids": _eos(fields.raw.get("eos_token_id", 2), fields.where),
    }


def _rope(fields: _Fields, name: str) -> tuple[float, Llama3Rope | None]:
    """Base and scaling of RoPE.

    transformers 5 writes rope_parameters; like it, prefer rope_scaling if both are there.
    """
    rope = fields.part("rope_scaling") or fields.part("rope_parameters") or _Fields({}, "")
    owner = rope if rope.has("rope_theta") else fields
    theta = owner.number("rope_theta") if owner.has("rope_theta") else 10_000.0
    kind = rope.raw.get("rope_type") or rope.raw.get("type") or "default"
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise CannotRun(
            f"{name}: rope type {kind!r} is not supported",
            hint="supported are plain rotary embeddings and llama3 scaling",
        )
    key = "original_max_position_embeddings"
    return theta, Llama3Rope(
        factor=rope.number("factor"),
        low_freq_factor=rope.number("low_freq_factor"),
        high_freq_factor=rope.number("high_freq_factor"),
        original_max_positions=(
            rope.count(key) if rope.has(key) else fields.count("max_position_embeddings", 2048)
        ),
    )


def _dtype(raw: Mapping[str, Any], name: str) -> Dtype:
    dtype = raw.get("dtype") or raw.get("torch_dtype") or "float32"
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


def _head_dim(fields: _Fields, name: str) -> int:
    """The head size that follows from the hidden size and the number of heads."""
    hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    if hidden % heads:
        raise UsageError(
            f"{name}: hidden_size {hidden} is not a multiple of {heads} attention heads",
            hint="compare config.json with the published one",
        )
    return hidden // heads
