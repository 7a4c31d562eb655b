"""CUDA graphs of passes with prompts, captured as passes of their kind come, and replayed later.

Knows what a pass reads, neither requests nor what it launches.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch

from dakrun.engine.prompt_attention import PromptAttention
from dakrun.kernels.attention.prompt import PromptTile
from dakrun.kernels.runtime import capture

MOST_GRAPHS = 24  # the one not used for longest makes room for another
Results = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class PassInputs:
    """What a pass reads of prompts, on the device.

    `ids`, `positions` int32 [T] and `kv_addresses` int64 [T, 3] (see store_kv) are of their tokens;
    idle ones have negative positions. `chosen`, int32 [S], are the numbers in the pass of those
    tokens whose logits are wanted, decode rows first; zeros behind them are padding.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    kv_addresses: torch.Tensor
    chosen: torch.Tensor
    attention: PromptAttention


class _Captured:
    """A graph, and the tensors that its replays write."""

    graph: torch.cuda.CUDAGraph
    results: Results


class PassGraphs:
    """Graphs of passes of up to `tokens` tokens, in one pool of memory.

    All read the same inputs, to which those of a pass are copied first.
    """

    def __init__(self, tokens: int, device: torch.device) -> None:
        numbers = torch.zeros(3, tokens, dtype=torch.int32, device=device)
        self._ids, self._positions, self._chosen = numbers
        self._kv_addresses = torch.zeros(tokens, 3, dtype=torch.int64, device=device)
        # A tile has a query at least.
        fields = len(PromptTile._fields)
        self._tiles = torch.zeros(tokens, fields, dtype=torch.int32, device=device)
        self._count = torch.zeros(1, dtype=torch.int32, device=device)
        self._pool: Any = None
        self._seen = Counter[Hashable]()
        self._graphs = OrderedDict[Hashable, _Captured]()

    def run(
        self, kind: Hashable, inputs: PassInputs, launch: Callable[[PassInputs], Results]
    ) -> Results:
        """What `launch` returns for `inputs`; all passes of a `kind` launch the same on theirs.

        The first pass of a kind is no graph: it loads kernels and allocates what is kept.
        """
        self._seen[kind] += 1
        if self._seen[kind] == 1:
            return launch(inputs)
        own = self._own(inputs)
        if kind not in self._graphs:
            self._graphs[kind] = self._capture(own, launch)
            if len(self._graphs) > MOST_GRAPHS:
                forgotten, _ = self._graphs.popitem(last=False)
                del self._seen[forgotten]
        self._graphs.move_to_end(kind)
        captured = self._graphs[kind]
        captured.graph.replay()
        return captured.results

    def _own(self, inputs: PassInputs) -> PassInputs:
        """The inputs that graphs read, with the values of `inputs`."""
        n, work = len(inputs.ids), inputs.attention.work
        tiles = self._tiles[: len(work.tiles)]
        own = PassInputs(
            self._ids[:n],
            self._positions[:n],
            self._kv_addresses[:n],
            self._chosen[: len(inputs.chosen)],
            inputs.attention.reading(self._tiles, self._count),
        )
        for to, values in (
            (own.ids, inputs.ids),
            (own.positions, inputs.positions),
            (own.kv_addresses, inputs.kv_addresses),
            (own.chosen, inputs.chosen),
            (tiles, work.tiles),
            (self._count, work.count),
        ):
            to.copy_(values)
        return own

    def _capture(self, own: PassInputs, launch: Callable[[PassInputs], Results]) -> _Captured:
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        found = _Captured()

        def launches() -> None:
            found.results = launch(own)

        found.graph = capture(launches, self._pool, quickly=True)
        return found
