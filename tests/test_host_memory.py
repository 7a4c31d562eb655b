"""Pages of host memory without CUDA: exact, touched, locked, and released on every path."""

import ctypes
import errno
import gc
import mmap
import resource
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dakrun.errors import CannotRun

# Patched below, as there is no CUDA: the calls of the driver and of libc, and /sys.
from dakrun.memory import host as host_memory
from dakrun.memory.host import HostBlock, check_page_locking, locked_block
from dakrun.memory.tiers import allocate_tiers

ROOT = Path(__file__).resolve().parent.parent
MIB = 2**20
REFUSED = "cudaErrorMemoryAllocation: out of memory"


class FakeCuda:
    """cudaHostRegister and cudaHostUnregister; `locked` are the bytes locked at each address."""

    def __init__(self, most: int | None = None) -> None:
        self.most = most
        self.locked: dict[int, int] = {}
        self.asked: list[int] = []

    def register(self, address: int, nbytes: int, device: int) -> None:
        self.asked.append(nbytes)
        if self.most is not None and nbytes > self.most:
            raise RuntimeError(REFUSED)
        self.locked[address] = nbytes

    def unlock(self, address: int, device: int) -> None:
        if self.locked.pop(address, None):
            ctypes.string_at(address, 1)  # a crash, were it unmapped already


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setattr(host_memory, "_register", fake.register)
    monkeypatch.setattr(host_memory, "_unlock", fake.unlock)
    monkeypatch.setattr(host_memory, "numa_nodes", lambda: 1)
    return fake


def mapped(address: int) -> bool:
    """Whether an address of this process is mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    spans = (line.split()[0].split("-") for line in lines)
    return any(int(start, 16) <= address < int(end, 16) for start, end in spans)


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def resident_in(start: int, size: int) -> int:
    """Bytes of the pages from address `start` on that are in memory, of `size` bytes."""
    pages = (ctypes.c_ubyte * (size // mmap.PAGESIZE))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(start), ctypes.c_size_t(size), pages) == 0
    return sum(page & 1 for page in pages) * mmap.PAGESIZE


def test_a_block_is_as_big_as_asked_and_zero() -> None:
    block = HostBlock(3 * MIB + 5)
    assert block.tensor.shape == (3 * MIB + 5,) and block.tensor.dtype == torch.uint8
    assert not block.tensor.any()
    block.tensor.fill_(7)
    assert block.tensor[-1] == 7


def test_an_empty_block(cuda: FakeCuda) -> None:
    with locked_block(0, 0) as block:
        assert block.tensor.numel() == 0 and not block.bind(0)
    assert cuda.asked == []


def test_touching_brings_every_page() -> None:
    with HostBlock(300 * MIB) as block:  # two pieces
        place = (block.tensor.data_ptr(), 300 * MIB)
        before = resident_in(*place)
        found: list[int] = []
        block.touch(found.append)
        assert found == [256 * MIB, 300 * MIB]
        after = resident_in(*place)
    assert before < 10 * MIB and after > 290 * MIB


def fake_libc(number: int) -> SimpleNamespace:
    """A libc whose madvise fails with `number`, once for EINTR."""
    real, calls = ctypes.CDLL(None), []

    def madvise(address: int, nbytes: int, advice: int) -> int:
        calls.append(nbytes)
        ctypes.set_errno(number)
        return 0 if number == errno.EINTR and len(calls) > 1 else -1

    def memset(address: int, value: int, nbytes: int) -> None:
        real.memset(ctypes.c_void_p(address), value, ctypes.c_size_t(nbytes))

    return SimpleNamespace(madvise=madvise, memset=memset, calls=calls)


def test_touching_on_an_older_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "_libc", fake_libc(errno.EINVAL))
    with HostBlock(64 * MIB) as block:
        before = resident()
        block.touch()
        assert resident() - before > 60 * MIB


def test_touching_goes_on_after_a_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    libc = fake_libc(errno.EINTR)
    monkeypatch.setattr(host_memory, "_libc", libc)
    with HostBlock(MIB) as block:
        block.touch()
    assert libc.calls == [MIB, MIB]


def test_pages_that_the_kernel_does_not_give(
    monkeypatch: pytest.MonkeyPatch, cuda: FakeCuda
) -> None:
    monkeypatch.setattr(host_memory, "_libc", fake_libc(errno.ENOMEM))
    with pytest.raises(CannotRun, match=r"1\.00 MiB .*Cannot allocate memory"):
        locked_block(MIB, 0)
    assert cuda.asked == []


def test_pages_that_the_kernel_does_not_map() -> None:
    with pytest.raises(CannotRun, match=r"cannot map 1048576\.00 TiB"):
        HostBlock(1 << 60)


def test_binding_never_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    with HostBlock(MIB) as block:
        assert block.bind(0) in (True, False)  # a sandbox may refuse
        assert not block.bind(1000)
        block.touch()
        monkeypatch.setattr(host_memory.platform, "machine", lambda: "riscv64")
        assert not block.bind(0)


def test_pages_are_bound_only_to_a_node_that_holds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    policies: list[int] = []

    def syscall(number: int, address: object, nbytes: object, policy: int, *rest: object) -> int:
        policies.append(policy)
        return 0

    monkeypatch.setattr(host_memory, "_libc", SimpleNamespace(syscall=syscall))
    monkeypatch.setattr(host_memory.platform, "machine", lambda: "x86_64")
    with HostBlock(16 * MIB) as block:
        for free in (18 * MIB, 17 * MIB):
            monkeypatch.setattr(host_memory, "node_memory", lambda node, free=free: free)
            assert block.bind(1)
    assert policies == [2, 1]  # MPOL_BIND, MPOL_PREFERRED


def test_a_locked_block_is_on_the_gpus_node(
    monkeypatch: pytest.MonkeyPatch, cuda: FakeCuda
) -> None:
    bound: list[int] = []
    monkeypatch.setattr(host_memory, "numa_nodes", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: None)
    monkeypatch.setattr(HostBlock, "bind", lambda block, node: bound.append(node))
    for node in (1, None):
        monkeypatch.setattr(host_memory, "numa_node", lambda address, node=node: node)
        locked_block(MIB, 0).close()
    assert bound == [1]


def test_closing_unlocks_once_and_unmaps(cuda: FakeCuda) -> None:
    block = locked_block(5 * MIB, 0)
    address = block.address
    assert cuda.locked == {address: 5 * MIB}
    block.close()
    assert cuda.locked == {} and not mapped(address)
    cuda.locked[address] = 1  # a later block at the same place is none of its business
    block.close()
    assert cuda.locked == {address: 1}


def test_tiers_are_freed_together() -> None:
    with allocate_tiers({"hbm": MIB, "host": MIB, "peer:1": 0}, torch.device("cpu")) as tiers:
        assert tiers["host"].allocate((4,), torch.float32).sum() == 0
        addresses = [tiers[t].allocate((4,), torch.float32).data_ptr() for t in ("hbm", "host")]
        assert all(map(mapped, addresses))
    assert not any(map(mapped, addresses))
    assert [tier.free for tier in tiers.values()] == [0, 0, 0]
    with pytest.raises(MemoryError, match="0 left"):
        tiers["host"].allocate((4,), torch.float32)
    tiers.close()


def test_views_keep_the_pages_after_closing(cuda: FakeCuda) -> None:
    with locked_block(5 * MIB, 0) as block:
        view, address = block.tensor[MIB : 2 * MIB].view(torch.float32), block.address
        view.fill_(3)
    assert cuda.locked == {}
    assert view.sum() == 3 * MIB // 4
    del view
    assert not mapped(address)


def test_the_last_view_unlocks_where_nobody_closes(cuda: FakeCuda) -> None:
    block = locked_block(5 * MIB, 0)
    view, address = block.tensor[:9], block.address
    del block
    gc.collect()
    assert cuda.locked == {address: 5 * MIB} and view.sum() == 0
    del view
    assert cuda.locked == {} and not mapped(address)


def test_the_interpreters_exit_unlocks() -> None:
    code = (
        "from dakrun.memory import host as h\n"
        "h._register = lambda *a: print('locked', flush=True)\n"
        "h._unlock = lambda *a: print('unlocked', flush=True)\n"
        "h.numa_nodes = lambda: 1\n"
        "block = h.locked_block(4096, 0)\n"
        "keep = block.tensor\n"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (run.stdout, run.stderr) == ("locked\nunlocked\n", "")


@pytest.mark.parametrize(
    ("limit", "hint"), [(None, "--host-budget"), (64 * MIB, "--host-budget"), (MIB, "ulimit -l")]
)
def test_a_failed_lock_releases_everything(
    limit: int | None, hint: str, monkeypatch: pytest.MonkeyPatch, cuda: FakeCuda
) -> None:
    cuda.most = 0
    monkeypatch.setattr(host_memory, "lock_limit", lambda: limit)
    before = resident()
    with pytest.raises(CannotRun, match=f"cannot page-lock 32.00 MiB .*{REFUSED}") as caught:
        locked_block(32 * MIB, 0)
    assert hint in caught.value.hint
    assert resident() - before < 16 * MIB and cuda.locked == {}


def test_an_interrupt_while_locking_releases_everything(
    monkeypatch: pytest.MonkeyPatch, cuda: FakeCuda
) -> None:
    def interrupted(address: int, nbytes: int, device: int) -> None:
        cuda.register(address, nbytes, device)
        raise KeyboardInterrupt

    monkeypatch.setattr(host_memory, "_register", interrupted)
    with pytest.raises(KeyboardInterrupt):
        locked_block(MIB, 0)
    assert cuda.locked == {}


@pytest.mark.parametrize(
    ("need", "limit", "asked"),
    [
        (MIB, 8 * MIB, []),  # within the limit
        (64 * MIB, None, []),
        (64 * MIB, 8 * MIB, [9 * MIB]),
        (8 * MIB + 1, 8 * MIB, [8 * MIB + 1]),
        (1 << 40, 2 << 30, []),  # a limit that takes long to try
    ],
)
def test_a_limit_on_page_locking_is_tried(
    need: int, limit: int | None, asked: list[int], monkeypatch: pytest.MonkeyPatch, cuda: FakeCuda
) -> None:
    monkeypatch.setattr(host_memory, "lock_limit", lambda: limit)
    check_page_locking(need, 0)
    assert cuda.asked == asked and cuda.locked == {}


def test_a_limit_on_page_locking_that_counts(
    monkeypatch: pytest.MonkeyPatch, cuda: FakeCuda
) -> None:
    cuda.most = 8 * MIB
    monkeypatch.setattr(host_memory, "lock_limit", lambda: 8 * MIB)
    with pytest.raises(CannotRun, match=r"cannot page-lock 9\.00 MiB") as caught:
        check_page_locking(1 << 40, 0)
    assert "ulimit -l unlimited" in caught.value.hint


def test_what_cuda_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def broken() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def unregister(address: int) -> None:
        asked.append(address)
        raise RuntimeError("cudaErrorIllegalAddress")

    runtime = SimpleNamespace(
        hostRegister=lambda *args: asked.append(args), hostUnregister=unregister
    )
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "cupy.cuda", SimpleNamespace(runtime=runtime))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", broken)
    monkeypatch.setattr(host_memory, "numa_nodes", lambda: 1)
    with locked_block(MIB, 0) as block:
        address = block.address
    assert asked == [(address, MIB, 3), address]  # portable and mapped; a broken GPU is no news


def test_no_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "numa_nodes", lambda: 1)
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)
    with pytest.raises(CannotRun, match="CuPy is not installed"):
        locked_block(MIB, 0)
