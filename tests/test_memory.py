"""Tiers and partitioned matrices: each element in one tier; sizes that do not fit are refused."""

import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dakrun.errors import CannotRun, OutOfGpuMemory
from dakrun.formats import Rows
from dakrun.geometry import row_block_count
from dakrun.kernels import reference
from dakrun.memory.device import DeviceBlock, enable_peer_access, free_on_peers
from dakrun.memory.host import HostBlock
from dakrun.memory.matrix import TieredMatrix
from dakrun.memory.tiers import Tier, allocate_tiers

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)
MIB = 2**20


def make_tiers(nbytes: int = 1 << 23) -> dict[str, Tier]:
    return {name: Tier(name, nbytes, CPU) for name in ("hbm", "host", "peer:1")}


@st.composite
def placements(draw: st.DrawFn) -> tuple[tuple[int, int], list[tuple[str, int]]]:
    shape = (draw(st.integers(1, 300)), draw(st.integers(1, 2500)))
    count = row_block_count(shape[0])
    cuts = sorted(draw(st.tuples(st.integers(0, count), st.integers(0, count))))
    counts = [cuts[0], cuts[1] - cuts[0], count - cuts[1]]
    return shape, list(zip(("hbm", "host", "peer:1"), counts, strict=True))


@given(placements())
def test_linear_and_gather_over_any_placement(
    case: tuple[tuple[int, int], list[tuple[str, int]]],
) -> None:
    shape, placement = case
    tiers = make_tiers()
    matrix = TieredMatrix.empty(shape, torch.float32, Rows(4), placement, tiers)
    dense = torch.randn(shape)
    covered = torch.zeros(shape, dtype=torch.int32)
    for piece in matrix.pieces(100):
        piece.write(dense[piece.rows])
        covered[piece.rows] += 1
    assert (covered == 1).all()
    assert torch.equal(matrix.dense(), dense)
    x, bias = torch.randn(3, shape[1]), torch.randn(shape[0])
    exact = x.double() @ dense.double().T + bias.double()
    assert (reference.linear(x, matrix, bias) - exact).abs().max() < 1e-3
    ids = torch.randint(0, shape[0], (7,))
    assert torch.equal(reference.gather_rows(matrix, ids), dense[ids])


def test_parts_lie_in_the_tier_that_the_placement_names() -> None:
    tiers = make_tiers()
    starts = {name: tier.allocate((256,), torch.uint8).data_ptr() for name, tier in tiers.items()}
    matrix = TieredMatrix.empty(
        (60, 2048), torch.float16, Rows(2), [("hbm", 3), ("host", 5)], tiers
    )
    assert [p.tier for p in matrix.parts] == ["hbm", "host"]
    assert [rows for _, rows in matrix.rows] == [slice(0, 24), slice(24, 60)]
    assert tiers["hbm"].used == 256 + 24 * 2048 * 2
    assert tiers["host"].used == 256 + 36 * 2048 * 2
    for part in matrix.parts:
        start = starts[part.tier]
        assert start < part.arrays[0].data_ptr() < start + tiers[part.tier].capacity


def test_a_placement_must_cover_the_matrix() -> None:
    with pytest.raises(ValueError, match=r"expected 4 row blocks .*, got 2"):
        TieredMatrix.empty((30, 1024), torch.float32, Rows(4), [("hbm", 2)], make_tiers())


def test_a_tier_never_grows() -> None:
    tier = Tier("host", 4096, CPU)
    tier.allocate((3000,), torch.uint8)
    with pytest.raises(MemoryError, match="tier host: 2000 bytes asked, 1024 left"):
        tier.allocate((2000,), torch.uint8)


def test_more_than_the_machine_has_is_refused_before_allocating() -> None:
    with pytest.raises(CannotRun, match=r"needs 1024\.00 TiB of host memory"):
        allocate_tiers({"hbm": 0, "host": 1 << 50}, CPU)


def test_bytes_are_told_while_tiers_are_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Host memory for a GPU comes in pieces; there is no GPU, so that is patched within."""
    found: list[tuple[int, int]] = []

    def take(
        name: str, nbytes: int, device: torch.device, on_bytes: Callable[[int], None]
    ) -> HostBlock:
        block = HostBlock(nbytes)
        if name == "host":
            block.touch(on_bytes)
        return block

    monkeypatch.setattr("dakrun.memory.tiers._take", take)
    with allocate_tiers({"hbm": MIB, "host": 300 * MIB}, CPU, lambda *both: found.append(both)):
        total = 301 * MIB
    assert found == [(n * MIB, total) for n in (0, 1, 257, 301, 301)]


def test_all_tiers_are_freed_if_one_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []

    def take(name: str, nbytes: int, device: torch.device, on_bytes: object) -> HostBlock:
        if name == "peer:1":
            raise CannotRun("no more", hint="none")
        taken.append(HostBlock(nbytes))
        return taken[-1]

    # Patched within: on a CPU nothing fails between the check of the sizes and the allocation.
    monkeypatch.setattr("dakrun.memory.tiers._take", take)
    with pytest.raises(CannotRun, match="no more"):
        allocate_tiers({"hbm": MIB, "host": MIB, "peer:1": MIB}, CPU)
    assert [block.tensor.numel() for block in taken] == [0, 0]


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A machine with 8 MiB free on GPU 0, 4 on GPU 1, and 1 more in torch's cache of each.

    Yields the names of the tiers that are allocated. That is patched within, as there is no GPU.
    """
    taken: list[str] = []
    cuda = torch.cuda
    monkeypatch.setattr(cuda, "device_count", lambda: 2)
    monkeypatch.setattr(cuda, "mem_get_info", lambda device: ((8, 4)[device] * MIB, 16 * MIB))
    monkeypatch.setattr(cuda, "memory_reserved", lambda device: 3 * MIB)
    monkeypatch.setattr(cuda, "memory_allocated", lambda device: 2 * MIB)
    monkeypatch.setattr(cuda, "can_device_access_peer", lambda device, peer: True)
    inner = "dakrun.memory.tiers"
    monkeypatch.setattr(f"{inner}.check_page_locking", lambda nbytes, device: None)
    monkeypatch.setattr(f"{inner}._take", lambda name, *rest: taken.append(name))
    yield taken


def test_tiers_that_a_machine_holds(two_gpus: list[str]) -> None:
    allocate_tiers({"hbm": 9 * MIB, "host": MIB, "peer:1": 5 * MIB, "peer:7": 0}, GPU)
    assert two_gpus == ["hbm", "host", "peer:1", "peer:7"]


@pytest.mark.parametrize(
    ("tier", "size", "message", "hint"),
    [
        ("hbm", 9 * MIB + 1, "plan needs 9.00 MiB of GPU 0", "--hbm-budget"),
        ("peer:1", 6 * MIB, "peer:1 needs 6.00 MiB of GPU 1.* 5.00 MiB", "--peer-budget"),
        ("peer:2", 1, "peer:2 needs GPU 2.* 2 GPUs are visible", "CUDA_VISIBLE_DEVICES"),
        ("peer:0", 1, "peer:0 is the GPU that runs", "another GPU"),
        ("peer:x", 1, "no tier .*'peer:x'", "host and peer:N"),
        ("disk", 1, "no tier .*'disk'", "host and peer:N"),
        ("host", 1 << 50, "needs 1024.00 TiB of host memory", "--host-budget"),
    ],
)
def test_what_a_gpu_machine_does_not_hold_is_refused_before_allocating(
    two_gpus: list[str], tier: str, size: int, message: str, hint: str
) -> None:
    with pytest.raises(CannotRun, match=message) as caught:
        allocate_tiers({"hbm": MIB, "host": MIB} | {tier: size}, GPU)
    assert hint in caught.value.hint and two_gpus == []


def test_a_peer_that_cannot_be_read(two_gpus: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda device, peer: False)
    with pytest.raises(CannotRun, match="GPU 0 cannot read the memory of GPU 1") as caught:
        allocate_tiers({"hbm": MIB, "peer:1": MIB}, GPU)
    assert "--remote host" in caught.value.hint and two_gpus == []


def test_free_bytes_of_peers(two_gpus: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert free_on_peers(("host",), GPU) is None and free_on_peers((), GPU) is None
    assert free_on_peers(("peer:1",), GPU) == 0  # its 5 MiB are less than what is kept back
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (900 * MIB, 999 * MIB))
    assert 800 * MIB < free_on_peers(("host", "peer:1"), GPU) < 901 * MIB
    with pytest.raises(CannotRun, match="peer:2 needs GPU 2"):
        free_on_peers(("peer:1", "peer:2"), GPU)


def test_peer_access_is_enabled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class CUDARuntimeError(RuntimeError):
        status = 704

    def enable(peer: int) -> None:
        asked.append(peer)
        raise CUDARuntimeError("no")

    asked: list[int] = []
    runtime = SimpleNamespace(deviceEnablePeerAccess=enable, CUDARuntimeError=CUDARuntimeError)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "cupy.cuda", SimpleNamespace(runtime=runtime))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    enable_peer_access(1, 0)
    CUDARuntimeError.status = 217
    with pytest.raises(CannotRun, match=r"GPU 0 to GPU 1 is denied \(no\)"):
        enable_peer_access(1, 0)
    assert asked == [1, 1]


def test_a_gpu_that_is_full_after_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **options: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 MiB.")

    monkeypatch.setattr(torch, "empty", full)
    with pytest.raises(OutOfGpuMemory, match=r"memory ran out by 1\.00 MiB"):
        DeviceBlock(MIB, torch.device("cuda", 1), hint="none")


def test_linear_refuses_wrong_arguments() -> None:
    matrix = TieredMatrix.empty((64, 32), torch.float32, Rows(4), [("hbm", 8)], make_tiers())
    with pytest.raises(ValueError, match=r"expected x \[N, 32\]"):
        reference.linear(torch.zeros(2, 31), matrix)
    with pytest.raises(ValueError, match=r"float64"):
        reference.linear(torch.zeros(2, 32, dtype=torch.float64), matrix)
    with pytest.raises(ValueError, match=r"expected bias \[64\]"):
        reference.linear(torch.zeros(2, 32), matrix, torch.zeros(63))
