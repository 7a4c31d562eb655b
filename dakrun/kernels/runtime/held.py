"""The card to whose limits launches are held, if they are, instead of the card of the GPU."""

import contextlib
from collections.abc import Iterator

from dakrun.hardware import Card

_held: list[Card] = []  # the last one counts, instead of all GPUs' cards


def held_card() -> Card | None:
    """The card to which launches of all GPUs are held now; None if they are not held."""
    return _held[-1] if _held else None


@contextlib.contextmanager
def held_to(card: Card) -> Iterator[None]:
    """Choose all launches for `card` meanwhile: without a technique, or for a smaller card."""
    _held.append(card)
    try:
        yield
    finally:
        _held.pop()


def held_macros() -> dict[str, int]:
    """Macros of all kernels that keep them from what the card lacks (native/hardware.cuh)."""
    card = held_card()
    if card is None:
        return {}
    lacks = {"WGMMA": not card.has_wgmma, "CLUSTERS": not card.clusters}
    return {name: 0 for name, lacking in lacks.items() if lacking}
