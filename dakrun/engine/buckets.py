"""Batch buckets: for how many rows of each tier decode steps are captured, and which one fits rows.

Also the order in which slots are filled. Knows numbers of slots by tier, no requests.
"""

import math
from collections.abc import Iterator, Sequence

SMALL_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64)
BUCKET_STEP = 32  # rows between larger buckets
LARGE_BUCKET, LARGE_BUCKET_STEP = 512, 64  # from here on

Bucket = tuple[int, ...]  # number of rows by the tier of their slots


def fill_order(counts: Sequence[int]) -> list[int]:
    """The order in which to fill the slots, which are numbered tier after tier.

    However many are in use, they are spread over the tiers in about the proportion of `counts`.
    """
    first, ranks = 0, []
    for count in counts:
        ranks += [((i + 0.5) / count, first + i) for i in range(count)]
        first += count
    return [slot for _, slot in sorted(ranks)]


def buckets(counts: Sequence[int]) -> list[Bucket]:
    """Buckets to capture for `counts` slots by tier, the smallest first; the last has all slots.

    A bucket has rows of each tier in the proportion of `counts`, and some more of the tiers with
    few slots. Requests end in any order, so such a tier often has more than its share of those that
    run: of 720 slots in HBM and 8 in host memory, 552 and 8 would need the bucket of 704 rows. The
    price is that just as many rows as a bucket has, which fill the slots in order, need the next.
    """
    order, found, before = fill_order(counts), list[Bucket](), 0
    for size in _sizes(sum(counts)):
        rows = _bucket(order[:size], counts)
        found.append(_with_spare(rows, counts, (size - before) // 2))
        before = size
    return found


def fitting(options: Sequence[Bucket], used: Sequence[int]) -> Bucket:
    """The first of `options` with room for `used` slots of each tier."""
    return next(
        option for option in options if all(room >= n for room, n in zip(option, used, strict=True))
    )


def _sizes(slots: int) -> Iterator[int]:
    yield from (size for size in SMALL_BUCKETS if size < slots)
    yield from range(SMALL_BUCKETS[-1] + BUCKET_STEP, min(slots, LARGE_BUCKET), BUCKET_STEP)
    yield from range(LARGE_BUCKET, slots, LARGE_BUCKET_STEP)
    yield slots


def _bucket(slots: Sequence[int], counts: Sequence[int]) -> Bucket:
    rows, first = [], 0
    for count in counts:
        rows.append(sum(first <= slot < first + count for slot in slots))
        first += count
    return tuple(rows)


def _with_spare(bucket: Bucket, counts: Sequence[int], idle: int) -> Bucket:
    """`bucket` with rows moved from tier to tier, for steps with `idle` idle rows.

    With m idle rows, k tiers and a share f of all slots in a tier, m (1 / k - f) rows more give all
    tiers equal room for more rows than expected. Of n slots, of which any may be in use, up to
    sqrt(n) more are enough: that is two standard deviations or more.
    """
    rows, total, tiers = list(bucket), sum(counts), sum(map(bool, counts))
    wanted = [
        own + min(math.sqrt(count), idle * (1 / tiers - count / total))
        for own, count in zip(bucket, counts, strict=True)
    ]

    def excess(tier: int) -> float:
        return rows[tier] - wanted[tier]

    while True:
        most = max((t for t, own in enumerate(rows) if own), key=excess)
        rest = (t for t, own in enumerate(rows) if own < counts[t])
        least = min(rest, key=excess, default=most)
        if excess(most) - excess(least) < 2:  # else one row less and one more are nearer
            return tuple(rows)
        rows[most] -= 1
        rows[least] += 1
