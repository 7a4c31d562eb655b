"""Pages of host memory: map, bind to a NUMA node, touch, page-lock for CUDA, release.

Knows the kernel's and CUDA's calls; not how much may be taken, nor what lies in the pages.
"""

import ctypes
import errno
import mmap
import os
import platform
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import torch

from dakrun.errors import CannotRun
from dakrun.memory.limits import lock_limit, node_memory, numa_node, numa_nodes, pci_address
from dakrun.units import format_bytes

MAP_NORESERVE = 0x4000  # numbers that Python's mmap lacks, the same on x86 and ARM
MADV_POPULATE_WRITE = 23  # Linux 5.14
MPOL_PREFERRED, MPOL_BIND = 1, 2
MBIND = {"x86_64": 237, "aarch64": 235}  # system calls
PORTABLE_MAPPED = 1 | 2  # cudaHostRegister: for every GPU, and for kernels
PIECE_BYTES = 256 << 20
MAX_THREADS = 16
MAX_TRIAL_BYTES = 1 << 30

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.memset.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)
_libc.memset.restype = ctypes.c_void_p
_libc.syscall.restype = ctypes.c_long
_libc.syscall.argtypes = (  # of mbind: number, address, bytes, policy, nodes, bits of nodes, flags
    ctypes.c_long, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_long,
    ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong,
)  # fmt: skip


class _Mapping(mmap.mmap):
    """Pages that give up their page lock, where they have one, before they are unmapped."""

    unlock: weakref.finalize | None = None  # type: ignore[type-arg]

    def __del__(self) -> None:
        if self.unlock is not None:
            self.unlock()


class HostBlock:
    """Private anonymous pages of exactly `nbytes`, zeros at first, as the uint8 `tensor`.

    Every tensor that views them keeps them mapped: `close` undoes the page lock, and the pages go
    with the last view. So does the lock where nobody closes, or else at the interpreter's exit.
    """

    def __init__(self, nbytes: int) -> None:
        """Raises CannotRun where the kernel does not map them."""
        self.tensor = torch.empty(0, dtype=torch.uint8)
        self._mapping: _Mapping | None = None
        if nbytes == 0:
            return
        # Not accounted for: the kernel may count less memory than it has (see host_limits).
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        try:
            self._mapping = _Mapping(-1, nbytes, flags=flags)
        except OSError as problem:
            raise CannotRun(
                f"the kernel does not map {format_bytes(nbytes)} of host memory "
                f"({problem.strerror})",
                hint="lower --host-budget; see ulimit -v and sysctl vm.max_map_count",
            ) from None
        self.tensor = torch.frombuffer(self._mapping, dtype=torch.uint8)

    @property
    def address(self) -> int:
        """Where the pages begin."""
        return self.tensor.data_ptr()

    def bind(self, node: int) -> bool:
        """Have the pages come from NUMA node `node`; whether the kernel does so.

        Where the node may have too little memory for them it is only preferred: a node that runs
        out ends the process. Call before touching.
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

    def touch(self) -> None:
        """Have the kernel give every page, on all cores that this process may use, up to 16.

        Raises CannotRun where it has none left.
        """
        if self._mapping is None:
            return
        with suppress(OSError):  # fewer pages to give and to lock
            self._mapping.madvise(mmap.MADV_HUGEPAGE)
        threads = min(MAX_THREADS, len(os.sched_getaffinity(0)))
        with ThreadPoolExecutor(threads) as pool:
            try:
                list(pool.map(_touch, _pieces(self.address, self.tensor.nbytes)))
            except OSError as problem:
                raise CannotRun(
                    f"the kernel does not give {format_bytes(self.tensor.nbytes)} of host memory "
                    f"({problem.strerror})",
                    hint="free some memory, or lower --host-budget",
                ) from None

    def lock(self, device: int) -> None:
        """Page-lock the pages for all GPUs, through CUDA device `device`.

        Raises CannotRun where CUDA refuses.
        """
        if self._mapping is None:
            return
        # Before the lock itself, so that none is left behind whatever comes in between.
        self._mapping.unlock = weakref.finalize(self._mapping, _unlock, self.address, device)
        try:
            _register(self.address, self.tensor.nbytes, device)
        except RuntimeError as problem:
            limit = lock_limit()
            limited = limit is not None and limit < self.tensor.nbytes
            raise CannotRun(
                f"CUDA does not page-lock {format_bytes(self.tensor.nbytes)} of host memory "
                f"({problem})",
                hint="raise the limit: ulimit -l unlimited (docker run --ulimit memlock=-1)"
                if limited
                else "free some memory, or lower --host-budget",
            ) from None

    def close(self) -> None:
        """Undo the page lock and let go of the pages. Repeating it does nothing."""
        if self._mapping is not None and self._mapping.unlock is not None:
            self._mapping.unlock()
        self._mapping = None
        self.tensor = torch.empty(0, dtype=torch.uint8)

    def __enter__(self) -> "HostBlock":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def locked_block(nbytes: int, device: int) -> HostBlock:
    """`nbytes` that every GPU can read, touched, on the NUMA node of CUDA device `device`.

    Raises CannotRun, with nothing taken, where the machine does not give them.
    """
    block = HostBlock(nbytes)
    try:
        if numa_nodes() > 1:
            node = numa_node(pci_address(torch.cuda.get_device_properties(device)))
            if node is not None:
                block.bind(node)  # else the pages are farther away, and as good
        block.touch()
        block.lock(device)
    except BaseException:
        block.close()
        raise
    return block


def check_page_locking(nbytes: int, device: int) -> None:
    """CannotRun where `nbytes` exceed ulimit -l and that limit counts for CUDA.

    NVIDIA's driver ignores it as a rule, so a little more than the limit is tried. Not a limit
    above 1 GiB: that would take long, and locking the pages tells as well.
    """
    limit = lock_limit()
    if limit is not None and limit < nbytes and limit <= MAX_TRIAL_BYTES:
        locked_block(min(nbytes, limit + (1 << 20)), device).close()


def _pieces(address: int, nbytes: int) -> Iterator[tuple[int, int]]:
    """(address, bytes) of the pieces that threads touch; small, so that Ctrl-C need not wait."""
    for start in range(0, nbytes, PIECE_BYTES):
        yield address + start, min(PIECE_BYTES, nbytes - start)


def _touch(piece: tuple[int, int]) -> None:
    """Have the kernel give the fresh pages of `piece`; ctypes lets other threads run meanwhile."""
    address, nbytes = piece
    while _libc.madvise(address, nbytes, MADV_POPULATE_WRITE):
        number = ctypes.get_errno()
        if number == errno.EINVAL:  # an older kernel
            _libc.memset(address, 0, nbytes)
            return
        if number not in (errno.EINTR, errno.EAGAIN):
            raise OSError(number, os.strerror(number))


def _register(address: int, nbytes: int, device: int) -> None:
    """cudaHostRegister; RuntimeError where it fails."""
    try:
        from cupy.cuda import runtime
    except ImportError:
        raise CannotRun("CuPy is not installed", hint="pip install 'dakrun[cuda13]'") from None
    with torch.cuda.device(device):
        runtime.hostRegister(address, nbytes, PORTABLE_MAPPED)


def _unlock(address: int, device: int) -> None:
    """cudaHostUnregister, once the GPU has read what it was told to."""
    # A broken or forked context can do neither; it gives the lock back when the process ends.
    with suppress(Exception):
        from cupy.cuda import runtime

        with torch.cuda.device(device):
            with suppress(RuntimeError):
                torch.cuda.synchronize()
            runtime.hostUnregister(address)
