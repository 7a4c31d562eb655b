"""The cases of an attention sweep: slots of each tier, launches of the chain, the planner's op.

Pure arithmetic on sizes that the caller gives; needs no GPU and no torch.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from dakrun.bench.attention_sweep import AttentionSweep, Slots
from dakrun.bench.cases import Case, units_by_tier
from dakrun.bench.effort import Effort
from dakrun.bench.sweep import BenchDtype
from dakrun.config import DTYPE_BYTES
from dakrun.plan.ops import KV_BLOCK, Op, attention_op
from dakrun.units import ceil_div


@dataclass(frozen=True, kw_only=True)
class AttentionCase(Case):
    """New tokens attend to `slots`, which are its units, and all full: what is kept is read."""

    slots: Slots
    head_dim: int

    def op(self, dtype: BenchDtype) -> Op:
        """What the planner makes of it, which counts no padding."""
        slots = self.slots
        return attention_op(
            (slots.heads, slots.kv_heads),
            self.head_dim,
            n=slots.batch,
            length=slots.length,
            positions=ceil_div(slots.length, KV_BLOCK) * KV_BLOCK,
            element_bytes=DTYPE_BYTES[dtype],
        )


def slot_bytes(slots: Slots, head_dim: int, dtype: BenchDtype) -> int:
    """Bytes that are read of each slot: whole blocks of keys and values, the new token's too."""
    blocks = slots.kv_heads * ceil_div(slots.length, KV_BLOCK)
    return blocks * 2 * KV_BLOCK * head_dim * DTYPE_BYTES[dtype]


def attention_cases(
    sweep: AttentionSweep, turning_point: float, effort: Effort, *, tiers: int
) -> Iterator[AttentionCase]:
    """The cases by batch and ratio, with slots in each of one or two `tiers`."""
    for slots, asked in itertools.product(sweep.slots, sweep.ratios):
        size = slot_bytes(slots, sweep.head_dim, sweep.dtype)
        yield AttentionCase(
            slots=slots,
            head_dim=sweep.head_dim,
            asked=asked,
            units=units_by_tier(slots.batch, asked, turning_point, tiers=tiers),
            unit_bytes=size,
            launches=effort.launches(slots.batch * size),
        )
