"""What the memories allow: rates measured in the run that they are compared with.

Pure arithmetic; tiers.py measures.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dakrun.hardware.profile import LOCAL, RemoteTier
from dakrun.probe.effort import KIB, Ring, ring_for

HBM_RING: Ring = (16 * KIB, 12)
LINK_BYTES = 2 * KIB, 128 * KIB  # in flight on an SM: what there are rings for


@dataclass(frozen=True)
class Ceilings:
    """Bytes/s that each tier in use delivers alone, HBM first.

    `copied` is what the copy engine brings of each remote tier, where that was measured.
    """

    rates: Mapping[str, float]
    copied: Mapping[str, float] = field(default_factory=dict)

    @property
    def turning_point(self) -> float:
        """The remote share at which all tiers take the same time."""
        total = sum(self.rates.values())
        return (total - self.rates[LOCAL]) / total

    def seconds(self, tier_bytes: Sequence[int]) -> float:
        """Seconds that reading so many bytes of each tier takes at least."""
        rates = self.rates.values()
        return max(n / rate for n, rate in zip(tier_bytes, rates, strict=True))


def link_ring(tier: RemoteTier) -> Ring:
    """Chunk and stages with which its SMs keep a tier's window, or little less, in flight."""
    least, most = LINK_BYTES
    per_sm = min(max(tier.window_bytes // tier.sms, least), most)
    ring = ring_for(1 << per_sm.bit_length() - 1)
    assert ring is not None
    return ring
