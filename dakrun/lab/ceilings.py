"""Ceilings: the bandwidths to compare times with, and the rings that read them.

Pure choices and arithmetic; memory.py measures.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from dakrun.hardware import LOCAL, Card, RemoteTier

KIB, MIB, GIB = 2**10, 2**20, 2**30
MAX_LAUNCHES = 16_384  # launches of a chain, however small the operands

Ring = tuple[int, int]  # chunk in bytes, stages
HBM_RING: Ring = (16 * KIB, 12)
MIN_IN_FLIGHT, MAX_IN_FLIGHT = 2 * KIB, 128 * KIB  # bytes per SM for which ring_for has a ring


@dataclass(frozen=True, kw_only=True)
class Effort:
    """Sizes and repetitions of a benchmark.

    Ceilings: `hbm_bytes` and `remote_bytes` of random data are read for `seconds`, `readings`
    times. Chains: every launch reads its own operand; a chain has at least `min_launches`, whose
    operands exceed `chain_bytes` in total, and is replayed `replays` times.
    """

    hbm_bytes: int = 4 * GIB
    remote_bytes: int = GIB
    seconds: float = 0.02
    readings: int = 5
    chain_bytes: int = 2 * GIB
    min_launches: int = 8
    replays: int = 7

    def launches(self, operand_bytes: int, least: int | None = None) -> int:
        """Launches of a chain whose operands have `operand_bytes` each."""
        wanted = max(least or self.min_launches, self.chain_bytes // operand_bytes + 1)
        return min(wanted, MAX_LAUNCHES)


FULL = Effort()


@dataclass(frozen=True)
class Ceilings:
    """Bytes/s of each tier read alone, HBM first.

    `copied` holds the copy engine's bytes/s from each remote tier, if that was measured.
    """

    rates: Mapping[str, float]
    copied: Mapping[str, float] = field(default_factory=dict)

    @property
    def turning_point(self) -> float:
        """The offload ratio at which all tiers take the same time."""
        total = sum(self.rates.values())
        return (total - self.rates[LOCAL]) / total

    def seconds(self, tier_bytes: Sequence[int]) -> float:
        """Lower bound in seconds for reading `tier_bytes` from the tiers at once."""
        rates = self.rates.values()
        return max(n / rate for n, rate in zip(tier_bytes, rates, strict=True))


def ring_for(per_cta: int, card: Card) -> Ring | None:
    """A ring with `per_cta` bytes, a power of two, in flight; None if `card` has none."""
    chunk = min(max(per_cta // 4, KIB), 16 * KIB)
    stages = per_cta // chunk
    return (chunk, stages) if 2 <= stages <= 8 and per_cta <= card.lone_ring_bytes else None


def fitting(rings: Iterable[Ring], card: Card) -> list[Ring]:
    """The `rings`, each with as many of its stages as fit on `card`."""
    room = card.lone_ring_bytes
    return list(dict.fromkeys((chunk, min(stages, room // chunk)) for chunk, stages in rings))


def link_ring(tier: RemoteTier, card: Card) -> Ring:
    """The largest ring for which all SMs of `tier` together stay within its window."""
    most = min(MAX_IN_FLIGHT, card.lone_ring_bytes)
    per_sm = min(max(tier.window_bytes // tier.sms, MIN_IN_FLIGHT), most)
    ring = ring_for(1 << per_sm.bit_length() - 1, card)
    assert ring is not None
    return ring
