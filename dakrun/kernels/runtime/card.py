"""The card of a GPU at hand, as the driver describes it, or the one to which launches are held."""

import functools
from dataclasses import replace
from typing import Any

import torch

from dakrun.geometry import TILED_THREADS
from dakrun.hardware import Card
from dakrun.kernels.runtime import jit
from dakrun.kernels.runtime.held import held_card


def card_of(device: torch.device) -> Card:
    """The card of a GPU: what launches may take of it."""
    return held_card() or _with_clusters(device)


def has_kernels(device: torch.device) -> bool:
    """Whether `device` runs the kernels. Compiles nothing."""
    return device.type == "cuda" and described_card(device).runs_kernels


def described_card(device: torch.device) -> Card:
    """The card of a GPU, with an estimate of the clusters. Compiles nothing."""
    return held_card() or _described(device)


def gpu_name(device: torch.device | None = None) -> str:
    """Name of a GPU, with the compute capability to whose limits it is held.

    By default it is torch's current GPU.
    """
    device = device or torch.device("cuda", torch.cuda.current_device())
    name, card = torch.cuda.get_device_name(device), held_card()
    if card is None or card.capability == _described(device).capability:
        return name
    return f"{name} held to {card.capability}"


def gpu_id() -> str:
    """The first digits of the UUID of torch's current GPU: cards of one name differ in it."""
    properties: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
    return str(properties.uuid)[:8]


def _described(device: torch.device) -> Card:
    """The card by the driver's properties, with an estimate of the clusters."""
    properties: Any = torch.cuda.get_device_properties(device)
    return Card.of(
        f"{properties.major}.{properties.minor}",
        sms=properties.multi_processor_count,
        shared_bytes_per_sm=properties.shared_memory_per_multiprocessor,
    )


@functools.cache
def _with_clusters(device: torch.device) -> Card:
    """The card, its clusters counted by the driver for a small kernel, compiled if need be."""
    card = _described(device)
    if not (card.runs_kernels and card.clusters):
        return card
    with torch.cuda.device(device):
        kernel = jit.kernel("copy_blocks.cu", "copy_blocks")
    sizes = range(2, card.max_cluster + 1)
    clusters = tuple(kernel.clusters(size, TILED_THREADS, card.lone_ring_bytes) for size in sizes)
    return replace(card, clusters=clusters)
