"""Exchanges of experts between steps: those chosen most often come to the local tier.

Knows counts and stack indices. In plain torch it also exchanges the bytes of two experts; where
kernels read experts, expert_copies.py does.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from dakrun.engine.expert_use import ExpertUse
from dakrun.memory.device import download
from dakrun.memory.matrix import MatrixPart, TieredMatrix
from dakrun.models.experts import Mixture

WINDOW = 32  # decode steps between two looks at the counts
# Standard deviations by which two counts differ, at least, for experts to be exchanged. Of 64 local
# and 64 remote experts that are chosen alike, the least and the most chosen differ by 3.4.
SIGNIFICANT = 5.0
# Reads of a step that an exchange must save, at least: it costs the link one read of an expert.
LEAST_SAVED = 0.02

# Exchanges the experts at two stack indices of a layer, the first remote and the second local.
# The iterator is advanced once before each step until it ends. It yields whether an expert lies
# away from its stack index.
Exchange = Callable[[int, int, int], Iterator[bool]]


class ExpertMoves:
    """Exchanges of experts by the counts of `use`, up to `together` pairs at a time.

    So far `exchanged` pairs were exchanged, `nbytes` bytes in all. Only experts whose matrices
    lie in one piece, in one tier, move. `exchange` moves them, by default in plain torch. `away`
    says whether an expert lies away from its stack index.
    """

    def __init__(
        self,
        use: ExpertUse,
        matrices: Mapping[str, TieredMatrix],
        exchange: Exchange | None = None,
        together: int = 1,
    ) -> None:
        self._use, self._matrices = use, matrices
        self._exchange = exchange or self._swap
        self._counted = torch.zeros_like(use.chosen(), device="cpu")  # up to the last pairs
        self._looked: tuple[torch.Tensor, torch.cuda.Event | None] | None = None
        self._steps = self._routed = 0  # of decoding, up to the last look
        self._width = 0.0  # tokens of a decode step between the last two looks
        self._due: deque[tuple[int, int, int]] = deque()  # a layer, and two stack indices
        self._together, self._moving = together, list[Iterator[bool]]()
        self._tiers = [tiers_of_stack(mixture, matrices) for mixture in use.mixtures]
        self.exchanged = self.nbytes = 0
        self.away = False

    def between_steps(self, *, settle: bool = False) -> None:
        """Go on with pairs that are due; look for more if WINDOW decode steps have passed.

        With `settle` go on until every expert lies at its stack index.
        """
        self._look()
        while self._due and len(self._moving) < self._together:
            self._moving.append(self._counting(*self._due.popleft()))
        while True:
            states = [(one, next(one, None)) for one in self._moving]
            self._moving = [one for one, state in states if state is not None]
            self.away = any(state for _, state in states)
            if not (settle and self.away):
                return

    @property
    def moving(self) -> bool:
        """Whether a pair is under way."""
        return bool(self._moving)

    def report(self) -> dict[str, Any]:
        """What has been exchanged, JSON-ready."""
        return {"exchanged_pairs": self.exchanged, "bytes": self.nbytes}

    def _counting(self, layer: int, first: int, second: int) -> Iterator[bool]:
        """The exchange of a pair, which is counted when it ends."""
        yield from self._exchange(layer, first, second)
        moved = matrices_at(self._use.mixtures[layer], self._matrices, first)
        self.exchanged += 1
        self.nbytes += 2 * sum(matrix.nbytes for matrix in moved)

    def _look(self) -> None:
        """Start to read the counts if WINDOW steps have passed; find pairs once they are read."""
        use = self._use
        if use.steps < self._steps:  # the counts have been cleared
            self._steps, self._routed, self._looked = 0, 0, None
            self._counted.zero_()
        idle = not (self._looked or self._due or self._moving)
        if idle and use.steps - self._steps >= WINDOW:
            self._width = (use.routed - self._routed) / (use.steps - self._steps)
            self._steps, self._routed = use.steps, use.routed
            chosen = use.chosen()
            counted = download(chosen)
            ready = torch.cuda.current_stream().record_event() if chosen.is_cuda else None
            self._looked = counted, ready
        if self._looked is None or not (self._looked[1] is None or self._looked[1].query()):
            return
        counted, self._looked = self._looked[0], None
        recent, found = (counted - self._counted).tolist(), []
        for layer, (by_expert, tiers) in enumerate(zip(recent, self._tiers, strict=True)):
            counts = [by_expert[expert] for expert in use.orders[layer]]
            tokens = sum(counts) / use.mixtures[layer].router.routing.top_k
            of_layer = pairs(counts, tiers, tokens, self._width)
            found += [(counts[at] - counts[to], layer, at, to) for at, to in of_layer]
        self._due.extend((layer, at, to) for _, layer, at, to in sorted(found, reverse=True))
        if found:  # else counts add up until they tell
            self._counted = counted

    def _swap(self, layer: int, first: int, second: int) -> Iterator[bool]:
        """An Exchange that is complete at once."""
        mixture = self._use.mixtures[layer]
        at = (matrices_at(mixture, self._matrices, index) for index in (first, second))
        for one, other in zip(*at, strict=True):
            for a, b in zip(one.arrays, other.arrays, strict=True):
                kept = a.clone()
                a.copy_(b)
                b.copy_(kept)
        self._use.exchange(layer, first, second)
        yield from ()


def pairs(
    counts: list[int], tiers: list[int | None], tokens: float, width: float
) -> list[tuple[int, int]]:
    """Stack indices to exchange, by the tier of each, 0 the local one, and by recent `counts`.

    The most chosen remote expert is exchanged with the least chosen local one, the second most
    chosen with the second least chosen, as long as their counts differ by more than chance, and
    steps of `width` tokens read the one more often. They are counts of `tokens`. A tier of None
    marks an expert that cannot move.
    """

    def reads(count: int) -> float:
        """The chance that a step reads an expert."""
        return 1 - (1 - min(1.0, count / tokens)) ** width if tokens else 0.0

    local = sorted((n, at) for at, n in enumerate(counts) if tiers[at] == 0)
    remote = sorted(((n, at) for at, n in enumerate(counts) if tiers[at]), reverse=True)
    found = []
    for (cold, to), (hot, at) in zip(local, remote, strict=False):
        chance = SIGNIFICANT * math.sqrt(hot + cold)
        if hot - cold <= chance or reads(hot) - reads(cold) < LEAST_SAVED:
            break
        found.append((at, to))
    return found


def tiers_of_stack(mixture: Mixture, matrices: Mapping[str, TieredMatrix]) -> list[int | None]:
    """The tier's number of the matrices at each index; None if they are cut, or in two tiers."""
    tiers, found = [part.tier for part in matrices[mixture.up.name].parts], list[int | None]()
    for index in range(mixture.router.routing.experts):
        here = matrices_at(mixture, matrices, index)
        alike = len(here) == 2 and here[0].tier == here[1].tier
        found.append(tiers.index(here[0].tier) if alike else None)
    return found


def matrices_at(
    mixture: Mixture, matrices: Mapping[str, TieredMatrix], index: int
) -> list[MatrixPart]:
    """The matrices of the expert at an index of a layer, as views; without those that are cut."""
    experts = mixture.router.routing.experts
    found = (matrices[one.name].stacked(index, experts) for one in (mixture.up, mixture.down))
    return [matrix for matrix in found if matrix]
