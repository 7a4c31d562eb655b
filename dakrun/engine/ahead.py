"""Which matrix each product prefetches into L2 as it ends, where HBM would have nothing to read."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from dakrun.models.experts import Experts
from dakrun.models.modules import Linear


class Ahead(NamedTuple):
    """A matrix by name. `idle`: HBM has nothing to do until a router has chosen experts."""

    name: str
    idle: bool = False


def matrices_ahead(order: Sequence[Linear | Experts]) -> dict[str, Ahead]:
    """By name of a matrix of `order`, which is that of their use: the one that it prefetches.

    That is the next one. Ahead of a router it is the largest of those behind its experts, which are
    known only when it has chosen; they are read evict-first, so that L2 keeps it.
    """
    runs = [
        (linear, list(run))
        for linear, run in itertools.groupby(order, lambda one: isinstance(one, Linear))
    ]
    found: dict[str, Ahead] = {}
    for number, (linear, run) in enumerate(runs):
        if linear:
            found |= {a.name: Ahead(b.name) for a, b in itertools.pairwise(run)}
        behind = runs[number + 2][1] if linear and number + 2 < len(runs) else []
        if behind:
            most = max(behind, key=lambda one: one.shape[0] * one.shape[1])
            found[run[-1].name] = Ahead(most.name, idle=True)
    return found
