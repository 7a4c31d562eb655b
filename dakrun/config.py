"""What a run is asked to do: the model's architecture, the workload and the sampling.

Frozen and validated; knows Hugging Face's config.json, but neither weights nor hardware.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from dakrun.errors import CannotRun, UsageError

Dtype = Literal["float32", "float16", "bfloat16"]
DTYPE_BYTES: dict[Dtype, int] = {"float32": 4, "float16": 2, "bfloat16": 2}
_SWITCHES = (
    *("tied_embeddings", "attention_bias", "mlp_bias"),
    *("pre_norm", "final_norm", "norm_affine"),
)
SUPPORTED_ARCHITECTURES = "OPTForCausalLM and LlamaForCausalLM"


@dataclass(frozen=True)
class Llama3Rope:
    """Frequency scaling of Llama 3.1's RoPE (`rope_type: llama3` in config.json)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int

    def __post_init__(self) -> None:
        if self.factor < 1 or self.high_freq_factor <= self.low_freq_factor:
            raise UsageError(
                f"llama3 rope with factor {self.factor} and frequency factors "
                f"{self.low_freq_factor} to {self.high_freq_factor} makes no sense",
                hint="config.json: factor >= 1 and high_freq_factor > low_freq_factor are needed",
            )


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Architecture of an OPT or Llama decoder.

    `ffn_size` is OPT's ffn_dim and Llama's intermediate_size; `embed_size` differs from
    `hidden_size` only where OPT projects its word embeddings (350m); `pre_norm` is False only
    there, too. `dtype` is the checkpoint's.
    """

    name: str
    family: Literal["opt", "llama"]
    vocab_size: int
    hidden_size: int
    ffn_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    embed_size: int
    tied_embeddings: bool
    dtype: Dtype = "float16"
    attention_bias: bool = False
    mlp_bias: bool = False
    pre_norm: bool = True
    final_norm: bool = True
    norm_affine: bool = True
    norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    rope_scaling: Llama3Rope | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "hidden_size", "ffn_size", "num_layers", "num_heads")
        for field in (*sizes, "num_kv_heads", "head_dim", "max_positions", "embed_size"):
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UsageError(
                    f"{self.name}: {field} is {value!r}, not a positive integer",
                    hint="check config.json against the one that the model was published with",
                )
        for field in _SWITCHES:
            if not isinstance(getattr(self, field), bool):
                raise UsageError(
                    f"{self.name}: {field} is {getattr(self, field)!r}, not true or false",
                    hint="check config.json against the one that the model was published with",
                )
        if self.num_heads % self.num_kv_heads:
            raise UsageError(
                f"{self.name}: {self.num_heads} query heads cannot share "
                f"{self.num_kv_heads} key-value heads evenly",
                hint="num_attention_heads must be a multiple of num_key_value_heads",
            )
        if self.family == "llama" and self.head_dim % 2:
            raise UsageError(
                f"{self.name}: rotary embeddings need an even head_dim, not {self.head_dim}",
                hint="check head_dim in config.json",
            )

    @property
    def q_size(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads together; the value heads are as wide."""
        return self.num_kv_heads * self.head_dim

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values that one token keeps over all layers, in `dtype`."""
        return 2 * self.num_layers * self.kv_size * DTYPE_BYTES[self.dtype]

    def with_dtype(self, dtype: Dtype) -> "ModelConfig":
        """The same model computed and stored in `dtype`."""
        return replace(self, dtype=dtype)

    @classmethod
    def from_directory(cls, directory: Path) -> "ModelConfig":
        """Read `config.json` (and the EOS ids of `generation_config.json`) of a checkpoint.

        Raises UsageError where the folder or the JSON is wrong, CannotRun where the
        architecture is not supported.
        """
        if not directory.is_dir():
            raise UsageError(
                f"{directory}: no such model directory",
                hint="give a folder with config.json and safetensors files, or a hub id",
            )
        raw = read_json_object(directory / "config.json")
        generation = directory / "generation_config.json"
        if generation.is_file():
            eos = read_json_object(generation).get("eos_token_id")
            raw = raw if eos is None else {**raw, "eos_token_id": eos}
        return cls.from_hf(raw, name=directory.resolve().name)

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], *, name: str) -> "ModelConfig":
        """Translate the contents of a Hugging Face config.json."""
        if raw.get("quantization_config"):
            method = raw["quantization_config"]
            method = method.get("quant_method", "unknown") if isinstance(method, dict) else method
            raise CannotRun(
                f"{name}: the checkpoint is quantised ({method})",
                hint="use the float16, bfloat16 or float32 checkpoint that it was made from",
            )
        family = raw.get("model_type")
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
        except (TypeError, ValueError, AttributeError) as problem:
            raise UsageError(
                f"{name}: config.json does not describe a model ({problem})",
                hint="take config.json from the place where the model was published",
            ) from None
        listed = raw.get("architectures")
        architecture = listed[0] if isinstance(listed, list) and listed else family
        raise CannotRun(
            f"{name}: architecture {architecture or '(none named)'} is not supported",
            hint=f"dakrun runs {SUPPORTED_ARCHITECTURES}",
        )


@dataclass(frozen=True, kw_only=True)
class Workload:
    """How many requests decode together, and how long they are (in tokens).

    `max_model_len` positions of KV cache are kept for each of the `batch_size` slots.
    """

    batch_size: int
    prompt_len: int
    new_tokens: int
    max_model_len: int

    def __post_init__(self) -> None:
        for field in ("batch_size", "prompt_len", "new_tokens", "max_model_len"):
            if getattr(self, field) < 1:
                raise UsageError(
                    f"{field.replace('_', ' ')} is {getattr(self, field)}",
                    hint="it must be at least 1",
                )

    @property
    def mean_kv_len(self) -> float:
        """Mean number of cached positions that a decode step reads from a slot."""
        return min(self.prompt_len + self.new_tokens / 2, self.max_model_len)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request's tokens are chosen and when it ends.

    temperature 0 is greedy; top_k 0 and top_p 1 keep all tokens. The result depends on
    `seed` and the request alone, not on what else is in the batch.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        whole = {"max_tokens": 1, "top_k": 0, "seed": 0}
        for field, least in whole.items():
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise _bad_sampling(field, value, f"an integer of at least {least}")
        for field, low, high in (("temperature", 0.0, 100.0), ("top_p", 0.0, 1.0)):
            value = getattr(self, field)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not low <= value <= high:
                raise _bad_sampling(field, value, f"a number from {low:g} to {high:g}")
        if self.top_p == 0:
            raise _bad_sampling("top_p", 0, "above 0")
        if not all(isinstance(s, str) and s for s in self.stop):
            raise _bad_sampling("stop", list(self.stop), "made of non-empty strings")


def _bad_sampling(field: str, value: object, expected: str) -> UsageError:
    return UsageError(f"{field} is {value!r}", hint=f"{field} must be {expected}")


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; UsageError where there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(
            f"{path}: no such file", hint="a Hugging Face model directory is needed"
        ) from None
    except (OSError, ValueError) as problem:
        raise UsageError(f"{path}: cannot be read ({problem})", hint="copy it anew") from None
    if not isinstance(value, dict):
        raise UsageError(f"{path}: holds no JSON object", hint="copy it anew")
    return value


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
        eos_token_ids=_eos(raw.get("eos_token_id", 2)),
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
        eos_token_ids=_eos(raw.get("eos_token_id", 2)),
    )


def _rope(raw: Mapping[str, Any], name: str) -> tuple[float, Llama3Rope | None]:
    """RoPE base and scaling; transformers 5 writes rope_parameters, older ones rope_scaling."""
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = float(rope.get("rope_theta") or raw.get("rope_theta") or 10_000.0)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise CannotRun(
            f"{name}: rope type {kind!r} is not supported",
            hint="dakrun knows plain rotary embeddings and llama3 scaling",
        )
    original = rope.get("original_max_position_embeddings") or raw["max_position_embeddings"]
    return theta, Llama3Rope(
        factor=float(rope["factor"]),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_max_positions=int(original),
    )


def _dtype(raw: Mapping[str, Any], name: str) -> Dtype:
    dtype = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    if dtype not in DTYPE_BYTES:
        raise CannotRun(
            f"{name}: dtype {dtype!r} is not supported",
            hint="float32, float16 and bfloat16 checkpoints are",
        )
    return dtype


def _eos(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(int(v) for v in value) if isinstance(value, list) else (int(value),)


def _divide(hidden: int, heads: int, name: str) -> int:
    if not isinstance(heads, int) or heads < 1 or hidden % heads:
        raise UsageError(
            f"{name}: hidden_size {hidden} is not a multiple of {heads} attention heads",
            hint="check config.json against the one that the model was published with",
        )
    return hidden // heads
