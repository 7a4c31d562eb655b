"""Time that chance adds to experts: tiers are read unevenly from step to step.

README.md in this folder derives the formulas. Knows no placement's layers and no machine.
"""

import math
from collections.abc import Sequence
from statistics import NormalDist

from dakrun.plan.ops import Op

_NORMAL = NormalDist()


def mean_longer(first: float, second: float, deviation: float) -> float:
    """Mean of the longer of two times whose difference is normal, with such means and deviation.

    See Clark, The Greatest of a Finite Set of Random Variables, Operations Research 9, 1961.
    """
    if not deviation:
        return max(first, second)
    distance = (first - second) / deviation
    longer = first * _NORMAL.cdf(distance) + second * _NORMAL.cdf(-distance)
    return longer + deviation * _NORMAL.pdf(distance)


def deviation_s(
    op: Op, counts: Sequence[int], tier: int, local_rate: float, remote_rate: float
) -> float:
    """Standard deviation of the seconds by which reading HBM takes longer than reading `tier`.

    It is that of one layer of experts with `counts` units per tier, HBM's first; the rates of both
    tiers are in bytes/s.
    """
    count, rows = len(op.chances), op.batch_size
    shares = op.shares(counts)
    first = sum(shares[:tier]) * count  # experts, with their parts
    ends = (0.0, shares[0] * count), (first, first + shares[tier] * count)
    expert = op.resident_bytes / count
    seconds = expert / local_rate, -expert / remote_rate
    variance = drawn = weighted = 0.0
    for index, chance in enumerate(op.chances):
        here = [max(0.0, min(index + 1, end) - max(index, start)) for start, end in ends]
        weight = sum(part * size for part, size in zip(here, seconds, strict=True))
        left_out = max(0.0, 1 - chance)
        chosen = 1 - left_out ** (1 / rows)  # by one token
        variance += weight**2 * chance * left_out
        weighted += weight * left_out * chosen
        drawn += chosen * (1 - chosen)
    if drawn:
        variance -= rows * weighted**2 / drawn
    return math.sqrt(max(0.0, variance))
