"""Popularity: how often tokens chose each expert of each layer, counted or assumed.

Knows no files: models/popularity.py reads and keeps counts. plan/README.md derives the formulas.
"""

import functools
import math
from dataclasses import dataclass

from dakrun.errors import UsageError

ASSUMED_TOKENS = 1_000_000  # of a popularity that is assumed, not counted


@dataclass(frozen=True)
class Popularity:
    """`counts[i][e]`: tokens that chose expert e in the i-th of the layers that have experts.

    `source` says where the counts are from, in words for people. Raises UsageError unless all
    counts are integers of at least 0, as many in every layer.
    """

    counts: tuple[tuple[int, ...], ...]
    source: str

    def __post_init__(self) -> None:
        wide = {len(layer) for layer in self.counts}
        if len(wide) != 1 or not all(
            type(count) is int and count >= 0 for layer in self.counts for count in layer
        ):
            raise UsageError(
                f"{self.source}: the counts are not a table of integers of at least 0",
                hint="it needs a row for each layer with experts, a column for each expert",
            )

    def __hash__(self) -> int:
        return self._hash  # tables are large, and models are looked up by their configuration

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.counts, self.source))

    @functools.cached_property
    def orders(self) -> tuple[tuple[int, ...], ...]:
        """Experts of each layer from the most to the least chosen; of equal ones the lowest first.

        Their matrices are stored in this order.
        """
        return tuple(
            tuple(sorted(range(len(layer)), key=layer.__getitem__, reverse=True))
            for layer in self.counts
        )

    @functools.cache  # noqa: B019  of few row counts of a few popularities
    def chances(self, top_k: int, tokens: int) -> tuple[float, ...]:
        """Chance that a pass of `tokens` tokens reads the first, second, ... expert of `orders`.

        It is the mean of all layers. A token chooses expert e with the chance
        q = top_k (count + 1) / (sum of counts + E): alike for all before any is counted. An expert
        is left out by all tokens with the chance (1 - q)^tokens.
        """
        total = [0.0] * len(self.counts[0])
        for layer, order in zip(self.counts, self.orders, strict=True):
            share = top_k / (sum(layer) + len(layer))
            for index, expert in enumerate(order):
                total[index] += 1 - (1 - min(1.0, share * (layer[expert] + 1))) ** tokens
        return tuple(chance / len(self.counts) for chance in total)

    @classmethod
    def zipf(cls, layers: int, experts: int, top_k: int, exponent: float) -> "Popularity":
        """Choices by Zipf's law: of `top_k` experts a token, drawn one by one without replacement.

        The r-th expert is drawn by the weight r^-s. If weights are rates of exponential clocks,
        the experts drawn are the first to ring, by a time t that hardly varies: each with the
        chance 1 - exp(-t r^-s), with t such that they are `top_k` on average. Which expert is the
        r-th differs from layer to layer.
        """
        weights = [(rank + 1) ** -exponent for rank in range(experts)]
        low, high = 0.0, 1.0
        while sum(1 - math.exp(-high * w) for w in weights) < min(top_k, experts - 0.5):
            high *= 2
        for _ in range(60):
            time = (low + high) / 2
            less = sum(1 - math.exp(-time * w) for w in weights) < top_k
            low, high = (time, high) if less else (low, time)
        counts = [round(ASSUMED_TOKENS * (1 - math.exp(-high * w))) for w in weights]
        shuffled = []
        for layer in range(layers):
            of_layer, stride = [0] * experts, _coprime(experts, 5 + 2 * layer)
            for rank, count in enumerate(counts):
                of_layer[(stride * rank + layer) % experts] = count
            shuffled.append(tuple(of_layer))
        return cls(tuple(shuffled), f"zipf:{exponent:g}")


def _coprime(size: int, start: int) -> int:
    """The first number from `start` on that has no divisor in common with `size`."""
    return next(n for n in range(start, start + size + 1) if math.gcd(n, size) == 1)
