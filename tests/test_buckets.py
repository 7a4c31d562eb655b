"""Batch buckets: enough of them, spread over the tiers, and always one that fits."""

import bisect
import itertools

from hypothesis import given
from hypothesis import strategies as st

from dakrun.engine import buckets, fill_order, fitting

COUNTS = st.lists(st.integers(0, 40), min_size=1, max_size=3).filter(any)


def test_sizes() -> None:
    assert [sum(b) for b in buckets((8,))] == [1, 2, 4, 8]
    assert [sum(b) for b in buckets((5,))] == [1, 2, 4, 5]
    assert [sum(b) for b in buckets((200,))][-6:] == [64, 96, 128, 160, 192, 200]
    assert [sum(b) for b in buckets((512,))][-3:] == [448, 480, 512]
    assert [sum(b) for b in buckets((700,))][-5:] == [480, 512, 576, 640, 700]
    assert buckets((6, 2)) == [(1, 0), (2, 0), (3, 1), (6, 2)]


def test_slots_are_filled_evenly() -> None:
    assert fill_order((4, 2)) == [0, 4, 1, 2, 5, 3]
    assert fill_order((3, 0)) == [0, 1, 2]


@given(COUNTS)
def test_all_slots_have_a_turn(counts: list[int]) -> None:
    assert sorted(fill_order(counts)) == list(range(sum(counts)))
    options = buckets(counts)
    assert options[-1] == tuple(counts)
    assert [sum(b) for b in options] == sorted({sum(b) for b in options})


@given(COUNTS, st.data())
def test_the_smallest_that_fits(counts: list[int], data: st.DataObject) -> None:
    used = [data.draw(st.integers(0, count)) for count in counts]
    options = buckets(counts)
    found = fitting(options, used)
    assert all(room >= n for room, n in zip(found, used, strict=True))
    for smaller in options[: options.index(found)]:
        assert any(room < n for room, n in zip(smaller, used, strict=True))


@given(st.lists(st.integers(1, 60), min_size=2, max_size=5))
def test_rows_in_proportion_need_no_larger_bucket(counts: list[int]) -> None:
    """Where a step has half of a bucket's idle rows: as many as it has on average."""
    order, options, before = fill_order(counts), buckets(counts), 0
    ends = [*itertools.accumulate(counts)]
    for size in (sum(b) for b in options):
        rows = size - (size - before) // 2
        used = [0] * len(counts)
        for slot in order[:rows]:
            used[bisect.bisect_right(ends, slot)] += 1
        assert sum(fitting(options, used)) == size
        before = size


def test_a_small_tier_may_have_more_than_its_share() -> None:
    """As in a file of short and long requests: of 720 + 8 slots, 554 + 8 are in use."""
    counts = 720, 8
    assert sum(fitting(buckets(counts), (554, 8))) == 576
    assert sum(fitting(buckets(counts), (340, 6))) == 352
    assert sum(fitting(buckets((461, 51)), (386, 45))) == 448
    assert sum(fitting(buckets((51, 461)), (45, 386))) == 448
