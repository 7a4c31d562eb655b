"""A decoder-only model as layers of modules, and its forward pass straight down through them.

Knows neither dtypes nor devices nor tiers. A `Backend` computes the ops; an `Attend` reads the KV
cache and appends to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

from dakrun.config import ModelConfig
from dakrun.formats import QuantisedRows, WeightFormat
from dakrun.models.modules import Attention, Embedding, Linear, Matrix, Module
from dakrun.models.operands import Operand

if TYPE_CHECKING:
    import torch


class Backend(Protocol):
    """Computes the ops of a pass over n tokens."""

    def begin(self, n: int) -> None:
        """Start a pass of `n` tokens."""
        ...

    def embed(
        self, embedding: Embedding, tokens: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Hidden states [n, H] of tokens [n] at positions [n]."""
        ...

    def linear(
        self, linear: Linear, x: torch.Tensor, residual: torch.Tensor | None = None, /
    ) -> torch.Tensor:
        """`linear` of x [n, K], with its norms, bias and activation.

        A linear that `adds` has a residual of the result's shape, and may overwrite it.
        """
        ...

    def end(self) -> None:
        """End a pass, after its last launch."""
        ...


class Attend(Protocol):
    """Computes attention of a pass's tokens to their requests' caches and to themselves."""

    def __call__(self, attention: Attention, qkv: torch.Tensor) -> torch.Tensor:
        """Heads [n, Hq * D] of a fused projection [n, (Hq + 2 Hkv) * D].

        Applies the norms of query and key heads, and RoPE, and appends the new keys and values to
        the cache; may overwrite `qkv`.
        """
        ...


class FeedForward(Protocol):
    """The second half of a layer: any module that adds to hidden states."""

    def __call__(self, x: torch.Tensor, run: Backend) -> torch.Tensor:
        """New hidden states [n, H] of x [n, H], which may be overwritten."""
        ...

    def modules(self) -> Iterator[Module]:
        """The modules with an op of the plan, in the order of their use."""
        ...


class MLP:
    """A feed-forward of two matrices."""

    def __init__(self, up: Linear, down: Linear) -> None:
        self.up, self.down = up, down

    def __call__(self, x: torch.Tensor, run: Backend) -> torch.Tensor:
        """x + down(up(x))."""
        return run.linear(self.down, run.linear(self.up, x), x)

    def modules(self) -> Iterator[Module]:
        """Both matrices."""
        yield from (self.up, self.down)


class Layer:
    """Attention between its two projections, then a feed-forward, if the layer has one."""

    def __init__(
        self, qkv: Linear, attention: Attention, o: Linear, feed_forward: FeedForward | None
    ) -> None:
        self.qkv, self.attention, self.o, self.feed_forward = qkv, attention, o, feed_forward

    def __call__(self, x: torch.Tensor, run: Backend, attend: Attend) -> torch.Tensor:
        """New hidden states [n, H] of x [n, H], which may be overwritten."""
        heads = attend(self.attention, run.linear(self.qkv, x))
        x = run.linear(self.o, heads, x)
        return self.feed_forward(x, run) if self.feed_forward else x

    def modules(self) -> Iterator[Module]:
        """The modules with an op of the plan, in the order of their use."""
        yield from (self.qkv, self.attention, self.o)
        if self.feed_forward:
            yield from self.feed_forward.modules()


def passes_on_norm(ahead: Module, behind: Module) -> bool:
    """Whether the products with `ahead` and `behind` each do a part of the norm between them.

    True for an RMSNorm of the hidden states between two quantised matrices: it cannot be folded
    into `behind`. Kernels do so for few rows.
    """
    return (
        isinstance(ahead, Linear)
        and isinstance(behind, Linear)
        and all(isinstance(one.format, QuantisedRows) for one in (ahead, behind))
        and ahead.adds
        and ahead.post_norm is None
        and behind.norm is not None
        and behind.norm.kind == "rms"
    )


class Decoder:
    """A model: embedding, layers and lm_head.

    `project_out`, of OPT-350m alone, maps hidden states to the width of the word embeddings. Raises
    ValueError unless all matrices of an op have the same shape.
    """

    def __init__(
        self,
        config: ModelConfig,
        embedding: Embedding,
        layers: Sequence[Layer],
        head: Linear,
        project_out: Linear | None = None,
    ) -> None:
        self.config, self.embedding, self.layers = config, embedding, layers
        self.head, self.project_out = head, project_out
        firsts: dict[str, Matrix] = {}
        for matrix in self.matrices():
            first = firsts.setdefault(matrix.op, matrix)
            if matrix.shape != first.shape:
                raise ValueError(
                    f"expected one shape of all {matrix.op}, got {first.shape} in {first.name} and "
                    f"{matrix.shape} in {matrix.name}"
                )

    def store(self) -> None:
        """Give all matrices their formats. Those of an op whose formats differ become several ops.

        Layers of the first format keep the op's name; the others are "qkv.2", "qkv.3", ...
        """
        formats: dict[str, list[WeightFormat]] = {}
        for matrix in self.matrices():
            matrix.store(self.config)
            found = formats.setdefault(matrix.op, [])
            if matrix.format not in found:
                found.append(matrix.format)
            if number := found.index(matrix.format):
                matrix.op += f".{number + 1}"

    def forward(
        self,
        run: Backend,
        attend: Attend,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Logits [n, V] after tokens [n] at positions [n].

        With `rows`, integers [r], logits [r, V] after these tokens alone.
        """
        run.begin(len(tokens))
        x = self.hidden(run, attend, tokens, positions)
        return self.logits(run, x if rows is None else x[rows])

    def hidden(
        self, run: Backend, attend: Attend, tokens: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """The first half of a pass that has begun: the last layer's output [n, H]."""
        x = run.embed(self.embedding, tokens, positions)
        for layer in self.layers:
            x = layer(x, run, attend)
        return x

    def logits(self, run: Backend, x: torch.Tensor) -> torch.Tensor:
        """The second half, or a pass of its own: logits [r, V] of rows [r, H] of `hidden`."""
        if self.project_out:
            x = run.linear(self.project_out, x)
        logits = run.linear(self.head, x)
        run.end()
        return logits

    def modules(self) -> Iterator[Module]:
        """All modules with an op of the plan, in the order of their use."""
        yield from self.embedding.modules()
        for layer in self.layers:
            yield from layer.modules()
        if self.project_out:
            yield self.project_out
        yield self.head

    def matrices(self) -> Iterator[Matrix]:
        """All matrices, in the order of their use."""
        yield from (module for module in self.modules() if isinstance(module, Matrix))

    def vectors(self) -> Iterator[Operand]:
        """All operands beside matrices."""
        found = {} if (own := self.embedding.positions) is None else {own.name: own}
        for module in self.modules():  # which may share a norm
            found |= {vector.name: vector for vector in module.vectors()}
        yield from found.values()

    @cached_property
    def ops(self) -> Mapping[str, Sequence[Module]]:
        """Modules by op, in the order of their first use; modules of one op are alike."""
        found: dict[str, list[Module]] = {}
        for module in self.modules():
            found.setdefault(module.op, []).append(module)
        return found

    @cached_property
    def attentions(self) -> list[Attention]:
        """Attention of all layers that have it."""
        return [module for module in self.modules() if isinstance(module, Attention)]

    @cached_property
    def widths(self) -> Mapping[str, int]:
        """Columns of the hidden states, "x", and of the outputs of the layers' linear ops.

        Linear ops with a residual are left out: they write to the hidden states.
        """
        firsts = (modules[0] for modules in self.ops.values())
        inner = (of for of in firsts if isinstance(of, Linear) and of.layer is not None)
        return {"x": self.config.hidden_size} | {of.op: of.width for of in inner if not of.adds}
