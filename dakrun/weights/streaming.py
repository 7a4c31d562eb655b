"""Reads tensors from files to a device: threads read ahead, results come in order.

The data passes through a fixed ring of buffers, page-locked if the device is a GPU, so that disk,
link and consumer overlap. Does not know tensor names.
"""

import math
import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

import torch

from dakrun.errors import CannotRun
from dakrun.interrupt import Workers
from dakrun.memory.limits import usable_cores
from dakrun.memory.tiers import HOST, aligned, allocate_tiers

BUFFERS = 16  # at most
RING_BYTES = 512 << 20  # of all buffers, if they are more than two
SLICE_BYTES = 8 << 20  # bytes that a thread reads in one call
MAX_READERS = 8


@dataclass(frozen=True)
class Extent:
    """A contiguous tensor of `shape` at byte `offset` of an open file."""

    path: str
    descriptor: int
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Size of the tensor in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def rows(self, start: int, stop: int) -> "Extent":
        """The extent of rows `start` to `stop` - 1."""
        row_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
        offset, shape = self.offset + start * row_bytes, (stop - start, *self.shape[1:])
        return replace(self, offset=offset, shape=shape)


def reader_count() -> int:
    """Number of threads that read files."""
    return min(MAX_READERS, usable_cores())


def read(extent: Extent, out: torch.Tensor) -> None:
    """Read an extent into `out`, a contiguous tensor of its dtype in host memory.

    Releases the GIL. Raises CannotRun if the file cannot be read or is too short.
    """
    _read(extent, 0, out.view(-1).view(torch.uint8))


def stream(
    requests: Sequence[Sequence[Extent]], device: torch.device
) -> Iterator[list[torch.Tensor]]:
    """Yield the extents of each request as tensors on `device`; the caller may overwrite them.

    On a GPU the tensors are ready in the order of torch's current stream. On a CPU they are valid
    until the next request is asked for. Raises CannotRun as `read` does.
    """
    size = max((_bytes(request) for request in requests), default=0)
    count = max(2, min(BUFFERS, RING_BYTES // max(1, size)))
    with (
        allocate_tiers({HOST: count * size}, device) as tiers,
        Workers(reader_count()) as readers,
    ):
        free = deque(_Buffer(tiers[HOST].allocate((size,), torch.uint8)) for _ in range(count))
        ahead: deque[tuple[Sequence[Extent], _Buffer, list[Future[None]]]] = deque()
        waiting = iter(requests)
        while True:
            while free and (request := next(waiting, None)) is not None:
                buffer = free.popleft()
                buffer.wait()
                slices = _slices(request, buffer.data)
                ahead.append((request, buffer, [readers.submit(_read, *s) for s in slices]))
            if not ahead:
                return
            request, buffer, reads = ahead.popleft()
            for each in reads:
                each.result()
            yield _tensors(request, buffer.copy_to(device, _bytes(request)))
            free.append(buffer)


class _Buffer:
    """A host buffer that a GPU may still be copying from."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data
        self._copied: torch.cuda.Event | None = None

    def wait(self) -> None:
        """Wait until the GPU has copied it."""
        if self._copied is not None:
            self._copied.synchronize()

    def copy_to(self, device: torch.device, count: int) -> torch.Tensor:
        """Copy the first `count` bytes to `device`; on a CPU return a view of them."""
        copied = self.data[:count].to(device, non_blocking=True)
        if device.type == "cuda":
            self._copied = torch.cuda.current_stream(device).record_event()
        return copied


def _bytes(request: Sequence[Extent]) -> int:
    return sum(aligned(extent.nbytes) for extent in request)


def _tensors(request: Sequence[Extent], data: torch.Tensor) -> list[torch.Tensor]:
    """Views of `data` as the extents of a request, one after the other, each aligned."""
    tensors, at = [], 0
    for extent in request:
        flat = data[at : at + extent.nbytes].view(extent.dtype)
        tensors.append(flat.view(extent.shape))
        at += aligned(extent.nbytes)
    return tensors


def _slices(
    request: Sequence[Extent], data: torch.Tensor
) -> Iterator[tuple[Extent, int, torch.Tensor]]:
    """The reads of a request: (extent, first byte in it, destination in `data`)."""
    for extent, tensor in zip(request, _tensors(request, data), strict=True):
        flat = tensor.view(-1).view(torch.uint8)
        for start in range(0, extent.nbytes, SLICE_BYTES):
            yield extent, start, flat[start : start + SLICE_BYTES]


def _read(extent: Extent, start: int, out: torch.Tensor) -> None:
    """Fill `out` (uint8, 1-D) with the bytes of an extent from byte `start` on."""
    left, at = out.numpy().data, extent.offset + start
    try:
        while left:
            count = os.preadv(extent.descriptor, [left], at)
            if not count:
                raise CannotRun(f"{extent.path}: too short", hint="copy it again")
            left, at = left[count:], at + count
    except OSError as problem:
        raise CannotRun(
            f"{extent.path}: cannot be read ({problem.strerror})", hint="copy the file again"
        ) from None
