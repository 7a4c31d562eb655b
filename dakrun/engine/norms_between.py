"""RMSNorms between two products with matrices of 4 and 8 bits, of which each product does a part.

The norm's weight cannot be folded into such a matrix. So, for few rows, the product ahead of the
norm also writes its output, the hidden states, times that weight (kernels/gemm/scaled_rows.py). The
norm then needs no launch. Knows which matrices follow each other, not how they are multiplied.
"""

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence

import torch

from dakrun.geometry import SPLITK_MAX_ROWS
from dakrun.kernels.gemm import ScaledRows, factor_of
from dakrun.memory.matrix import TieredMatrix
from dakrun.models.decoder import passes_on_norm
from dakrun.models.experts import Experts
from dakrun.models.modules import Linear

CanScale = Callable[[int, TieredMatrix], bool]  # whether so many rows' product can do a part


class NormsBetween:
    """Which products of `order` do a part of a norm, and the scaled hidden states between them."""

    def __init__(
        self,
        order: Sequence[Linear | Experts],
        matrices: Mapping[str, TieredMatrix],
        vectors: Mapping[str, torch.Tensor],
        can_scale: CanScale,
    ) -> None:
        """`vectors` has the norms' weights. Only a copy by `with_rows` has memory for rows."""
        self._can_scale = can_scale
        # By the product ahead: both matrices, the norm's weight and its factor.
        self._ahead: dict[str, tuple[list[TieredMatrix], torch.Tensor, float]] = {}
        self._behind: dict[str, str] = {}  # the product ahead, by the one behind
        for ahead, behind in itertools.pairwise(order):
            if passes_on_norm(ahead, behind):
                assert isinstance(behind, Linear) and behind.norm and behind.norm.weight
                weight = vectors[behind.norm.weight.name]
                both = [matrices[ahead.name], matrices[behind.name]]
                self._ahead[ahead.name] = both, weight, factor_of(weight)
                self._behind[behind.name] = ahead.name
        self._rows: ScaledRows | None = None
        self._x: torch.Tensor | None = None  # the hidden states whose scaled rows are in _rows

    def with_rows(self, rows: int) -> "NormsBetween":
        """A copy with memory for `rows` scaled rows, at most SPLITK_MAX_ROWS."""
        found = copy.copy(self)
        found._rows = found._x = None
        if self._ahead:
            _, weight, factor = next(iter(self._ahead.values()))
            found._rows = ScaledRows.empty(min(rows, SPLITK_MAX_ROWS), weight, factor)
        return found

    def write(self, linear: Linear, x: torch.Tensor) -> ScaledRows | None:
        """Where `linear` writes scaled rows beside its output x; None if it writes none."""
        if linear.name not in self._ahead:
            return None
        matrices, *_ = self._ahead[linear.name]
        fits = self._rows is not None and len(x) <= len(self._rows.rows)
        fits = fits and all(self._can_scale(len(x), matrix) for matrix in matrices)
        self._x = x if fits else None
        return self._part(linear.name, len(x)) if fits else None

    def read(self, linear: Linear, x: torch.Tensor) -> ScaledRows | None:
        """The rows that `linear` multiplies instead of norm(x); None if x has no scaled rows."""
        if linear.norm is None or x is not self._x or linear.name not in self._behind:
            return None
        return self._part(self._behind[linear.name], len(x))

    def _part(self, ahead: str, n: int) -> ScaledRows:
        assert self._rows is not None
        _, weight, factor = self._ahead[ahead]
        return ScaledRows(self._rows.rows[:n], self._rows.squares[:n], weight, factor)
