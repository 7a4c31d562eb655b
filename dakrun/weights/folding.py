"""Folds norms into matrices, and puts the rows of gated matrices into the order for kernels.

A norm of a row x is r (x - mean(x)) g + b, where r is one number; RMSNorm has no mean and no b.
Let W'[m, k] = W[m, k] g[k], from which LayerNorm also subtracts the mean over k, and
bias'[m] = bias[m] + sum_k W[m, k] b[k]. Then W norm(x) + bias = r W' x + bias', so that the kernels
only scale rows by r.
"""

from collections.abc import Mapping, Sequence

import torch

from dakrun.models.modules import Norm


def fold(
    rows: torch.Tensor, norm: Norm, vectors: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rows [M, K] of W', float32, from rows of W, and the change of their bias, [M] or None.

    `vectors` has the norm's weight and bias by name, float32 [K]. `rows` may be overwritten.
    """
    rows = rows.float()
    added = _row_sums(rows * vectors[norm.bias.name]) if norm.bias else None
    if norm.weight:
        rows *= vectors[norm.weight.name]
    if norm.kind == "layer":
        rows -= _row_sums(rows)[:, None] / rows.shape[1]
    return rows, added


def _row_sums(rows: torch.Tensor) -> torch.Tensor:
    """Sums of rows, float32, added in float64: the same bits however many rows come together."""
    return rows.sum(1, dtype=torch.float64).float()


def interleave(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Tensors of one shape with alternating rows: row i of tensor j is row n i + j of n tensors."""
    return torch.stack(list(tensors), 1).flatten(0, 1)
