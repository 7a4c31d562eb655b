"""A feed-forward of experts (Shazeer et al., arXiv 1701.06538): a router chooses few for a token.

Knows what the modules are stored as and what a step asks of them, not how experts are chosen.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

from dakrun.config import MixtureConfig, Routing
from dakrun.models.decoder import MLP, Backend, Decoder
from dakrun.models.modules import Matrix, Module, Norm
from dakrun.models.operands import Operand, Scope, Source

if TYPE_CHECKING:
    import torch


class Router:
    """The router of a layer: its weight [E, H] and its bias [E], if any, both in float32.

    Stacked matrices have the experts in `order`: `stack_indices` has the index of each in the
    stack, None where all are in the order of their numbers. Rows of weight and bias, and what is
    chosen of equal scores, go by numbers. `joined` is another name of the weight.
    """

    def __init__(
        self,
        at: Scope,
        module: str,
        routing: Routing,
        hidden: int,
        *,
        order: Sequence[int],
        joined: str | None = None,
    ) -> None:
        def operand(part: str, stored: str, *cols: int, joined: str | None = None) -> Operand:
            sources = at.sources({module: routing.experts}, stored, *cols)
            other = Source(f"{at.prefix}{joined}", sources[0].shape) if joined else None
            return Operand(at.name(f"router.{part}"), sources, wide=True, joined=other)

        self.layer, self.routing, self.order = at.layer, routing, order
        indices = tuple(sorted(range(routing.experts), key=order.__getitem__))
        in_order = indices == tuple(range(routing.experts))
        self.stack_indices = None if in_order else indices
        self.weight = operand("weight", "weight", hidden, joined=joined)
        self.bias = operand("bias", "e_score_correction_bias") if routing.biased else None

    def vectors(self) -> Iterator[Operand]:
        """The weight, and the bias if there is one."""
        yield from (operand for operand in (self.weight, self.bias) if operand)


class Experts(Matrix):
    """The matrices [M, K] of all experts of a layer, stacked: [E M, K], expert after expert.

    They are stacked in `order`, by number. `modules` has the rows of the modules of an expert by
    name, "{}" being the expert's number.
    y = silu(gate(norm(x))) * up(norm(x)) if `gated`, where the first half of M rows is the gate.
    Otherwise y is the weighted sum of a token's experts, added to a residual. `joined` names the
    tensor [E, M, K] that some checkpoints have instead. `beside` are operands of the same step.
    """

    category = "experts"

    def __init__(
        self,
        at: Scope,
        op: str,
        modules: Mapping[str, int],
        cols: int,
        *,
        mixture: MixtureConfig,
        order: Sequence[int],
        joined: str,
        gated: bool = False,
        norm: Norm | None = None,
        beside: Sequence[Operand] = (),
    ) -> None:
        every = {name.format(number): rows for number in order for name, rows in modules.items()}
        super().__init__(at, op, every, cols, interleaved=gated)
        self.routing, self.gated, self.norm, self._beside = mixture.routing, gated, norm, beside
        self._order, self._popularity = order, mixture.popularity
        self.expert_rows = sum(modules.values())
        shape = (len(order), self.expert_rows, cols)
        self.joined = Source(f"{at.prefix}{joined}", shape)

    def in_checkpoint(self) -> Sequence[Source]:
        """The sources by the numbers of their experts, as `joined` has their rows."""
        of_each = len(self.sources) // len(self._order)
        indices = sorted(range(len(self._order)), key=self._order.__getitem__)
        return [self.sources[of_each * at + i] for at in indices for i in range(of_each)]

    def chances(self, tokens: int) -> Sequence[float]:
        """Chance that a pass of `tokens` tokens reads each expert, in the order of the rows.

        An expert is left out by all of n tokens with the chance (1 - q)^n, where a token chooses
        it with the chance q, independently of other tokens: k / E if nothing is known of its use.
        With a popularity it is the mean of all layers.
        """
        top_k, count = self.routing.top_k, self.routing.experts
        if self._popularity:
            return self._popularity.chances(top_k, tokens)
        return (1 - (1 - top_k / count) ** tokens,) * count

    def experts_read(self, tokens: int) -> float:
        """Experts that a pass of `tokens` tokens is expected to read."""
        return math.fsum(self.chances(tokens))

    def rows_read(self, tokens: int) -> float:
        """The rows of the experts that are read."""
        return self.experts_read(tokens) * self.expert_rows

    def flops(self, tokens: int) -> float:
        """A multiplication and an addition for each token and element of its experts."""
        return 2.0 * tokens * self.routing.top_k * self.expert_rows * self.shape[1]

    def vectors(self) -> Iterator[Operand]:
        """The vectors of the norm, and the operands beside the matrices."""
        if self.norm:
            yield from self.norm.vectors()
        yield from self._beside


class ExpertsBackend(Protocol):
    """A backend that computes experts; what it keeps of a pass's choices is its own."""

    def route(self, router: Router, norm: Norm, x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """norm(x) [n, H] of x [n, H], and the experts chosen for each of its rows."""
        ...

    def experts(
        self, experts: Experts, x: torch.Tensor, chosen: Any, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`experts` of x by the choices of `route`.

        `gated`: of x [n, H], rows [n k, M / 2], in an order that is the backend's. Otherwise of
        these rows, with a residual [n, H], which it may overwrite: [n, H].
        """
        ...


class Mixture:
    """x + the experts chosen for x, and + `shared`, an MLP whose norm is that of the experts."""

    def __init__(self, router: Router, up: Experts, down: Experts, shared: MLP | None) -> None:
        self.router, self.up, self.down, self.shared = router, up, down, shared

    def __call__(self, x: torch.Tensor, run: Backend) -> torch.Tensor:
        """New hidden states [n, H] of x [n, H], which may be overwritten."""
        assert self.up.norm, "a norm is ahead of experts"
        experts = cast(ExpertsBackend, run)  # a check would take longer than a launch
        inner = run.linear(self.shared.up, x) if self.shared else x
        normed, chosen = experts.route(self.router, self.up.norm, x)
        x = experts.experts(self.down, experts.experts(self.up, normed, chosen), chosen, x)
        return run.linear(self.shared.down, inner, x) if self.shared else x

    def modules(self) -> Iterator[Module]:
        """The matrices of the experts, and those of `shared`, in the order of their use."""
        if self.shared:
            yield self.shared.up
        yield from (self.up, self.down)
        if self.shared:
            yield self.shared.down


def mixtures(model: Decoder) -> list[Mixture]:
    """The layers' feed-forwards of experts, in order."""
    found = (layer.feed_forward for layer in model.layers)
    return [one for one in found if isinstance(one, Mixture)]


def routers(model: Decoder) -> list[Router]:
    """The routers of `model`, layer by layer."""
    return [mixture.router for mixture in mixtures(model)]
