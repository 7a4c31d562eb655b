"""The card to whose limits launches are held, if they are, in place of the card of the GPU.

A test or an ablation holds them for a while, `--limits` as long as the process runs.
"""

import contextlib
from collections.abc import Iterator

import torch

from dakrun.errors import CannotRun, UsageError
from dakrun.hardware import SM_SHARED_BYTES, Card

_held: list[Card] = []  # the last one takes the place of all GPUs' cards


def held() -> Card | None:
    """The card that takes the place of all GPUs' cards now."""
    return _held[-1] if _held else None


@contextlib.contextmanager
def held_to(card: Card) -> Iterator[None]:
    """Choose all launches for `card` meanwhile: without a technique, or for a smaller card."""
    _held.append(card)
    try:
        yield
    finally:
        _held.pop()


def hold_to_limits(capability: str) -> None:
    """Hold all launches of this process to the cards of a compute capability, such as "12.0".

    The GPU keeps its SMs, its memory and its architecture. Raises UsageError for a capability that
    is unknown or above the GPU's shared memory, CannotRun without a GPU.
    """
    if capability not in SM_SHARED_BYTES:
        raise UsageError(
            f"--limits {capability}: no card of that compute capability is known",
            hint=f"known are {', '.join(SM_SHARED_BYTES)}",
        )
    if not torch.cuda.is_available():
        raise CannotRun("--limits needs a CUDA GPU", hint="leave it out, or see: dakrun doctor")
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    card = Card.of(capability, sms=properties.multi_processor_count)
    own = f"{properties.major}.{properties.minor}"
    if card.shared_bytes_per_sm > properties.shared_memory_per_multiprocessor or (
        card.has_wgmma and own != capability
    ):
        raise UsageError(
            f"--limits {capability}: {properties.name} (compute capability {own}) has less",
            hint="give the limits of a smaller card",
        )
    _held.append(card)


def held_name(name: str) -> str:
    """The name of a GPU, and the limits to which its launches are held, if they are."""
    card = held()
    return name if card is None else f"{name} held to {card.capability}"


def held_macros() -> dict[str, int]:
    """Macros of all kernels that keep them from what the card lacks (native/hardware.cuh)."""
    card = held()
    if card is None:
        return {}
    lacks = {"WGMMA": not card.has_wgmma, "CLUSTERS": not card.clusters}
    return {name: 0 for name, lacking in lacks.items() if lacking}
