"""The parts of a hardware profile: where its numbers come from, tiers, rates, costs, sweeps.

Each checks its own values; how they form a machine, and TOML, are in hardware.py.
"""

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from dakrun.errors import UsageError

LOCAL = "hbm"
# Beyond these no number is meant, and a predicted time may be infinite.
MIN, MAX = 1.0, 1e24  # bytes, or bytes or FLOP per second
MAX_WHOLE = 10**6  # SMs, rows
MAX_SECONDS = 3600.0  # fixed cost of an op
MIN_EFFICIENCY = 1e-6


class OtherSchema(UsageError):
    """A profile that another version of dakrun wrote."""


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """Where a profile's numbers come from: measured (when, how) or a spec sheet (which)."""

    kind: Literal["measured", "spec-sheet", "nominal"]
    date: str
    source: str

    def __post_init__(self) -> None:
        if self.kind not in ("measured", "spec-sheet", "nominal"):
            raise bad(f"provenance.kind is {self.kind!r}", "measured, spec-sheet or nominal")
        if not all(isinstance(text, str) and text for text in (self.source, self.date)):
            raise bad("provenance lacks its date or source", "say when and how it was found")


@dataclass(frozen=True, kw_only=True)
class RemoteTier:
    """Memory behind a link. Bandwidths are in bytes/s, of runs that read HBM, too.

    `window_bytes` caps the bytes in flight of direct reads over all SMs; `sms` is how many SMs
    saturate the link with it. Tiers that name the same `group` share that link's total rate.
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

    `peak` is what the unit can do; `measured` holds (N, FLOP/s) pairs with N ascending.
    """

    peak: float
    measured: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        ns = [n for n, _ in self.measured]
        rates = [self.peak, *(rate for _, rate in self.measured)]
        if not all(MIN <= rate < math.inf for rate in rates) or not _ascending(ns):
            raise bad("compute rates are not positive with N ascending", "a list [[N, FLOP/s]]")

    def at(self, n: int) -> float:
        """FLOP/s at batch `n`: between measured points linear in log N and log rate."""
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
    """What ops of one kind cost, by rows of X (attention: new tokens), which are ascending.

    An op that the roofline bounds by t seconds is predicted to take t / efficiency + seconds.
    """

    rows: tuple[int, ...]
    seconds: tuple[float, ...]
    efficiency: tuple[float, ...]

    def __post_init__(self) -> None:
        if not len(self.rows) == len(self.seconds) == len(self.efficiency) > 0:
            raise bad("costs are not of one length", "as many rows as seconds and efficiencies")
        if not _ascending(self.rows):
            raise bad(f"costs are of {list(self.rows)} rows", "positive integers, ascending")
        if not all(0 <= seconds <= MAX_SECONDS for seconds in self.seconds):
            raise bad("a fixed cost is negative, above an hour or not finite", "seconds")
        if not all(MIN_EFFICIENCY <= value <= 1 for value in self.efficiency):
            expected = f"at least {MIN_EFFICIENCY:g} and at most 1"
            raise bad(f"efficiencies are {list(self.efficiency)}", expected)

    def at(self, n: int) -> tuple[float, float]:
        """(seconds, efficiency) at `n` rows: between those listed linear in n."""
        i, j = _around(self.rows, n)
        share = (n - self.rows[i]) / (self.rows[j] - self.rows[i]) if i < j else 0.0

        def between(values: Sequence[float]) -> float:
            return values[i] + share * (values[j] - values[i])

        return between(self.seconds), between(self.efficiency)


@dataclass(frozen=True, kw_only=True)
class Published:
    """What others measured on such a machine: decode steps of a model that dakrun knows by name.

    `offload_ratio` is the share outside HBM, `eb_bytes_per_s` the model's weight bytes over a
    step's time.
    """

    model: str
    batch_size: int
    offload_ratio: float
    eb_bytes_per_s: float
    source: str

    def __post_init__(self) -> None:
        if not all(isinstance(text, str) and text for text in (self.model, self.source)):
            raise bad("a published figure lacks its model or source", "who measured what")
        check_whole(self, f"published {self.model}", "batch_size")
        check_positive(self, f"published {self.model}", "eb_bytes_per_s")
        if not 0 <= self.offload_ratio <= 1:
            raise bad(f"published offload_ratio is {self.offload_ratio}", "from 0 to 1")


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """What was measured over a grid: one row of numbers per point, under named columns.

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


def _around(ns: Sequence[int], n: int) -> tuple[int, int]:
    """Indices of the two of `ns`, ascending, that `n` lies between; twice the same one outside."""
    above = bisect.bisect(ns, n)
    return max(0, above - 1), min(above, len(ns) - 1)


def _ascending(ns: Sequence[int]) -> bool:
    """Whether `ns` are positive integers, each more than the one before."""
    return list(ns) == sorted({n for n in ns if type(n) is int and n > 0})


def check_positive(owner: object, name: str, *fields: str) -> None:
    """UsageError unless the `fields` of `owner` (sizes, rates) are finite numbers from LEAST on."""
    for attribute in fields:
        value = getattr(owner, attribute)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not MIN <= value <= MAX:
            raise bad(f"{name}: {attribute} is {value!r}", f"a number from {MIN:g} to {MAX:g}")


def check_whole(owner: object, name: str, *fields: str) -> None:
    """UsageError unless the `fields` of `owner` are positive integers."""
    for attribute in fields:
        value = getattr(owner, attribute)
        if type(value) is not int or not 1 <= value <= MAX_WHOLE:
            raise bad(f"{name}: {attribute} is {value!r}", f"an integer from 1 to {MAX_WHOLE:,}")


def bad(problem: str, expected: str) -> UsageError:
    """The error for a profile that does not follow the schema."""
    return UsageError(problem, hint=f"expected: {expected}; see profiles/ for examples")
