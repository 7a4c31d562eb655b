"""Timed reads of memory tiers by bulk copies; wraps native/bandwidth.cu.

Knows addresses and numbers of CTAs, not which memory an address belongs to.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dakrun.geometry import BANDWIDTH_MAX_SOURCES, BANDWIDTH_MAX_STAGES
from dakrun.kernels.runtime.card import card_of
from dakrun.kernels.runtime.jit import kernel
from dakrun.kernels.runtime.needs import Macros, Needs, compiled_ahead
from dakrun.kernels.runtime.operands import fields, ints, pointers

SOURCE = "bandwidth.cu"


@dataclass(frozen=True, kw_only=True)
class Reader:
    """`ctas` CTAs that read the `bytes` bytes at `address` repeatedly.

    Each keeps `stages` copies of `chunk` bytes in flight; groups of `sharers` read the same chunks.
    """

    address: int
    bytes: int
    ctas: int
    chunk: int
    stages: int
    sharers: int = 1

    def __post_init__(self) -> None:
        if self.ctas < 1 or not 1 <= self.sharers <= self.ctas:
            raise ValueError(f"expected at least one CTA and at most as many sharers, got {self}")
        _check_ring(self.chunk, self.stages)
        if self.bytes < self.chunk * self.ctas:
            raise ValueError(f"expected a chunk for every CTA, got {self}")

    @property
    def in_flight(self) -> int:
        """Bytes in flight over all its CTAs."""
        return self.ctas * self.chunk * self.stages


class _Source(ctypes.Structure):
    _fields_ = (
        *fields(ctypes.c_uint64, "base", "bytes"),
        *ints("ctas", "chunk", "stages", "sharers"),
    )


class _ReadWindowArgs(ctypes.Structure):
    _fields_ = (
        ("sources", _Source * BANDWIDTH_MAX_SOURCES),
        *fields(ctypes.c_uint64, "window_ns", "bytes", "span"),
    )


class _ReadMulticastArgs(ctypes.Structure):
    _fields_ = (*fields(ctypes.c_uint64, "base", "bytes"), *ints("chunk", "stages", "chunks"))


class _ReadOnceArgs(ctypes.Structure):
    _fields_ = (
        *fields(ctypes.c_uint64, "base", "bytes"),
        *ints("chunk", "stages"),
        *pointers("sink"),
    )


class Window:
    """Readers running on torch's current stream; `rates` waits for them."""

    def __init__(self, readers: Sequence[Reader], seconds: float) -> None:
        """Start `readers` side by side, each on its own CTAs, for `seconds`."""
        if not 1 <= len(readers) <= BANDWIDTH_MAX_SOURCES:
            raise ValueError(f"expected 1 to {BANDWIDTH_MAX_SOURCES} readers, got {len(readers)}")
        self._count = len(readers)
        self._bytes = torch.zeros(BANDWIDTH_MAX_SOURCES, dtype=torch.int64, device="cuda")
        self._span = torch.tensor([torch.iinfo(torch.int64).max, 0], device="cuda")
        args = _ReadWindowArgs(
            window_ns=int(seconds * 1e9), bytes=self._bytes.data_ptr(), span=self._span.data_ptr()
        )
        for i, reader in enumerate(readers):
            args.sources[i] = _Source(
                base=reader.address,
                bytes=reader.bytes,
                ctas=reader.ctas,
                chunk=reader.chunk,
                stages=reader.stages,
                sharers=reader.sharers,
            )
        kernel(SOURCE, "read_window").launch(
            sum(reader.ctas for reader in readers),
            32,
            args,
            shared_bytes=max(_ring_bytes(reader.chunk, reader.stages) for reader in readers),
        )

    def rates(self) -> list[float]:
        """Bytes/s that each reader received, over all its CTAs."""
        start, end = self._span.tolist()
        return [n * 1e9 / (end - start) for n in self._bytes.tolist()[: self._count]]


def read_window(readers: Sequence[Reader], seconds: float) -> list[float]:
    """Bytes/s of each of `readers` while all read side by side for `seconds`."""
    return Window(readers, seconds).rates()


def read_multicast(
    address: int, nbytes: int, *, clusters: int, size: int, chunk: int, stages: int, chunks: int
) -> float:
    """Bytes/s over the link while each of `clusters` reads `chunks` chunks by multicast.

    A cluster has `size` CTAs, so shared memory receives `size` times as many bytes.
    """
    _check_ring(chunk, stages)
    if nbytes < chunk * clusters:
        raise ValueError(f"expected at least {chunk * clusters} bytes, got {nbytes}")
    args = _ReadMulticastArgs(base=address, bytes=nbytes, chunk=chunk, stages=stages, chunks=chunks)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    kernel(SOURCE, "read_multicast").launch(
        clusters * size, 32, args, shared_bytes=_ring_bytes(chunk, stages), cluster=size
    )
    end.record()
    end.synchronize()
    return clusters * chunks * chunk / (start.elapsed_time(end) * 1e-3)


def read_once(
    address: int, nbytes: int, *, ctas: int, chunk: int, stages: int, sink: torch.Tensor,
    pdl: bool,
) -> None:  # fmt: skip
    """Launch an op that reads `nbytes` (a multiple of `chunk`, may be 0) once.

    `sink` is int32 [ctas] on the GPU. With `pdl` its reads start before its predecessor ends.
    """
    _check_ring(chunk, stages)
    if nbytes % chunk or sink.numel() < ctas or sink.dtype != torch.int32:
        raise ValueError(
            f"expected whole chunks and an int32 sink of at least {ctas}, got {nbytes} bytes"
        )
    args = _ReadOnceArgs(
        base=address, bytes=nbytes, chunk=chunk, stages=stages, sink=sink.data_ptr()
    )
    shared_bytes = _ring_bytes(chunk, stages)
    kernel(SOURCE, "read_once").launch(ctas, 64, args, shared_bytes=shared_bytes, pdl=pdl)


def _check_ring(chunk: int, stages: int) -> None:
    if chunk < 16 or chunk % 16 or not 1 <= stages <= BANDWIDTH_MAX_STAGES:
        raise ValueError(
            f"expected chunks of a multiple of 16 bytes and 1 to {BANDWIDTH_MAX_STAGES} stages, "
            f"got {stages} stages of {chunk} bytes"
        )


def _ring_bytes(chunk: int, stages: int) -> int:
    """Shared memory of the ring of a CTA. Raises ValueError if the current GPU has less."""
    card = card_of(torch.device("cuda", torch.cuda.current_device()))
    if chunk * stages > card.lone_ring_bytes:
        raise ValueError(f"{stages} stages of {chunk} bytes do not fit into shared memory")
    return chunk * stages


@compiled_ahead(SOURCE)
def _variants(needs: Needs) -> list[Macros]:
    return [{}] if needs.every else []
