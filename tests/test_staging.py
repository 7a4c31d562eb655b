"""Where staged matrices come to lie, and when they may be copied there."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from packed_matrices import normal, packed

from dakrun.engine import Staging, StagingRing, grouped, staged_bytes
from dakrun.hardware import LOCAL
from dakrun.kernels.gemm import Split

SIZES = st.lists(st.integers(1, 50), min_size=1, max_size=40)


def items(sizes: list[int]) -> list[list[torch.Tensor]]:
    """One tensor of each size, with its number in every byte."""
    return [[torch.full((size,), i, dtype=torch.uint8)] for i, size in enumerate(sizes)]


def test_what_never_fits_is_refused() -> None:
    with pytest.raises(ValueError, match="at most 512 bytes, got 768"):
        StagingRing(items([1, 600]), torch.empty(1024, dtype=torch.uint8))
    StagingRing(items([600]), torch.empty(1024, dtype=torch.uint8))


@given(SIZES, st.booleans())
def test_a_half_is_filled_as_soon_as_it_is_free(sizes: list[int], early: bool) -> None:
    """With the item after next; an early first one when its half has been read for the last time.

    On a CPU a copy is complete at once: what is still to be read must not be copied over.
    """
    ring = StagingRing(items(sizes), torch.zeros(2 * 256, dtype=torch.uint8), early=early)
    copied: list[int] = []
    ring._copy = lambda number, copy=ring._copy: (copied.append(number), copy(number))  # type: ignore[assignment,misc]
    ring.fill()
    assert copied == [0] * early
    last = len(sizes) - 1
    for _ in range(2):
        copied.clear()
        ring.begin()
        for number, size in enumerate(sizes):
            expected = [*range(early, min(number + 2, len(sizes)))]
            assert copied[: len(expected)] == expected
            ring.wait(number)
            assert ring.staged[number][0].tolist() == [number] * size
            ring.free(number)
            assert (copied[-1:] == [0]) == (early and number >= last - last % 2) or not last
        ring.end()
        assert sorted(copied) == [*range(len(sizes))]


@given(SIZES, st.integers(1, 200))
def test_small_items_are_grouped(sizes: list[int], together: int) -> None:
    groups = grouped(sizes, together)
    assert [i for group in groups for i in group] == [*range(len(sizes))]
    together = min(together, -(-sum(sizes) // 2))
    several = [group for group in groups if len(group) > 1]
    assert all(sum(sizes[i] for i in group) <= together for group in several)
    assert len(groups) % 2 == 0 or not several, "the first and the last are in different halves"
    count = sum(sum(sizes[i] for i in a + b) <= together for a, b in itertools.pairwise(groups))
    assert count <= 3, "only the group that was split, and its neighbours"


def test_large_items_stay_alone() -> None:
    assert grouped([30, 10, 40, 40], 8) == [[0], [1], [2], [3]]
    assert grouped([], 8) == []


@pytest.mark.parametrize("together", [1, 60_000])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_passes_find_their_matrices(device: str, together: int) -> None:
    """Those that fill the ring anew, and those that find in it what the one before has left."""
    tiers = (Split(2, 2, 1, 64), Split(3, 1, 2, 64), Split(1, 1, 1, 64))
    dense = {f"{i}": normal(48, 128, dtype=torch.float16, device=device) for i in range(7)}
    matrices = {name: packed(weight, tiers) for name, weight in dense.items()}
    staged = [name for name in matrices if name != "3"]
    size = staged_bytes(matrices["0"])
    groups = grouped([size] * len(staged), together)
    assert len(groups) == (6 if together == 1 else 2)
    ring = torch.empty(2 * size * len(groups[0]), dtype=torch.uint8, device=device)
    steps = Staging(matrices, staged, ring, together=together)
    prompts = Staging(matrices, staged, ring, together=together, early=False)
    assert sum(map(steps.waits, dense)) == len(groups)

    def run(operands: Staging) -> None:
        operands.begin()
        for name, weight in dense.items():
            found = operands.fetch(name)
            assert torch.equal(found.dense(device), weight)
            if name in staged:
                assert [part.tier for part in found.parts[1:]] == [LOCAL, LOCAL]
                for part in found.parts[1:]:
                    start = part.data.data_ptr() - ring.data_ptr()
                    assert 0 <= start <= ring.numel() - part.data.nbytes
            operands.release(name)
        operands.end()

    for _ in range(2):
        for _ in range(2):
            ring.fill_(255)
            run(prompts)
        steps.fill()
        for _ in range(3):
            run(steps)
