"""Descriptions of a run: the model's architecture, the workload and the sampling parameters.

Frozen dataclasses, validated on construction; know neither files nor hardware. models/hf_config.py
translates a config.json into a ModelConfig.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from dakrun.errors import (
    UsageError,
    check_count,
    check_number,
    invalid_value,
    refuse_unsupported,
)
from dakrun.formats import KVLayout, Quantization, Rows, WeightFormat
from dakrun.grammars import StructuredOutputsParams

Dtype = Literal["float32", "float16", "bfloat16"]
NormKind = Literal["rms", "layer"]  # RMSNorm, LayerNorm
Activation = Literal["none", "relu", "silu_mul"]  # silu_mul: silu(gate) * up
LoadFormat = Literal["auto", "dummy"]  # a checkpoint's weights, or random ones
DEFAULT_MAX_MODEL_LEN = 4096  # by default, where a model has more positions
DTYPE_BYTES: dict[Dtype, int] = {"float32": 4, "float16": 2, "bfloat16": 2}
MAX_LAYERS, MAX_SIZE = 1_000, 2**31 - 1  # of a model; beyond them its config.json is wrong
_HINT = "compare config.json with the published one"
_FLAGS = (
    *("tied_embeddings", "attention_bias", "o_bias", "mlp_bias"),
    *("pre_norm", "final_norm", "norm_affine"),
)


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
            hint=_HINT,
        )


RopeScaling = LinearRope | YarnRope | LongRope | Llama3Rope
FamilyName = Literal[
    "opt", "llama", "mistral", "qwen2", "qwen3", "phi3", "qwen3_moe", "mixtral", "olmoe", "glm4_moe"
]  # fmt: skip
Scores = Literal["softmax", "sigmoid"]


@dataclass(frozen=True, kw_only=True)
class Routing:
    """How a router chooses `top_k` of `experts` experts for a token, and weighs their results.

    An expert's score is its part of the softmax of the router's logits, or the sigmoid of its own.
    Experts of the highest score are chosen, with `biased` of the highest sum of score and bias;
    of equal ones those of the lowest index. Of `groups` groups of experts only the `top_groups`
    take part whose two highest experts have the highest sum. The weights are the scores, with
    `renormalized` divided by their sum, times `scale`.
    """

    experts: int
    top_k: int
    scores: Scores = "softmax"
    renormalized: bool = True
    biased: bool = False
    groups: int = 1
    top_groups: int = 1
    scale: float = 1.0

    def __post_init__(self) -> None:
        size, rest = divmod(self.experts, self.groups)
        if rest or self.top_groups > self.groups or (self.groups > 1 and size < 2):
            raise UsageError(
                f"{self.top_groups} of {self.groups} groups of {self.experts} experts cannot be "
                "chosen",
                hint=_HINT,
            )
        if self.top_k > self.top_groups * size:
            raise UsageError(
                f"{self.top_k} experts a token cannot be chosen of {self.top_groups * size}",
                hint=_HINT,
            )


@dataclass(frozen=True, kw_only=True)
class MixtureConfig:
    """Feed-forwards of experts, of `ffn_size` each, in all layers but `dense_layers`.

    Experts that all tokens share have `shared_size` together.
    """

    routing: Routing
    ffn_size: int
    shared_size: int = 0
    dense_layers: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Architecture of a decoder of one `family`. Raises UsageError for sizes that do not match.

    `ffn_size` is OPT's ffn_dim and others' intermediate_size. Only OPT-350m projects its word
    embeddings (`embed_size` is not `hidden_size`) and normalizes after attention and MLP
    (`pre_norm` is False). `attention_bias` is that of queries, keys and values, `o_bias` that of
    attention's output. `max_positions` are those that the model can attend to as it is run here;
    `limited_by` says what limits them, if that is not the table of positions. `dtype` is that of
    weights, KV cache and activations; `quantization` says which weights have fewer bits. RoPE
    rotates the first `rotary_factor` of each head.
    `head_norms` says whether query and key heads are normalized, in a family whose models differ
    in it. A checkpoint has `extra_layers` behind the last layer, which are left out.
    """

    name: str
    family: FamilyName
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
    o_bias: bool = False
    mlp_bias: bool = False
    pre_norm: bool = True
    final_norm: bool = True
    norm_affine: bool = True
    norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    limited_by: str = ""
    mixture: MixtureConfig | None = None
    rotary_factor: float = 1.0
    head_norms: bool = False
    extra_layers: int = 0
    eos_token_ids: tuple[int, ...] = ()
    quantization: Quantization | None = None

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "hidden_size", "ffn_size", "num_layers", "num_heads")
        for field in (*sizes, "num_kv_heads", "head_dim", "max_positions", "embed_size"):
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UsageError(
                    f"{self.name}: {field} is {value!r}, not a positive integer",
                    hint=_HINT,
                )
            if value > (most := MAX_LAYERS if field == "num_layers" else MAX_SIZE):
                raise UsageError(
                    f"{self.name}: {field} is {value:,}, above the maximum of {most:,}", hint=_HINT
                )
        for field in _FLAGS:
            if not isinstance(getattr(self, field), bool):
                raise UsageError(
                    f"{self.name}: {field} is {getattr(self, field)!r}, not true or false",
                    hint=_HINT,
                )
        for field in ("norm_eps", "rope_theta"):
            if not 0 < getattr(self, field) < math.inf:
                raise UsageError(
                    f"{self.name}: {field} is {getattr(self, field)!r}, not a positive number",
                    hint=_HINT,
                )
        if self.num_heads % self.num_kv_heads:
            raise UsageError(
                f"{self.name}: {self.num_heads} query heads cannot share "
                f"{self.num_kv_heads} key-value heads evenly",
                hint="num_attention_heads must be a multiple of num_key_value_heads",
            )
        if self.family != "opt" and (self.rotary_dim % 2 or not 0 < self.rotary_factor <= 1):
            part = "" if self.rotary_factor == 1 else f" times {self.rotary_factor}"
            raise UsageError(
                f"{self.name}: rotary embeddings need an even head_dim, not {self.head_dim}{part}",
                hint="compare head_dim in config.json with the published one",
            )

    @property
    def rotary_dim(self) -> int:
        """Columns of a head that RoPE rotates, from the first on."""
        return int(self.head_dim * self.rotary_factor)

    @property
    def q_size(self) -> int:
        """Columns of the queries: all query heads side by side."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Columns of the keys, and of the values: all KV heads side by side."""
        return self.num_kv_heads * self.head_dim

    @property
    def weight_format(self) -> WeightFormat:
        """How a checkpoint in `dtype` stores matrices that are not quantized."""
        return Rows(DTYPE_BYTES[self.dtype])

    @property
    def kv_layout(self) -> KVLayout:
        """The layout of the KV cache, in `dtype`."""
        return KVLayout(self.num_kv_heads, self.head_dim, DTYPE_BYTES[self.dtype])

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of a token's keys and values in all layers."""
        return self.num_layers * self.kv_layout.position_bytes

    def with_dtype(self, dtype: Dtype) -> "ModelConfig":
        """The same model, stored and computed in `dtype`."""
        return replace(self, dtype=dtype)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The requests to plan for. Lengths are in tokens.

    Up to `batch_size` requests decode together, each of up to `max_model_len` positions of the KV
    cache. `prompt_len` and `new_tokens` are the expected lengths of prompt and completion.
    """

    batch_size: int
    prompt_len: int
    new_tokens: int
    max_model_len: int

    def __post_init__(self) -> None:
        for field in ("batch_size", "prompt_len", "new_tokens", "max_model_len"):
            object.__setattr__(self, field, check_count(field, getattr(self, field)))

    @property
    def mean_kv_len(self) -> float:
        """Mean number of cached positions that a decode step reads from a slot."""
        return min(self.prompt_len + self.new_tokens / 2, self.max_model_len)


MAX_LOGPROBS = 20  # maximum of SamplingParams.logprobs and prompt_logprobs
MAX_BIASES = 1024  # tokens in SamplingParams.logit_bias
MAX_BAD_TOKENS = 4096  # tokens of SamplingParams.bad_words, in all
MAX_BIAS = 100.0
# Options of SamplingParams by which the choice differs from that of the model's own logits.
ADJUSTING = (
    *("min_p", "min_tokens", "bad_words", "logit_bias"),
    *("repetition_penalty", "frequency_penalty", "presence_penalty"),
)
MAX_SEED_BITS = 96
SEED_BITS = 64  # of the seed of a request with several choices: their numbers are added above them

# Sampling options that are not supported, and their values that change nothing.
NEUTRAL_SAMPLING: Mapping[str, tuple[object, ...]] = {
    "best_of": (1,),
    "skip_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
}
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    **NEUTRAL_SAMPLING,
    "detokenize": (True,),
    "extra_args": ({},),
    "flat_logprobs": (False,),
    "logits_processors": ([],),
    "spaces_between_special_tokens": (True,),
}


@dataclass(frozen=True, init=False)
class SamplingParams:
    """Sampling parameters and stop conditions of a request.

    Temperature 0 is greedy; top_k 0 (or -1) and top_p 1 keep all tokens. A request ends at a stop
    string, at `max_tokens`, at one of `stop_token_ids`, or at an end-of-sequence token unless
    `ignore_eos`. With `max_tokens` None it may fill the model's positions, or max_model_len.
    `stop` is a string or several. Stop strings are searched in the text with special tokens
    spelled out. The result depends on `seed`, of up to 96 bits (None is 0), and on the request, not
    on the other requests in the batch. A prompt of the Python API gets `n` completions, with a
    seed each. With `logprobs`, a number up to MAX_LOGPROBS, the result has for each new token its
    log-probability, and those of this many likeliest tokens in its place. With `prompt_logprobs`
    it has them for each token of the prompt but the first; `max_tokens` may then be 0.

    `min_p` keeps tokens that have at least this part of the likeliest one's probability. None of
    the first `min_tokens` tokens is an end-of-sequence token or one of `stop_token_ids`, and stop
    strings are searched behind them. Of `bad_words`, which are strings or sequences of token ids,
    the last token is never chosen behind the others. `logit_bias` has a number for each of some
    token ids, which is added to the token's logit. Then `repetition_penalty` divides the positive
    logits, and multiplies the others, of tokens in the prompt or the completion.
    `frequency_penalty` is subtracted for each time that a token is in the completion, and
    `presence_penalty` once. Log-probabilities are the model's own all the same.

    `structured_outputs` is the form that an answer must have, StructuredOutputsParams or a mapping
    with its keywords. An answer with a form ends where its grammar does, also with `ignore_eos`.
    A thought that has `thinking_token_budget` tokens is closed.

    Other sampling options of vLLM are taken where their value changes nothing. Raises UsageError,
    which names the option, for any other, and for wrong values.
    """

    max_tokens: int | None
    temperature: float
    top_k: int
    top_p: float
    seed: int
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    logprobs: int | None
    prompt_logprobs: int | None
    n: int
    min_p: float
    min_tokens: int
    bad_words: tuple[str | tuple[int, ...], ...]
    logit_bias: tuple[tuple[int, float], ...]  # in the order of the ids
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    structured_outputs: StructuredOutputsParams | None
    thinking_token_budget: int | None

    def __init__(
        self,
        *,
        max_tokens: int | None = 128,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int | None = 0,
        stop: str | Sequence[str] | None = (),
        stop_token_ids: Sequence[int] | None = (),
        ignore_eos: bool = False,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        n: int = 1,
        min_p: float = 0.0,
        min_tokens: int = 0,
        bad_words: Sequence[str | Sequence[int]] | None = (),
        logit_bias: Mapping[int | str, float] | Sequence[tuple[int, float]] | None = (),
        repetition_penalty: float = 1.0,
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = None,
        thinking_token_budget: int | None = None,
        **other: Any,
    ) -> None:
        refuse_unsupported(other, _NEUTRAL, [field.name for field in fields(self)])
        logprobs = _count_of_likeliest("logprobs", logprobs)
        prompt_logprobs = _count_of_likeliest("prompt_logprobs", prompt_logprobs)
        if max_tokens == 0 and prompt_logprobs is None:
            least = "at least 1, or 0 with prompt_logprobs (with echo in a Batch row)"
            raise invalid_value("max_tokens", max_tokens, least)
        top_k = check_count("top_k", top_k, -1)
        seed = check_count("seed", 0 if seed is None else seed, 0)
        n = check_count("n", n)
        bits = MAX_SEED_BITS if n == 1 else SEED_BITS
        if seed >> bits:
            among = "" if n == 1 else f" with n {n}"
            raise UsageError(
                f"seed has {seed.bit_length()} bits{among}", hint=f"at most {bits} are read"
            )
        top_p = check_number("top_p", top_p, 0.0, 1.0)
        if top_p == 0:
            raise invalid_value("top_p", 0, "above 0")
        if not isinstance(ignore_eos, bool):
            raise invalid_value("ignore_eos", ignore_eos, "a bool")
        values = {
            "max_tokens": check_count("max_tokens", max_tokens, 0, or_one_of=(None,)),
            "temperature": check_number("temperature", temperature, 0.0, 100.0),
            "top_k": max(0, top_k),
            "top_p": top_p,
            "seed": seed,
            "stop": _stop_strings(stop),
            "stop_token_ids": _stop_tokens(stop_token_ids),
            "ignore_eos": ignore_eos,
            "logprobs": logprobs,
            "prompt_logprobs": prompt_logprobs,
            "n": n,
            "min_p": check_number("min_p", min_p, 0.0, 1.0),
            "min_tokens": check_count("min_tokens", min_tokens, 0),
            "bad_words": _bad_words(bad_words),
            "logit_bias": _logit_bias(logit_bias),
            "repetition_penalty": check_number("repetition_penalty", repetition_penalty, 0.0),
            "frequency_penalty": check_number("frequency_penalty", frequency_penalty, -2.0, 2.0),
            "presence_penalty": check_number("presence_penalty", presence_penalty, -2.0, 2.0),
            "structured_outputs": None
            if structured_outputs is None
            else StructuredOutputsParams.of(structured_outputs),
            "thinking_token_budget": check_count(
                "thinking_token_budget", thinking_token_budget, 0, or_one_of=(None,)
            ),
        }
        if repetition_penalty == 0:
            raise invalid_value("repetition_penalty", 0, "above 0")
        least, most = values["min_tokens"], values["max_tokens"]
        if most is not None and least > most:
            raise UsageError(
                f"min_tokens is {least}, above max_tokens, {most}",
                hint="min_tokens must be at most max_tokens",
            )
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def penalizes(self) -> bool:
        """Whether logits depend on which tokens the prompt and the completion have."""
        penalties = (self.repetition_penalty, self.frequency_penalty, self.presence_penalty)
        return penalties != (1, 0, 0)

    @property
    def adjusts(self) -> bool:
        """Whether logits of single tokens are changed, or tokens forbidden."""
        return self.penalizes or bool(self.min_tokens or self.bad_words or self.logit_bias)

    def limit(self, room: int) -> int:
        """The most tokens of a completion that has room for `room` of them."""
        return room if self.max_tokens is None else min(self.max_tokens, room)


def _count_of_likeliest(name: str, given: object) -> int | None:
    count: int | None = check_count(name, given, 0, or_one_of=(None,))
    if count is not None and count > MAX_LOGPROBS:
        raise invalid_value(name, count, f"at most {MAX_LOGPROBS}")
    return count


def _stop_strings(stop: object) -> tuple[str, ...]:
    given = (stop,) if isinstance(stop, str) else () if stop is None else stop
    if not isinstance(given, tuple | list):
        raise invalid_value("stop", stop, "a string, a list of strings or None")
    if not all(isinstance(text, str) and text for text in given):
        raise invalid_value("stop", list(given), "made of non-empty strings")
    return tuple(given)


def _bad_words(given: object) -> tuple[str | tuple[int, ...], ...]:
    words = () if given is None else given
    if not isinstance(words, tuple | list):
        raise invalid_value("bad_words", given, "a list of strings and of lists of token ids")
    found: list[str | tuple[int, ...]] = []
    for word in words:
        if isinstance(word, str) and word.strip():
            found.append(word)
        elif isinstance(word, tuple | list) and word and all(map(_is_token, word)):
            found.append(tuple(word))
        else:
            expected = "made of strings that are not blank and lists of token ids, not empty"
            raise invalid_value("bad_words", list(words), expected)
    tokens = sum(1 if isinstance(word, str) else len(word) for word in found)
    if tokens > MAX_BAD_TOKENS:
        raise UsageError(
            f"bad_words have {tokens} tokens", hint=f"at most {MAX_BAD_TOKENS} are supported"
        )
    return tuple(found)


def _logit_bias(given: object) -> tuple[tuple[int, float], ...]:
    """The biases by token in a mapping, whose keys may be strings as in JSON, or in pairs."""
    biases = dict(given or ()) if isinstance(given, Mapping | tuple | None) else given
    if not isinstance(biases, dict):
        raise invalid_value("logit_bias", given, "numbers by token id")
    found: dict[int, float] = {}
    for key, bias in biases.items():
        token = int(key) if isinstance(key, str) and key.isdecimal() else key
        if not _is_token(token):
            raise invalid_value("logit_bias", {key: bias}, "numbers by token id, from 0")
        if token in found:
            raise UsageError(f"logit_bias has token {token} twice", hint="name each token once")
        name = f"logit_bias of token {token}"
        found[token] = check_number(name, bias, -MAX_BIAS, MAX_BIAS)
    if len(found) > MAX_BIASES:
        raise UsageError(
            f"logit_bias has {len(found)} tokens", hint=f"at most {MAX_BIASES} are supported"
        )
    return tuple(sorted(found.items()))


def _is_token(value: object) -> bool:
    return type(value) is int and value >= 0


def _stop_tokens(ids: object) -> tuple[int, ...]:
    given = () if ids is None else ids
    if not isinstance(given, tuple | list):
        raise invalid_value("stop_token_ids", ids, "a list of token ids or None")
    if not all(map(_is_token, given)):
        raise invalid_value("stop_token_ids", list(given), "made of token ids, from 0")
    return tuple(given)


def model_len(config: ModelConfig, given: int | None) -> int:
    """Maximum tokens of a prompt and its completion: `given`, or what the model allows by default.

    That is its positions, but at most DEFAULT_MAX_MODEL_LEN.
    """
    return given or min(config.max_positions, DEFAULT_MAX_MODEL_LEN)
