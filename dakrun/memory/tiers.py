"""Tiers: the memories that a plan fills, and matrices whose row blocks lie in several of them.

Host and GPU memory come from host_memory.py and device_memory.py. Knows no plans and no models.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from dakrun.geometry import first_row, row_block_count
from dakrun.hardware.profile import LOCAL
from dakrun.memory.device import (
    DeviceBlock,
    check_free,
    check_peer,
    device_index,
    enable_peer_access,
    peer_index,
)
from dakrun.memory.host import HostBlock, check_page_locking, locked_block
from dakrun.memory.limits import available_host_memory as available_host_memory
from dakrun.memory.limits import check_host_memory
from dakrun.units import ceil_div

ALIGNMENT = 256
HOST = "host"
LOCAL_HINT = "lower --hbm-budget, --batch-size or --max-model-len, or end what else uses the GPU"
PEER_HINT = "lower --peer-budget, or end what else uses that GPU"


class Tier:
    """One memory of fixed size that hands out aligned, uninitialised tensors and never grows.

    On a GPU the tier "hbm" is its own memory, "host" page-locked host memory that every GPU can
    read, and "peer:N" memory of GPU N that `device` can read. On a CPU all are host memory.
    """

    def __init__(self, name: str, capacity: int, device: torch.device) -> None:
        """Take `capacity` bytes; CannotRun where the machine does not give them."""
        self.name = name
        self.capacity = capacity
        self.used = 0
        self._block = _take(name, capacity, device)

    def close(self) -> None:
        """Give the memory back. Repeating it does nothing; tensors of it are not to be read."""
        self.used = self.capacity
        self._block.close()

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor of this tier; MemoryError where it does not fit any more."""
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        end = self.used + aligned(nbytes)
        if end > self.capacity:
            raise MemoryError(f"tier {self.name}: {nbytes} bytes asked, {self.free} left")
        block = self._block.tensor[self.used : self.used + nbytes]
        self.used = end
        return block.view(dtype).view(*shape)

    @property
    def free(self) -> int:
        """Bytes that are not handed out."""
        return self.capacity - self.used


class Tiers(dict[str, Tier]):
    """Tiers by name that are given back together; a context manager."""

    def close(self) -> None:
        """Close every tier. Repeating it does nothing."""
        for tier in self.values():
            tier.close()

    def __enter__(self) -> "Tiers":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


@dataclass(frozen=True)
class Part:
    """Whole rows of a matrix in one tier: `data` is [rows, K], row-major, contiguous."""

    tier: str
    rows: slice
    data: torch.Tensor


@dataclass(frozen=True)
class PartitionedTensor:
    """A matrix [M, K] whose rows lie in several tiers; the parts follow their order."""

    shape: tuple[int, int]
    dtype: torch.dtype
    parts: tuple[Part, ...]

    @classmethod
    def empty(
        cls,
        shape: tuple[int, int],
        dtype: torch.dtype,
        placement: Sequence[tuple[str, int]],
        tiers: Mapping[str, Tier],
    ) -> "PartitionedTensor":
        """Allocate a matrix with `placement` (tier, row blocks), in the order of its rows."""
        (height, cols), first, parts = shape, 0, []
        for tier, count in placement:
            if count:
                rows = slice(first_row(first, height), first_row(first + count, height))
                data = tiers[tier].allocate((rows.stop - rows.start, cols), dtype)
                parts.append(Part(tier, rows, data))
            first += count
        if first != row_block_count(height):
            raise ValueError(f"{first} row blocks placed of a matrix of {row_block_count(height)}")
        return cls(shape, dtype, tuple(parts))

    def dense(self) -> torch.Tensor:
        """The matrix [M, K] in one piece, on the device of the first part."""
        out = torch.empty(self.shape, dtype=self.dtype, device=self.parts[0].data.device)
        for part in self.parts:
            out[part.rows] = part.data.to(out.device)
        return out


def aligned(nbytes: int) -> int:
    """`nbytes` rounded up to what an allocation occupies."""
    return ceil_div(nbytes, ALIGNMENT) * ALIGNMENT


def allocate_tiers(capacities: Mapping[str, int], device: torch.device) -> Tiers:
    """Tiers of exactly the given sizes in bytes, to be closed by the caller.

    Raises CannotRun before anything is allocated where this machine does not hold them, and with
    everything given back where that shows only then.
    """
    _check(capacities, device)
    tiers = Tiers()
    try:
        for name, size in capacities.items():
            tiers[name] = Tier(name, size, device)
    except BaseException:
        tiers.close()
        raise
    return tiers


def _check(capacities: Mapping[str, int], device: torch.device) -> None:
    """CannotRun where a tier cannot be had; takes nothing that it does not give back."""
    if device.type == "cpu":
        check_host_memory(sum(capacities.values()))
        return
    gpu, on_host = device_index(device), capacities.get(HOST, 0)
    check_host_memory(on_host)
    for name, size in capacities.items():
        if name == LOCAL:
            check_free(size, gpu, what="the plan", hint=LOCAL_HINT)
        elif name != HOST and size:
            check_peer(peer_index(name), gpu)
            check_free(size, peer_index(name), what=f"tier {name}", hint=PEER_HINT)
    check_page_locking(on_host, gpu)


def _take(name: str, nbytes: int, device: torch.device) -> HostBlock | DeviceBlock:
    """Memory for the tier `name` of a model that runs on `device`."""
    if device.type == "cpu":
        return HostBlock(nbytes)
    if name == HOST:
        return locked_block(nbytes, device_index(device))
    if name == LOCAL or not nbytes:
        return DeviceBlock(nbytes, device, hint=LOCAL_HINT)
    peer = peer_index(name)
    enable_peer_access(peer, device_index(device))
    return DeviceBlock(nbytes, torch.device("cuda", peer), hint=PEER_HINT)
