"""Time of one op whose bytes are read from several tiers at once (DESIGN.md, the planner).

Everything here is a bound: bytes over bandwidths, FLOPs over rates. `predicted` adds a profile's
efficiencies and its fixed cost per op.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from dakrun.config import DTYPE_BYTES, Dtype, ModelConfig
from dakrun.hardware.profile import LOCAL, HardwareProfile
from dakrun.plan.ops import Op

COMPUTE = "compute"
MIN_TENSOR_ROWS = 8

Regime = Literal["memory-bound", "mixed", "compute-bound"]

# Seconds plus, for each tier by its number, seconds per share: a lower bound of an op's time.
Line = tuple[float, Mapping[int, float]]


@dataclass(frozen=True)
class Links:
    """Rates in bytes/s of the tiers in use, the local one first, and what they share.

    `direct` and `staged` are rates by tier (the local tier's are the same); `groups` are sets of
    tiers with a total rate; each tier is in one at most.
    """

    direct: Mapping[str, float]
    staged: Mapping[str, float]
    groups: tuple[tuple[frozenset[str], float], ...] = ()

    @classmethod
    def of(cls, profile: HardwareProfile, remote: Sequence[str]) -> "Links":
        """The local tier and the `remote` ones of `profile`."""
        tiers = [profile.tier(name) for name in remote]
        members = {LOCAL: profile.hbm_group} | {tier.name: tier.group for tier in tiers}
        limits = profile.link_groups
        local = min(profile.hbm_bytes_per_s, limits.get(profile.hbm_group, math.inf))
        groups = [
            (frozenset(name for name, of in members.items() if of == group), rate)
            for group, rate in limits.items()
        ]
        return cls(
            {LOCAL: local} | {tier.name: tier.direct_bytes_per_s for tier in tiers},
            {LOCAL: local} | {tier.name: tier.staged_bytes_per_s for tier in tiers},
            tuple((names, rate) for names, rate in groups if names),
        )

    def rate(self, tiers: Iterable[str], *, staged: bool = False) -> float:
        """Bytes/s of some tiers together; groups are disjoint, so each adds its own limit."""
        rates, left, total = (self.staged if staged else self.direct), set(tiers), 0.0
        for names, limit in self.groups:
            total += min(limit, sum(rates[tier] for tier in names & left))
            left -= names
        return total + sum(rates[tier] for tier in left)

    def total_rate(self) -> float:
        """Bytes/s of all tiers together, read directly."""
        return self.rate(self.direct)

    def lines(self, read: float, floor: float, *, staged: bool = False) -> tuple[Line, ...]:
        """Lower bounds of the time in seconds of an op that reads `read` bytes in all.

        Direct reads of all tiers run side by side. Staged ones go through the copy engine into
        the local tier, which so writes and reads every remote byte, too.
        """
        return tuple(self.named_lines(read, floor, staged=staged).values())

    def named_lines(self, read: float, floor: float, *, staged: bool = False) -> dict[str, Line]:
        """`lines` by what takes that time: COMPUTE, a tier, or tiers behind one link ("a+b")."""
        numbers = {name: i for i, name in enumerate(self.direct)}
        rates = self.staged if staged else self.direct
        lines: dict[str, Line] = {COMPUTE: (floor, {})}
        lines |= {name: (0.0, {numbers[name]: read / rate}) for name, rate in rates.items()}
        if staged:
            local = read / self.direct[LOCAL]
            lines[LOCAL] = 0.0, {i: local if i == 0 else 2 * local for i in numbers.values()}
        for names, rate in self.groups:
            sharing = [n for n in numbers if n in names and not (staged and n == LOCAL)]
            if len(sharing) > 1:  # one alone has a rate within the limit already
                shared = {numbers[name]: read / rate for name in sharing}
                lines["+".join(sharing)] = 0.0, shared
        return lines


def time_of(lines: Iterable[Line], shares: Sequence[float]) -> float:
    """Seconds of an op with the given lower bounds, at its share of every tier."""
    return max(line_time(line, shares) for line in lines)


def times_of(lines: Mapping[str, Line], shares: Sequence[float]) -> tuple[float, float]:
    """(kernel, link) seconds of an op with such `named_lines`, at its share of every tier.

    Those of arithmetic and the local tier, and those of links: it takes the longer of both.
    """
    here = (COMPUTE, LOCAL)
    links = [line for name, line in lines.items() if name not in here]
    kernel = time_of((lines[name] for name in here), shares)
    return kernel, time_of(links, shares) if links else 0.0


def line_time(line: Line, shares: Sequence[float]) -> float:
    """Seconds that one lower bound comes to, at an op's share of every tier."""
    constant, by_tier = line
    return constant + sum(k * shares[tier] for tier, k in by_tier.items())


def matmul_rows(rows: int, profile: HardwareProfile) -> int:
    """Rows that a matrix product takes the time of: tensor cores work on eight at least."""
    return max(rows, MIN_TENSOR_ROWS) if profile.device == "cuda" else rows


def compute_time(op: Op, profile: HardwareProfile, dtype: Dtype) -> float:
    """Seconds of arithmetic of one layer, for the rows that a matrix product really takes."""
    if op.category == "gather":
        return 0.0
    linear = op.category == "linear"
    rows = matmul_rows(op.batch_size, profile) if linear else op.batch_size
    return op.flops * rows / op.batch_size / profile.flops_per_s(dtype, rows)


def has_many_rows(op: Op, profile: HardwareProfile) -> bool:
    """Whether `op` is a product of more rows than the machine's kernel for few of them takes."""
    return (
        op.category == "linear"
        and profile.many_rows is not None
        and op.batch_size > profile.linear.rows[-1]
    )


def op_cost(op: Op, profile: HardwareProfile) -> tuple[float, float]:
    """(seconds, efficiency) of one launch of `op`; a gather's are a linear op's of as many rows."""
    if op.category == "attention":
        return profile.attention.at(op.units)
    return profile.products.at(op.batch_size)


def kernel_time(op: Op, compute: float, profile: HardwareProfile) -> float:
    """Seconds of the kernels' own arithmetic, which takes `compute` at the profile's rates."""
    return compute / op_cost(op, profile)[1] if has_many_rows(op, profile) else compute


def predicted_time(op: Op, kernel: float, profile: HardwareProfile, *, link: float = 0.0) -> float:
    """Seconds that `op` is expected to take, with its fixed cost and that of a norm ahead of it.

    It is bounded by `kernel` seconds of arithmetic and of reading local bytes, for which a norm has
    to end first, and by `link` seconds of reading remote ones. Links give their full rate, whatever
    the efficiency of the rest: kernels ask for remote bytes while ops before end.
    """
    seconds, efficiency = op_cost(op, profile)
    if profile.device == "cpu":  # whose cores read all of it
        kernel = max(kernel, link)
    return max(kernel / efficiency + norm_time(op, profile), link) + seconds


def staged_time(op: Op, kernel: float, profile: HardwareProfile, *, link: float) -> float:
    """Seconds that `op` is expected to take where the copy engine brings its remote bytes.

    That takes `link` seconds, beside ops before and whatever they wait for. Then `kernel` seconds
    follow as elsewhere, but not overlapping the op before.
    """
    return max(predicted_time(op, kernel, profile) + profile.staged_seconds, link)


def norm_time(op: Op, profile: HardwareProfile) -> float:
    """Seconds more for a norm of what `op` multiplies; 0 where it has none, or that is unknown."""
    if not op.normed or profile.norm is None:
        return 0.0
    seconds, efficiency = profile.norm.at(op.batch_size)
    nbytes = 2 * op.batch_size * op.shape[1] * op.element_bytes  # read and written
    return nbytes / (profile.hbm_bytes_per_s * efficiency) + seconds


def sampling_time(model: ModelConfig, rows: int, profile: HardwareProfile) -> float:
    """Seconds in which the likeliest tokens of `rows` rows of logits are found, as far as known."""
    if profile.sampling is None:
        return 0.0
    seconds, efficiency = profile.sampling.at(rows)
    nbytes = rows * model.vocab_size * DTYPE_BYTES[model.dtype]
    return nbytes / (profile.hbm_bytes_per_s * efficiency) + seconds


def regime(op: Op, compute: float, links: Links) -> Regime:
    """What limits the op wherever its bytes lie: decided by times, not by the ridge."""
    if compute >= op.read_bytes / links.direct[LOCAL]:
        return "compute-bound"
    return "memory-bound" if compute < op.read_bytes / links.total_rate() else "mixed"
