"""Tiers on a GPU: page-locked host memory and a peer's memory, readable where they lie."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peers import readable_peer

from dakrun.engine.kv_cache import KVCache
from dakrun.engine.kv_layout import RowLayout
from dakrun.errors import CannotRun
from dakrun.formats import Rows
from dakrun.geometry import KV_BLOCK
from dakrun.kernels.runtime import copy
from dakrun.memory.device import in_order
from dakrun.memory.matrix import TieredMatrix
from dakrun.memory.tiers import allocate_tiers

pytestmark = [pytest.mark.gpu, pytest.mark.alone]
ROOT = Path(__file__).resolve().parent.parent
GIB = 2**30
HOST_TYPE, DEVICE_TYPE = 1, 2  # cudaMemoryTypeHost, cudaMemoryTypeDevice


@pytest.fixture(scope="module")
def runtime() -> Any:
    return pytest.importorskip("cupy").cuda.runtime


@pytest.fixture
def device() -> Iterator[torch.device]:
    yield torch.device("cuda", torch.cuda.current_device())
    torch.cuda.synchronize()  # nothing is left broken


def locked(runtime: Any, address: int) -> bool:
    return runtime.pointerGetAttributes(address).type == HOST_TYPE


def test_the_host_tier_is_page_locked(runtime: Any, device: torch.device) -> None:
    with allocate_tiers({"hbm": 4096, "host": GIB + 5}, device) as tiers:
        tensor = tiers["host"].allocate((GIB // 4,), torch.int32)
        tensor.copy_(torch.arange(GIB // 4, dtype=torch.int32))
        first, last = tensor.data_ptr(), tensor.data_ptr() + GIB - 1
        assert tensor.is_pinned() and tensor[12345:].is_pinned()
        for address in (first, last):
            attributes = runtime.pointerGetAttributes(address)
            assert attributes.type == HOST_TYPE and attributes.devicePointer == address
        there = tensor.to(device, non_blocking=True)
        assert torch.equal(there, torch.arange(GIB // 4, dtype=torch.int32, device=device))
        assert tiers["hbm"].allocate((4,), torch.float32).device == device
    assert not locked(runtime, first) and not locked(runtime, last)
    assert not tensor.is_pinned() and tensor[-1] == GIB // 4 - 1  # still there, for the CPU
    tiers.close()


def test_kernels_read_the_host_tier_where_it_lies(device: torch.device) -> None:
    cupy = pytest.importorskip("cupy")
    add_up = cupy.ElementwiseKernel(
        "uint64 address", "int64 y", "y = ((const int *)address)[i] + 1", "add_up"
    )
    with allocate_tiers({"hbm": 0, "host": 1 << 22}, device) as tiers:
        tensor = tiers["host"].allocate((1 << 20,), torch.int32)
        tensor.copy_(torch.arange(1 << 20, dtype=torch.int32))
        out = add_up(np.uint64(tensor.data_ptr()), size=1 << 20)
        assert (out == cupy.arange(1, (1 << 20) + 1)).all()


def test_dropping_the_tier_unlocks_it(runtime: Any, device: torch.device) -> None:
    tiers = allocate_tiers({"hbm": 0, "host": 1 << 24}, device)
    tensor = tiers["host"].allocate((1 << 24,), torch.uint8)
    address = tensor.data_ptr()
    del tiers
    assert tensor.is_pinned()
    del tensor
    assert not locked(runtime, address)


def test_a_refused_lock_leaves_cuda_usable(
    runtime: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Patched within: flags unknown to CUDA are the one refusal that leaves the machine as it is.
    monkeypatch.setattr("dakrun.memory.host.PORTABLE_MAPPED", 0x7000)
    with pytest.raises(CannotRun, match=r"cannot page-lock .*cudaErrorInvalidValue"):
        allocate_tiers({"hbm": 1 << 20, "host": 1 << 20}, device)
    assert torch.ones(3, device=device).sum() == 3


def test_the_interpreters_exit_is_quiet() -> None:
    code = (
        "import torch\n"
        "from dakrun.memory.tiers import allocate_tiers\n"
        "tiers = allocate_tiers({'hbm': 1 << 20, 'host': 1 << 28}, torch.device('cuda'))\n"
        "kept = tiers['host'].allocate((1 << 28,), torch.uint8)\n"
        "there = kept.to('cuda', non_blocking=True)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


def test_more_than_the_gpu_has_is_refused(device: torch.device) -> None:
    with pytest.raises(CannotRun, match=r"of GPU \d+, .* are free") as caught:
        allocate_tiers({"hbm": 1 << 50, "host": 0}, device)
    assert "--hbm-budget" in caught.value.hint


def test_the_computing_gpu_is_no_peer(device: torch.device) -> None:
    with pytest.raises(CannotRun, match="is the GPU that runs"):
        allocate_tiers({"hbm": 0, f"peer:{device.index}": 4096}, device)
    with pytest.raises(CannotRun, match="needs GPU 99"):
        allocate_tiers({"hbm": 0, "peer:99": 4096}, device)


def test_the_peer_tier_is_read_where_it_lies(runtime: Any, device: torch.device) -> None:
    cupy = pytest.importorskip("cupy")
    peer = readable_peer()
    name, count = f"peer:{peer}", 1 << 28
    before = torch.cuda.mem_get_info(peer)[0]
    for _ in range(2):  # enabling access again is no error
        with allocate_tiers({"hbm": 0, name: 4 * count}, device) as tiers:
            tensor = tiers[name].allocate((count,), torch.int32)
            assert tensor.device.index == peer
            assert runtime.pointerGetAttributes(tensor.data_ptr()).type == DEVICE_TYPE
            tensor.copy_(torch.arange(count, dtype=torch.int32))
            torch.cuda.synchronize(peer)
            read = cupy.ElementwiseKernel("uint64 a", "int32 y", "y = ((const int *)a)[i]", "read")
            with cupy.cuda.Device(device.index):
                out = read(np.uint64(tensor.data_ptr()), size=count)
                assert (out == cupy.arange(count, dtype=cupy.int32)).all()
            del tensor
    assert torch.cuda.mem_get_info(peer)[0] > before - GIB // 2
    assert torch.cuda.current_device() == device.index


def test_a_matrix_over_all_tiers(device: torch.device) -> None:
    with allocate_tiers({"hbm": 1 << 20, "host": 1 << 20}, device) as tiers:
        placement = [("hbm", 20), ("host", 12)]
        matrix = TieredMatrix.empty((256, 1024), torch.float16, Rows(2), placement, tiers)
        dense = torch.randn(256, 1024, dtype=torch.float16)
        for piece in matrix.pieces(100_000):
            piece.write(dense[piece.rows].to(device))
        assert torch.equal(matrix.dense(device).cpu(), dense)
        assert [part.arrays[0].is_cuda for part in matrix.parts] == [True, False]
        del matrix, piece


@pytest.fixture
def side_stream(device: torch.device) -> Iterator[None]:
    """A stream of its own: copies between GPUs on the default one wait for both of them."""
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream(device)):
        yield


@pytest.mark.usefixtures("side_stream")
def test_blocks_of_a_peer_are_gathered_after_they_are_written(device: torch.device) -> None:
    peer = readable_peer()
    layout = RowLayout(kv_heads=1, head_dim=64, positions=2 * KV_BLOCK, dtype=torch.float16)
    with allocate_tiers({"hbm": 2**20, f"peer:{peer}": 2**20}, device) as tiers:
        cache = KVCache((("hbm", 1, 2), (f"peer:{peer}", 1, 2)), 2, layout, tiers, device)
        assert cache.reserve(1, 2 * KV_BLOCK)
        new = torch.randint(0, 256, cache.parts[1].shape, dtype=torch.uint8, device=device)
        cache.parts[1].zero_()
        cache.gather(0, 1, 2)  # what a first call sets up
        for gpu in (device.index, peer):
            torch.cuda.synchronize(gpu)
        torch.cuda._sleep(10**9)  # half a second: the writer of this GPU is late
        copy(cache.parts[1], new)
        assert not torch.cuda.current_stream(device).query(), "expected the writer to be delayed"
        found = cache.gather(0, 1, 2)
        order = [cache.block(1, number).data_ptr() for number in range(2)]
        numbers = [(at - cache.parts[1].data_ptr()) // cache.parts[1].stride(0) for at in order]
        assert torch.equal(found, new[numbers, 0])


@pytest.mark.usefixtures("side_stream")
def test_a_later_write_to_a_peer_waits_for_the_gather(device: torch.device) -> None:
    peer = torch.device("cuda", readable_peer())
    with allocate_tiers({"hbm": 0, f"peer:{peer.index}": 2**20}, device) as tiers:
        there = tiers[f"peer:{peer.index}"].allocate((2**20,), torch.uint8)
        there.zero_()
        _ = there + 1  # loads the kernel
        new = torch.full_like(there, 7, device=device)
        for gpu in (device.index, peer.index):
            torch.cuda.synchronize(gpu)
        with in_order(peer, device), torch.cuda.device(peer):
            torch.cuda._sleep(10**9)  # the reader on the peer is late
            found = there + 1
        copy(there, new)
        assert torch.equal(found.cpu(), torch.ones(2**20, dtype=torch.uint8))
        torch.cuda.synchronize(device)
        assert torch.equal(there.cpu(), torch.full((2**20,), 7, dtype=torch.uint8))
