"""The greedy choice of offload ratios (DESIGN.md, the planner; arXiv 2604.26074, section 4).

T(x) = max(floor, C (1 - x) / B_g, C x / B_h) falls up to a, is flat up to b, then rises. Filling
the cheapest stretches of all ops first is optimal because every T is convex. Knows no items.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Curve:
    """Time of one op (all its layers together) against the share x of it that is remote.

    `resident` bytes are placed, `read` bytes are read a step; rates are in bytes/s; `floor` is
    the time in seconds that no placement beats.
    """

    resident: float
    read: float
    floor: float
    local_rate: float
    remote_rate: float

    @property
    def a(self) -> float:
        """Share up to which moving bytes to the remote tier makes the op faster."""
        return min(1.0, max(0.0, 1 - self.floor * self.local_rate / self.read))

    @property
    def b(self) -> float:
        """Share up to which moving bytes to the remote tier does not make the op slower."""
        return min(1.0, max(self.a, self.floor * self.remote_rate / self.read))

    def time(self, x: float) -> float:
        """Seconds at share `x`."""
        local, remote = self.read * (1 - x) / self.local_rate, self.read * x / self.remote_rate
        return max(self.floor, local, remote)


def best_total(curves: Sequence[Curve]) -> float:
    """Remote resident bytes that minimise the total time: every op at its threshold a."""
    return sum(curve.a * curve.resident for curve in curves)


def greedy_shares(curves: Sequence[Curve], remote_bytes: float) -> list[float]:
    """Share of each op to place remotely so that `remote_bytes` are, in the least total time.

    Stretches of equal cost per byte are filled in proportion, so that like ops stay alike.
    """
    stretches: list[tuple[float, int, float]] = []  # cost in s per resident byte, op, bytes
    for i, curve in enumerate(curves):
        per_byte = curve.read / curve.resident
        stretches += [
            (-per_byte / curve.local_rate, i, curve.a * curve.resident),
            (0.0, i, (curve.b - curve.a) * curve.resident),
            (per_byte / curve.remote_rate, i, (1 - curve.b) * curve.resident),
        ]
    placed = [0.0] * len(curves)
    left = remote_bytes
    stretches.sort(key=lambda stretch: stretch[0])
    while stretches and left > 0:
        cost = stretches[0][0]
        alike = [s for s in stretches if s[0] <= cost + 1e-9 * abs(cost)]
        stretches = stretches[len(alike) :]
        room = sum(size for _, _, size in alike)
        for _, i, size in alike:
            placed[i] += size * min(1.0, left / room) if room else 0.0
        left -= room
    return [min(1.0, p / curve.resident) for p, curve in zip(placed, curves, strict=True)]


def uniform_shares(curves: Sequence[Curve], remote_bytes: float) -> list[float]:
    """The same share of every op, `remote_bytes` in all: the strategy to compare with."""
    share = remote_bytes / sum(curve.resident for curve in curves) if curves else 0.0
    return [min(1.0, share)] * len(curves)
