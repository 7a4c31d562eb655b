"""Biases of random routers that make tokens choose experts as often as a popularity says.

A router with random weights chooses all experts alike. Its bias is added to the scores by which it
chooses, not to the weights of the experts. It is found on drawn logits by the rule that balances
experts in training (arXiv 2408.15664): the bias of an expert rises while too few tokens choose it.
"""

import functools

import torch

from dakrun.config import Popularity, Routing
from dakrun.kernels.experts.reference import choose

TOKENS, ROUNDS = 2048, 80
_SEED = 0


def router_bias(
    popularity: Popularity, layer: int, routing: Routing, deviation: float
) -> torch.Tensor:
    """The bias, float32 [E], of the router number `layer` of those of a model.

    Its logits are drawn from a normal distribution around 0 with `deviation`.
    """
    counts = popularity.counts[layer]
    share = routing.top_k / max(1, sum(counts))
    order = range(routing.experts) if routing.groups > 1 else popularity.orders[layer]
    targets = tuple(min(1.0, share * counts[expert]) for expert in order)
    found = torch.empty(routing.experts)
    found[list(order)] = _fitted(targets, routing, deviation)
    return found


@functools.lru_cache(maxsize=256)
def _fitted(targets: tuple[float, ...], routing: Routing, deviation: float) -> torch.Tensor:
    """The bias, float32 [E], with which tokens choose the experts with the chances `targets`."""
    generator = torch.Generator().manual_seed(_SEED)
    logits = deviation * torch.randn(TOKENS, routing.experts, generator=generator)
    scores = logits.sigmoid() if routing.scores == "sigmoid" else logits.softmax(-1)
    wanted, bias = torch.tensor(targets), torch.zeros(routing.experts)
    for number in range(ROUNDS):
        experts, _ = choose(logits, bias, routing)
        chances = experts.flatten().bincount(minlength=routing.experts) / TOKENS
        bias += 2 * scores.std() / (1 + number / 20) * (wanted - chances)
    return bias
