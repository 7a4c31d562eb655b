"""Steps on the project's kernels: of decode rows as CUDA graphs, one graph for each batch bucket.

A step that also has parts of prompts is launched op by op: it takes long enough to hide that.
Knows rows and slots. decode_step.py has the launches of a decode step, prefill.py those of prompts.
"""

import statistics
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dakrun.config import SamplingParams
from dakrun.engine.decode_step import (
    IDLE,
    LOG_STEPS,
    Bucket,
    DecodeStep,
    buckets,
    fill_order,
    fitting,
)
from dakrun.engine.kv_cache import KVCache
from dakrun.engine.prefill import Prefill
from dakrun.engine.runner import Chosen, NextTokens, PromptPart, Row
from dakrun.geometry import KV_BLOCK
from dakrun.kernels import sampling_words
from dakrun.kernels.attention import KVShape, RowGroup, SharedPrefix, shared_prefixes
from dakrun.kernels.runtime import (
    capture,
    edge_kinds,
    graph_edges,
    programmatic_lead,
    replay_seconds,
)
from dakrun.memory.device import upload
from dakrun.plan import Segment

# KV bytes of a layer that reading prefixes once has to save, in HBM and in remote tiers: about
# what memory reads while the further kernel is launched.
MIN_SAVED_BYTES, MIN_REMOTE_SAVED_BYTES = 16 << 20, 256 << 10
MAX_PDL_LEAD = 1  # from embed to a norm; the first product then waits for both
MIN_PDL_EDGES = 2  # per layer: launches that may start before their predecessor kernel ends


@dataclass
class Replays:
    """Number of replays, and of padding rows (rows without a request), by rows of the bucket."""

    count: Counter[int] = field(default_factory=Counter)
    padding: Counter[int] = field(default_factory=Counter)


@dataclass(frozen=True)
class _Step:
    """A launched step; `rows` include those of prompts that end in it.

    `chosen` has log-probabilities if any row asks for them, else it is None.
    """

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
        self._decode, self._backend, self._prefill = step, step.backend, prefill
        self.cache, self._positions = cache, shape.blocks * KV_BLOCK
        self._layer_bytes = shape.layer_bytes  # of a KV block
        self._filled = False  # whether the staging ring holds the next step's first matrices
        self._buckets = buckets(cache.counts)
        self._mapped: list[int] = []  # the slot, or IDLE, of each row of the last bucket
        self._steps: deque[_Step] = deque()
        self._last: _Step | None = None  # the step collected last
        self._sampling = dict.fromkeys(range(cache.slots), sampling_words(SamplingParams(), 0))
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
    def launch(self, rows: Sequence[Row], parts: Sequence[PromptPart] = ()) -> None:
        """Start a step in the smallest bucket that holds all rows."""
        self.cache.flush()
        bucket = self._assign(rows) if rows else ()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        ended = [part.row for part in parts if part.ends]
        if parts:
            self._set_sampling(ended)
            start.record()
            if not rows:
                self._mapped = []  # slots may get other requests before they have rows again
            logits, tokens = self._pass(bucket, parts, ended)
        else:
            if not self._filled:
                self._fill()
            start.record()
            if self._decode.cascades and bucket not in self._cascades:
                self._capture_cascade(bucket)
            (self._cascades if self._decode.cascades else self.graphs)[bucket].replay()
            logits, tokens = self._backend.logits, self._decode.tokens
            self.replays.count[sum(bucket)] += 1
            self.replays.padding[sum(bucket)] += sum(bucket) - len(rows)
        chosen = None
        if any(row.params.logprobs is not None for row in (*rows, *ended)):
            places = [self._mapped.index(row.slot) for row in rows]
            at = self._on_gpu([*places, *range(sum(bucket), sum(bucket) + len(ended))])
            chosen = Chosen(logits[at], (*rows, *ended), tokens[at])
        end.record()
        self._steps.append(_Step((*rows, *ended), start, end, chosen))

    @torch.inference_mode()
    def resume(self, row: Row, token: int) -> None:
        """Let `token` be the newest of the row's slot."""
        self._set_sampling([row])
        self._decode.newest[row.slot].fill_(token)
        self._mapped = []  # the slot's row may be another request's

    @torch.inference_mode()
    def collect(self) -> NextTokens:
        """The tokens of the oldest step."""
        step = self._steps.popleft()
        if self._decode.cascades and not step.end.query():
            later = (b for b in reversed(self._buckets) if sum(b) <= len(self._mapped))
            if bucket := next((b for b in later if b not in self._cascades), None):
                self._capture_cascade(bucket)  # while the CPU would wait
        step.end.synchronize()
        if self._last is not None:
            self._gaps_s.append(self._last.end.elapsed_time(step.start) / 1e3)
        self._last = step
        places = [row.slot * LOG_STEPS + row.position % LOG_STEPS for row in step.rows]
        tokens = self._decode.log.take(torch.tensor(places, dtype=torch.int64)).tolist()
        return NextTokens(tokens, step.chosen.collect().logprobs if step.chosen else {})

    def drop(self) -> None:
        """Wait for all launched steps and discard their tokens."""
        while self._steps:
            self.collect()

    def _pass(
        self, bucket: Bucket, parts: Sequence[PromptPart], ended: Sequence[Row]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute a step with parts of prompts, of which `ended` end.

        Returns the logits and next tokens of its rows, then of these.
        """
        self._filled = False
        segments = [Segment(part.row.slot, part.start, len(part.tokens)) for part in parts]
        ids = [token for part in parts for token in part.tokens]
        wanted = [part.ends for part in parts]
        n, decode = sum(bucket), self._decode
        logits = self._prefill.logits(ids, segments, wanted, decode, bucket)
        if n:
            decode.select(n, logits[:n])
        tokens = decode.tokens[:n]
        if ended:
            slots = self._on_gpu([row.slot for row in ended])
            positions = self._on_gpu([row.position for row in ended])
            first = decode.first_tokens(logits[n:], slots, positions)
            tokens = torch.cat((tokens, first))
        return logits, tokens

    def _set_sampling(self, rows: Sequence[Row]) -> None:
        """Say how the tokens of the rows' slots are chosen, where this has changed."""
        words = {row.slot: sampling_words(row.params, row.seed) for row in rows}
        changed = {slot: new for slot, new in words.items() if self._sampling[slot] != new}
        if changed:
            slots = self._on_gpu(list(changed))
            new = upload(torch.tensor(list(changed.values()), dtype=torch.int32), slots.device)
            self._decode.sampling[slots] = new
            self._sampling |= changed

    def _capture(self) -> None:
        """Capture all buckets, the largest first, in one pool of memory.

        Steps whose rows share prefixes are captured once there are such rows.
        """
        self.graphs: dict[Bucket, torch.cuda.CUDAGraph] = {}
        self._cascades: dict[Bucket, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._fill()
        self._decode.prepare(self._buckets)
        self._decode.cascades = True
        self._decode.run(self._buckets[-1])
        self._decode.cascades = False
        for bucket in reversed(self._buckets):
            self._decode.run(bucket)  # compiles its kernels; all rows are idle
            graph = capture(lambda bucket=bucket: self._decode.run(bucket), self._pool)  # type: ignore[misc]
            # Edges to and from copies of staged matrices and torch's kernels are not programmatic.
            if not self._backend.staging and self._backend.kernel_for(sum(bucket)) != "torch":
                pdl, others = edge_kinds(graph)
                minimum = MIN_PDL_EDGES * self._backend.model.config.num_layers
                assert pdl >= minimum, f"expected {minimum} PDL edges, got {pdl}, {others} others"
                # Attention reads lengths and block tables before its PDL wait (native/README.md).
                lead = programmatic_lead(graph_edges(graph))
                assert lead <= MAX_PDL_LEAD, f"expected a full edge behind embed, got {lead} PDL"
            self.graphs[bucket] = graph
        self._filled = False

    def _capture_cascade(self, bucket: Bucket) -> None:
        """Capture the graph of a step of `bucket` whose rows share prefixes."""
        self._cascades[bucket] = capture(lambda: self._decode.run(bucket), self._pool, quickly=True)

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
        decode, bucket = self._decode, self._buckets[-1]
        self._mapped = []
        decode.slots.copy_(self._on_gpu(range(sum(bucket))))
        decode.spilled.copy_(self._on_gpu(self.cache.pretend(length + 1)))
        decode.lengths.fill_(length)
        found = {}
        for name, launches in decode.chains(bucket).items():
            decode.lengths.fill_(length)
            found[name] = replay_seconds(lambda chain=launches: [launch() for launch in chain])  # type: ignore[misc]
        decode.lengths.fill_(IDLE)
        return found

    def _assign(self, rows: Sequence[Row]) -> Bucket:
        """Give every row a place in the smallest bucket that holds them all.

        Rows keep their places where all of them have one in it; the other places become idle.
        """
        positions = {row.slot: row.position for row in rows}
        counts = [0] * len(self.cache.counts)
        for slot in positions:
            counts[self.cache.tier(slot)] += 1
        bucket = fitting(self._buckets, counts)
        groups: list[RowGroup] | None
        if len(self._mapped) == sum(bucket) and positions.keys() <= set(self._mapped):
            mapped = [slot if slot in positions else IDLE for slot in self._mapped]
            groups = None
        else:
            mapped, groups = [], []
            prefixes = self._prefixes(positions)
            grouped = {slot for prefix in prefixes for slot in prefix.slots}
            for tier, room in enumerate(bucket):
                first = len(mapped)
                for slots, blocks in prefixes:
                    if self.cache.tier(slots[0]) == tier:
                        shared = [self.cache.address(slots[0], block) for block in range(blocks)]
                        groups.append(RowGroup(len(mapped), len(slots), shared, remote=tier > 0))
                        mapped += slots
                here = (slot for slot in positions if self.cache.tier(slot) == tier)
                mapped += sorted(slot for slot in here if slot not in grouped)
                mapped += [IDLE] * (first + room - len(mapped))
        if mapped != self._mapped:
            lengths = [positions.get(slot, IDLE) for slot in mapped]
            self._decode.assign([max(slot, 0) for slot in mapped], lengths, groups)
            self._mapped = mapped
        return bucket

    def _prefixes(self, slots: Iterable[int]) -> list[SharedPrefix]:
        """Prefixes that `slots` share, those that save most first; none if that is too little."""
        found, saved = [], [0, 0]  # blocks, in HBM and in remote tiers
        for number in range(len(self.cache.counts)):
            here = (slot for slot in slots if self.cache.tier(slot) == number)
            held = {slot: common for slot in here if (common := self.cache.common(slot))}
            prefixes = shared_prefixes(held)
            saved[number > 0] += sum(prefix.saved for prefix in prefixes)
            found += prefixes
        least = (MIN_SAVED_BYTES, MIN_REMOTE_SAVED_BYTES)
        if all(n * self._layer_bytes < wanted for n, wanted in zip(saved, least, strict=True)):
            return []
        return sorted(found, key=lambda prefix: -prefix.saved)

    def _on_gpu(self, numbers: Sequence[int]) -> torch.Tensor:
        """int32 on the GPU, without waiting for it."""
        return upload(torch.tensor(numbers, dtype=torch.int32), self._backend.like.device)
