"""Shared by all kernel benchmarks: offload ratios, cases, and the times that a profile predicts.

Pure arithmetic; needs no GPU and no torch. The kernels' own sweeps and cases are in gemm_sweep.py
and attention_sweep.py.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from dakrun.errors import UsageError
from dakrun.hardware import HardwareProfile, RemoteTier
from dakrun.lab.bench.ceilings import Effort
from dakrun.plan import (
    Links,
    Op,
    Policy,
    bound_times,
    compute_time,
    launch_times,
    predicted_time,
    sms_by_tier,
)
from dakrun.units import ceil_div

TURNING_POINT: Literal["turning-point"] = "turning-point"

Ratio = float | Literal["turning-point"]
BenchDtype = Literal["float16", "bfloat16"]


@dataclass(frozen=True, kw_only=True)
class Case(ABC):
    """A launch that reads one operand, whose `units` are counted by tier, the local tier first.

    A unit (a row block, or a slot) has `unit_bytes`. `requested` is the offload ratio that the
    units were computed from. A chain has `launches` launches, each with its own operand.
    """

    requested: Ratio
    units: tuple[int, ...]
    unit_bytes: int
    launches: int

    @property
    @abstractmethod
    def label(self) -> str:
        """The case without its ratio; cases of one label share the baseline's measurement."""

    @abstractmethod
    def op(self, dtype: BenchDtype) -> Op:
        """The planner's description of the launch."""

    @property
    def ratio(self) -> float:
        """Remote units over all units."""
        return sum(self.units[1:]) / sum(self.units)

    @property
    def held_bytes(self) -> tuple[int, ...]:
        """Bytes of the operand in each tier, padding included."""
        return tuple(count * self.unit_bytes for count in self.units)

    @property
    def tier_bytes(self) -> tuple[int, ...]:
        """Bytes that a launch reads from each tier."""
        return self.held_bytes

    @property
    def read_bytes(self) -> int:
        """Bytes of the operand that a launch reads from all tiers."""
        return sum(self.tier_bytes)


@dataclass(frozen=True, kw_only=True)
class Sweep(ABC):
    """All cases of a kernel, each with every offload ratio of `ratios`.

    `remote` is the remote tier by its name in the profile.
    """

    kernel: ClassVar[str]
    operand: ClassVar[str]  # in progress messages
    ratios: tuple[Ratio, ...]
    remote: str
    dtype: BenchDtype

    @abstractmethod
    def cases(self, turning_point: float, effort: Effort, *, tiers: int) -> Iterator[Case]:
        """The cases in order, with units in one or two `tiers`."""

    def remote_tiers(self, profile: HardwareProfile) -> list[RemoteTier]:
        """The remote tier in `profile`; an empty list if every ratio is 0.

        Raises UsageError if the profile has no such tier or describes a CPU.
        """
        if profile.device != "cuda":
            raise UsageError(
                f"profile {profile.name} describes a CPU", hint="name a GPU's, or --profile auto"
            )
        if not any(self.ratios):
            return []
        return [profile.tier(name) for name in Policy(remote=(self.remote,)).remote_tiers(profile)]


@dataclass(frozen=True)
class Forecast:
    """The predicted seconds of a case, and the SMs that a plan would assign to each tier."""

    seconds: float
    sms: tuple[int, ...]


def forecast(
    case: Case, dtype: BenchDtype, profile: HardwareProfile, remote: Sequence[str]
) -> Forecast:
    """The planner's prediction for a case whose remote units lie in the tiers `remote`."""
    op = case.op(dtype)
    compute = compute_time(op, profile, dtype)
    ratios = [count / sum(case.units) for count in case.units]
    lines = Links.of(profile, remote).lines(op.read_bytes, compute)
    kernel, link = bound_times(lines, ratios)
    sms = sms_by_tier(op, [case.units], compute, max(kernel, link), profile, remote)
    launched = launch_times(op, case.units, sms, compute, profile, remote)
    kernel, link = max(kernel, launched[0]), max(link, launched[1])
    return Forecast(predicted_time(op, kernel, profile, link=link), sms)


def units_by_tier(
    units: int, requested: Ratio, turning_point: float, *, tiers: int
) -> tuple[int, ...]:
    """An operand's `units` split over one or two `tiers`, the local tier first."""
    remote = remote_units(units, requested, turning_point)
    return (units - remote, remote)[:tiers]


def remote_units(units: int, requested: Ratio, turning_point: float) -> int:
    """The remote units, rounded to the nearest number.

    At the turning point they are rounded down: with one more unit the remote tier would finish
    after the local tier.
    """
    if requested == TURNING_POINT:
        return math.floor(units * turning_point)
    return math.floor(units * requested + 0.5)


def buffer_bytes(cases: Sequence[Case], alignment: int) -> list[int]:
    """Bytes of a buffer in each tier that fits the operands of any of the `cases`.

    The local buffer also fits all operands whole, each aligned to `alignment` bytes: the baseline
    reads them there.
    """
    whole = max(case.launches * (sum(case.held_bytes) + alignment) for case in cases)
    held = ([case.launches * nbytes for nbytes in case.held_bytes] for case in cases)
    local, *remote = (max(sizes) for sizes in zip(*held, strict=True))
    return [ceil_div(size, alignment) * alignment for size in (max(whole, local), *remote)]


def parse_ratios(texts: Iterable[str]) -> tuple[Ratio, ...]:
    """Offload ratios without repetitions; UsageError if one is malformed."""
    return tuple(dict.fromkeys(map(parse_ratio, texts)))


def parse_ratio(text: str) -> Ratio:
    """The offload ratio "0.1", or "turning-point"; UsageError for anything else."""
    return TURNING_POINT if text == TURNING_POINT else parse_number(text, TURNING_POINT)


def parse_number(text: str, keyword: str) -> float:
    """A number from 0 to 1; else a UsageError that also offers `keyword`."""
    try:
        ratio = float(text)
    except ValueError:
        ratio = -1.0
    if not 0 <= ratio <= 1:
        raise UsageError(
            f"{text!r} is not an offload ratio",
            hint=f"write a number from 0 to 1, or {keyword}, as in --ratio 0.1",
        )
    return ratio
