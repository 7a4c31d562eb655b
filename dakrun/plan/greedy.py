"""The greedy offload ratios over one remote tier (arXiv 2604.26074, section 4; README.md here).

An op reads C bytes in a step, a ratio x of them from the remote tier; B_g and B_h are the rates of
HBM and of the remote tier. Its time T(x) = max(floor, C (1 - x) / B_g, C x / B_h) falls up to
x = a, is flat up to x = b, then rises. Every T is convex, so filling the cheapest segments of all
ops first is optimal.
"""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Curve:
    """Time of one op (all its layers together) by its offload ratio x.

    `resident` bytes are placed, `read` bytes are read in a step; rates are in bytes/s; `floor` is
    the least time in seconds of any placement. `staged` bytes are first copied into the local
    tier and add to its traffic: T(x) = max(floor, C (1 + x) / B_g, C x / B_h). With `beyond`, a
    rate, bytes past b arrive at that rate instead: T(x) = T(b) + C (x - b) / beyond.
    `classes` are shares of C that equal parts of the resident bytes have, in the order in which
    they go to the remote tier, never falling: C (1 - s(x)) and C s(x) bytes are then read of the
    tiers, s being the sum of the first parts up to x. They go with neither `staged` nor `beyond`.
    """

    resident: float
    read: float
    floor: float
    local_rate: float
    remote_rate: float
    staged: bool = False
    beyond: float | None = None
    classes: tuple[float, ...] = (1.0,)

    def reads(self, x: float) -> float:
        """Share s(x) of the bytes read that the remote tier has at offload ratio `x`."""
        if len(self.classes) == 1:
            return x
        whole, part = divmod(min(1.0, x) * len(self.classes), 1.0)
        return sum(self.classes[: int(whole)]) + part * (*self.classes, 0.0)[int(whole)]

    def ratio(self, reads: float) -> float:
        """The offload ratio x with s(x) = `reads`; the highest one."""
        if len(self.classes) == 1:
            return reads
        done = 0.0
        for number, share in enumerate(self.classes):
            if reads < done + share:
                return (number + (reads - done) / share) / len(self.classes)
            done += share
        return 1.0

    @functools.cached_property
    def a(self) -> float:
        """Ratio up to which offloading makes the op faster."""
        if self.staged:
            return 0.0
        return self.ratio(min(1.0, max(0.0, 1 - self.floor * self.local_rate / self.read)))

    @functools.cached_property
    def b(self) -> float:
        """Ratio up to which offloading does not make the op slower than at a."""
        flat = self.floor * self.remote_rate / self.read
        if self.staged:
            flat = min(flat, self.floor * self.local_rate / self.read - 1)
        return min(1.0, max(self.a, self.ratio(flat)))

    def time(self, x: float) -> float:
        """Seconds at offload ratio `x`."""
        if self.beyond is not None and x > self.b:
            return self.time(self.b) + self.read * (x - self.b) / self.beyond
        x = self.reads(x)
        local_ratio = 1 + x if self.staged else 1 - x
        local, remote = local_ratio / self.local_rate, x / self.remote_rate
        return max(self.floor, self.read * local, self.read * remote)

    def segments(self) -> list[tuple[float, float]]:
        """(slope, length) of T's linear segments from x = 0 to 1; slopes never fall.

        With `classes` T is above its first segment between 0 and a, where layers may differ.
        """
        down, up = -self.read / self.local_rate, self.read / (self.beyond or self.remote_rate)
        if len(self.classes) > 1:
            return self._segments_of_classes(down, up)
        segments = [(down, self.a), (0.0, self.b - self.a)]
        if self.staged and self.local_rate > self.remote_rate:
            turn = self.remote_rate / (self.local_rate - self.remote_rate)
            gentle = min(1.0, max(self.b, turn)) - self.b
            segments.append((-down, gentle))
            return [*segments, (up, 1 - self.b - gentle)]
        return [*segments, (-down if self.staged else up, 1 - self.b)]

    def _segments_of_classes(self, down: float, up: float) -> list[tuple[float, float]]:
        mean = self.reads(self.a) / self.a if self.a else 1.0
        segments = [(down * mean, self.a), (0.0, self.b - self.a)]
        for number, share in enumerate(self.classes, 1):
            end = number / len(self.classes)
            length = min(1 / len(self.classes), end - self.b)
            if length > 0:
                segments.append((up * share * len(self.classes), length))
        return segments


def best_total(curves: Sequence[Curve]) -> float:
    """Remote resident bytes with the least total time: every op at its threshold a."""
    return sum(curve.a * curve.resident for curve in curves)


def best_uniform_total(curves: Sequence[Curve]) -> float:
    """Remote resident bytes with the least total time if all ops have one ratio.

    The sum of the convex T is convex, too, so its minimum is at the end of a segment.
    """
    ends = {0.0}
    for curve in curves:
        ends.update(itertools.accumulate(length for _, length in curve.segments()))
    best = min(sorted(ends), key=lambda x: sum(curve.time(x) for curve in curves))
    return best * sum(curve.resident for curve in curves)


def greedy_ratios(curves: Sequence[Curve], remote_bytes: float) -> list[float]:
    """Offload ratio of each op that places `remote_bytes` remotely in the least total time.

    Segments of equal slope per byte are filled in proportion, so that like ops stay alike.
    """
    segments = [  # slope in seconds per resident byte, op, bytes
        (slope / curve.resident, i, length * curve.resident)
        for i, curve in enumerate(curves)
        for slope, length in curve.segments()
    ]
    placed = [0.0] * len(curves)
    left = remote_bytes
    segments.sort(key=lambda segment: segment[0])
    while segments and left > 0:
        slope = segments[0][0]
        alike = [s for s in segments if s[0] <= slope + 1e-9 * abs(slope)]
        segments = segments[len(alike) :]
        room = sum(size for _, _, size in alike)
        for _, i, size in alike:
            placed[i] += size * min(1.0, left / room) if room else 0.0
        left -= room
    return [min(1.0, p / curve.resident) for p, curve in zip(placed, curves, strict=True)]


def uniform_ratios(curves: Sequence[Curve], remote_bytes: float) -> list[float]:
    """The same offload ratio for every op, `remote_bytes` in all: the strategy to compare with."""
    ratio = remote_bytes / sum(curve.resident for curve in curves) if curves else 0.0
    return [min(1.0, ratio)] * len(curves)
