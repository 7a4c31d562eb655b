"""Memory tiers of fixed size.

host.py and device.py allocate the memory. Knows neither plans nor models.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from dakrun.hardware import LOCAL
from dakrun.memory.device import (
    DeviceBlock,
    check_free,
    check_peer,
    device_index,
    enable_peer_access,
    peer_index,
)
from dakrun.memory.host import HostBlock, check_page_locking, locked_block
from dakrun.memory.limits import check_host_memory
from dakrun.units import ceil_div

ALIGNMENT = 256  # bytes
HOST = "host"
LOCAL_HINT = (
    "lower --hbm-budget, --batch-size or --max-model-len, or stop other programs on the GPU"
)
PEER_HINT = "lower --peer-budget, or stop other programs on that GPU"


class Tier:
    """An arena of fixed size in one memory; allocates aligned, uninitialised tensors.

    If `device` is a GPU, tier "hbm" is its own memory, "host" is page-locked host memory that every
    GPU can read, and "peer:N" is memory of GPU N that `device` can read. If `device` is a CPU, all
    tiers are host memory.
    """

    def __init__(
        self,
        name: str,
        capacity: int,
        device: torch.device,
        on_bytes: Callable[[int], None] = lambda done: None,
    ) -> None:
        """Allocate `capacity` bytes. Raises CannotRun if the machine does not have them.

        `on_bytes` is called with the bytes of host memory so far, since that takes long.
        """
        self.name = name
        self.capacity = capacity
        self.used = 0
        self._block = _take(name, capacity, device, on_bytes)

    def close(self) -> None:
        """Free the memory; its tensors must not be read any more. A second call does nothing."""
        self.used = self.capacity
        self._block.close()

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous, uninitialised tensor. Raises MemoryError if it does not fit."""
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        end = self.used + aligned(nbytes)
        if end > self.capacity:
            raise MemoryError(f"tier {self.name}: {nbytes} bytes asked, {self.free} left")
        block = self._block.tensor[self.used : self.used + nbytes]
        self.used = end
        return block.view(dtype).view(*shape)

    @property
    def free(self) -> int:
        """Bytes not allocated yet."""
        return self.capacity - self.used


class Tiers(dict[str, Tier]):
    """Tiers by name; as a context manager it closes all of them."""

    def close(self) -> None:
        """Close every tier. A second call does nothing."""
        for tier in self.values():
            tier.close()

    def __enter__(self) -> "Tiers":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def aligned(nbytes: int) -> int:
    """Bytes that an allocation of `nbytes` takes: rounded up to ALIGNMENT."""
    return ceil_div(nbytes, ALIGNMENT) * ALIGNMENT


def allocate_tiers(
    capacities: Mapping[str, int],
    device: torch.device,
    on_bytes: Callable[[int, int], None] = lambda done, total: None,
) -> Tiers:
    """Allocate tiers of exactly the given sizes in bytes; the caller closes them.

    `on_bytes` is called meanwhile, with the bytes allocated so far and those of all tiers.
    Raises CannotRun if a size does not fit. That is checked before anything is allocated; if an
    allocation fails all the same, the others are freed.
    """
    _check(capacities, device)
    tiers, before, total = Tiers(), 0, sum(capacities.values())
    try:
        for name, size in capacities.items():
            on_bytes(before, total)
            tiers[name] = Tier(name, size, device, partial(_more, on_bytes, before, total))
            before += size
        on_bytes(before, total)
    except BaseException:
        tiers.close()
        raise
    return tiers


def _more(on_bytes: Callable[[int, int], None], before: int, total: int, done: int) -> None:
    """Tell `on_bytes` of `done` bytes of a tier, beside those of the tiers before."""
    on_bytes(before + done, total)


def _check(capacities: Mapping[str, int], device: torch.device) -> None:
    """Raise CannotRun if a tier does not fit. Allocates nothing that outlasts the call."""
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


def _take(
    name: str, nbytes: int, device: torch.device, on_bytes: Callable[[int], None]
) -> HostBlock | DeviceBlock:
    """Allocate the memory of tier `name` for a model that runs on `device`."""
    if device.type == "cpu":
        return HostBlock(nbytes)
    if name == HOST:
        return locked_block(nbytes, device_index(device), on_bytes)
    if name == LOCAL or not nbytes:
        return DeviceBlock(nbytes, device, hint=LOCAL_HINT)
    peer = peer_index(name)
    enable_peer_access(peer, device_index(device))
    return DeviceBlock(nbytes, torch.device("cuda", peer), hint=PEER_HINT)
