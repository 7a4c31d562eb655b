"""The router and the products with experts, with the memory that their kernels need.

Knows operands and how a router chooses, no models and no plans.
"""

import functools
from collections.abc import Sequence
from dataclasses import replace

import torch

from dakrun.config import Routing
from dakrun.geometry import ATOM_BYTES
from dakrun.hardware import Card
from dakrun.kernels.experts.grouped_splitk import PairSums, down, gate_up
from dakrun.kernels.experts.grouped_tiled import grouped_tiled_gemm, tile_counters
from dakrun.kernels.experts.permute import combine, permute
from dakrun.kernels.experts.route import Routed, route
from dakrun.launches import (
    GroupedConfig,
    Launch,
    TierAccess,
    expert_chunks,
    few_expert_rows,
    grouped_config,
    grouped_launch,
)
from dakrun.memory.matrix import TieredMatrix

_config = functools.cache(grouped_config)
_tiled = functools.cache(grouped_launch)
Choices = Sequence[tuple[slice, Routed]]  # rows, and the experts that they chose


class ExpertProducts:
    """Passes of up to `rows` rows [H] through layers of experts of ffn size I, one after the other.

    They share buffers, which stay allocated, since captured graphs hold their addresses.
    Launches may start while their predecessors end (PDL). Nothing waits for the GPU. An atom of a
    layer's matrices has up to `atom_bytes`.
    """

    def __init__(
        self,
        rows: int,
        routing: Routing,
        hidden: int,
        ffn: int,
        like: torch.Tensor,
        card: Card,
        atom_bytes: int = ATOM_BYTES,
    ) -> None:
        self._routing, self._card, self._atom_bytes = routing, card, atom_bytes
        how = {"experts": routing.experts, "top_k": routing.top_k}
        self._few = few_expert_rows(**how, card=card, atom_bytes=atom_bytes)
        chunks = self._chunks(rows)
        self._inner = like.new_empty(rows * routing.top_k, ffn)
        self._routed = [
            Routed.allocate(chunk.stop - chunk.start, routing, hidden, like.device)
            for chunk in chunks
        ]
        most = min(rows, self._few)
        self._sums = PairSums.empty(most, routing.top_k, hidden, like.device)
        # Of the grouped tiled GEMM: copies of rows, sorted by expert, and then their products.
        many = chunks[0].stop if chunks[0].stop > self._few else 0
        self._sorted = like.new_empty(many * routing.top_k, hidden)
        self._counters = tile_counters(like.device)

    def route(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        lengths: torch.Tensor,
        stacked: torch.Tensor | None = None,
        use: torch.Tensor | None = None,
    ) -> Choices:
        """Choose the experts of x [n, H] as route.route() does; valid until the next call."""
        chunks = self._chunks(len(x))
        found = list(zip(chunks, self._routed[: len(chunks)], strict=True))
        for rows, out in found:
            route(
                x[rows], weight, self._routing, out, bias=bias, lengths=lengths[rows],
                stacked=stacked, use=use, pdl=True,
            )  # fmt: skip
        return found

    def gate_up(
        self,
        x: torch.Tensor,
        choices: Choices,
        weight: TieredMatrix,
        accesses: Sequence[TierAccess],
        *,
        pdl: bool = True,
    ) -> torch.Tensor:
        """Gated rows [n k, I] of x [n, H]: the pairs of the `choices`, one after another.

        Without `pdl` no launch starts before what is ahead of this call has ended. Nor does a
        SplitK_GEMM where its CTAs would be placed unevenly: it needs the router's list at once, so
        that an early start gains little (qwen3-30b-a3b, 64 rows, H100: 477 us for both products of
        a layer, which take 414 in a chain of their own).
        """
        out = self._inner[: len(x) * self._routing.top_k]
        for rows, routed in choices:
            if rows.stop - rows.start > self._few:
                copies = self._copies(rows)
                permute(x[rows], routed.pairs[: rows.stop - rows.start], copies, pdl=pdl)
                self._multiply(copies, routed, weight, accesses, out[self._pairs(rows)], gates=True)
            else:
                config = self._config(rows, weight, accesses)
                early = pdl and self._card.places_evenly(rows.stop - rows.start)
                gate_up(x[rows], routed, weight, config, out[self._pairs(rows)], pdl=early)
            pdl = True
        return out

    def down(
        self,
        inner: torch.Tensor,
        choices: Choices,
        weight: TieredMatrix,
        accesses: Sequence[TierAccess],
        out: torch.Tensor,
        *,
        pdl: bool = True,
    ) -> torch.Tensor:
        """Add the weighted experts of each row to out [n, H], of `inner` as gate_up() gives it.

        `pdl` is as in gate_up().
        """
        for rows, routed in choices:
            x = inner[self._pairs(rows)]
            if rows.stop - rows.start > self._few:
                products, to = self._copies(rows), out[rows]
                self._multiply(x, routed, weight, accesses, products, gates=False, pdl=pdl)
                pairs, weights = routed.pairs[: len(to)], routed.weights[: len(products)]
                combine(products, pairs, weights, to, to, pdl=True)
            else:
                config = self._config(rows, weight, accesses)
                down(x, routed, weight, config, out[rows], self._sums, pdl=pdl)
            pdl = True
        return out

    def _multiply(
        self,
        x: torch.Tensor,
        routed: Routed,
        weight: TieredMatrix,
        accesses: Sequence[TierAccess],
        out: torch.Tensor,
        *,
        gates: bool,
        pdl: bool = True,
    ) -> None:
        """Launch the grouped tiled GEMM of pairs, behind others of this class's many rows.

        All of them let their successor start after their own wait, so that `routed` is complete.
        """
        tiers, row_blocks = zip(*weight.row_blocks_by_tier, strict=True)
        access = {part.tier: how for part, how in zip(weight.parts, accesses, strict=True)}
        launch: Launch = _tiled(
            len(x), self._routing.experts, row_blocks, tuple(access[tier] for tier in tiers),
            card=self._card, atom_bytes=weight.format.atom_bytes,
        )  # fmt: skip
        grouped_tiled_gemm(
            x, routed.ends, weight, launch, out, counters=self._counters,
            activation="silu_mul" if gates else "none", listed=True, pdl=pdl,
        )  # fmt: skip

    def _chunks(self, rows: int) -> list[slice]:
        return expert_chunks(
            rows, experts=self._routing.experts, top_k=self._routing.top_k, card=self._card,
            atom_bytes=self._atom_bytes,
        )  # fmt: skip

    def _copies(self, rows: slice) -> torch.Tensor:
        return self._sorted[: (rows.stop - rows.start) * self._routing.top_k]

    def _pairs(self, rows: slice) -> slice:
        return slice(rows.start * self._routing.top_k, rows.stop * self._routing.top_k)

    def _config(
        self, rows: slice, weight: TieredMatrix, accesses: Sequence[TierAccess]
    ) -> GroupedConfig:
        parts, local = weight.parts, weight.parts[0].tier
        splits = tuple(part.split for part in parts)
        # Staged parts are in the local tier, too, whose CTAs read them.
        accesses = [
            replace(how, mixed=True) if number and part.tier == local else how
            for number, (part, how) in enumerate(zip(parts, accesses, strict=True))
        ]
        return _config(
            rows.stop - rows.start, splits, tuple(accesses), experts=self._routing.experts,
            top_k=self._routing.top_k, card=self._card, atom_bytes=weight.format.atom_bytes,
        )  # fmt: skip
