"""The router and the products with experts, with the memory that their kernels need.

Knows operands and how a router chooses, no models and no plans.
"""

import functools
from collections.abc import Sequence

import torch

from dakrun.config import Routing
from dakrun.hardware import Card
from dakrun.kernels.experts.grouped_splitk import PairSums, down, gate_up
from dakrun.kernels.experts.route import Routed, route
from dakrun.launches import (
    EXPERT_CHUNK_ROWS,
    GroupedConfig,
    TierAccess,
    expert_chunks,
    grouped_config,
)
from dakrun.memory.matrix import TieredMatrix

_config = functools.cache(grouped_config)
Choices = Sequence[tuple[slice, Routed]]  # rows, and the experts that they chose


class ExpertProducts:
    """Passes of up to `rows` rows [H] through layers of experts of ffn size I, one after the other.

    They share buffers, which stay allocated, since captured graphs hold their addresses. All
    launches may start while their predecessors end (PDL). Nothing waits for the GPU.
    """

    def __init__(
        self, rows: int, routing: Routing, hidden: int, ffn: int, like: torch.Tensor, card: Card
    ) -> None:
        self._routing, self._card = routing, card
        self._inner = like.new_empty(rows * routing.top_k, ffn)
        self._routed = [
            Routed.allocate(chunk.stop - chunk.start, routing, like.device)
            for chunk in expert_chunks(rows)
        ]
        most = min(rows, EXPERT_CHUNK_ROWS)
        self._sums = PairSums.empty(most, routing.top_k, hidden, like.device)

    def route(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        lengths: torch.Tensor,
    ) -> Choices:
        """Choose the experts of x [n, H] as route.route() does; valid until the next call."""
        chunks = expert_chunks(len(x))
        found = list(zip(chunks, self._routed[: len(chunks)], strict=True))
        ctas = self._card.with_idle(1)
        for rows, out in found:
            route(
                x[rows], weight, self._routing, out, bias=bias, lengths=lengths[rows], ctas=ctas,
                pdl=True,
            )  # fmt: skip
        return found

    def gate_up(
        self,
        x: torch.Tensor,
        choices: Choices,
        weight: TieredMatrix,
        accesses: Sequence[TierAccess],
    ) -> torch.Tensor:
        """Gated rows [n k, I] of x [n, H]: the pairs of the `choices`, one after another."""
        out = self._inner[: len(x) * self._routing.top_k]
        for rows, routed in choices:
            config = self._config(rows, weight, accesses)
            gate_up(x[rows], routed, weight, config, out[self._pairs(rows)], pdl=True)
        return out

    def down(
        self,
        inner: torch.Tensor,
        choices: Choices,
        weight: TieredMatrix,
        accesses: Sequence[TierAccess],
        out: torch.Tensor,
    ) -> torch.Tensor:
        """Add the weighted experts of each row to out [n, H], of `inner` as gate_up() gives it."""
        for rows, routed in choices:
            config = self._config(rows, weight, accesses)
            x = inner[self._pairs(rows)]
            down(x, routed, weight, config, out[rows], self._sums, pdl=True)
        return out

    def _pairs(self, rows: slice) -> slice:
        return slice(rows.start * self._routing.top_k, rows.stop * self._routing.top_k)

    def _config(
        self, rows: slice, weight: TieredMatrix, accesses: Sequence[TierAccess]
    ) -> GroupedConfig:
        splits = tuple(part.split for part in weight.parts)
        return _config(
            rows.stop - rows.start, splits, tuple(accesses), experts=self._routing.experts,
            top_k=self._routing.top_k, card=self._card, atom_bytes=weight.format.atom_bytes,
        )  # fmt: skip
