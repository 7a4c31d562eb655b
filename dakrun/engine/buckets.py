"""Batch buckets: the numbers of rows that decode steps are captured for.

Knows slots by tier; pure, needs no GPU.
"""

from collections.abc import Iterator, Sequence

STEPS = (1, 2, 4, 8, 16, 24, 32, 48, 64)
FURTHER = 64  # above the last of them

Bucket = tuple[int, ...]  # rows whose slots lie in each tier


def fill_order(counts: Sequence[int]) -> list[int]:
    """All slots, numbered tier after tier, so that the first of them are spread over the tiers.

    However many of them are in use, each tier then has about its share of those.
    """
    first, ranks = 0, []
    for count in counts:
        ranks += [((i + 0.5) / count, first + i) for i in range(count)]
        first += count
    return [slot for _, slot in sorted(ranks)]


def buckets(counts: Sequence[int]) -> list[Bucket]:
    """Buckets for `counts` slots by tier, the smallest first; the last holds all slots."""
    slots, order = sum(counts), fill_order(counts)
    return [_bucket(order[:size], counts) for size in _sizes(slots)]


def fitting(options: Sequence[Bucket], used: Sequence[int]) -> Bucket:
    """The first of `options` with room for `used` slots of each tier."""
    return next(
        option for option in options if all(room >= n for room, n in zip(option, used, strict=True))
    )


def _sizes(slots: int) -> Iterator[int]:
    yield from (size for size in STEPS if size < slots)
    yield from range(STEPS[-1] + FURTHER, slots, FURTHER)
    yield slots


def _bucket(slots: Sequence[int], counts: Sequence[int]) -> Bucket:
    rows, first = [], 0
    for count in counts:
        rows.append(sum(first <= slot < first + count for slot in slots))
        first += count
    return tuple(rows)
