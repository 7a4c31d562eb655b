"""The rows of an attention benchmark: what rows.py has, of batches of slots.

Pure; tables, CSV and JSON are made of these by output.py.
"""

import statistics
from dataclasses import dataclass
from typing import Any

from dakrun.bench.attention_cases import AttentionCase
from dakrun.bench.attention_sweep import AttentionSweep
from dakrun.bench.output import Column
from dakrun.bench.rows import Row, common_columns, microseconds


@dataclass(frozen=True, kw_only=True)
class AttentionRow(Row):
    """Seconds of a launch of one case, beside torch's scaled_dot_product_attention.

    Where it has slots in both tiers, `local_alone_s` and `local_beside_s` are what those in HBM
    take by themselves and beside reads of remote ones.
    """

    case: AttentionCase
    local_alone_s: float | None = None
    local_beside_s: float | None = None

    @property
    def local_slowdown(self) -> float | None:
        """How much longer slots in HBM take beside remote ones, as a share."""
        if self.local_alone_s is None or self.local_beside_s is None:
            return None
        return self.local_beside_s / self.local_alone_s - 1

    def figures(self) -> dict[str, Any]:
        """The row under keys with units; bytes are of keys and values, in blocks with positions."""
        slots = self.case.slots
        return {
            "case": str(slots),
            "batch": slots.batch,
            "heads": slots.heads,
            "kv_heads": slots.kv_heads,
            "length": slots.length,
            "mean_length": statistics.fmean(slots.lengths),
            "head_dim": self.case.head_dim,
            **self.common(operand="kv", rival="sdpa"),
            "local_alone_s": self.local_alone_s,
            "local_beside_s": self.local_beside_s,
            "local_slowdown": self.local_slowdown,
        }


def attention_columns(sweep: AttentionSweep) -> tuple[Column, ...]:
    """The columns of a table: that of HBM slots beside remote ones only where there are any."""
    return (
        Column("case", "case"),
        *common_columns(Column("sdpa_s", "SDPA us", microseconds)),
        *((Column("local_slowdown", "HBM beside", "{:+.1%}".format),) if any(sweep.ratios) else ()),
    )
