"""The rows of an attention benchmark: what rows.py has, of batches of slots.

Pure; tables, CSV and JSON are made of these by output.py.
"""

import statistics
from dataclasses import dataclass
from typing import Any

from dakrun.bench.attention_cases import AttentionCase
from dakrun.bench.output import Column
from dakrun.bench.rows import Row, common_columns, microseconds


@dataclass(frozen=True, kw_only=True)
class AttentionRow(Row):
    """Seconds of a launch of one case, beside torch's scaled_dot_product_attention."""

    case: AttentionCase

    def figures(self) -> dict[str, Any]:
        """The row under keys with units; bytes are of keys and values."""
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
        }


ATTENTION_COLUMNS = (
    Column("case", "case"),
    *common_columns(Column("sdpa_s", "SDPA us", microseconds)),
)
