"""Time of one op whose bytes are read from several tiers at once (DESIGN.md, the planner).

Everything here is a bound: bytes over bandwidths, FLOPs over rates. `predicted` adds a profile's
efficiencies and its fixed cost per op.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from dakrun.config import Dtype
from dakrun.hardware import LOCAL, HardwareProfile
from dakrun.plan.ops import Op

MIN_TENSOR_ROWS = 8

Regime = Literal["memory-bound", "mixed", "compute-bound"]


@dataclass(frozen=True)
class Links:
    """Rates in bytes/s of the tiers in use, and the groups of tiers that share a total rate."""

    rates: Mapping[str, float]
    groups: tuple[tuple[frozenset[str], float], ...] = ()

    @classmethod
    def of(cls, profile: HardwareProfile, remote: Sequence[str]) -> "Links":
        """The local tier and the `remote` ones of `profile`, read directly."""
        tiers = [profile.tier(name) for name in remote]
        rates = {LOCAL: profile.hbm_bytes_per_s}
        rates |= {tier.name: tier.direct_bytes_per_s for tier in tiers}
        members = {LOCAL: profile.hbm_group} | {tier.name: tier.group for tier in tiers}
        limits = profile.link_groups
        rates = {name: min(rate, limits.get(members[name], rate)) for name, rate in rates.items()}
        groups = [
            (frozenset(name for name, of in members.items() if of == group), rate)
            for group, rate in profile.link_groups.items()
        ]
        return cls(rates, tuple((names, rate) for names, rate in groups if names))

    def read_time(self, tier_bytes: Mapping[str, float]) -> float:
        """Seconds to read the given bytes of each tier, all tiers at once."""
        alone = [n / self.rates[tier] for tier, n in tier_bytes.items()]
        shared = [
            sum(tier_bytes.get(tier, 0.0) for tier in names) / rate for names, rate in self.groups
        ]
        return max(alone + shared)

    def total_rate(self) -> float:
        """Bytes/s of all tiers together. Groups are disjoint, so each adds its own limit."""
        free = sum(r for t, r in self.rates.items() if all(t not in g for g, _ in self.groups))
        return free + sum(
            min(rate, sum(self.rates[tier] for tier in names)) for names, rate in self.groups
        )


def compute_time(op: Op, profile: HardwareProfile, dtype: Dtype) -> float:
    """Seconds of arithmetic: tensor cores work on at least eight rows, however few are used."""
    if op.category == "gather":
        return 0.0
    rows = max(op.batch_size, MIN_TENSOR_ROWS) if op.category == "linear" else op.batch_size
    return op.flops * rows / op.batch_size / profile.flops_per_s(dtype, rows)


def predicted_time(op: Op, bound: float, profile: HardwareProfile) -> float:
    """Seconds that an op bounded by `bound` is expected to take, its launch included."""
    attention = op.category == "attention"
    efficiency = profile.attention_efficiency if attention else profile.linear_efficiency
    return bound / efficiency + profile.op_seconds


def regime(op: Op, compute: float, links: Links) -> Regime:
    """What limits the op wherever its bytes lie: decided by times, not by the ridge."""
    if compute >= op.read_bytes / links.rates[LOCAL]:
        return "compute-bound"
    return "memory-bound" if compute < op.read_bytes / links.total_rate() else "mixed"
