"""The greedy offload ratios over one remote tier (arXiv 2604.26074, section 4).

README.md in this folder has the times, their segments and the proof. T(x) of an op falls up to
x = a, is flat up to x = b, then rises; the op's time in the prompt passes that a step carries is
added. C are the bytes that the op reads in a step, x is the share of them that the remote tier has,
B_g and B_h are the rates of HBM and of that tier.
"""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from dakrun.plan.roofline import Line

Segments = list[tuple[float, float]]  # (slope, length) from x = 0 to 1, slopes never falling


@dataclass(frozen=True)
class Curve:
    """Time of one op (all its layers together) by its offload ratio x.

    `resident` bytes are placed, `read` bytes are read in a step; rates are in bytes/s; `floor` is
    the least time in seconds of any placement. `staged` bytes are first copied into the local
    tier and add to its traffic: T(x) = max(floor, C (1 + x) / B_g, C x / B_h). With `beyond`, a
    rate, bytes past b arrive at that rate instead: T(x) = T(b) + C (x - b) / beyond.
    `classes` divide the resident bytes into equal parts, in the order in which these go to the
    remote tier; each number is the share of C that is read of a part, never falling. Then
    C (1 - s(x)) and C s(x) bytes are read of the tiers, s(x) being the sum of the shares up to x.
    Classes go with neither `staged` nor `beyond`. `prompts` are lines, given as seconds at x = 0
    and at x = 1: in the prompt passes of a decode step the op takes the longest of them.
    """

    resident: float
    read: float
    floor: float
    local_rate: float
    remote_rate: float
    staged: bool = False
    beyond: float | None = None
    classes: tuple[float, ...] = (1.0,)
    prompts: tuple[tuple[float, float], ...] = ()

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
        """Seconds of a decode step and of the prompts that it carries, at offload ratio `x`."""
        passes = (start + (end - start) * x for start, end in self.prompts)
        return self.decode_time(x) + max(passes, default=0.0)

    def decode_time(self, x: float) -> float:
        """Seconds of a decode step, T(x)."""
        if self.beyond is not None and x > self.b:
            return self.decode_time(self.b) + self.read * (x - self.b) / self.beyond
        x = self.reads(x)
        local_ratio = 1 + x if self.staged else 1 - x
        local, remote = local_ratio / self.local_rate, x / self.remote_rate
        return max(self.floor, self.read * local, self.read * remote)

    @functools.cached_property
    def lines(self) -> tuple[Line, ...]:
        """T(x) as the maximum of these, by the ratios of both tiers; without `classes`."""
        local = self.read / self.local_rate
        beyond = 0.0, {1: self.read / self.remote_rate}
        if self.beyond is not None:
            at_b, slope = self.decode_time(self.b), self.read / self.beyond
            beyond = at_b - slope * self.b, {1: slope}
        return (self.floor, {}), (0.0, {0: local} | ({1: 2 * local} if self.staged else {})), beyond

    @functools.cached_property
    def best(self) -> float:
        """Ratio up to which offloading makes a step and its prompts faster; a without prompts."""
        if not self.prompts:
            return self.a
        return sum(length for slope, length in self.segments if slope < 0)

    @functools.cached_property
    def segments(self) -> Segments:
        """Linear segments of the time.

        With `classes` T is above its first segment between 0 and a, where layers may differ.
        """
        return added(self._decode_segments(), envelope(self.prompts))

    def _decode_segments(self) -> Segments:
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

    def _segments_of_classes(self, down: float, up: float) -> Segments:
        mean = self.reads(self.a) / self.a if self.a else 1.0
        segments = [(down * mean, self.a), (0.0, self.b - self.a)]
        for number, share in enumerate(self.classes, 1):
            end = number / len(self.classes)
            length = min(1 / len(self.classes), end - self.b)
            if length > 0:
                segments.append((up * share * len(self.classes), length))
        return segments


def envelope(lines: Sequence[tuple[float, float]]) -> Segments:
    """Segments of the maximum of `lines`, which are given as seconds at x = 0 and at x = 1."""
    if not lines:
        return []
    segments: Segments = []
    x, (start, end) = 0.0, max(lines)
    while True:
        crossings = [  # with steeper lines
            ((start - other) / (rise - (end - start)), -rise, other)
            for other, rise in ((first, last - first) for first, last in lines)
            if rise > end - start
        ]
        crossing, rise, other = min(crossings, default=(1.0, 0.0, 0.0))
        if crossing >= 1:
            return [*segments, (end - start, 1 - x)]
        segments.append((end - start, crossing - x))
        x, start, end = crossing, other, other - rise


def added(first: Segments, second: Segments) -> Segments:
    """Segments of the sum of two times; an empty `second` is a time of 0."""
    if not second:
        return first
    segments: Segments = []
    left = [list(reversed(first)), list(reversed(second))]
    while all(left):
        (slope, length), (other, rest) = left[0].pop(), left[1].pop()
        segments.append((slope + other, min(length, rest)))
        if length > rest:
            left[0].append((slope, length - rest))
        elif rest > length:
            left[1].append((other, rest - length))
    return segments


def best_total(curves: Sequence[Curve]) -> float:
    """Remote resident bytes with the least total time: every op at its best ratio."""
    return sum(curve.best * curve.resident for curve in curves)


def best_uniform_total(curves: Sequence[Curve]) -> float:
    """Remote resident bytes with the least total time if all ops have one ratio.

    The sum of the convex T is convex, too, so its minimum is at the end of a segment.
    """
    ends = {0.0}
    for curve in curves:
        ends.update(itertools.accumulate(length for _, length in curve.segments))
    best = min(sorted(ends), key=lambda x: sum(curve.time(x) for curve in curves))
    return best * sum(curve.resident for curve in curves)


def greedy_ratios(curves: Sequence[Curve], remote_bytes: float) -> list[float]:
    """Offload ratio of each op that places `remote_bytes` remotely in the least total time.

    Segments of equal slope per byte are filled in proportion, so that like ops stay alike.
    """
    segments = [  # slope in seconds per resident byte, op, bytes
        (slope / curve.resident, i, length * curve.resident)
        for i, curve in enumerate(curves)
        for slope, length in curve.segments
        if length > 0  # rounding may leave some a little below
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
