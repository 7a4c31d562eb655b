"""What a profile keeps of its sweeps: the congestion window, the costs of ops, compute rates.

Pure functions of measured points; the paper's congestion window is arXiv 2604.26074, section 5.
"""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dakrun.hardware.profile import OpCosts, Sweep

KEEPS = 0.99  # share of its own rate that a tier must keep while the other is read, too
GAINS = 1.005  # times a tier's rate: worth a wider window
# Bytes of a remote tier that an SM of a kernel can have in flight: a stage is the least, and the
# ring of a kernel that leaves half of an SM to the next one's holds no more.
PER_SM = (16 * 1024, 64 * 1024)
GROWS = 1.25  # times longer than the shortest: a matrix product that takes this is not all reading


@dataclass(frozen=True)
class Point:
    """A tier read by `sms` SMs with `in_flight` bytes in all, the rest of the SMs reading HBM.

    Rates are in bytes/s.
    """

    sms: int
    in_flight: int
    remote_rate: float
    hbm_rate: float

    @property
    def usable(self) -> bool:
        """Whether kernels can read like this: so many bytes in flight on each of so many SMs."""
        return PER_SM[0] <= self.in_flight / self.sms <= PER_SM[1]


def choose_window(points: Sequence[Point], link_rate: float, hbm_rate: float) -> Point:
    """The smallest window, then the fewest SMs, at which neither tier slows the other.

    Both must keep KEEPS of the rate that they have alone. Only usable points count, where there
    are any: crumbs on half of the SMs fill a link with the fewest bytes in flight (on an H200 64
    SMs x 2 KiB reach 99.0%, 16 x 8 KiB 95.5%), but a kernel moves whole stages, and needs those SMs
    to read HBM. Where no point keeps enough, the one whose worse tier keeps most is taken.
    """

    def kept(point: Point) -> float:
        return min(point.remote_rate / link_rate, point.hbm_rate / hbm_rate)

    usable = [point for point in points if point.usable] or points
    good = [point for point in usable if kept(point) >= KEEPS]
    if good:
        return min(good, key=lambda point: (point.in_flight, point.sms))
    return max(usable, key=kept)


def widened(points: Sequence[Point], chosen: Point) -> Point:
    """The next larger window on as many SMs, where it moves more of the tier and costs HBM nothing.

    So it is with a peer on NVLink, which has no congestion: its window is what kernels' rings hold,
    though they move whole stages and stay below it.
    """
    larger = [
        point
        for point in points
        if point.sms == chosen.sms
        and point.in_flight > chosen.in_flight
        and point.remote_rate >= GAINS * chosen.remote_rate
        and point.hbm_rate >= chosen.hbm_rate / GAINS
    ]
    return min(larger, key=lambda point: point.in_flight, default=chosen)


def op_costs(sweep: Sweep, rate: Callable[[int], float]) -> OpCosts:
    """What the ops of a sweep cost besides bytes at `rate` of their rows, by rows, in four digits.

    Its columns are "n", "op_bytes" and "op_s" among others, with two sizes or more of every n.
    """
    points = list(zip(*map(sweep.column, ("n", "op_bytes", "op_s")), strict=True))
    rows = sorted({int(n) for n, *_ in points})
    found = []
    for n in rows:
        _, sizes, times = zip(*(point for point in points if point[0] == n), strict=True)
        found.append([float(f"{value:.4g}") for value in fixed_cost(sizes, times, rate(n))])
    seconds, efficiency = zip(*found, strict=True)
    return OpCosts(rows=tuple(rows), seconds=seconds, efficiency=efficiency)


def fixed_cost(
    sizes: Sequence[float], seconds: Sequence[float], rate: float
) -> tuple[float, float]:
    """(seconds, efficiency) such that an op of `sizes` bytes takes size / (rate e) + fixed.

    Least squares of the relative error; the efficiency is at most 1, the fixed cost at least 0.
    ValueError where there are not two different sizes.
    """
    if len(set(sizes)) < 2:
        raise ValueError(f"expected two sizes or more, got {sizes}")
    # Minimise sum(((slope * s + fixed) / t - 1)^2) over slope and fixed.
    u = [s / t for s, t in zip(sizes, seconds, strict=True)]
    v = [1 / t for t in seconds]
    uu, vv, uv = (sum(map(operator.mul, a, b)) for a, b in ((u, u), (v, v), (u, v)))
    slope = (sum(u) * vv - sum(v) * uv) / (uu * vv - uv * uv)
    slope = max(slope, 1 / rate)
    fixed = max(0.0, (sum(v) - slope * uv) / vv)
    if fixed == 0:
        slope = max(sum(u) / uu, 1 / rate)
    return fixed, 1 / (slope * rate)


def arithmetic_rates(points: Sequence[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """Of (N, FLOP/s) of a weight times N rows, N ascending, those that arithmetic decides.

    The product of a small batch takes as long as its weight takes to be read, from L2 too, whatever
    N is; a plan counts bytes by themselves. Kept are those that take GROWS times the shortest or
    longer, the last one at least: smaller batches then count with the rate of the first kept.
    """
    shortest = min(n / rate for n, rate in points)
    kept = tuple((n, rate) for n, rate in points if n / rate >= GROWS * shortest)
    return kept or (points[-1],)
