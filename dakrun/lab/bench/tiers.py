"""Memory for a benchmark: allocated in tiers, filled with random data, and its ceilings measured.

Knows tiers and bytes, not the kernels under test.
"""

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from dakrun.errors import CannotRun
from dakrun.hardware import LOCAL, RemoteTier
from dakrun.kernels import Reader, read_window
from dakrun.kernels.runtime import card_of, copy
from dakrun.lab.bench.ceilings import Ceilings, Effort, hbm_ring, link_ring
from dakrun.lab.bench.sweep import Case, buffer_bytes
from dakrun.lab.probe.measurement import steadier
from dakrun.lab.probe.sweeps import Buffer, copy_seconds
from dakrun.memory.device import check_free, check_peer, device_index, peer_index
from dakrun.memory.limits import available_host_memory
from dakrun.memory.tiers import ALIGNMENT, HOST, Tiers, allocate_tiers
from dakrun.units import format_bytes

BLOCK_BYTES = 2**26  # random bytes that a buffer repeats
HINT = "choose smaller shapes, cases or ratios, or end other programs that use the memory"


def check_gpu() -> None:
    """Raise CannotRun if there is no GPU."""
    if not torch.cuda.is_available():
        raise CannotRun("this benchmark needs a CUDA GPU", hint="see: dakrun doctor")


def measure_ceilings(
    remote: Sequence[RemoteTier], effort: Effort, device: torch.device, *, copies: bool = False
) -> Ceilings:
    """Bandwidths of HBM read by all SMs, and of each remote tier read by its SMs within its window.

    Each tier is read alone, with bulk copies of random bytes into shared memory. With `copies`,
    also the copy engine's bandwidth from each remote tier.
    """
    names = [tier.name for tier in remote]
    sizes = {LOCAL: effort.hbm_bytes} | dict.fromkeys(names, effort.remote_bytes)
    with allocate(sizes, device) as tiers:
        buffers = whole(tiers)
        rates = _rates(buffers, remote, effort, device)
        if not copies:
            return Ceilings(rates)
        return Ceilings(
            rates, {name: _copied(buffers[LOCAL], buffers[name], effort) for name in names}
        )


def _copied(local: torch.Tensor, remote: torch.Tensor, effort: Effort) -> float:
    """Bytes/s of the copy engine from `remote` to `local`: the median of several copies."""
    nbytes = min(local.numel(), remote.numel())
    target, source = local[:nbytes], remote[:nbytes]

    def readings() -> list[float]:
        return [nbytes / copy_seconds(target, source) for _ in range(effort.readings)]

    return statistics.median(steadier(readings))


def _rates(
    buffers: Mapping[str, torch.Tensor],
    remote: Sequence[RemoteTier],
    effort: Effort,
    device: torch.device,
) -> dict[str, float]:
    """Bytes/s of each tier: the median of several readings."""
    block = torch.randint(0, 256, (BLOCK_BYTES,), dtype=torch.uint8, device=device)
    for buffer in buffers.values():
        fill(buffer, block)
    card = card_of(device)
    readers = {LOCAL: Buffer(buffers[LOCAL]).reader(card.sms, hbm_ring(card))}
    for tier in remote:
        far = Buffer(buffers[tier.name])
        readers[tier.name] = far.reader(min(tier.sms, card.sms), link_ring(tier, card))

    def readings(reader: Reader) -> list[float]:
        return [read_window([reader], effort.seconds)[0] for _ in range(effort.readings)]

    return {
        name: statistics.median(steadier(partial(readings, reader)))
        for name, reader in readers.items()
    }


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


def whole(tiers: Tiers) -> dict[str, torch.Tensor]:
    """All bytes of each tier as one tensor: uint8 [bytes]."""
    return {name: tier.allocate((tier.capacity,), torch.uint8) for name, tier in tiers.items()}


@contextmanager
def operands(
    cases: Sequence[Case],
    name: str,
    tiers: Iterable[str],
    device: torch.device,
    progress: Callable[[str], None],
) -> Iterator[dict[str, torch.Tensor]]:
    """Buffers for the operands of any of the `cases`: uint8 [bytes] by tier.

    `progress` reports their size; `name` describes the operands. Raises CannotRun if memory is
    short.
    """
    sizes = dict(zip(tiers, buffer_bytes(cases, ALIGNMENT), strict=True))
    progress(f"measuring {len(cases)} cases with {format_bytes(sum(sizes.values()))} of {name}")
    with allocate(sizes, device) as memories:
        buffers = whole(memories)
        yield buffers
        buffers.clear()  # references would keep the memory


def fill_random(
    buffers: Mapping[str, torch.Tensor], dtype: torch.dtype, *, scale: float = 1.0
) -> None:
    """Write normal values times `scale` into all `buffers`."""
    values = torch.randn(BLOCK_BYTES // dtype.itemsize, device=buffers[LOCAL].device)
    block = values.mul_(scale).to(dtype).view(torch.uint8)
    for buffer in buffers.values():
        fill(buffer, block)


def fill(buffer: torch.Tensor, block: torch.Tensor) -> None:
    """Repeat `block` in `buffer`, both uint8 [bytes]; `block` lies in HBM.

    Synchronizes: with programmatic dependent launch, a kernel may read `buffer` before the work
    ahead of it on the stream has ended.
    """
    for part in buffer.split(block.numel()):
        copy(part, block[: part.numel()])
    torch.cuda.synchronize()
