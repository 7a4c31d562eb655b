"""Cards made by hand, for launches that are chosen without a GPU."""

from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dakrun.hardware import Card
from dakrun.kernels.runtime import card_of

H200 = Card.of("9.0", sms=132)
PORTABLE = Card.of("10.0", sms=132)  # without wgmma
SMALL = Card.of("12.0", sms=188)  # 100 KiB an SM, no clusters


def hopper(sms: int, **changes: Any) -> Card:
    """A Hopper with `sms` SMs, as many clusters as an H200, and `changes`."""
    return replace(H200, sms=sms, **changes)


def here(sms: int = 0, **changes: Any) -> Card:
    """The card of torch's current GPU, or that to which it is held, with `sms` SMs."""
    card = card_of(torch.device("cuda", torch.cuda.current_device()))
    return replace(card, sms=sms or card.sms, **changes)


def hold_to(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `card` be that of every device until the test ends, as held_to does."""
    # By its full name it would be the function of the same name, which the folder exports.
    monkeypatch.setattr(import_module("dakrun.kernels.runtime.held"), "_held", [card])


def properties(capability: str, shared_kib: int, name: str = "a card") -> SimpleNamespace:
    """What the driver says of a card with that much shared memory an SM."""
    major, minor = map(int, capability.split("."))
    return SimpleNamespace(
        major=major,
        minor=minor,
        multi_processor_count=132,
        shared_memory_per_multiprocessor=shared_kib << 10,
        name=name,
    )
