"""The slot of each row of a GPU's batch, from step to step.

Rows of a tier lie side by side, and among them those that share a prefix. Knows rows, slots and
KV blocks, no graphs.
"""

from collections.abc import Iterable, Sequence

from dakrun.engine.buckets import Bucket, fitting
from dakrun.engine.decode_step import IDLE, DecodeStep
from dakrun.engine.kv_cache import KVCache
from dakrun.engine.step import Row
from dakrun.kernels.attention import RowGroup, SharedPrefix, shared_prefixes

# Shared prefixes are read once, by a kernel of their own, if that saves as many KV bytes a layer,
# in HBM or in remote tiers: about what the memory reads during the launch of this kernel.
MIN_SAVED_BYTES, MIN_REMOTE_SAVED_BYTES = 16 << 20, 256 << 10


class RowMap:
    """`slots`: the slot, or IDLE, of each row of the last step's bucket; empty if not known."""

    def __init__(
        self, step: DecodeStep, cache: KVCache, buckets: Sequence[Bucket], layer_bytes: int
    ) -> None:
        """A KV block has `layer_bytes` in a layer."""
        self._step, self._cache, self._buckets = step, cache, buckets
        self._layer_bytes = layer_bytes
        self.slots: list[int] = []

    def forget(self) -> None:
        """Assign all rows anew in the next step, since slots have got other requests or tokens."""
        self.slots = []

    def bucket(self, slots: Iterable[int]) -> Bucket:
        """The smallest bucket that holds a row of each of `slots`."""
        counts = [0] * len(self._cache.counts)
        for slot in slots:
            counts[self._cache.tier(slot)] += 1
        return fitting(self._buckets, counts)

    def assign(self, rows: Sequence[Row]) -> tuple[Bucket, bool]:
        """Give each of `rows` a row of the smallest bucket that holds them all.

        They keep their rows of the batch where all of them have one; the other rows become idle.
        Returns the bucket, and whether any row of the batch has changed.
        """
        positions = {row.slot: row.start for row in rows}
        bucket = self.bucket(positions)
        groups: list[RowGroup] | None
        if len(self.slots) == sum(bucket) and positions.keys() <= set(self.slots):
            mapped = [slot if slot in positions else IDLE for slot in self.slots]
            groups = None
        else:
            mapped, groups = self._mapped(bucket, positions)
        if mapped == self.slots:
            return bucket, False
        lengths = [positions.get(slot, IDLE) for slot in mapped]
        self._step.assign([max(slot, 0) for slot in mapped], lengths, groups)
        self.slots = mapped
        return bucket, True

    def _mapped(self, bucket: Bucket, slots: Iterable[int]) -> tuple[list[int], list[RowGroup]]:
        """The slots in the rows of `bucket`, and the groups of rows that share prefixes."""
        mapped, groups = list[int](), list[RowGroup]()
        prefixes = self._prefixes(slots)
        grouped = {slot for prefix in prefixes for slot in prefix.slots}
        for tier, room in enumerate(bucket):
            first = len(mapped)
            for sharing, blocks in prefixes:
                if self._cache.tier(sharing[0]) == tier:
                    shared = [self._cache.address(sharing[0], block) for block in range(blocks)]
                    groups.append(RowGroup(len(mapped), len(sharing), shared, remote=tier > 0))
                    mapped += sharing
            here = (slot for slot in slots if self._cache.tier(slot) == tier)
            mapped += sorted(slot for slot in here if slot not in grouped)
            mapped += [IDLE] * (first + room - len(mapped))
        return mapped, groups

    def _prefixes(self, slots: Iterable[int]) -> list[SharedPrefix]:
        """Prefixes that `slots` share, the largest saving first; none if they save too little."""
        found, saved = [], [0, 0]  # blocks, in HBM and in remote tiers
        for number in range(len(self._cache.counts)):
            here = (slot for slot in slots if self._cache.tier(slot) == number)
            held = {slot: common for slot in here if (common := self._cache.common(slot))}
            prefixes = shared_prefixes(held)
            saved[number > 0] += sum(prefix.saved for prefix in prefixes)
            found += prefixes
        least = (MIN_SAVED_BYTES, MIN_REMOTE_SAVED_BYTES)
        if all(n * self._layer_bytes < wanted for n, wanted in zip(saved, least, strict=True)):
            return []
        return sorted(found, key=lambda prefix: -prefix.saved)
