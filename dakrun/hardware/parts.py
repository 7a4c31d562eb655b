"""The parts of a hardware profile: provenance, tiers, rates, costs, the kernel model, sweeps.

Each part checks its own values. profile.py joins them to a machine.
"""

import bisect
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from dakrun.errors import UsageError

LOCAL = "hbm"
# Limits of plausible values: beyond them predicted times could become zero or infinite.
MIN, MAX = 1.0, 1e24  # bytes, bytes/s and FLOP/s
MAX_WHOLE = 10**6  # SMs and rows
MAX_SECONDS = 3600.0  # maximum fixed cost of an op
MIN_SECONDS = 1e-9  # minimum latency of a link
MIN_EFFICIENCY = 1e-6


class OtherSchema(UsageError):
    """The error for a profile that was written by another version of dakrun."""


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """Origin of a profile's numbers: measured (when and how), a named spec sheet, or nominal."""

    kind: Literal["measured", "spec-sheet", "nominal"]
    date: str
    source: str

    def __post_init__(self) -> None:
        if self.kind not in ("measured", "spec-sheet", "nominal"):
            raise bad(f"provenance.kind is {self.kind!r}", "measured, spec-sheet or nominal")
        if not all(isinstance(text, str) and text for text in (self.source, self.date)):
            raise bad("provenance has no date or source", "when and how the numbers were found")

    @property
    def spread(self) -> str:
        """How many of the measured figures spread, and which most; empty if none does.

        These are the words with which dakrun profile ends `source` (see lab/samples.py).
        """
        found = re.search(r"[1-9]\d* of \d+ figures spread by more than .*", self.source)
        return found[0] if found and self.kind == "measured" else ""


@dataclass(frozen=True, kw_only=True)
class RemoteTier:
    """Memory behind a link. Bandwidths are in bytes/s, measured while HBM is read as well.

    `window_bytes` is what direct reads are to have in flight over all SMs, as near as whole stages
    come to it, and attention up to twice as much (kernels/attention/config.py); `sms` is the number
    of SMs that saturate the link with it. Tiers of the same `group` share its total rate, that of a
    link or of the memory behind it. A group may have one tier: host memory that is slower than the
    link, or of which other GPUs and the CPU take a share, limits its tier to the group's rate.
    """

    name: str
    capacity_bytes: int
    direct_bytes_per_s: float
    staged_bytes_per_s: float
    window_bytes: int
    sms: int
    group: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or self.name in (LOCAL, ""):
            raise bad(f"a remote tier is named {self.name!r}", "host, peer:1 and the like")
        if not isinstance(self.group, str):
            raise bad(f"remote tier {self.name}: group is {self.group!r}", "a name")
        owner = f"remote tier {self.name}"
        check_positive(self, owner, "capacity_bytes", "direct_bytes_per_s", "staged_bytes_per_s")
        check_positive(self, owner, "window_bytes")
        check_whole(self, owner, "sms")


@dataclass(frozen=True, kw_only=True)
class ComputeRate:
    """Dense matrix multiply rate of one dtype, in FLOP/s.

    `peak` is the rate of the arithmetic units; `measured` holds (N, FLOP/s) pairs, N ascending.
    """

    peak: float
    measured: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        ns = [n for n, _ in self.measured]
        rates = [self.peak, *(rate for _, rate in self.measured)]
        if not all(is_number(rate) for rate in rates):
            raise bad(f"compute rates are {rates}", "numbers of FLOP/s")
        if not all(MIN <= rate < math.inf for rate in rates) or not _ascending(ns):
            raise bad("compute rates are not positive with N ascending", "a list [[N, FLOP/s]]")

    def at(self, n: int) -> float:
        """FLOP/s at batch `n`, interpolated linearly in log N and log rate."""
        if not self.measured:
            return self.peak
        i, j = _around([m for m, _ in self.measured], n)
        (n0, r0), (n1, r1) = self.measured[i], self.measured[j]
        if i == j:
            return r0
        share = math.log(n / n0) / math.log(n1 / n0)
        return math.exp(math.log(r0) + share * math.log(r1 / r0))


@dataclass(frozen=True, kw_only=True)
class OpCosts:
    """Costs of one kind of op by rows of X (attention: new tokens), ascending.

    An op with a roofline bound of t seconds is predicted to take t / efficiency + seconds.
    """

    rows: tuple[int, ...]
    seconds: tuple[float, ...]
    efficiency: tuple[float, ...]

    def __post_init__(self) -> None:
        if not len(self.rows) == len(self.seconds) == len(self.efficiency) > 0:
            raise bad("costs are not of one length", "as many rows as seconds and efficiencies")
        if not _ascending(self.rows):
            raise bad(f"costs are of {list(self.rows)} rows", "positive integers, ascending")
        for name in ("seconds", "efficiency"):
            if not all(map(is_number, getattr(self, name))):
                raise bad(f"{name} are {list(getattr(self, name))}", "numbers")
        if not all(0 <= seconds <= MAX_SECONDS for seconds in self.seconds):
            raise bad("a fixed cost is negative, above an hour or not finite", "seconds")
        if not all(MIN_EFFICIENCY <= value <= 1 for value in self.efficiency):
            expected = f"at least {MIN_EFFICIENCY:g} and at most 1"
            raise bad(f"efficiencies are {list(self.efficiency)}", expected)

    def at(self, n: float) -> tuple[float, float]:
        """(seconds, efficiency) at `n` rows, interpolated linearly between those listed."""
        i, j = _around(self.rows, n)
        share = (n - self.rows[i]) / (self.rows[j] - self.rows[i]) if i < j else 0.0

        def between(values: Sequence[float]) -> float:
            return values[i] + share * (values[j] - values[i])

        return between(self.seconds), between(self.efficiency)


@dataclass(frozen=True, kw_only=True)
class KernelModel:
    """Constants of the CTA model (dakrun/plan/cta_model.py): how kernels share bandwidths.

    The defaults were fitted on H200s, with host memory over PCIe 5 and a peer over NVLink 4, to
    times of chains of dakrun's kernels in CUDA graphs.

    - busiest_cta_weight: weight of the busiest CTA's excess over the mean in the time that
      products take to read HBM; 0 counts bytes alone. 0.5 to 0.7 fits products with 0 to 7% on a
      peer, read by 8 to 16 of 132 SMs.
    - busy_sms: fraction of SMs that were busy in the chains with which op costs were measured.
    - remote_attention_cost: relative slowdown of attention's reads of HBM, extrapolated to all
      SMs reading remote slots.
    - saturating_sms: fraction of SMs that saturate HBM in attention.
    - attention_ring_factor: ring bytes that attention needs for a link's full rate, per byte in
      flight, as rings hold blocks until they are attended to. Fitted to 4 of 64 slots of 8,192
      positions on a peer, read by 16, 11 and 10 SMs: 489, 475 and 475 us.
    - mixed_link_efficiency: fraction of a link's rate that local CTAs reach when they read remote
      units among their own. Fitted to products with 8% on a peer, and to 5 of 64 slots there.
    - few_sms_link_loss: relative loss of a link's rate with half of the SMs that fill its window
      (PCIe 5).
    - launch_gap_seconds: time from a launch's last read to the first read that depends on it.
    - link_latency_seconds: latency of a link without a window: the bytes in flight that it needs,
      divided by its rate.
    - late_start_seconds: extra time of a product that starts when the launch ahead of it has ended
      (no PDL), as quantized ones do behind norms: chains of reads of 4 and 8 MiB with and without.
    - pass_launch_seconds: time in which the CPU launches a step with prompts that is no graph, for
      32 layers without experts: 22 to 27 ms beside an H200; for 48 with experts 69 to 122.
    - mixed_step_seconds: time of the GPU between the launches of a step with prompts.
    """

    busiest_cta_weight: float = 0.5
    busy_sms: float = 0.97
    remote_attention_cost: float = 0.48
    saturating_sms: float = 0.5
    attention_ring_factor: float = 1.3
    mixed_link_efficiency: float = 0.965
    few_sms_link_loss: float = 0.05
    launch_gap_seconds: float = 4.8e-6
    link_latency_seconds: float = 2.3e-6
    late_start_seconds: float = 1.7e-6
    pass_launch_seconds: float = 0.025
    mixed_step_seconds: float = 0.002

    def __post_init__(self) -> None:
        ranges: dict[str, tuple[float, float]] = {
            "busiest_cta_weight": (0, 1),
            "busy_sms": (MIN_EFFICIENCY, 1),
            "remote_attention_cost": (0, 100),
            "saturating_sms": (MIN_EFFICIENCY, 1),
            "attention_ring_factor": (MIN_EFFICIENCY, 100),
            "mixed_link_efficiency": (MIN_EFFICIENCY, 1),
            "few_sms_link_loss": (0, 1),
            "launch_gap_seconds": (0, MAX_SECONDS),
            "link_latency_seconds": (MIN_SECONDS, MAX_SECONDS),
            "late_start_seconds": (0, MAX_SECONDS),
            "pass_launch_seconds": (0, MAX_SECONDS),
            "mixed_step_seconds": (0, MAX_SECONDS),
        }
        for name, (low, high) in ranges.items():
            value = getattr(self, name)
            if not (is_number(value) and low <= value <= high):
                raise bad(f"kernel_model.{name} is {value!r}", f"a number from {low:g} to {high:g}")


@dataclass(frozen=True, kw_only=True)
class Published:
    """A published measurement on such a machine: decode steps of a model known by name.

    `offload_ratio` is the ratio of bytes outside HBM, `eb_bytes_per_s` the model's weight bytes
    over a step's time.
    """

    model: str
    batch_size: int
    offload_ratio: float
    eb_bytes_per_s: float
    source: str

    def __post_init__(self) -> None:
        if not all(isinstance(text, str) and text for text in (self.model, self.source)):
            raise bad("a published figure has no model or source", "both, as text")
        check_whole(self, f"published {self.model}", "batch_size")
        check_positive(self, f"published {self.model}", "eb_bytes_per_s")
        if not (is_number(self.offload_ratio) and 0 <= self.offload_ratio <= 1):
            raise bad(f"published offload_ratio is {self.offload_ratio}", "from 0 to 1")


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Measurements over a grid: one row of numbers per point, under named columns.

    Column names end in their units, as in "hbm_bytes_per_s".
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        if not all(isinstance(name, str) for name in self.columns):
            raise bad(f"a sweep has columns {self.columns}", "names")
        if any(len(row) != len(self.columns) for row in self.rows):
            raise bad(f"a sweep's rows differ from its columns {self.columns}", "a number for each")
        if not all(math.isfinite(value) for row in self.rows for value in row):
            raise bad("a sweep holds a value that is not finite", "numbers")

    def column(self, name: str) -> tuple[float, ...]:
        """The values under `name`, row after row; KeyError where there is no such column."""
        if name not in self.columns:
            raise KeyError(name)
        at = self.columns.index(name)
        return tuple(row[at] for row in self.rows)

    def points(self, *names: str) -> list[tuple[float, ...]]:
        """The values under `names`, row after row; KeyError where there is no such column."""
        return list(zip(*map(self.column, names), strict=True))


def _around(ns: Sequence[int], n: float) -> tuple[int, int]:
    """Indices of the two neighbours of `n` in ascending `ns`; both the same outside its range."""
    above = bisect.bisect(ns, n)
    return max(0, above - 1), min(above, len(ns) - 1)


def _ascending(ns: Sequence[int]) -> bool:
    """Whether `ns` are positive integers in strictly ascending order."""
    return list(ns) == sorted({n for n in ns if type(n) is int and n > 0})


def check_keys(table: Mapping[str, object], name: str, known: Iterable[str]) -> None:
    """Raise UsageError unless the keys of the table `name` ("" for the top level) are `known`."""
    if not isinstance(table, Mapping):
        raise TypeError(f"{name} is not one table")
    known = sorted(known)
    for key in table:
        if key not in known:
            raise bad(f"{name and f'{name}.'}{key} is unknown", f"one of {', '.join(known)}")


def is_number(value: object) -> bool:
    """Whether `value` is an int or a float, and no bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_positive(owner: object, name: str, *fields: str) -> None:
    """Raise UsageError unless the `fields` of `owner` (sizes, rates) lie between MIN and MAX."""
    for attribute in fields:
        value = getattr(owner, attribute)
        if not (is_number(value) and MIN <= value <= MAX):
            raise bad(f"{name}: {attribute} is {value!r}", f"a number from {MIN:g} to {MAX:g}")


def check_whole(owner: object, name: str, *fields: str) -> None:
    """Raise UsageError unless the `fields` of `owner` are positive integers up to MAX_WHOLE."""
    for attribute in fields:
        value = getattr(owner, attribute)
        if type(value) is not int or not 1 <= value <= MAX_WHOLE:
            raise bad(f"{name}: {attribute} is {value!r}", f"an integer from 1 to {MAX_WHOLE:,}")


def bad(problem: str, expected: str) -> UsageError:
    """The error for a profile that does not follow the schema."""
    return UsageError(problem, hint=f"expected: {expected}; see profiles/ for examples")
