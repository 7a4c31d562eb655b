"""Tiers and partitioned matrices: every element in exactly one tier, and exactly as big."""

import sys
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dakrun.errors import CannotRun
from dakrun.geometry import row_block_count
from dakrun.kernels import reference
from dakrun.memory import device as device_memory
from dakrun.memory import tiers as memory
from dakrun.memory.tiers import PartitionedTensor, Tier, allocate_tiers

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


@settings(max_examples=60, deadline=None)
@given(placements())
def test_linear_and_gather_over_any_placement(
    case: tuple[tuple[int, int], list[tuple[str, int]]],
) -> None:
    shape, placement = case
    tiers = make_tiers()
    matrix = PartitionedTensor.empty(shape, torch.float32, placement, tiers)
    dense = torch.randn(shape)
    covered = torch.zeros(shape, dtype=torch.int32)
    for part in matrix.parts:
        part.data.copy_(dense[part.rows])
        covered[part.rows] += 1
    assert (covered == 1).all()
    assert torch.equal(matrix.dense(), dense)
    x, bias = torch.randn(3, shape[1]), torch.randn(shape[0])
    exact = x.double() @ dense.double().T + bias.double()
    assert (reference.linear(x, matrix, bias) - exact).abs().max() < 1e-3
    ids = torch.randint(0, shape[0], (7,))
    assert torch.equal(reference.gather_rows(matrix, ids), dense[ids])


def test_parts_lie_in_the_tier_that_the_placement_names() -> None:
    tiers = make_tiers()
    matrix = PartitionedTensor.empty((60, 2048), torch.float16, [("hbm", 3), ("host", 5)], tiers)
    assert [p.tier for p in matrix.parts] == ["hbm", "host"]
    assert [p.rows for p in matrix.parts] == [slice(0, 24), slice(24, 60)]
    assert tiers["hbm"].used == 24 * 2048 * 2
    assert tiers["host"].used == 36 * 2048 * 2
    for part in matrix.parts:
        buffer = tiers[part.tier]._block.tensor
        start = buffer.data_ptr()
        assert start <= part.data.data_ptr() < start + buffer.numel()


def test_a_placement_must_cover_the_matrix() -> None:
    with pytest.raises(ValueError, match="2 row blocks placed of a matrix of 4"):
        PartitionedTensor.empty((30, 1024), torch.float32, [("hbm", 2)], make_tiers())


def test_a_tier_never_grows() -> None:
    tier = Tier("host", 4096, CPU)
    tier.allocate((3000,), torch.uint8)
    with pytest.raises(MemoryError, match="tier host: 2000 bytes asked, 1024 left"):
        tier.allocate((2000,), torch.uint8)


def test_more_than_the_machine_has_is_refused_before_allocating() -> None:
    with pytest.raises(CannotRun, match=r"needs 1024\.00 TiB of host memory"):
        allocate_tiers({"hbm": 0, "host": 1 << 50}, CPU)


def test_tiers_are_given_back_together() -> None:
    with allocate_tiers({"hbm": MIB, "host": MIB, "peer:1": 0}, CPU) as tiers:
        assert tiers["host"].allocate((4,), torch.float32).sum() == 0
    for tier in tiers.values():
        assert tier.free == 0 and tier._block.tensor.numel() == 0
    with pytest.raises(MemoryError, match="0 left"):
        tiers["host"].allocate((4,), torch.float32)
    tiers.close()


def test_all_tiers_are_given_back_where_one_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []

    def take(name: str, nbytes: int, device: torch.device) -> memory.HostBlock:
        if name == "peer:1":
            raise CannotRun("no more", hint="none")
        taken.append(memory.HostBlock(nbytes))
        return taken[-1]

    monkeypatch.setattr(memory, "_take", take)
    with pytest.raises(CannotRun, match="no more"):
        allocate_tiers({"hbm": MIB, "host": MIB, "peer:1": MIB}, CPU)
    assert [block.tensor.numel() for block in taken] == [0, 0]


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A machine whose GPUs 0 and 1 have 8 and 4 MiB free; the list of what is taken of it."""
    taken: list[str] = []
    cuda = torch.cuda
    monkeypatch.setattr(cuda, "device_count", lambda: 2)
    monkeypatch.setattr(cuda, "mem_get_info", lambda device: ((8, 4)[device] * MIB, 16 * MIB))
    monkeypatch.setattr(cuda, "memory_reserved", lambda device: 3 * MIB)
    monkeypatch.setattr(cuda, "memory_allocated", lambda device: 2 * MIB)
    monkeypatch.setattr(cuda, "can_device_access_peer", lambda device, peer: True)
    monkeypatch.setattr(memory, "check_page_locking", lambda nbytes, device: None)
    monkeypatch.setattr(memory, "_take", lambda name, nbytes, device: taken.append(name))
    yield taken


def test_tiers_that_a_machine_holds(two_gpus: list[str]) -> None:
    allocate_tiers({"hbm": 9 * MIB, "host": MIB, "peer:1": 5 * MIB, "peer:7": 0}, GPU)
    assert two_gpus == ["hbm", "host", "peer:1", "peer:7"]


@pytest.mark.parametrize(
    ("tier", "size", "message", "hint"),
    [
        ("hbm", 9 * MIB + 1, "plan needs 9.00 MiB of GPU 0, 9.00 MiB are free", "--hbm-budget"),
        ("peer:1", 6 * MIB, "peer:1 needs 6.00 MiB of GPU 1, 5.00 MiB are free", "--peer-budget"),
        ("peer:2", 1, "peer:2 needs GPU 2, and 2 GPUs are visible", "CUDA_VISIBLE_DEVICES"),
        ("peer:0", 1, "peer:0 is the GPU that computes", "another GPU"),
        ("peer:x", 1, "tier 'peer:x' is none that a GPU can read", "host and peer:N"),
        ("disk", 1, "tier 'disk' is none that a GPU can read", "host and peer:N"),
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


def test_what_peers_have_free(two_gpus: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    free = device_memory.free_on_peers
    assert free(("host",), GPU) is None and free((), GPU) is None
    monkeypatch.setattr(device_memory, "PEER_RESERVE", 2 * MIB)
    assert free(("host", "peer:1"), GPU) == 3 * MIB
    monkeypatch.setattr(device_memory, "PEER_RESERVE", 9 * MIB)
    assert free(("peer:1",), GPU) == 0
    with pytest.raises(CannotRun, match="peer:2 needs GPU 2, and 2 GPUs are visible"):
        free(("peer:1", "peer:2"), GPU)


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
    device_memory.enable_peer_access(1, 0)
    CUDARuntimeError.status = 217
    with pytest.raises(CannotRun, match=r"GPU 0 is not let read the memory of GPU 1 \(no\)"):
        device_memory.enable_peer_access(1, 0)
    assert asked == [1, 1]


def test_a_gpu_that_is_full_after_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **options: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "empty", full)
    with pytest.raises(CannotRun, match=r"cuda:1 does not give 1\.00 MiB of its memory"):
        device_memory.DeviceBlock(MIB, torch.device("cuda", 1), hint="none")


def test_linear_refuses_wrong_arguments() -> None:
    matrix = PartitionedTensor.empty((64, 32), torch.float32, [("hbm", 8)], make_tiers())
    with pytest.raises(ValueError, match=r"expected x \[N, 32\]"):
        reference.linear(torch.zeros(2, 31), matrix)
    with pytest.raises(ValueError, match=r"float64"):
        reference.linear(torch.zeros(2, 32, dtype=torch.float64), matrix)
    with pytest.raises(ValueError, match=r"expected bias \[64\]"):
        reference.linear(torch.zeros(2, 32), matrix, torch.zeros(63))
