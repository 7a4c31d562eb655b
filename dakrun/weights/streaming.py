"""Stretches of files on their way to a device: read ahead by threads, copied, handed on in order.

They pass through a few buffers, page-locked where the device is a GPU, so that reading, the link
and whoever takes them work side by side, in memory that does not grow. Knows no tensor names.
"""

import math
import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch

from dakrun.errors import CannotRun
from dakrun.memory.tiers import HOST, aligned, allocate_tiers

BUFFERS = 4
SLICE_BYTES = 8 << 20  # that a thread reads at a time
MAX_READERS = 8


@dataclass(frozen=True)
class Extent:
    """A tensor of `shape`, row-major, that lies in an open file from `offset` on."""

    path: str
    descriptor: int
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * self.dtype.itemsize

    def rows(self, start: int, stop: int) -> "Extent":
        """The same of the rows start ... stop - 1."""
        row_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
        offset, shape = self.offset + start * row_bytes, (stop - start, *self.shape[1:])
        return replace(self, offset=offset, shape=shape)


def reader_count() -> int:
    """Threads that read files."""
    return min(MAX_READERS, len(os.sched_getaffinity(0)))


def read(extent: Extent, out: torch.Tensor) -> None:
    """Read an extent into `out`, a contiguous tensor of its dtype in host memory.

    Other threads run meanwhile. Raises CannotRun where the file cannot be read, or ends too early.
    """
    _read(extent, 0, out.view(-1).view(torch.uint8))


def stream(
    requests: Sequence[Sequence[Extent]], device: torch.device
) -> Iterator[list[torch.Tensor]]:
    """The extents of each request in turn, as tensors on `device`; they are the taker's to change.

    On a GPU they are ready in the order of torch's current stream. On a CPU they are only valid
    until the next ones are asked for. Raises CannotRun as `read` does.
    """
    size = max((_bytes(request) for request in requests), default=0)
    with (
        allocate_tiers({HOST: BUFFERS * size}, device) as tiers,
        ThreadPoolExecutor(reader_count()) as readers,
    ):
        free = deque(_Buffer(tiers[HOST].allocate((size,), torch.uint8)) for _ in range(BUFFERS))
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
            yield _tensors(request, buffer.moved(_bytes(request), device))
            free.append(buffer)


class _Buffer:
    """Host memory, which a GPU may still be copying from."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data
        self._copied: torch.cuda.Event | None = None

    def wait(self) -> None:
        """Wait until it can be written."""
        if self._copied is not None:
            self._copied.synchronize()

    def moved(self, count: int, device: torch.device) -> torch.Tensor:
        """The first `count` bytes on `device`; itself, where that is a CPU."""
        there = self.data[:count].to(device, non_blocking=True)
        if device.type == "cuda":
            self._copied = torch.cuda.current_stream(device).record_event()
        return there


def _bytes(request: Sequence[Extent]) -> int:
    return sum(aligned(extent.nbytes) for extent in request)


def _tensors(request: Sequence[Extent], data: torch.Tensor) -> list[torch.Tensor]:
    """The extents of a request that lie one after the other, aligned, in `data`."""
    tensors, at = [], 0
    for extent in request:
        flat = data[at : at + extent.nbytes].view(extent.dtype)
        tensors.append(flat.view(extent.shape))
        at += aligned(extent.nbytes)
    return tensors


def _slices(
    request: Sequence[Extent], data: torch.Tensor
) -> Iterator[tuple[Extent, int, torch.Tensor]]:
    """What threads read: an extent, the byte of it to start from, and where to."""
    for extent, tensor in zip(request, _tensors(request, data), strict=True):
        flat = tensor.view(-1).view(torch.uint8)
        for start in range(0, extent.nbytes, SLICE_BYTES):
            yield extent, start, flat[start : start + SLICE_BYTES]


def _read(extent: Extent, start: int, out: torch.Tensor) -> None:
    """Read bytes of an extent, from byte `start` on, until `out` (uint8, 1-D) is full."""
    left, at = out.numpy().data, extent.offset + start
    try:
        while left:
            count = os.preadv(extent.descriptor, [left], at)
            if not count:
                raise CannotRun(f"{extent.path}: ends too early", hint="copy the file anew")
            left, at = left[count:], at + count
    except OSError as problem:
        raise CannotRun(
            f"{extent.path}: cannot be read ({problem.strerror})", hint="copy the file anew"
        ) from None
