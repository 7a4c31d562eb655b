"""The greedy choice of offload ratios (DESIGN.md, the planner; arXiv 2604.26074, section 4).

T(x) = max(floor, C (1 - x) / B_g, C x / B_h) falls up to a, is flat up to b, then rises. Filling
the cheapest stretches of all ops first is optimal because every T is convex. Knows no row blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Curve:
    """Time of one op (all its layers together) against the share x of it that is remote.

    `resident` bytes are placed, `read` bytes are read a step; rates are in bytes/s; `floor` is
    the time in seconds that no placement beats. Where `staged`, remote bytes are first copied
    into the local tier, whose traffic they add to: T(x) = max(floor, C (1 + x) / B_g, C x / B_h).
    Beyond b remote bytes may come at another rate, `beyond`: T(x) = T(b) + C (x - b) / beyond.
    """

    resident: float
    read: float
    floor: float
    local_rate: float
    remote_rate: float
    staged: bool = False
    beyond: float | None = None

    @property
    def a(self) -> float:
        """Share up to which moving bytes to the remote tier makes the op faster."""
        if self.staged:
            return 0.0
        return min(1.0, max(0.0, 1 - self.floor * self.local_rate / self.read))

    @property
    def b(self) -> float:
        """Share up to which moving bytes to the remote tier does not make the op slower."""
        flat = self.floor * self.remote_rate / self.read
        if self.staged:
            flat = min(flat, self.floor * self.local_rate / self.read - 1)
        return min(1.0, max(self.a, flat))

    def time(self, x: float) -> float:
        """Seconds at share `x`."""
        if self.beyond is not None and x > self.b:
            return self.time(self.b) + self.read * (x - self.b) / self.beyond
        local_share = 1 + x if self.staged else 1 - x
        local, remote = local_share / self.local_rate, x / self.remote_rate
        return max(self.floor, self.read * local, self.read * remote)

    def stretches(self) -> list[tuple[float, float]]:
        """(seconds per share, share) of the pieces of T, from x = 0 to 1; costs never fall."""
        down, up = -self.read / self.local_rate, self.read / (self.beyond or self.remote_rate)
        pieces = [(down, self.a), (0.0, self.b - self.a)]
        if self.staged and self.local_rate > self.remote_rate:
            turn = self.remote_rate / (self.local_rate - self.remote_rate)
            gentle = min(1.0, max(self.b, turn)) - self.b
            pieces.append((-down, gentle))
            return [*pieces, (up, 1 - self.b - gentle)]
        return [*pieces, (-down if self.staged else up, 1 - self.b)]


def best_total(curves: Sequence[Curve]) -> float:
    """Remote resident bytes that minimise the total time: every op at its threshold a."""
    return sum(curve.a * curve.resident for curve in curves)


def greedy_shares(curves: Sequence[Curve], remote_bytes: float) -> list[float]:
    """Share of each op to place remotely so that `remote_bytes` are, in the least total time.

    Stretches of equal cost per byte are filled in proportion, so that like ops stay alike.
    """
    stretches = [  # cost in seconds per resident byte, op, bytes
        (cost / curve.resident, i, share * curve.resident)
        for i, curve in enumerate(curves)
        for cost, share in curve.stretches()
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
