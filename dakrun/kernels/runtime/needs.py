"""The kernel variants that a model needs: each wrapper registers a function that lists its own.

They are compiled ahead and in parallel. Knows no kernel. Needs no GPU.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from dakrun.config import Routing
from dakrun.formats import PACKED16, WeightFormat
from dakrun.hardware import Card

Macros = dict[str, int]
Variant = tuple[str, Macros]  # a file of native/, and the macros of the variant


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What a model asks of kernels for weights and activations of `dtype` on `card`.

    Products of few rows of X have any of the numbers `rows`; with `mixes` some of their weights
    have mixed tiers. Weights have any of `formats`. Attention has heads of `head_dim` and `group`
    query heads per KV head; with `spills` its slots may spill, with `head_norms` it normalizes
    query and key heads. A mixture's experts are chosen by `routing`. `every` asks for variants that
    no model needs, too.
    """

    dtype: torch.dtype
    card: Card
    rows: Sequence[int] = ()
    head_dim: int
    group: int = 1
    mixes: bool = False
    spills: bool = False
    head_norms: bool = False
    routing: Routing | None = None
    every: bool = False
    formats: Sequence[WeightFormat] = (PACKED16,)


_Of = Callable[[Needs], Iterable[Macros]]
_registered: dict[str, tuple[float, _Of]] = {}


def compiled_ahead(source: str, *, seconds: float = 1) -> Callable[[_Of], _Of]:
    """Register the decorated function: the macros of the variants of native/`source` by Needs.

    A variant takes about `seconds` on one core to compile, for most sources less than 1.
    """

    def register(of: _Of) -> _Of:
        _registered[source] = seconds, of
        return of

    return register


def needed(needs: Needs) -> list[Variant]:
    """All variants that `needs` asks for, those first that take longest to compile."""
    found = ((source, macros) for source, (_, of) in _registered.items() for macros in of(needs))
    return longest_first(found)


def longest_first(found: Iterable[Variant]) -> list[Variant]:
    """The variants in the order in which they are compiled; those of a source keep their order."""
    return sorted(found, key=lambda variant: -_registered[variant[0]][0])
