"""Where staged matrices come to lie, and when they may be copied there."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from packed_matrices import normal, packed

from dakrun.engine import RingSpan, Staging, grouped, ring_spans, staged_bytes
from dakrun.formats import Split
from dakrun.hardware import LOCAL

SIZES = st.lists(st.integers(1, 50), min_size=1, max_size=40)


def test_a_ring_of_two() -> None:
    first, *others = ring_spans([60, 60, 60, 30], 120)
    assert first == RingSpan(0, 60, 2, early=True)
    assert others == [
        RingSpan(60, 120, None, early=False),  # the last item is there before
        RingSpan(0, 60, 0, early=False),
        RingSpan(60, 90, 1, early=False),
    ]
    assert ring_spans([60, 60, 60, 30], 120, early=False) == [
        replace(first, after=None, early=False),
        *others,
    ]


def test_what_never_fits_is_refused() -> None:
    with pytest.raises(ValueError, match="at most 8 bytes, got 9"):
        ring_spans([1, 9], 8)


@given(SIZES, st.integers(50, 150), st.booleans())
def test_nothing_is_copied_over_what_is_still_to_be_read(
    sizes: list[int], ring: int, first: bool
) -> None:
    """Two passes after the other, with copies as early as their spans allow."""
    found = ring_spans(sizes, ring, early=first)
    count = len(sizes)
    early = [i for i, span in enumerate(found) if span.early]
    assert early == list(range(len(early))) and bool(early) == first, "the first ones"
    assert all(found[i].after != count - 1 for i in early[1:])
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
        assert not waiting, "the next pass finds its first matrices"


@given(SIZES, st.integers(1, 100))
def test_small_items_are_grouped(sizes: list[int], together: int) -> None:
    groups = grouped(sizes, together)
    assert [i for group in groups for i in group] == [*range(len(sizes))]
    held = [sum(sizes[i] for i in group) for group in groups]
    assert all(n <= together or len(group) == 1 for n, group in zip(held, groups, strict=True))
    for size, group in zip(held, groups[1:], strict=False):
        assert size + sizes[group[0]] > together


@pytest.mark.parametrize("count", range(2, 40))
def test_the_first_and_the_last_item_are_apart(count: int) -> None:
    """The pass before copies the first one while kernels read the last one."""
    first = ring_spans([4 + count % 2, *[4, 5] * count][:count], 18)[0]
    assert first.after is not None and first.after < count - 1


@pytest.mark.parametrize("behind", [(), ("1", "3", "5"), ("6",)])
@pytest.mark.parametrize("together", [1, 60_000])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_passes_find_their_matrices(device: str, together: int, behind: tuple[str, ...]) -> None:
    """Those that fill the ring anew, and those that find in it what the one before has left."""
    tiers = (Split(2, 2, 1, 64), Split(3, 1, 2, 64), Split(1, 1, 1, 64))
    dense = {f"{i}": normal(48, 128, dtype=torch.float16, device=device) for i in range(7)}
    matrices = {name: packed(weight, tiers) for name, weight in dense.items()}
    staged = [name for name in matrices if name != "3"]
    size = staged_bytes(matrices["0"])
    ring = torch.empty((2 if together == 1 else 8) * size, dtype=torch.uint8, device=device)
    together = min(together, ring.numel() // 4)
    groups = grouped(
        [size] * len(staged), together, [staged.index(of) for of in behind if of in staged]
    )
    assert behind or len(groups) == (6 if together == 1 else 3)
    steps = Staging(matrices, staged, ring, together=together, behind=behind)
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
                    start = part.arrays[0].data_ptr() - ring.data_ptr()
                    assert 0 <= start <= ring.numel() - part.nbytes
                    for array in part.arrays:  # the next pass must copy it again
                        array.fill_(255)
            operands.release(name)
        operands.end()

    for _ in range(2):
        for _ in range(2):
            ring.fill_(255)
            run(prompts)
        steps.fill()
        for _ in range(3):
            run(steps)


def test_copies_start_behind_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a layer while the one before is computed, if the ring has room for two layers.

    With less room some start when they are waited for.
    """
    tiers, names = (Split(2, 2, 1, 64), Split(3, 1, 2, 64)), ("qkv", "o", "up", "down")
    weight = normal(40, 128, dtype=torch.float16, device="cpu")
    matrices = {f"{layer}.{name}": packed(weight, tiers) for layer in range(5) for name in names}
    order, size = list(matrices), staged_bytes(matrices["0.qkv"])
    behind = [name for name in order if name.endswith(".o")]
    started: list[tuple[str, str]] = []  # each copy, and the matrix that was used next
    now, copy = "", Staging._copy

    def spy(staging: Staging, number: int) -> None:
        started.append((order[number], now))
        copy(staging, number)

    monkeypatch.setattr(Staging, "_copy", spy)
    for items in (8, 3):
        ring = torch.empty(items * size, dtype=torch.uint8)
        staging = Staging(matrices, order, ring, together=1, behind=behind)
        staging.fill()
        first = {name for name, _ in started}
        for _ in range(2):
            started.clear()
            now = "begin"
            staging.begin()
            for now in order:
                staging.fetch(now)
                staging.release(now)
            now = "end"
            staging.end()
            assert Counter(name for name, _ in started) == Counter(order)
        last = order[order.index("4.o") :]
        assert {at for name, at in started if name in first} <= {*last}, "for the next pass"
        late = {at for _, at in started} - {*behind, *last}
        assert bool(late) == (items == 3)
        if items == 8:
            ahead = {
                order.index(name) - order.index(at)
                for name, at in started
                if at in behind[1:] and name not in first
            }
            assert ahead == {4, 5, 6, 7}, "from the next layer's o on"
        started.clear()
        now = ""


@given(SIZES, st.integers(1, 100), st.sets(st.integers(0, 39)))
def test_groups_begin_behind_attention(sizes: list[int], together: int, first: set[int]) -> None:
    """So the groups of all layers are alike, and two layers fill the ring."""
    groups = grouped(sizes, together, first)
    assert [i for group in groups for i in group] == [*range(len(sizes))]
    assert not first & {i for group in groups for i in group[1:]}
