"""Pages of host memory: map, bind to a NUMA node, touch, page-lock for CUDA, release.

Knows system calls and CUDA's, not the contents of pages. limits.py knows how many bytes may be
taken.
"""

import ctypes
import errno
import mmap
import os
import platform
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import accumulate

import torch

from dakrun.errors import CannotRun
from dakrun.interrupt import Workers
from dakrun.memory.device import cuda_runtime
from dakrun.memory.limits import (
    lock_limit,
    node_memory,
    numa_node,
    numa_nodes,
    pci_address,
    usable_cores,
)
from dakrun.units import format_bytes

MAP_NORESERVE = 0x4000  # missing in Python's mmap; the same on x86 and ARM
MADV_POPULATE_WRITE = 23  # Linux 5.14
MPOL_PREFERRED, MPOL_BIND = 1, 2
MBIND = {"x86_64": 237, "aarch64": 235}  # system call numbers
PORTABLE_MAPPED = 1 | 2  # cudaHostRegister flags: valid on every GPU, readable by kernels
PIECE_BYTES = 256 << 20  # touched by a thread in one call; short enough for a prompt Ctrl-C
MAX_THREADS = 16
MAX_TRIAL_BYTES = 1 << 30  # largest ulimit -l that is tested by locking memory

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.memset.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)
_libc.memset.restype = ctypes.c_void_p
_libc.syscall.restype = ctypes.c_long
_libc.syscall.argtypes = (  # mbind: number, address, bytes, policy, node mask, mask bits, flags
    ctypes.c_long, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_long,
    ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong,
)  # fmt: skip


class _Mapping(mmap.mmap):
    """Mapped pages; the page lock, if any, is undone before they are unmapped."""

    unlock: weakref.finalize | None = None  # type: ignore[type-arg]

    def __del__(self) -> None:
        if self.unlock is not None:
            self.unlock()


class HostBlock:
    """`nbytes` of private anonymous pages, initially zero, as the uint8 `tensor`.

    `close` undoes the page lock. The pages are unmapped with the last tensor that views them.
    Without `close`, the lock is undone then too, or at the interpreter's exit.
    """

    def __init__(self, nbytes: int) -> None:
        """Map the pages. Raises CannotRun if the kernel refuses."""
        self.tensor = torch.empty(0, dtype=torch.uint8)
        self._mapping: _Mapping | None = None
        if nbytes == 0:
            return
        # MAP_NORESERVE: the kernel may count less memory than there is (limits.unused_ram).
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        try:
            self._mapping = _Mapping(-1, nbytes, flags=flags)
        except OSError as problem:
            raise CannotRun(
                f"cannot map {format_bytes(nbytes)} of host memory ({problem.strerror})",
                hint="lower --host-budget; see ulimit -v and sysctl vm.max_map_count",
            ) from None
        self.tensor = torch.frombuffer(self._mapping, dtype=torch.uint8)

    @property
    def address(self) -> int:
        """Address of the first byte."""
        return self.tensor.data_ptr()

    def bind(self, node: int) -> bool:
        """Ask for pages of NUMA node `node`; return whether the kernel agreed.

        Call it before `touch`. The node is mandatory only if it has 1/16 more memory than needed,
        else preferred: the kernel kills a process whose mandatory node is full.
        """
        number = MBIND.get(platform.machine())
        if number is None or self._mapping is None:
            return False
        roomy = node_memory(node) > self.tensor.nbytes * 17 // 16
        policy = MPOL_BIND if roomy else MPOL_PREFERRED
        mask = (ctypes.c_ulong * (node // 64 + 1))()
        mask[node // 64] = 1 << node % 64
        bits = 64 * len(mask) + 1
        nbytes = self.tensor.nbytes
        return _libc.syscall(number, self.address, nbytes, policy, mask, bits, 0) == 0

    def touch(self, on_bytes: Callable[[int], None] = lambda done: None) -> None:
        """Fault in every page, on up to 16 threads. Raises CannotRun if memory runs out.

        `on_bytes` is called with the bytes that are there so far.
        """
        if self._mapping is None:
            return
        with suppress(OSError):  # huge pages are faster to touch and to lock
            self._mapping.madvise(mmap.MADV_HUGEPAGE)
        threads = min(MAX_THREADS, usable_cores())
        with Workers(threads) as pool:
            try:
                for done in accumulate(pool.map(_touch, _pieces(self.address, self.tensor.nbytes))):
                    on_bytes(done)
            except OSError as problem:
                raise CannotRun(
                    f"cannot get {format_bytes(self.tensor.nbytes)} of host memory "
                    f"({problem.strerror})",
                    hint="free some memory, or lower --host-budget",
                ) from None

    def lock(self, device: int) -> None:
        """Page-lock the pages for all GPUs, in the context of CUDA device `device`.

        Raises CannotRun if CUDA refuses.
        """
        if self._mapping is None:
            return
        # Set before locking, so that an exception in between leaves no lock behind.
        self._mapping.unlock = weakref.finalize(self._mapping, _unlock, self.address, device)
        try:
            _register(self.address, self.tensor.nbytes, device)
        except RuntimeError as problem:
            limit = lock_limit()
            limited = limit is not None and limit < self.tensor.nbytes
            raise CannotRun(
                f"CUDA cannot page-lock {format_bytes(self.tensor.nbytes)} of host memory "
                f"({problem})",
                hint="raise the limit: ulimit -l unlimited (docker run --ulimit memlock=-1)"
                if limited
                else "free some memory, or lower --host-budget",
            ) from None

    def close(self) -> None:
        """Undo the page lock and drop the pages. A second call does nothing."""
        if self._mapping is not None and self._mapping.unlock is not None:
            self._mapping.unlock()
        self._mapping = None
        self.tensor = torch.empty(0, dtype=torch.uint8)

    def __enter__(self) -> "HostBlock":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def locked_block(
    nbytes: int, device: int, on_bytes: Callable[[int], None] = lambda done: None
) -> HostBlock:
    """`nbytes` of page-locked host memory, on the NUMA node of CUDA device `device` if possible.

    The pages are touched (see HostBlock.touch), and every GPU can read them. Raises CannotRun, with
    nothing taken, if the kernel or CUDA refuses.
    """
    block = HostBlock(nbytes)
    try:
        if numa_nodes() > 1:
            node = numa_node(pci_address(torch.cuda.get_device_properties(device)))
            if node is not None:
                block.bind(node)  # a refusal costs some bandwidth, nothing else
        block.touch(on_bytes)
        block.lock(device)
    except BaseException:
        block.close()
        raise
    return block


def check_page_locking(nbytes: int, device: int) -> None:
    """Raise CannotRun if `nbytes` exceed ulimit -l and CUDA obeys that limit.

    NVIDIA's driver usually ignores it, so the check locks 1 MiB more than the limit. A limit above
    1 GiB is not tested, since that takes long; locking the pages themselves shows it later.
    """
    limit = lock_limit()
    if limit is not None and limit < nbytes and limit <= MAX_TRIAL_BYTES:
        locked_block(min(nbytes, limit + (1 << 20)), device).close()


def _pieces(address: int, nbytes: int) -> Iterator[tuple[int, int]]:
    """(address, bytes) of the pieces that threads touch."""
    for start in range(0, nbytes, PIECE_BYTES):
        yield address + start, min(PIECE_BYTES, nbytes - start)


def _touch(piece: tuple[int, int]) -> int:
    """Fault in the pages of `piece`, and return its bytes; ctypes releases the GIL meanwhile."""
    address, nbytes = piece
    while _libc.madvise(address, nbytes, MADV_POPULATE_WRITE):
        number = ctypes.get_errno()
        if number == errno.EINVAL:  # before Linux 5.14
            _libc.memset(address, 0, nbytes)
            return nbytes
        if number not in (errno.EINTR, errno.EAGAIN):
            raise OSError(number, os.strerror(number))
    return nbytes


def _register(address: int, nbytes: int, device: int) -> None:
    """cudaHostRegister. Raises RuntimeError if it fails, CannotRun without CuPy."""
    runtime = cuda_runtime()
    with torch.cuda.device(device):
        runtime.hostRegister(address, nbytes, PORTABLE_MAPPED)


def _unlock(address: int, device: int) -> None:
    """cudaHostUnregister, after all work of the GPU."""
    # Both fail in a broken or forked context; its locks end with the process.
    with suppress(Exception):
        runtime = cuda_runtime()
        with torch.cuda.device(device):
            with suppress(RuntimeError):
                torch.cuda.synchronize()
            runtime.hostUnregister(address)
