"""Decode steps as CUDA graphs of the project's kernels, one graph for each batch bucket.

Knows rows and slots. decode_step.py has the launches of a step, prefill.py those of prompts.
"""

import statistics
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dakrun.engine.decode_step import (
    IDLE,
    LOG_STEPS,
    Bucket,
    DecodeStep,
    buckets,
    fill_order,
    fitting,
)
from dakrun.engine.prefill import Prefill
from dakrun.engine.runner import Chosen, NextTokens, Row
from dakrun.geometry import KV_BLOCK
from dakrun.kernels.attention import KVCache, KVShape
from dakrun.kernels.runtime import capture, edge_kinds, replay_seconds
from dakrun.memory.device import upload
from dakrun.plan import Segment

MIN_PDL_EDGES = 2  # per layer: launches that may start before their predecessor kernel ends


@dataclass
class Replays:
    """Number of replays, and of padding rows (rows without a request), by rows of the bucket."""

    count: Counter[int] = field(default_factory=Counter)
    padding: Counter[int] = field(default_factory=Counter)


@dataclass(frozen=True)
class _Step:
    """A launched step; `chosen` has its tokens if any row needs the logits, else None."""

    rows: Sequence[Row]
    start: torch.cuda.Event
    end: torch.cuda.Event
    chosen: Chosen | None


class GraphRunner:
    """A runner whose steps need no CPU: tokens are fed back on the device.

    The CPU reads them later from a log in host memory, after an event. Between replays, in stream
    order, it changes the slots of the rows.
    """

    ahead = 2

    def __init__(self, step: DecodeStep, prefill: Prefill, cache: KVCache, shape: KVShape) -> None:
        """Capture all buckets. Passes of `prefill` may overwrite the ring that steps stage in."""
        self.chunk_tokens = prefill.chunk_tokens
        self.order: Sequence[int] = fill_order(cache.counts)
        self.replays = Replays()
        self._gaps_s: list[float] = []  # between replays, on the GPU
        self._rows, self._backend, self._prefill = step, step.backend, prefill
        self.cache, self._positions = cache, shape.blocks * KV_BLOCK
        self._filled = False  # whether the staging ring holds the next step's first matrices
        self._buckets = buckets(cache.counts)
        self._mapped: list[int] | None = None  # the slot, or IDLE, of each row of the last bucket
        self._steps: deque[_Step] = deque()
        self._last: _Step | None = None  # the step collected last
        self._newest = torch.zeros_like(step.tokens)  # newest token by slot
        self._capture()

    def details(self) -> dict[str, Any]:
        """Replays and padding rows of each bucket, and the median gap between replays."""
        gaps = statistics.median(self._gaps_s) if self._gaps_s else None
        buckets = [
            {"rows": rows, "replays": count, "padding_rows": self.replays.padding[rows]}
            for rows, count in sorted(self.replays.count.items())
        ]
        return {"buckets": buckets, "replay_gap_s": gaps}

    @torch.inference_mode()
    def prefill(self, tokens: Sequence[int], segments: Sequence[Segment]) -> torch.Tensor:
        """Logits [S, V] after the last token of each segment."""
        self._filled = False
        self.cache.flush()
        return self._prefill.logits(tokens, segments)

    @torch.inference_mode()
    def begin(self, slots: Sequence[int], tokens: Sequence[int]) -> None:
        """Store the first tokens of slots for the next step."""
        self._unmap()
        self._newest[self._on_gpu(slots)] = self._on_gpu(tokens)

    @torch.inference_mode()
    def launch(self, rows: Sequence[Row]) -> None:
        """Replay the smallest bucket that holds all rows."""
        counts = [0] * len(self.cache.counts)
        for row in rows:
            counts[self.cache.tier(row.slot)] += 1
        bucket = fitting(self._buckets, counts)
        mapped = self._arrange(rows, bucket)
        if mapped != self._mapped:
            self._map(mapped, rows)
        self.cache.flush()
        if not self._filled:
            self._fill()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self.graphs[bucket].replay()
        chosen = self._choose(rows, mapped) if any(row.needs_logits for row in rows) else None
        end.record()
        self._steps.append(_Step(rows, start, end, chosen))
        self.replays.count[sum(bucket)] += 1
        self.replays.padding[sum(bucket)] += sum(bucket) - len(rows)

    def collect(self) -> NextTokens:
        """The tokens of the oldest step."""
        step = self._steps.popleft()
        step.end.synchronize()
        if self._last is not None:
            self._gaps_s.append(self._last.end.elapsed_time(step.start) / 1e3)
        self._last = step
        if step.chosen is not None:
            return step.chosen.collect()
        places = [row.slot * LOG_STEPS + row.position % LOG_STEPS for row in step.rows]
        return NextTokens(self._rows.log.take(torch.tensor(places)).tolist())

    def drop(self) -> None:
        """Wait for all launched steps and discard their tokens."""
        while self._steps:
            self.collect()

    def _choose(self, rows: Sequence[Row], mapped: Sequence[int]) -> Chosen:
        """Choose the rows' tokens from the logits; they replace the greedy choices of the graph."""
        places = self._on_gpu([mapped.index(row.slot) for row in rows]).long()
        chosen = Chosen(self._backend.logits[places], rows)
        self._rows.tokens[places] = chosen.tokens.clamp(min=0).int()  # NO_TOKEN has no embedding
        return chosen

    def _capture(self) -> None:
        """Capture all buckets, the largest first, in one pool of memory."""
        self.graphs: dict[Bucket, torch.cuda.CUDAGraph] = {}
        pool = torch.cuda.graph_pool_handle()
        self._fill()
        self._rows.prepare(self._buckets)
        for bucket in reversed(self._buckets):
            self._rows.run(bucket)  # compiles its kernels; all rows are idle
            graph = capture(lambda bucket=bucket: self._rows.run(bucket), pool)  # type: ignore[misc]
            # Edges to and from copies of staged matrices and torch's kernels are not programmatic.
            if not self._backend.staging and self._backend.by(sum(bucket)) != "torch":
                pdl, others = edge_kinds(graph)
                minimum = MIN_PDL_EDGES * self._backend.model.config.num_layers
                assert pdl >= minimum, f"expected {minimum} PDL edges, got {pdl}, {others} others"
            self.graphs[bucket] = graph
        self._filled = False

    def _fill(self) -> None:
        """Stage the first matrices of the next step, as the previous step usually does."""
        if self._backend.staging:
            self._backend.staging.fill()
        self._filled = True

    @torch.inference_mode()
    def op_seconds(self, length: int) -> dict[str, float]:
        """Seconds of a full batch's step by op, each op's launches of all layers in one graph.

        Slots hold `length` cached positions, or fewer to leave room for the new one. Matrices are
        not staged. No request or step may be running: slots are overwritten.
        """
        length = min(length, self._positions - 1)
        rows, bucket = self._rows, self._buckets[-1]
        self._mapped = None
        rows.slots.copy_(self._on_gpu(range(sum(bucket))))
        self.cache.pretend(length + 1)
        rows.lengths.fill_(length)
        found = {}
        for name, launches in rows.chains(bucket).items():
            rows.lengths.fill_(length)
            found[name] = replay_seconds(lambda chain=launches: [launch() for launch in chain])  # type: ignore[misc]
        rows.lengths.fill_(IDLE)
        return found

    def _arrange(self, rows: Sequence[Row], bucket: Bucket) -> list[int]:
        """The slot, or IDLE, of every row of `bucket`; the present mapping if it still fits."""
        wanted, before = {row.slot for row in rows}, self._mapped or []
        if len(before) == sum(bucket) and {slot for slot in before if slot != IDLE} == wanted:
            return before
        mapped: list[int] = []
        for tier, room in enumerate(bucket):
            here = sorted(slot for slot in wanted if self.cache.tier(slot) == tier)
            mapped += here + [IDLE] * (room - len(here))
        return mapped

    def _map(self, mapped: list[int], rows: Sequence[Row]) -> None:
        """Assign the slots `mapped` to the rows of the next replays."""
        self._unmap()
        positions = {row.slot: row.position for row in rows}
        n = len(mapped)
        slots = self._on_gpu([max(slot, 0) for slot in mapped])
        self._rows.slots[:n] = slots
        self._rows.lengths[:n] = self._on_gpu([positions.get(slot, IDLE) for slot in mapped])
        self._rows.tokens[:n] = self._newest[slots]
        self._mapped = mapped

    def _unmap(self) -> None:
        """Save the newest tokens of the slots that are assigned to rows."""
        if self._mapped is not None:
            places = [(i, slot) for i, slot in enumerate(self._mapped) if slot != IDLE]
            rows, slots = (self._on_gpu(numbers) for numbers in zip(*places, strict=True))
            self._newest[slots] = self._rows.tokens[rows]
        self._mapped = None

    def _on_gpu(self, numbers: Sequence[int]) -> torch.Tensor:
        """int32 on the GPU, without waiting for it."""
        return upload(torch.tensor(numbers, dtype=torch.int32), self._backend.like.device)
