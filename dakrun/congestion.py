"""What a profile keeps of its sweeps: the congestion window, and an op's fixed cost.

Pure functions of measured points; the paper's congestion window is arXiv 2604.26074, section 5.
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass

KEEPS = 0.99  # share of its own rate that a tier must keep while the other is read, too


@dataclass(frozen=True)
class Point:
    """A tier read by `sms` SMs with `in_flight` bytes in all, the rest of the SMs reading HBM.

    Rates are in bytes/s.
    """

    sms: int
    in_flight: int
    remote_rate: float
    hbm_rate: float


def choose_window(points: Sequence[Point], link_rate: float, hbm_rate: float) -> Point:
    """The smallest window, then the fewest SMs, at which neither tier slows the other.

    Both must keep KEEPS of the rate that they have alone. Where no point does, the one whose worse
    tier keeps most.
    """

    def kept(point: Point) -> float:
        return min(point.remote_rate / link_rate, point.hbm_rate / hbm_rate)

    good = [point for point in points if kept(point) >= KEEPS]
    if good:
        return min(good, key=lambda point: (point.in_flight, point.sms))
    return max(points, key=kept)


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
