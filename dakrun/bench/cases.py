"""What the cases of all sweeps share: units and bytes per tier, and the time a profile predicts.

Pure arithmetic on sizes that the caller gives; needs no GPU and no torch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dakrun.bench.sweep import TURNING_POINT, BenchDtype, Ratio
from dakrun.hardware.profile import HardwareProfile
from dakrun.plan.ops import Op
from dakrun.plan.roofline import Links, compute_time, predicted_time, times_of
from dakrun.plan.waves import launch_times, sms_by_tier
from dakrun.units import ceil_div


@dataclass(frozen=True, kw_only=True)
class Case:
    """A launch that reads an operand, of whose `units` each tier holds some, the local one first.

    `asked` is the remote share that the units come from; a unit has `unit_bytes`. `launches` is how
    many of them, each with an operand of its own, are measured in a row.
    """

    asked: Ratio
    units: tuple[int, ...]
    unit_bytes: int
    launches: int

    @property
    def ratio(self) -> float:
        """The remote share of the units."""
        return sum(self.units[1:]) / sum(self.units)

    @property
    def held_bytes(self) -> tuple[int, ...]:
        """Bytes of the operand in each tier: as they are stored, padding included."""
        return tuple(count * self.unit_bytes for count in self.units)

    @property
    def tier_bytes(self) -> tuple[int, ...]:
        """Bytes that a launch reads of each tier: all that is there."""
        return self.held_bytes

    @property
    def read_bytes(self) -> int:
        """Bytes of the operand that a launch reads."""
        return sum(self.tier_bytes)


@dataclass(frozen=True)
class Forecast:
    """The predicted seconds of a case, and the SMs that the plan would give to each tier."""

    seconds: float
    sms: tuple[int, ...]


def units_by_tier(units: int, asked: Ratio, turning_point: float, *, tiers: int) -> tuple[int, ...]:
    """An operand's `units` in each of one or two `tiers`, the local one first."""
    far = remote_units(units, asked, turning_point)
    return (units - far, far)[:tiers]


def remote_units(units: int, asked: Ratio, turning_point: float) -> int:
    """How many of an operand's `units` a remote share comes to.

    The nearest number; at the turning point no more than that, as one more would be waited for.
    """
    if asked == TURNING_POINT:
        return math.floor(units * turning_point)
    return math.floor(units * asked + 0.5)


def buffer_bytes(cases: Sequence[Case], alignment: int) -> list[int]:
    """Bytes of each tier that hold the operands of any of the `cases`.

    The local tier also holds them whole, for torch, each operand `alignment` bytes aligned.
    """
    whole = max(case.launches * (sum(case.held_bytes) + alignment) for case in cases)
    held = ([case.launches * nbytes for nbytes in case.held_bytes] for case in cases)
    local, *remote = (max(sizes) for sizes in zip(*held, strict=True))
    return [ceil_div(size, alignment) * alignment for size in (max(whole, local), *remote)]


def forecast(
    case: Case, op: Op, dtype: BenchDtype, profile: HardwareProfile, remote: Sequence[str]
) -> Forecast:
    """What `profile` predicts for a case of `op` with its remote units in the tiers `remote`."""
    compute = compute_time(op, profile, dtype)
    shares = [count / sum(case.units) for count in case.units]
    lines = Links.of(profile, remote).named_lines(op.read_bytes, compute)
    kernel, link = times_of(lines, shares)
    sms = sms_by_tier(op, [case.units], compute, max(kernel, link), profile, remote)
    launched = launch_times(op, case.units, sms, compute, profile, remote)
    kernel, link = max(kernel, launched[0]), max(link, launched[1])
    return Forecast(predicted_time(op, kernel, profile, link=link), sms)
