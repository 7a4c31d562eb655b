"""Statistics of CUDA graph replays: replays and padding rows by bucket, gaps between steps."""

import statistics
from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Replays:
    """Number of replays, and of padding rows (rows without a request), by rows of the bucket.

    `gaps_s` are the seconds between steps on the GPU.
    """

    count: Counter[int] = field(default_factory=Counter)
    padding: Counter[int] = field(default_factory=Counter)
    gaps_s: list[float] = field(default_factory=list)

    def add(self, bucket_rows: int, rows: int) -> None:
        """Count a replay of a bucket of `bucket_rows`, of which `rows` have a request."""
        self.count[bucket_rows] += 1
        self.padding[bucket_rows] += bucket_rows - rows

    def report(self) -> dict[str, Any]:
        """Replays and padding rows of each bucket, and the median gap; None without a gap."""
        buckets = [
            {"rows": rows, "replays": count, "padding_rows": self.padding[rows]}
            for rows, count in sorted(self.count.items())
        ]
        gap = statistics.median(self.gaps_s) if self.gaps_s else None
        return {"buckets": buckets, "replay_gap_s": gap}
