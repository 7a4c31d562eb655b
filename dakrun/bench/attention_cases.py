"""The cases of an attention sweep: slots of each tier, launches of the chain, the planner's op.

Pure arithmetic on sizes that the caller gives; needs no GPU and no torch.
"""

import itertools
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace

from dakrun.bench.attention_sweep import AttentionSweep, Slots
from dakrun.bench.cases import Case, units_by_tier
from dakrun.bench.effort import Effort
from dakrun.bench.sweep import BenchDtype
from dakrun.config import DTYPE_BYTES
from dakrun.plan.ops import KV_BLOCK, Op, attention_op
from dakrun.units import ceil_div


@dataclass(frozen=True, kw_only=True)
class AttentionCase(Case):
    """New tokens attend to `slots`, which are its units, each with room for the longest."""

    slots: Slots
    head_dim: int

    @property
    def tier_bytes(self) -> tuple[int, ...]:
        """Bytes that a launch reads of each tier, for each its new token's, too."""
        position = self.unit_bytes // (_blocks(self.slots.length) * KV_BLOCK)
        lengths = iter(self.slots.lengths)
        return tuple(position * sum(itertools.islice(lengths, count)) for count in self.units)

    def op(self, dtype: BenchDtype) -> Op:
        """What the planner makes of it, which counts no padding, of slots of the mean length."""
        slots = self.slots
        return attention_op(
            (slots.heads, slots.kv_heads),
            self.head_dim,
            n=slots.batch,
            length=statistics.fmean(slots.lengths),
            positions=_blocks(slots.length) * KV_BLOCK,
            element_bytes=DTYPE_BYTES[dtype],
        )


def slot_bytes(slots: Slots, head_dim: int, dtype: BenchDtype) -> int:
    """Bytes that each slot has room for: whole blocks of keys and values, the new token's too."""
    blocks = slots.kv_heads * _blocks(slots.length)
    return blocks * 2 * KV_BLOCK * head_dim * DTYPE_BYTES[dtype]


def attention_cases(
    sweep: AttentionSweep, turning_point: float, effort: Effort, *, tiers: int
) -> Iterator[AttentionCase]:
    """The cases by batch and ratio, with slots in each of one or two `tiers`."""
    for slots, asked in itertools.product(sweep.slots, sweep.ratios):
        once = AttentionCase(
            slots=slots,
            head_dim=sweep.head_dim,
            asked=asked,
            units=units_by_tier(slots.batch, asked, turning_point, tiers=tiers),
            unit_bytes=slot_bytes(slots, sweep.head_dim, sweep.dtype),
            launches=1,
        )
        yield replace(once, launches=effort.launches(once.read_bytes))


def _blocks(length: int) -> int:
    return ceil_div(length, KV_BLOCK)
