"""A profile's figures from its sweeps: congestion window, links, costs of ops, FLOP/s.

Pure functions of measured points. The congestion window is that of arXiv 2604.26074, section 5.
"""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from dakrun.hardware import OpCosts, RemoteTier, Sweep

MIN_KEPT = 0.99  # fraction of a tier's own rate that it must keep while the other tier is read
MIN_GAIN = 1.005  # factor on a tier's rate that justifies a wider window
# Bytes of a remote tier in flight on one SM of a kernel: at least one stage, at most the ring of a
# kernel that leaves half of the shared memory to the next kernel.
PER_SM = (16 * 1024, 64 * 1024)
GROUP_RATIO = 0.97  # rate together over the sum of rates alone, below which peers share a link
COMPUTE_BOUND = 1.25  # times the shortest product's time; longer products are compute-bound


@dataclass(frozen=True)
class TierReading:
    """A remote tier read by `sms` SMs with `in_flight` bytes in total; the other SMs read HBM.

    Rates are in bytes/s.
    """

    sms: int
    in_flight: int
    remote_rate: float
    hbm_rate: float

    @property
    def usable(self) -> bool:
        """Whether a kernel can have that many bytes in flight on each SM."""
        return PER_SM[0] <= self.in_flight / self.sms <= PER_SM[1]


def choose_window(points: Sequence[TierReading], link_rate: float, hbm_rate: float) -> TierReading:
    """The smallest window, then the fewest SMs, at which neither tier slows the other.

    Both tiers must keep MIN_KEPT of their rate alone; if no point does, take the one whose slower
    tier keeps most. Unusable points count only if there are no others: many SMs with few bytes
    each fill a link with the smallest window (on an H200, 64 SMs x 2 KiB reach 99.0%, 16 x 8 KiB
    95.5%), but a kernel moves whole stages, and needs those SMs to read HBM.
    """

    def kept(point: TierReading) -> float:
        return min(point.remote_rate / link_rate, point.hbm_rate / hbm_rate)

    usable = [point for point in points if point.usable] or points
    good = [point for point in usable if kept(point) >= MIN_KEPT]
    if good:
        return min(good, key=lambda point: (point.in_flight, point.sms))
    return max(usable, key=kept)


def widened(points: Sequence[TierReading], chosen: TierReading) -> TierReading:
    """The next larger window on as many SMs, if it speeds up the tier and does not slow HBM.

    This holds for peers on NVLink, which do not congest: their window is the size of the kernels'
    rings.
    """
    larger = [
        point
        for point in points
        if point.sms == chosen.sms
        and point.in_flight > chosen.in_flight
        and point.remote_rate >= MIN_GAIN * chosen.remote_rate
        and point.hbm_rate >= chosen.hbm_rate / MIN_GAIN
    ]
    return min(larger, key=lambda point: point.in_flight, default=chosen)


def op_costs(sweep: Sweep, rate: Callable[[int], float]) -> OpCosts:
    """Fixed cost and efficiency of a sweep's ops, by rows, rounded to four digits.

    `rate` gives bytes/s by rows. The sweep needs the columns "n", "op_bytes" and "op_s", and at
    least two sizes for every n.
    """
    points = sweep.points("n", "op_bytes", "op_s")
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
    """(fixed seconds, efficiency) of the model: seconds = size / (rate * efficiency) + fixed.

    `sizes` are in bytes, `rate` in bytes/s. Least squares of the relative error, with efficiency
    <= 1 and fixed >= 0. Raises ValueError for fewer than two different sizes.
    """
    if len(set(sizes)) < 2:
        raise ValueError(f"expected at least two sizes, got {sizes}")
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
    """The compute-bound points of (N, FLOP/s), products of a weight with N rows, N ascending.

    A small batch takes as long as reading the weight, even from L2, whatever N is; plans count
    bytes separately. Points are kept if they take COMPUTE_BOUND times the shortest or longer, and
    the last one always. Smaller batches use the rate of the first point kept.
    """
    shortest = min(n / rate for n, rate in points)
    kept = tuple((n, rate) for n, rate in points if n / rate >= COMPUTE_BOUND * shortest)
    return kept or (points[-1],)


def grouped(
    remote: Sequence[RemoteTier], together: float | None
) -> tuple[list[RemoteTier], dict[str, float]]:
    """The tiers and link groups: peers form a group if they do not reach the sum of their rates.

    `together` is their rate in bytes/s when all are read at once.
    """
    rates = [tier.direct_bytes_per_s for tier in remote if tier.name.startswith("peer")]
    if together is None or together >= GROUP_RATIO * sum(rates):
        return list(remote), {}
    grouped = [
        replace(tier, group="peers") if tier.name.startswith("peer") else tier for tier in remote
    ]
    return grouped, {"peers": together}
