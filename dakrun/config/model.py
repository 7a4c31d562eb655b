"""A model's architecture, and the requests to plan for.

Frozen dataclasses, validated on construction; know neither files nor hardware. models/hf_config.py
translates a config.json into a ModelConfig.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from dakrun.config.popularity import Popularity
from dakrun.config.rope import LongRope, RopeScaling
from dakrun.config.speculation import OFF, Speculation
from dakrun.errors import UsageError, check_count
from dakrun.formats import KVLayout, Quantization, Rows, WeightFormat

Dtype = Literal["float32", "float16", "bfloat16"]
NormKind = Literal["rms", "layer"]  # RMSNorm, LayerNorm
Activation = Literal["none", "relu", "silu_mul"]  # silu_mul: silu(gate) * up
FamilyName = Literal[
    "opt", "llama", "mistral", "qwen2", "qwen3", "phi3", "qwen3_moe", "mixtral", "olmoe", "glm4_moe"
]  # fmt: skip
Scores = Literal["softmax", "sigmoid"]
LoadFormat = Literal["auto", "dummy"]  # a checkpoint's weights, or random ones
DEFAULT_MAX_MODEL_LEN = 4096  # by default, where a model has more positions
DTYPE_BYTES: dict[Dtype, int] = {"float32": 4, "float16": 2, "bfloat16": 2}
MAX_LAYERS, MAX_SIZE = 1_000, 2**31 - 1  # of a model; beyond them its config.json is wrong
_HINT = "compare config.json with the published one"
_FLAGS = (
    *("tied_embeddings", "attention_bias", "o_bias", "mlp_bias"),
    *("pre_norm", "final_norm", "norm_affine"),
)


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

    Experts that all tokens share have `shared_size` together. `popularity` is what is known of
    their use, which decides their order in stacked matrices; None: nothing. Random routers choose
    by the popularity `choices`, if there is one.
    """

    routing: Routing
    ffn_size: int
    shared_size: int = 0
    dense_layers: tuple[int, ...] = ()
    popularity: Popularity | None = None
    choices: Popularity | None = None

    def order(self, layer: int) -> Sequence[int]:
        """The experts of `layer` in the order in which its matrices stack them."""
        if self.popularity is None:
            return range(self.routing.experts)
        return self.popularity.orders[layer - sum(dense < layer for dense in self.dense_layers)]


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
    in it. A checkpoint has `extra_layers` behind the last layer, which are left out. Tokens of
    `eos_token_ids` outside the vocabulary are dropped: the model cannot choose them.
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
        ends = tuple(token for token in self.eos_token_ids if 0 <= token < self.vocab_size)
        object.__setattr__(self, "eos_token_ids", ends)
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
        rope, pairs = self.rope_scaling, self.rotary_dim // 2
        if isinstance(rope, LongRope) and len(rope.factors) != pairs:
            raise UsageError(
                f"{self.name}: longrope has {len(rope.factors)} short factors, not {pairs}: "
                "one for every two columns that RoPE rotates",
                hint=_HINT,
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
    cache. `prompt_len` and `new_tokens` are the expected lengths of prompt and completion. Of a
    prompt, the first `shared_len` tokens have been computed for others. `speculation` says how
    many drafted tokens of a request steps carry. Memory has KV blocks for `kept_len` positions of
    each slot; None: for those of the expected lengths.
    """

    batch_size: int
    prompt_len: int
    new_tokens: int
    max_model_len: int
    speculation: Speculation = OFF
    shared_len: int = 0
    kept_len: int | None = None

    def __post_init__(self) -> None:
        for field in ("batch_size", "prompt_len", "new_tokens", "max_model_len"):
            object.__setattr__(self, field, check_count(field, getattr(self, field)))
        if self.kept_len is not None:
            check_count("kept_len", self.kept_len)

    @property
    def mean_kv_len(self) -> float:
        """Mean number of cached positions that a decode step reads from a slot."""
        return min(self.prompt_len + self.new_tokens / 2, self.max_model_len)


def model_len(config: ModelConfig, given: int | None) -> int:
    """Maximum tokens of a prompt and its completion: `given`, or what the model allows by default.

    That is its positions, but at most DEFAULT_MAX_MODEL_LEN.
    """
    return given or min(config.max_positions, DEFAULT_MAX_MODEL_LEN)
