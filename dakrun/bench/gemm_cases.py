"""The cases of a GEMM sweep: octets and bytes per tier, and the time that a profile predicts.

Pure arithmetic on sizes that the caller gives; needs no GPU and no torch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dakrun.bench.gemm_sweep import TURNING_POINT, GemmDtype, Ratio, Shape
from dakrun.config import DTYPE_BYTES
from dakrun.hardware import HardwareProfile
from dakrun.plan.ops import linear_op
from dakrun.plan.roofline import Links, compute_time, predicted_time, sms_by_tier, time_of


@dataclass(frozen=True, kw_only=True)
class GemmCase:
    """X [n, K] times a weight of `shape` whose `octets` lie in each tier, the local one first.

    `asked` is the remote share that the octets come from; an octet has `octet_bytes`. `launches` is
    how many such products, each with a weight of its own, are measured in a row.
    """

    shape: Shape
    n: int
    asked: Ratio
    octets: tuple[int, ...]
    octet_bytes: int
    launches: int

    @property
    def ratio(self) -> float:
        """The remote share of the octets."""
        return sum(self.octets[1:]) / sum(self.octets)

    @property
    def tier_bytes(self) -> tuple[int, ...]:
        """Bytes that a launch reads of each tier: as they are stored, padding included."""
        return tuple(count * self.octet_bytes for count in self.octets)

    @property
    def weight_bytes(self) -> int:
        """Bytes of W that a launch reads."""
        return sum(self.tier_bytes)


@dataclass(frozen=True)
class Forecast:
    """The predicted seconds of a case, and the SMs that the plan would give to each tier."""

    seconds: float
    sms: tuple[int, ...]


def remote_octets(octets: int, asked: Ratio, turning_point: float) -> int:
    """How many of a weight's `octets` a remote share comes to.

    The nearest number; at the turning point no more than that, as one more would be waited for.
    """
    if asked == TURNING_POINT:
        return math.floor(octets * turning_point)
    return math.floor(octets * asked + 0.5)


def buffer_bytes(cases: Sequence[GemmCase], alignment: int) -> list[int]:
    """Bytes of each tier that hold the weights of any of the `cases`.

    The local tier also holds them whole, for cuBLAS, each weight `alignment` bytes aligned.
    """
    whole = max(case.launches * (case.weight_bytes + alignment) for case in cases)
    sizes = [max(held) for held in zip(*(_held(case) for case in cases), strict=True)]
    return [-(-size // alignment) * alignment for size in (max(whole, sizes[0]), *sizes[1:])]


def _held(case: GemmCase) -> list[int]:
    return [case.launches * nbytes for nbytes in case.tier_bytes]


def forecast(
    case: GemmCase, dtype: GemmDtype, profile: HardwareProfile, remote: Sequence[str]
) -> Forecast:
    """What `profile` predicts for a case with its remote octets in the tiers `remote`."""
    shape = (case.shape.rows, case.shape.cols)
    op = linear_op(str(case.shape), shape, n=case.n, element_bytes=DTYPE_BYTES[dtype])
    compute = compute_time(op, profile, dtype)
    shares = [count / sum(case.octets) for count in case.octets]
    bound = time_of(Links.of(profile, remote).lines(op.read_bytes, compute), shares)
    sms = sms_by_tier(op, [case.octets], compute, bound, profile, remote)
    return Forecast(predicted_time(op, bound, profile), sms)
