"""Memory for a benchmark: taken, filled with random data, and the rates at which it is read.

Knows tiers and bytes and how they are read, not the kernels under test.
"""

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from dakrun.bench.cases import Case, buffer_bytes
from dakrun.bench.ceilings import HBM_RING, Ceilings, link_ring
from dakrun.bench.effort import Effort
from dakrun.errors import CannotRun
from dakrun.hardware.profile import LOCAL, RemoteTier
from dakrun.kernels.bandwidth import Reader, read_window
from dakrun.kernels.runtime.copy_engine import copy
from dakrun.memory import (
    ALIGNMENT,
    HOST,
    Tiers,
    allocate_tiers,
    available_host_memory,
    check_free,
    check_peer,
    device_index,
    peer_index,
)
from dakrun.probe.measurement import steadier
from dakrun.probe.sweeps import Buffer, copy_seconds
from dakrun.units import format_bytes

BLOCK_BYTES = 2**26  # of different values, repeated all over a buffer
HINT = "choose smaller shapes, cases or ratios, or end what else uses that memory"


def check_gpu() -> None:
    """Raise CannotRun where there is no GPU."""
    if not torch.cuda.is_available():
        raise CannotRun("a benchmark needs a CUDA GPU; none can be used", hint="see: dakrun doctor")


def measure_ceilings(
    remote: Sequence[RemoteTier], effort: Effort, device: torch.device, *, copies: bool = False
) -> Ceilings:
    """What HBM delivers to all SMs, and each of `remote` to its SMs within its window, alone.

    The bytes are random ones. With `copies` also what the copy engine brings of each of `remote`.
    """
    names = [tier.name for tier in remote]
    sizes = {LOCAL: effort.hbm_bytes} | dict.fromkeys(names, effort.remote_bytes)
    with take(sizes, device) as tiers:
        buffers = whole(tiers)
        rates = _rates(buffers, remote, effort, device)
        if not copies:
            return Ceilings(rates)
        return Ceilings(
            rates, {name: _copied(buffers[LOCAL], buffers[name], effort) for name in names}
        )


def _copied(local: torch.Tensor, remote: torch.Tensor, effort: Effort) -> float:
    """Bytes/s of the copy engine: the median of its copies."""
    nbytes = min(local.numel(), remote.numel())
    to, of = local[:nbytes], remote[:nbytes]

    def readings() -> list[float]:
        return [nbytes / copy_seconds(to, of) for _ in range(effort.readings)]

    return statistics.median(steadier(readings))


def _rates(
    buffers: Mapping[str, torch.Tensor],
    remote: Sequence[RemoteTier],
    effort: Effort,
    device: torch.device,
) -> dict[str, float]:
    """Bytes/s of each tier: the median of its readings."""
    block = torch.randint(0, 256, (BLOCK_BYTES,), dtype=torch.uint8, device=device)
    for buffer in buffers.values():
        fill(buffer, block)
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    readers = {LOCAL: Buffer(buffers[LOCAL]).reader(sms, HBM_RING)}
    for tier in remote:
        there = Buffer(buffers[tier.name])
        readers[tier.name] = there.reader(min(tier.sms, sms), link_ring(tier))

    def readings(reader: Reader) -> list[float]:
        return [read_window([reader], effort.seconds)[0] for _ in range(effort.readings)]

    return {
        name: statistics.median(steadier(partial(readings, reader)))
        for name, reader in readers.items()
    }


def take(sizes: Mapping[str, int], device: torch.device) -> Tiers:
    """Tiers of `sizes` bytes, to be closed by the caller; CannotRun where they cannot be had."""
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


def whole(tiers: Tiers) -> dict[str, torch.Tensor]:
    """All bytes of each tier as one tensor: uint8, 1-D."""
    return {name: tier.allocate((tier.capacity,), torch.uint8) for name, tier in tiers.items()}


@contextmanager
def operands(
    cases: Sequence[Case],
    what: str,
    tiers: Iterable[str],
    device: torch.device,
    note: Callable[[str], None],
) -> Iterator[dict[str, torch.Tensor]]:
    """Memory for the operands of any of the `cases`: uint8, 1-D, by tier.

    `note` is told how much it is, of `what`. Raises CannotRun where it cannot be had.
    """
    sizes = dict(zip(tiers, buffer_bytes(cases, ALIGNMENT), strict=True))
    note(f"measuring {len(cases)} cases with {format_bytes(sum(sizes.values()))} of {what}")
    with take(sizes, device) as memories:
        buffers = whole(memories)
        yield buffers
        buffers.clear()  # else they keep the memory


def fill_random(
    buffers: Mapping[str, torch.Tensor], dtype: torch.dtype, *, scale: float = 1.0
) -> None:
    """Put normal values times `scale` into all `buffers`."""
    values = torch.randn(BLOCK_BYTES // dtype.itemsize, device=buffers[LOCAL].device)
    block = values.mul_(scale).to(dtype).view(torch.uint8)
    for buffer in buffers.values():
        fill(buffer, block)


def fill(buffer: torch.Tensor, block: torch.Tensor) -> None:
    """Repeat `block`, which lies in HBM, all over `buffer`: both uint8, 1-D.

    Done when it returns: launches that overlap may read what is in `buffer` before their turn.
    """
    for part in buffer.split(block.numel()):
        copy(part, block[: part.numel()])
    torch.cuda.synchronize()
