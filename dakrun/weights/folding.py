"""Norms folded into the matrices that follow them, so that kernels only scale rows.

Both norms of a row x are r (x - mean(x)) g + b, RMSNorm without the mean and b, where r is a number
for each row. With W'[m, k] = W[m, k] g[k], its rows made to have a mean of 0 for LayerNorm, and
bias'[m] = bias[m] + sum_k W[m, k] b[k], W norm(x) + bias is r W' x + bias'.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True)
class Fold:
    """The norm ahead of a matrix, and the names of its weight and bias, where it has them."""

    kind: Literal["rms", "layer"]
    weight: str | None = None
    bias: str | None = None


def fold(
    rows: torch.Tensor, norm: Fold, vectors: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rows [M, K] of W as rows of W', float32, and what there is to add to their bias, [M].

    `vectors` has the norm's weight and bias, float32 [K]. `rows` may be overwritten.
    """
    rows = rows.float()
    added = _sums(rows * vectors[norm.bias]) if norm.bias else None
    if norm.weight:
        rows *= vectors[norm.weight]
    if norm.kind == "layer":
        rows -= _sums(rows)[:, None] / rows.shape[1]
    return rows, added


def _sums(rows: torch.Tensor) -> torch.Tensor:
    """Sums of rows, in float64: what torch adds first, which depends on how many rows there are,
    then shows in no bit of them.
    """
    return rows.sum(1, dtype=torch.float64).float()


def interleaved(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Tensors of one shape row by row in turn: row i of number j is row n i + j, n how many."""
    return torch.stack(list(tensors), 1).flatten(0, 1)
