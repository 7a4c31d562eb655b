"""The table of model families: which norms, projections, biases and activation a layer has.

`Family` is a row of the table; `Architecture` is that row with one model's sizes. The planner's
ops, the loader's manifest and the forward pass read it. Knows neither weights nor devices.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from dakrun.config import FamilyName, ModelConfig

Activation = Literal["none", "relu", "silu_mul"]
NormKind = Literal["rms", "layer"]


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family of models by the names that Hugging Face gives its modules.

    `root` is the decoder's prefix, which some checkpoints store without "model."; names of a layer
    are relative to its own prefix. `qkv` are the modules of queries, keys and values, or one of all
    of them; `qk_norms` are RMSNorms of each query and key head, before RoPE. `up` projects into the
    feed-forward width: one matrix, or gate and up, which `silu_mul` joins, from two modules or, in
    this order, from one; `ops` are the planner's names for `up` and `down`. Positions are rotary,
    or learned: the table `positions`, whose first `position_offset` rows are unused.
    """

    root: str
    norm: NormKind
    attention_norm: str
    ffn_norm: str
    final_norm: str
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    qk_norms: tuple[str, str] | None = None
    o: str
    up: tuple[str, ...]
    down: str
    ops: tuple[str, str]
    activation: Activation
    rotary: bool
    positions: str | None = None
    position_offset: int = 0


_LLAMA = Family(
    root="model.",
    norm="rms",
    attention_norm="input_layernorm",
    ffn_norm="post_attention_layernorm",
    final_norm="norm",
    o="self_attn.o_proj",
    up=("mlp.gate_proj", "mlp.up_proj"),
    down="mlp.down_proj",
    ops=("gate_up", "down"),
    activation="silu_mul",
    rotary=True,
)
FAMILIES: dict[FamilyName, Family] = {
    "opt": Family(
        root="model.decoder.",
        norm="layer",
        attention_norm="self_attn_layer_norm",
        ffn_norm="final_layer_norm",
        final_norm="final_layer_norm",
        o="self_attn.out_proj",
        up=("fc1",),
        down="fc2",
        ops=("fc1", "fc2"),
        activation="relu",
        rotary=False,
        positions="embed_positions",
        position_offset=2,
    ),
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": replace(_LLAMA, qk_norms=("self_attn.q_norm", "self_attn.k_norm")),
    "phi3": replace(_LLAMA, qkv=("self_attn.qkv_proj",), up=("mlp.gate_up_proj",)),
}


@dataclass(frozen=True)
class Norm:
    """A norm by its operand's `name` and its module's `source`, both relative to the layer.

    Its vectors are `name`.weight and, of a LayerNorm, `name`.bias; without `affine` it has neither.
    """

    name: str
    source: str
    kind: NormKind
    affine: bool

    @property
    def vectors(self) -> tuple[str, ...]:
        """Suffixes of the vectors: "weight", "bias"."""
        kinds = ("weight",) if self.kind == "rms" else ("weight", "bias")
        return kinds if self.affine else ()


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """A linear op: y = post_norm(activation(norm(x) W^T + bias) + residual).

    `op` is its name in a plan. W [rows, cols] stacks the weights of `sources`, (module, rows), each
    relative to the layer, or to the checkpoint for a name that begins with ".".
    """

    op: str
    sources: tuple[tuple[str, int], ...]
    cols: int
    bias: bool = False
    norm: Norm | None = None
    post_norm: Norm | None = None
    activation: Activation = "none"

    @property
    def rows(self) -> int:
        """Rows of all sources together: the M of the product."""
        return sum(rows for _, rows in self.sources)


@dataclass(frozen=True)
class Architecture:
    """A model as a list of matrices, norms and biases.

    All layers are alike. `head` is the lm_head, whose matrix is also the embedding table where the
    two are tied; else `embedding` is that table. `project_in` and `project_out` are OPT-350m's,
    between embeddings and hidden states of another width.
    """

    config: ModelConfig
    family: Family
    embedding: Matrix | None
    project_in: Matrix | None
    layer: tuple[Matrix, Matrix, Matrix, Matrix]
    project_out: Matrix | None
    head: Matrix

    @property
    def table(self) -> str:
        """Operand name of the embedding table."""
        return "lm_head" if self.embedding is None else "embedding"

    def step(self) -> Iterator[tuple[str, Matrix]]:
        """(operand name, matrix) of all matrices but `embedding`, in the order of their use."""
        if self.project_in:
            yield self.project_in.op, self.project_in
        for i in range(self.config.num_layers):
            yield from ((f"layers.{i}.{matrix.op}", matrix) for matrix in self.layer)
        if self.project_out:
            yield self.project_out.op, self.project_out
        yield self.head.op, self.head

    def matrices(self) -> Iterator[tuple[str, Matrix]]:
        """(operand name, matrix) of all matrices."""
        if self.embedding:
            yield self.embedding.op, self.embedding
        yield from self.step()

    def head_norms(self) -> Iterator[tuple[str, tuple[str, int]]]:
        """(operand name, (module, size)) of the weights of all norms of query and key heads."""
        if self.family.qk_norms:
            for i in range(self.config.num_layers):
                for kind, module in zip("qk", self.family.qk_norms, strict=True):
                    name = f"layers.{i}.{kind}_norm.weight"
                    yield name, (f"layers.{i}.{module}", self.config.head_dim)

    def norms(self) -> Iterator[tuple[str, Norm]]:
        """(operand name, norm) of all norms of hidden states."""
        for name, matrix in self.step():
            layer = name.removesuffix(matrix.op)
            for norm in (matrix.norm, matrix.post_norm):
                if norm:
                    yield f"{layer}{norm.name}", norm


@functools.cache
def architecture(config: ModelConfig) -> Architecture:
    """The architecture of `config`: its family's row of the table, with its sizes and switches."""
    c, family = config, FAMILIES[config.family]
    hidden, final = c.hidden_size, None
    projected = c.embed_size != hidden

    def norm(name: str, source: str) -> Norm:
        return Norm(name, source, family.norm, c.norm_affine)

    norms = norm("attention_norm", family.attention_norm), norm("ffn_norm", family.ffn_norm)
    pre_norms, post_norms = (norms, (None, None)) if c.pre_norm else ((None, None), norms)
    if c.final_norm:
        final = norm("final_norm", family.final_norm)
    up_op, down_op = family.ops
    heads = [c.q_size, c.kv_size, c.kv_size]
    if len(family.qkv) == 1:
        heads = [sum(heads)]
    ups = (2 if family.activation == "silu_mul" else 1) // len(family.up)  # of a module
    layer = (
        Matrix(
            op="qkv",
            sources=tuple(zip(family.qkv, heads, strict=True)),
            cols=hidden,
            bias=c.attention_bias,
            norm=pre_norms[0],
        ),
        Matrix(
            op="o",
            sources=((family.o, hidden),),
            cols=c.q_size,
            bias=c.o_bias,
            post_norm=post_norms[0],
        ),
        Matrix(
            op=up_op,
            sources=tuple((source, ups * c.ffn_size) for source in family.up),
            cols=hidden,
            bias=c.mlp_bias,
            norm=pre_norms[1],
            activation=family.activation,
        ),
        Matrix(
            op=down_op,
            sources=((family.down, hidden),),
            cols=c.ffn_size,
            bias=c.mlp_bias,
            post_norm=post_norms[1],
        ),
    )
    words = (("embed_tokens", c.vocab_size),)
    separate = ((".lm_head", c.vocab_size),)
    return Architecture(
        config,
        family,
        embedding=None
        if c.tied_embeddings
        else Matrix(op="embedding", sources=words, cols=c.embed_size),
        project_in=Matrix(op="project_in", sources=(("project_in", hidden),), cols=c.embed_size)
        if projected
        else None,
        layer=layer,
        project_out=Matrix(
            op="project_out", sources=(("project_out", c.embed_size),), cols=hidden, norm=final
        )
        if projected
        else None,
        head=Matrix(
            op="lm_head",
            sources=words if c.tied_embeddings else separate,
            cols=c.embed_size,
            norm=None if projected else final,
        ),
    )
