"""Where staged matrices come to lie, and when they may be copied there."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from packed_matrices import normal, packed

from dakrun.engine import Place, Staging, places, staged_bytes
from dakrun.hardware import LOCAL
from dakrun.kernels.gemm import Split


def test_a_ring_of_two() -> None:
    found = places([60, 60, 60, 30], 120)
    assert found == [
        Place(0, 60, 2, early=True),
        Place(60, 120, 3, early=True),
        Place(0, 60, 0, early=False),
        Place(60, 90, 1, early=False),
    ]


def test_what_never_fits_is_refused() -> None:
    with pytest.raises(ValueError, match="at most 8 bytes, got 9"):
        places([1, 9], 8)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(50, 150))
def test_nothing_is_copied_over_what_is_still_to_be_read(sizes: list[int], ring: int) -> None:
    """Two steps after the other, with copies as early as their places allow."""
    found = places(sizes, ring)
    count = len(sizes)
    early = [i for i, place in enumerate(found) if place.early]
    assert early == list(range(len(early))), "the first ones"
    held: dict[int, int] = {}  # what byte belongs to which matrix

    def copy(number: int) -> None:
        held.update(dict.fromkeys(range(found[number].start, found[number].end), number))

    for number in early:
        copy(number)
    for _ in range(2):
        waiting = [*range(len(early), count), *early]
        for number in range(-1, count):
            if number >= 0:
                span = range(found[number].start, found[number].end)
                assert len(span) == sizes[number] and {held[byte] for byte in span} == {number}
            while waiting and (
                found[waiting[0]].after is None or found[waiting[0]].after <= number
            ):
                copy(waiting.pop(0))
        assert not waiting, "the next step finds its first matrices"


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_passes_find_their_matrices(device: str) -> None:
    """Those that fill the ring anew, and those that find in it what the one before has left."""
    tiers = (Split(2, 2, 1, 64), Split(3, 1, 2, 64), Split(1, 1, 1, 64))
    dense = {f"{i}": normal(48, 128, dtype=torch.float16, device=device) for i in range(7)}
    matrices = {name: packed(weight, tiers) for name, weight in dense.items()}
    staged = [name for name in matrices if name != "3"]
    ring = torch.empty(2 * staged_bytes(matrices["0"]), dtype=torch.uint8, device=device)
    steps = Staging(matrices, staged, ring)
    prompts = Staging(matrices, staged, ring, ahead=False)

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
