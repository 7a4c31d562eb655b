"""Experts in plain torch: the router's choice, and products grouped by expert.

Knows matrices that stack those of all experts, [E M, K], whose row blocks lie in any tiers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from dakrun.config import Routing
from dakrun.geometry import ROWS_PER_BLOCK
from dakrun.memory.matrix import TieredMatrix
from dakrun.units import ceil_div


@dataclass(frozen=True)
class Chosen:
    """The experts of n tokens, k each, as n k pairs in the order of experts, then of tokens.

    `tokens`, int64 [n k], are the pairs' tokens, `weights`, float32 [n k], those of their experts.
    `counts` has the pairs of each expert that has any, by its index in the stacked matrices, in the
    order of the experts' numbers.
    """

    tokens: torch.Tensor
    weights: torch.Tensor
    counts: dict[int, int]


def choose(
    logits: torch.Tensor, bias: torch.Tensor | None, routing: Routing
) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts, int64 [n, k], and their weights, float32 [n, k], by logits [n, E] and `bias` [E].

    They are in the order of their scores; of equal ones the lowest is first (see Routing).
    """
    sigmoid = routing.scores == "sigmoid"
    scores = logits.sigmoid() if sigmoid else logits.softmax(-1)
    by = scores if bias is None else scores + bias
    if routing.groups > 1:
        groups = by.unflatten(1, (routing.groups, -1))
        best = _highest(groups.topk(2).values.sum(-1), routing.top_groups)
        out = torch.ones(groups.shape[:2], dtype=torch.bool, device=by.device)
        out.scatter_(1, best, value=False)
        by = groups.masked_fill(out[:, :, None], -torch.inf).flatten(1)
    experts = _highest(by, routing.top_k)
    weights = scores.gather(1, experts)
    if routing.renormalized:
        weights = weights / (weights.sum(-1, keepdim=True) + (1e-20 if sigmoid else 0.0))
    return experts, weights * routing.scale


def route(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    routing: Routing,
    stack_indices: Sequence[int] | None = None,
) -> Chosen:
    """The experts of x [n, H] by a router's weight [E, H] and bias [E], in float32.

    `stack_indices` are those of the experts in stacked matrices, by default their numbers.
    """
    return grouped(*choose(F.linear(x.float(), weight), bias, routing), stack_indices)


def grouped(
    experts: torch.Tensor, weights: torch.Tensor, stack_indices: Sequence[int] | None = None
) -> Chosen:
    """The choice of `experts`, integers [n, k], with their weights, float32 [n, k].

    Experts whose number is beyond those of `stack_indices` are left out.
    """
    of_pairs, order = experts.flatten().sort(stable=True)
    numbers, counts = (found.tolist() for found in of_pairs.unique_consecutive(return_counts=True))
    if stack_indices is not None:
        here = sum(number < len(stack_indices) for number in numbers)
        numbers, counts = [stack_indices[number] for number in numbers[:here]], counts[:here]
        order = order[: sum(counts)]
    found = dict(zip(numbers, counts, strict=True))
    return Chosen(order // experts.shape[1], weights.flatten()[order], found)


def gate_up(x: torch.Tensor, chosen: Chosen, weight: TieredMatrix, rows: int) -> torch.Tensor:
    """silu(gate) * up of each pair, [n k, M / 2], of x [n, K] and experts of M = `rows` rows."""
    out = x.new_empty(len(chosen.tokens), rows // 2)
    first = 0
    for index, count in chosen.counts.items():
        pairs = slice(first, first + count)
        matrix = _matrix(weight, index * rows, (index + 1) * rows, x.device)
        gate, up = F.linear(x[chosen.tokens[pairs]], matrix).chunk(2, dim=-1)
        torch.mul(F.silu(gate), up, out=out[pairs])
        first += count
    return out


def down(
    x: torch.Tensor, chosen: Chosen, weight: TieredMatrix, residual: torch.Tensor
) -> torch.Tensor:
    """residual [n, M] + the products of each token's experts with its pairs' rows of x [n k, K].

    A token's products are weighted and added in float32, in the order of its experts.
    """
    out, rows = torch.zeros_like(residual, dtype=torch.float32), residual.shape[1]
    first = 0
    for index, count in chosen.counts.items():
        pairs = slice(first, first + count)
        matrix = _matrix(weight, index * rows, (index + 1) * rows, x.device)
        products = F.linear(x[pairs], matrix).float() * chosen.weights[pairs, None]
        out[chosen.tokens[pairs]] += products  # a token has an expert once
        first += count
    return residual + out.to(x.dtype)


def _highest(values: torch.Tensor, count: int) -> torch.Tensor:
    """Indexes [n, count] of the highest of values [n, m]; of equal ones the lowest first."""
    return values.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def _matrix(weight: TieredMatrix, start: int, stop: int, device: torch.device) -> torch.Tensor:
    """Rows `start` to `stop` - 1 of `weight` on `device`; only their row blocks are read."""
    found = []
    for part, rows in weight.rows:
        first, last = max(start, rows.start) - rows.start, min(stop, rows.stop) - rows.start
        if first < last:
            top, end = first // ROWS_PER_BLOCK, ceil_div(last, ROWS_PER_BLOCK)
            read = weight.read(part.row_blocks(weight.shape[1], top, end), device)
            found.append(read[first - ROWS_PER_BLOCK * top :][: last - first])
    return found[0] if len(found) == 1 else torch.cat(found)
