"""The modules that models are made of: what each is stored as, and what a step asks of it.

A module of type `Module` says its op in the plan and its layer; a Matrix also has a name in the
whole model, such as "layers.3.qkv". Families (opt.py, llama.py) put modules together; planner,
loader and runners walk the modules. Knows neither devices nor tiers.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from dakrun.config import Activation, ModelConfig, NormKind
from dakrun.errors import CannotRun
from dakrun.formats import QuantisedRows, WeightFormat
from dakrun.models.operands import Operand, Scope, Source

if TYPE_CHECKING:
    import torch


class Norm:
    """An RMSNorm, which has a weight, or a LayerNorm, which has a weight and a bias.

    A LayerNorm that is not `affine` has neither.
    """

    def __init__(
        self, kind: NormKind, at: Scope, name: str, module: str, size: int, *, affine: bool = True
    ) -> None:
        def vector(part: str) -> Operand:
            return Operand(at.name(f"{name}.{part}"), at.sources({module: size}, part))

        self.kind = kind
        self.weight = vector("weight") if affine else None
        self.bias = vector("bias") if affine and kind == "layer" else None

    def vectors(self) -> Iterator[Operand]:
        """The weight and the bias, if there are any."""
        yield from (vector for vector in (self.weight, self.bias) if vector)


class Matrix(Operand):
    """A matrix W [M, K] whose row blocks the plan places.

    W stacks the weights of `modules`, which has their rows by name. Kernels expect the norm
    `folded` to be folded into W (weights/loading.py).
    """

    category: ClassVar[Literal["linear", "experts", "gather"]]
    norm: Norm | None = None  # ahead of W
    folded: Norm | None = None
    format: WeightFormat

    def __init__(
        self,
        at: Scope,
        op: str,
        modules: Mapping[str, int],
        cols: int,
        *,
        interleaved: bool = False,
    ) -> None:
        super().__init__(at.name(op), at.sources(modules, "weight", cols), interleaved=interleaved)
        self.op, self.layer = op, at.layer
        self.bias_name = f"{self.name}.bias"  # also of a bias that a folded norm adds
        self.shape: tuple[int, int] = (sum(modules.values()), cols)

    def store(self, c: ModelConfig) -> None:
        """Take the format that the model has for W: that of its modules, or 16 bits if they differ.

        No norm folds into a W of fewer than 16 bits: it stays as it is stored. Raises CannotRun if
        a module cannot have its format.
        """
        self.sources = tuple(_stored(source, c) for source in self.sources)
        first = self.sources[0]
        alike = all(source.stored == first.stored for source in self.sources)
        self.format = c.weight_format
        if alike and first.layout:
            self.format, self.folded = QuantisedRows(first.layout), None

    @property
    def quantised(self) -> bool:
        """Whether any of the sources is."""
        return any(source.stored for source in self.sources)

    def rows_read(self, tokens: int) -> float:
        """Rows of W that a pass of `tokens` tokens is expected to read."""
        raise NotImplementedError

    def flops(self, tokens: int) -> float:
        """FLOPs of a pass of `tokens` tokens."""
        raise NotImplementedError

    def vectors(self) -> Iterator[Operand]:
        """The operands beside W, which lie in the local tier."""
        yield from ()


def _stored(source: Source, c: ModelConfig) -> Source:
    """The source with the format that the checkpoint of `c` has for it."""
    stored = c.quantization and c.quantization.of(source.name.removesuffix(".weight"))
    if not stored:
        return source
    try:
        stored.parts(*source.shape)
        return source._replace(stored=stored, layout=stored.layout(c.dtype, source.shape[1]))
    except ValueError as problem:
        raise CannotRun(
            f"{c.name}: {source.name} cannot be {stored.name}: {problem}",
            hint="compare config.json with the published one",
        ) from None


class Table(Matrix):
    """A table of word embeddings, of which a pass reads a row for each token."""

    category = "gather"

    def rows_read(self, tokens: int) -> float:
        """One for each token."""
        return tokens

    def flops(self, tokens: int) -> float:
        """0: a pass copies rows."""
        return 0.0


class Linear(Matrix):
    """y = post_norm(activation(norm(x) W^T + bias) + residual), of x [n, K].

    y has `width` columns: M / 2 with silu_mul, where the first half of W's rows is the gate, else
    M. `adds`: whether there is a residual, which y may overwrite. With `folds` kernels expect
    `norm` folded into W.
    """

    category = "linear"

    def __init__(
        self,
        at: Scope,
        op: str,
        modules: Mapping[str, int],
        cols: int,
        *,
        bias: bool = False,
        norm: Norm | None = None,
        folds: bool = True,
        activation: Activation = "none",
        adds: bool = False,
        post_norm: Norm | None = None,
    ) -> None:
        gated = activation == "silu_mul"
        super().__init__(at, op, modules, cols, interleaved=gated)
        self.norm, self.post_norm, self.activation, self.adds = norm, post_norm, activation, adds
        self.folded = norm if folds else None
        self.width = self.shape[0] // 2 if gated else self.shape[0]
        self.bias = None
        if bias:
            self.bias = Operand(self.bias_name, at.sources(modules, "bias"), interleaved=gated)

    def rows_read(self, tokens: int) -> float:
        """All M rows."""
        return self.shape[0]

    def flops(self, tokens: int) -> float:
        """A multiplication and an addition for each token and element."""
        return 2.0 * tokens * self.shape[0] * self.shape[1]

    def vectors(self) -> Iterator[Operand]:
        """The bias, and the vectors of the norms."""
        if self.bias:
            yield self.bias
        for norm in (self.norm, self.post_norm):
            if norm:
                yield from norm.vectors()


class Attention:
    """Attention of a layer's new tokens to the cached positions of their requests.

    With `norms` each query head is normalized by the first RMSNorm, each key head by the second; if
    `norms_all_heads`, all heads of a token together. `self.norms` has the weights of both: [D], or
    [Hq * D] and [Hkv * D]. RoPE follows if `rotary`.
    """

    op = "attention"

    def __init__(
        self, c: ModelConfig, layer: int, *, rotary: bool, norms: Sequence[Norm] = ()
    ) -> None:
        self.layer, self.rotary = layer, rotary
        self.norms = [vector for norm in norms for vector in norm.vectors()]
        self.heads, self.kv_heads, self.head_dim = c.num_heads, c.num_kv_heads, c.head_dim
        self.scale = c.head_dim**-0.5
        self.norms_all_heads = any(weight.shape[0] > c.head_dim for weight in self.norms)

    def split(self, qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """q [n, Hq, D], k and v [n, Hkv, D] of a fused projection [n, (Hq + 2 Hkv) * D]; views."""
        heads = qkv.view(len(qkv), self.heads + 2 * self.kv_heads, self.head_dim)
        return heads.split((self.heads, self.kv_heads, self.kv_heads), dim=1)

    def vectors(self) -> Iterator[Operand]:
        """The weights of the norms."""
        yield from self.norms


Module = Matrix | Attention  # with an op of the plan
Fused = Literal["norms", "activation", "rope"]  # parts of ops


def without(module: Any, part: Fused) -> Any:
    """A copy of a module that leaves out a part, to be timed; None if the module has no such part.

    A linear op without its activation has M columns, for which there is no kept buffer.
    """
    found = copy.copy(module)
    if part == "norms" and isinstance(found, Linear) and (found.norm or found.post_norm):
        found.norm = found.folded = found.post_norm = None
    elif part == "activation" and isinstance(found, Linear) and found.activation != "none":
        found.op, found.activation, found.width = "", "none", found.shape[0]
    elif part == "rope" and isinstance(found, Attention) and found.rotary:
        found.rotary = False
    else:
        return None
    return found


@dataclass(frozen=True)
class Embedding:
    """Hidden states of tokens: rows of `table`, projected by `project` to another width if given.

    `table` is a Table, or the lm_head where both are one matrix. With learned `positions` row
    p + `offset` of these is added to the hidden state at position p.
    """

    table: Table | Linear
    project: Linear | None = None
    positions: Operand | None = None
    offset: int = 0

    def modules(self) -> Iterator[Matrix]:
        """The matrices that belong to the embedding alone, in the order of their use."""
        if isinstance(self.table, Table):
            yield self.table
        if self.project:
            yield self.project


def vocabulary(c: ModelConfig, at: Scope, norm: Norm | None) -> tuple[Table | Linear, Linear]:
    """The table of word embeddings and the lm_head with its `norm`: one matrix where they are tied.

    The norm does not fold into a matrix that is also the table.
    """
    words = {"embed_tokens": c.vocab_size}
    if c.tied_embeddings:
        head = Linear(at, "lm_head", words, c.embed_size, norm=norm, folds=False)
        return head, head
    head = Linear(Scope(""), "lm_head", {"lm_head": c.vocab_size}, c.embed_size, norm=norm)
    return Table(at, "embedding", words, c.embed_size), head
