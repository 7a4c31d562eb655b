"""An op with its units placed: stage 1 computes its time, and plans are made of such ops."""

import functools
from collections import Counter
from dataclasses import dataclass, replace

from dakrun.plan.ops import Op
from dakrun.plan.policy import Transport


@dataclass(frozen=True, kw_only=True)
class PlacedOp:
    """One op with its units placed, and the time that follows.

    `placement[layer][t]` units lie in the plan's tier number t; `bounds_s` and `predicted_s` are
    seconds per layer. `sms[t]` SMs read tier t. A part that is read directly and has none is
    mixed: the local tier's SMs read it among their own. Staged bytes are read by all SMs; steps of
    few rows that read experts in place have SMs of their own for it (engine/build.py).
    """

    op: Op
    transport: Transport
    sms: tuple[int, ...]
    placement: tuple[tuple[int, ...], ...]
    bounds_s: tuple[float, ...]
    predicted_s: tuple[float, ...]

    def resident_bytes(self, tier: int) -> int:
        """Bytes that all layers keep in the plan's tier number `tier`."""
        return self._tier_bytes[tier]

    @functools.cached_property
    def _tier_bytes(self) -> tuple[int, ...]:
        layers = Counter(self.placement)
        held = ([n * size for size in self.op.tier_bytes(of)] for of, n in layers.items())
        return tuple(map(sum, zip(*held, strict=True)))

    @functools.cached_property
    def shares(self) -> tuple[float, ...]:
        """Share of all layers' bytes that each tier keeps."""
        return tuple(n / (self.op.layers * self.op.resident_bytes) for n in self._tier_bytes)

    @property
    def is_copied(self) -> bool:
        """Whether a step copies all remote bytes ahead of their use.

        Steps of fewer rows than the plan's batch may read experts in place all the same.
        """
        return self.transport == "staged" and self.op.can_be_staged(self.shares[0])

    def read_bytes(self, tier: int) -> float:
        """Bytes that a decode step reads from the plan's tier number `tier`, or copies from it."""
        if tier and self.is_copied:
            return self.resident_bytes(tier)
        if self.op.chances:
            return sum(
                n * self.op.tier_reads(of)[tier] for of, n in Counter(self.placement).items()
            )
        return self.resident_bytes(tier) * (self.op.read_bytes / self.op.resident_bytes)

    def read_at(self, tier: int, rows: int) -> float:
        """The same of a step with `rows` rows, on which experts' reads depend."""
        if not self.op.chances:
            return self.read_bytes(tier)
        return replace(self, op=self.op.with_rows(rows)).read_bytes(tier)

    def mixed(self, tier: int) -> bool:
        """Whether the local tier's SMs read the part in the plan's tier number `tier`."""
        held = tier > 0 and self.resident_bytes(tier) > 0
        return held and self.transport == "direct" and self.sms[tier] == 0

    @property
    def ratio(self) -> float:
        """Offload ratio: the op's bytes outside the local tier, over all."""
        return 1 - self.resident_bytes(0) / (self.op.layers * self.op.resident_bytes)

    @property
    def remote_bytes(self) -> int:
        """Bytes that all layers keep outside the local tier."""
        return sum(self._tier_bytes[1:])

    @property
    def largest_remote_part(self) -> int:
        """Most bytes of one layer outside the local tier."""
        sizes = (self.op.unit_bytes(of[0], self.op.units) for of in set(self.placement))
        return max(sizes, default=0)
