"""Experts that change places between steps: those of most use come to the local tier.

Knows counts, places and bytes; knows no kernels. An exchange is complete before the next step
begins. Kernels that read weights before their PDL wait would need a full dependency there, and read
where an expert lies from a table on the device (`stacked` in native/route.cu).
"""

import math
from collections import deque
from collections.abc import Mapping

import torch

from dakrun.engine.expert_use import CHOSEN, ExpertUse
from dakrun.geometry import ROWS_PER_BLOCK
from dakrun.memory.matrix import TieredMatrix
from dakrun.models.experts import Experts, Mixture

WINDOW = 32  # decode steps between two looks at the counts
SIGNIFICANT = 3.0  # standard deviations by which two counts of a window differ


class ExpertMoves:
    """Exchanges of experts, at most one pair between two steps, by the counts of `use`.

    `exchanged` pairs of `nbytes` bytes in all so far. Experts move whose matrices are whole row
    blocks, and lie in one tier.
    """

    def __init__(self, use: ExpertUse, matrices: Mapping[str, TieredMatrix]) -> None:
        self._use, self._matrices = use, matrices
        self._counted = torch.zeros_like(use.table[0, :, CHOSEN])  # up to the last look
        self._steps = 0
        self._due: deque[tuple[int, int, int]] = deque()  # a layer, and two places
        self._tiers = [_tiers(mixture, matrices) for mixture in use.mixtures]
        self.exchanged = self.nbytes = 0

    def between_steps(self) -> None:
        """Exchange the next pair; look for pairs if a window has passed."""
        if self._use.steps < self._steps:  # the counts have been cleared
            self._steps = 0
            self._counted.zero_()
        if self._due:
            self._exchange(*self._due.popleft())
        elif self._use.steps - self._steps >= WINDOW:
            self._steps = self._use.steps
            counted = self._use.table[:, :, CHOSEN].sum(0)
            recent = (counted - self._counted).tolist()
            self._counted = counted
            for layer, (counts, tiers) in enumerate(zip(recent, self._tiers, strict=True)):
                self._due.extend((layer, *pair) for pair in pairs(counts, tiers))

    def _exchange(self, layer: int, first: int, second: int) -> None:
        """Let the experts at two places of a layer change places."""
        mixture = self._use.mixtures[layer]
        for module in (mixture.up, mixture.down):
            one, other = (self._arrays(module, place) for place in (first, second))
            for a, b in zip(one, other, strict=True):
                kept = a.clone()
                a.copy_(b)
                b.copy_(kept)
                self.nbytes += a.nbytes + b.nbytes
        self._use.exchange(layer, first, second)
        self._counted[layer, [first, second]] = self._counted[layer, [second, first]]
        self.exchanged += 1

    def _arrays(self, module: Experts, place: int) -> tuple[torch.Tensor, ...]:
        """The bytes of the expert at a place, as views."""
        matrix, blocks = self._matrices[module.name], module.expert_rows // ROWS_PER_BLOCK
        top = place * blocks
        for part in matrix.parts:
            if top < part.split.row_blocks:
                return part.row_blocks(matrix.shape[1], top, top + blocks).arrays
            top -= part.split.row_blocks
        raise AssertionError("a place within the matrix")


def pairs(counts: list[int], tiers: list[int | None]) -> list[tuple[int, int]]:
    """Places to exchange, by the `counts` of a window and the tier of each place, 0 the local one.

    The most chosen of remote experts takes the place of the least chosen of local ones, and so on,
    while their counts differ by more than chance lets them. None is a place that cannot move.
    """
    local = sorted((n, at) for at, n in enumerate(counts) if tiers[at] == 0)
    remote = sorted(((n, at) for at, n in enumerate(counts) if tiers[at]), reverse=True)
    found = []
    for (cold, to), (hot, at) in zip(local, remote, strict=False):
        if hot - cold <= SIGNIFICANT * math.sqrt(hot + cold):
            break
        found.append((at, to))
    return found


def _tiers(mixture: Mixture, matrices: Mapping[str, TieredMatrix]) -> list[int | None]:
    """The number of the tier in which each place has its matrices; None if not in one, or cut."""
    found: list[int | None] = []
    for place in range(mixture.router.routing.experts):
        of_place = {
            _tier(matrices[module.name], place * rows, (place + 1) * rows)
            for module in (mixture.up, mixture.down)
            for rows in [module.expert_rows]
        }
        found.append(of_place.pop() if len(of_place) == 1 else None)
    return found


def _tier(matrix: TieredMatrix, start: int, stop: int) -> int | None:
    """The number of the part that has the rows from `start` on, if these are whole row blocks."""
    for number, (part, rows) in enumerate(matrix.rows):
        if rows.start <= start and stop <= rows.stop:
            whole = start % ROWS_PER_BLOCK == stop % ROWS_PER_BLOCK == 0
            return number if whole and part.split.wave == 1 else None
    return None
