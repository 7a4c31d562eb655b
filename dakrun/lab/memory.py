"""Memory for measuring: buffers in tiers, random data in them, and the bandwidths of reading them.

Knows tiers and bytes, not the kernels under test.
"""

import statistics
from collections.abc import Mapping, Sequence
from functools import partial

import torch

from dakrun.errors import CannotRun
from dakrun.hardware import LOCAL, RemoteTier
from dakrun.kernels import Reader, read_window
from dakrun.kernels.runtime import card_of, copy
from dakrun.lab.ceilings import HBM_RING, Ceilings, Effort, Ring, fitting, link_ring
from dakrun.lab.chain import event_seconds
from dakrun.lab.samples import steadier
from dakrun.memory.device import check_free, check_peer, device_index, peer_index
from dakrun.memory.limits import available_host_memory
from dakrun.memory.tiers import HOST, Tiers, aligned, allocate_tiers
from dakrun.units import format_bytes

BLOCK_BYTES = 2**26  # random bytes that a buffer repeats
HINT = "choose smaller shapes, cases or ratios, or end other programs that use the memory"

Buffers = dict[str, torch.Tensor]  # uint8 [bytes] by tier, HBM first


class Room:
    """Buffers on `device` and in remote tiers that grow; a context manager that frees them."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.buffers = device, Buffers()
        self._tiers: Tiers | None = None

    def __enter__(self) -> "Room":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the buffers, of which no view may be left."""
        self.buffers.clear()
        if self._tiers is not None:
            self._tiers.close()
        self._tiers = None

    def at_least(self, sizes: Mapping[str, int]) -> Buffers:
        """Buffers of `sizes` bytes or more by tier; CannotRun if memory is short."""
        held = {name: buffer.numel() for name, buffer in self.buffers.items()}
        if held.keys() != sizes.keys() or any(held[name] < sizes[name] for name in sizes):
            self.close()
            wanted = {name: max(size, held.get(name, 0), 1) for name, size in sizes.items()}
            self._tiers = allocate({name: aligned(n) for name, n in wanted.items()}, self.device)
            for name, tier in self._tiers.items():
                self.buffers[name] = tier.allocate((tier.capacity,), torch.uint8)
        return self.buffers


def allocate(sizes: Mapping[str, int], device: torch.device) -> Tiers:
    """Allocate tiers of `sizes` bytes, which the caller closes; CannotRun if memory is short."""
    check = partial(check_free, what="the benchmark", hint=HINT)
    for name, size in sizes.items():
        if name == LOCAL:
            check(size, device_index(device))
        elif name != HOST:
            check_peer(peer_index(name), device_index(device))
            check(size, peer_index(name))
        elif size > (available := available_host_memory()):
            raise CannotRun(
                f"the benchmark needs {format_bytes(size)} of host memory, "
                f"{format_bytes(available)} are available",
                hint=HINT,
            )
    return allocate_tiers(sizes, device)


def reader(
    buffer: torch.Tensor, ctas: int, ring: Ring, *, sharers: int = 1, nbytes: int = 0
) -> Reader:
    """`ctas` CTAs that read `buffer`, uint8 [bytes] in any tier, or its first `nbytes`."""
    size, (chunk, stages) = nbytes or buffer.numel(), ring
    return Reader(
        address=buffer.data_ptr(),
        bytes=size,
        ctas=ctas,
        chunk=chunk,
        stages=stages,
        sharers=sharers,
    )


def measure_ceilings(
    remote: Sequence[RemoteTier], effort: Effort, device: torch.device, *, copies: bool = False
) -> Ceilings:
    """Bandwidths of HBM read by all SMs, and of each remote tier read by its SMs within its window.

    Each tier is read alone, with bulk copies of random bytes into shared memory: the median of
    several readings. With `copies`, also the copy engine's bandwidth from each remote tier.
    """
    sizes = {LOCAL: effort.hbm_bytes} | {tier.name: effort.remote_bytes for tier in remote}
    card = card_of(device)
    with Room(device) as room:
        buffers = room.at_least(sizes)
        fill_bytes(buffers)
        readers = {LOCAL: reader(buffers[LOCAL], card.sms, fitting([HBM_RING], card)[0])}
        for tier in remote:
            sms = min(tier.sms, card.sms)
            readers[tier.name] = reader(buffers[tier.name], sms, link_ring(tier, card))

        def read(name: str) -> list[float]:
            return read_rates([readers[name]], effort.seconds, effort.readings)[0]

        def copied(name: str) -> list[float]:
            nbytes = min(buffers[LOCAL].numel(), buffers[name].numel())
            to, source = buffers[LOCAL][:nbytes], buffers[name][:nbytes]
            return [nbytes / copy_seconds(to, source) for _ in range(effort.readings)]

        rates = {name: statistics.median(steadier(partial(read, name))) for name in readers}
        names = [tier.name for tier in remote if copies]
        return Ceilings(
            rates, {name: statistics.median(steadier(partial(copied, name))) for name in names}
        )


def copy_seconds(to: torch.Tensor, source: torch.Tensor) -> float:
    """Seconds of one asynchronous copy by the copy engine."""
    return event_seconds(partial(copy, to, source))


def read_rates(readers: Sequence[Reader], seconds: float, runs: int) -> list[list[float]]:
    """Bytes/s of each reader in each of `runs` windows of `seconds`, with all of them reading."""
    windows = [read_window(readers, seconds) for _ in range(runs)]
    return [list(rates) for rates in zip(*windows, strict=True)]


def fill_bytes(buffers: Mapping[str, torch.Tensor]) -> None:
    """Write random bytes into all `buffers`; zeros have another bandwidth."""
    device = buffers[LOCAL].device
    fill(buffers, torch.randint(0, 256, (BLOCK_BYTES,), dtype=torch.uint8, device=device))


def fill_random(
    buffers: Mapping[str, torch.Tensor], dtype: torch.dtype, *, scale: float = 1.0
) -> None:
    """Write normal values times `scale` into all `buffers`."""
    values = torch.randn(BLOCK_BYTES // dtype.itemsize, device=buffers[LOCAL].device)
    fill(buffers, values.mul_(scale).to(dtype).view(torch.uint8))


def fill(buffers: Mapping[str, torch.Tensor], block: torch.Tensor) -> None:
    """Repeat `block` in all `buffers`, uint8 [bytes]; `block` lies in HBM.

    Synchronizes: with programmatic dependent launch, a kernel may read a buffer before the work
    ahead of it on the stream has ended.
    """
    for buffer in buffers.values():
        for part in buffer.split(block.numel()):
            copy(part, block[: part.numel()])
    torch.cuda.synchronize()
