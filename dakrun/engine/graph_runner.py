"""Steps on the project's kernels: CUDA graphs of decode rows, one graph for each batch bucket.

A step with parts of prompts is launched op by op; steps with drafts have graphs of their own. Knows
rows and slots. decode_step.py has the launches of a decode step, verify_step.py those of a step
with drafts, prefill.py those of prompts.
"""

import statistics
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from dakrun.config import SamplingParams
from dakrun.engine.decode_step import (
    IDLE,
    Bucket,
    DecodeStep,
    buckets,
    fill_order,
    fitting,
)
from dakrun.engine.expert_copies import ExpertCopies
from dakrun.engine.expert_moves import ExpertMoves
from dakrun.engine.expert_use import ExpertUse
from dakrun.engine.kv_cache import KVCache
from dakrun.engine.logprobs import Scores
from dakrun.engine.mask_writer import MaskWriter
from dakrun.engine.prefill import Prefill
from dakrun.engine.runner import Chosen
from dakrun.engine.step import Accepted, Row, Step
from dakrun.engine.verify_step import VerifyStep
from dakrun.geometry import KV_BLOCK
from dakrun.kernels import adjustments, sampling_words, without_options
from dakrun.kernels.attention import KVShape, RowGroup, SharedPrefix, shared_prefixes
from dakrun.kernels.runtime import (
    capture,
    edge_kinds,
    graph_edges,
    programmatic_lead,
    replay_seconds,
)
from dakrun.memory.device import upload
from dakrun.models.modules import Fused

# Shared prefixes are read once, by a kernel of their own, if that saves as many KV bytes a layer,
# in HBM or in remote tiers: about what the memory reads during the launch of this kernel.
MIN_SAVED_BYTES, MIN_REMOTE_SAVED_BYTES = 16 << 20, 256 << 10
MAX_PDL_LEAD = 1  # from embed to a norm; the first product then waits for both
MIN_PDL_EDGES = 2  # per layer: launches that may start before their predecessor kernel ends


@dataclass
class Replays:
    """Number of replays, and of padding rows (rows without a request), by rows of the bucket."""

    count: Counter[int] = field(default_factory=Counter)
    padding: Counter[int] = field(default_factory=Counter)


@dataclass(frozen=True)
class _Launched:
    """A launched step. `chosen` has log-probabilities; None if no row asks for any.

    `scores` are those of prompts' tokens; None if no row has any.
    """

    step: Step
    start: torch.cuda.Event
    end: torch.cuda.Event
    chosen: Chosen | None
    scores: Scores | None


class GraphRunner:
    """A runner whose steps need no CPU: tokens are fed back on the device.

    The CPU reads them later from a log in host memory, after an event. Between replays, in stream
    order, it changes the slots of the rows.
    """

    ahead = 2
    moves_experts = True

    def __init__(
        self,
        step: DecodeStep,
        prefill: Prefill,
        cache: KVCache,
        shape: KVShape,
        copies: ExpertCopies | None = None,
    ) -> None:
        """Capture all buckets. Passes of `prefill` may overwrite the ring where steps stage.

        With `copies` experts are exchanged as the run goes.
        """
        self.chunk_tokens = prefill.chunk_tokens
        self.order: Sequence[int] = fill_order(cache.counts)
        self.replays = Replays()
        self._gaps_s: list[float] = []  # between replays, on the GPU
        self._decode, self._backend, self._prefill = step, step.backend, prefill
        self.cache, self._positions = cache, shape.blocks * KV_BLOCK
        self._layer_bytes = shape.layer_bytes  # of a KV block
        self._filled = False  # whether the staging ring holds the next step's first matrices
        self._buckets, self._shape = buckets(cache.counts), shape
        self._verify: VerifyStep | None = None
        self._verifying: dict[Bucket, torch.cuda.CUDAGraph] = {}
        self._mapped: list[int] = []  # the slot, or IDLE, of each row of the last bucket
        self._steps: deque[_Launched] = deque()
        self._masks = MaskWriter(step.log, step.backend.model.config.vocab_size, self.ahead)
        self._last: _Launched | None = None  # the step collected last
        self._sampling = dict.fromkeys(range(cache.slots), sampling_words(SamplingParams(), 0))
        self._adjustments: dict[int, torch.Tensor | None] = {}  # by slot
        self._capture()
        if (use := self._backend.expert_use) is not None:
            use.clear()  # what captures have counted
        self.expert_use: ExpertUse | None = use
        self._copies, self._moves = copies, None
        if copies and use:
            matrices = self._backend.matrices
            self._moves = ExpertMoves(use, matrices, copies.exchange, copies.together)
        self._step_s = 0.0  # of the last step without prompts

    def details(self) -> dict[str, Any]:
        """Replays and padding rows of each bucket, and the median gap between replays."""
        gaps = statistics.median(self._gaps_s) if self._gaps_s else None
        buckets = [
            {"rows": rows, "replays": count, "padding_rows": self.replays.padding[rows]}
            for rows, count in sorted(self.replays.count.items())
        ]
        moved = {"expert_moves": self._moves.report()} if self._moves else {}
        return {"buckets": buckets, "replay_gap_s": gaps, **moved}

    @torch.inference_mode()
    def draft(self, most: int) -> None:
        """Capture steps of rows with up to `most` drafts, of the buckets that are small enough."""
        made = VerifyStep(self._decode, self.cache, self._shape, self._buckets, most)
        self._decode.lengths.fill_(IDLE)
        self._mapped = []
        self._fill()
        for bucket in reversed(self._buckets):
            if bucket in made.buckets:
                run = partial(made.run, sum(bucket))
                run()  # compiles its kernels; all rows are idle
                self._verifying[bucket] = capture(run, self._pool)
        self._filled, self._verify = False, made
        self._masks.ahead, self._masks.forces = self.ahead * made.width, True

    @torch.inference_mode()
    def launch(self, step: Step) -> None:
        """Start a step in the smallest bucket that holds all decode rows."""
        self.cache.flush()
        rows, prompts = step
        if self._moves and self._copies and self.moves_experts:
            settle = bool(prompts) and self._prefill.stages_experts
            self._copies.allow(None if settle else self._step_s)
            self._moves.between_steps(settle=settle)
        if self.expert_use is not None:
            self.expert_use.begin_step(len(rows), prompts=bool(prompts))
        verify = self._verify
        bucket = self._assign(rows) if rows else ()
        width = 1
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        ended = [row for row in prompts if row.wanted]
        chosen = scores = None
        if prompts:
            self._set_sampling(ended)
            start.record()
            if not rows:
                self._mapped = []  # slots may get other requests before they have rows again
            logits, tokens, hidden = self._pass(bucket, prompts, ended)
            if verify:
                if rows:
                    verify.keep(sum(bucket))
                verify.begin(ended, chosen=True)
            if any(row.scored for row in prompts):
                scores = self._prefill.scores(step, hidden)
        elif verify and bucket in verify.buckets and any(row.length > 1 for row in rows):
            if not self._filled:
                self._fill()
            verify.limit(rows, self._masks.forced())
            start.record()
            self._verifying[bucket].replay()
            logits, tokens, width = verify.backend.logits, verify.chosen, verify.width
            self._count_replay(bucket, len(rows))
        else:
            if not self._filled:
                self._fill()
            start.record()
            if self._decode.cascades and bucket not in self._cascades:
                self._capture_cascade(bucket)
            (self._cascades if self._decode.cascades else self.graphs)[bucket].replay()
            logits, tokens = self._backend.logits, self._decode.tokens
            self._count_replay(bucket, len(rows))
        if any(row.sampling.params.logprobs is not None for row in step.choosing):
            firsts = [self._mapped.index(row.slot) * width for row in rows]
            numbers = [first + i for first in firsts for i in range(width)]
            numbers += range(sum(bucket), sum(bucket) + len(ended))
            counts = [width] * len(rows) + [1] * len(ended)
            chosen = Chosen(logits, step, tokens, counts, numbers)
        if verify and rows and width == 1 and not prompts:
            verify.keep(sum(bucket))
        end.record()
        self._steps.append(_Launched(step, start, end, chosen, scores))

    @torch.inference_mode()
    def resume(self, row: Row) -> None:
        """Let the token of `row` be the newest of its slot."""
        self._set_sampling([row])
        (token,) = row.tokens
        self._decode.newest[row.slot].fill_(token)
        self._mapped = []  # the slot's row may be another request's
        if self._verify:
            self._verify.begin([row], chosen=False)

    def has_ended(self) -> bool:
        """Whether the oldest step has ended, or all were dropped."""
        return not self._steps or self._steps[0].end.query()

    @torch.inference_mode()
    def collect(self) -> Accepted:
        """The tokens accepted in the oldest step."""
        launched = self._steps.popleft()
        if self._decode.cascades and not launched.end.query():
            later = (b for b in reversed(self._buckets) if sum(b) <= len(self._mapped))
            if bucket := next((b for b in later if b not in self._cascades), None):
                self._capture_cascade(bucket)  # while the CPU would wait
        launched.end.synchronize()
        self._masks.check()
        if self._last is not None:
            self._gaps_s.append(self._last.end.elapsed_time(launched.start) / 1e3)
        self._last = launched
        if self._moves and not launched.step.prompts:
            self._step_s = launched.start.elapsed_time(launched.end) / 1e3
        logprobs = launched.chosen.collect().logprobs if launched.chosen else ()
        scores = launched.scores.collect() if launched.scores else ()
        step, drafted = launched.step, list[int]()
        tokens = self._decode.logged(step._replace(decode=()) if self._verify else step)
        if self._verify:
            accepted = self._verify.accepted(step, tokens)
            tokens, drafted = accepted.tokens, list(accepted.drafted)
            own = zip(logprobs, tokens, strict=False)
            logprobs = [likeliest[: len(new)] for likeliest, new in own]
        slots = (row.slot for row in step.rows)
        self._masks.release_failed(zip(slots, tokens, strict=True))
        return Accepted(tokens, logprobs, scores, drafted)

    def _count_replay(self, bucket: Bucket, rows: int) -> None:
        self.replays.count[sum(bucket)] += 1
        self.replays.padding[sum(bucket)] += sum(bucket) - rows

    def drop(self) -> None:
        """Wait for all launched steps and discard their tokens."""
        self._masks.release_all()
        while self._steps:
            self.collect()
        if self._copies:
            self._copies.finish()

    def _pass(
        self, bucket: Bucket, parts: Sequence[Row], ended: Sequence[Row]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Compute a step of the rows of `bucket` and `parts` of prompts, of which `ended` end.

        Returns logits and next tokens: those of the bucket's rows, then those of `ended`; and the
        last layer's output after the tokens of `parts`.
        """
        self._filled = False
        n, decode = sum(bucket), self._decode
        logits, hidden = self._prefill.logits(parts, decode, bucket)
        if n:
            decode.select(n, logits[:n])
        tokens = decode.tokens[:n]
        if ended:
            slots = self._on_gpu([row.slot for row in ended])
            positions = self._on_gpu([row.last for row in ended])
            first = decode.first_tokens(logits[n:], slots, positions)
            tokens = torch.cat((tokens, first))
        return logits, tokens, hidden

    def _set_sampling(self, rows: Sequence[Row]) -> None:
        """Say how the tokens of the rows' slots are chosen, where this has changed.

        All tokens of the rows' requests are known; their guides begin behind the rows.
        """
        words, device = {}, self._backend.like.device
        vocabulary = self._backend.model.config.vocab_size
        for row in rows:
            params, seed, history, limit, guidance = row.sampling
            own = mask = None
            if params.adjusts:
                made = adjustments(params, *history, limit=limit, vocabulary=vocabulary)
                own = upload(made, device)
            if guidance is not None:
                mask = self._masks.begin(row.slot, guidance.guide(history.tokens), row.last + 1)
            else:
                self._masks.release(row.slot)
            words[row.slot] = sampling_words(params, seed, mask, own)
            self._adjustments[row.slot] = own
        self._masks.announce()
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
    def op_seconds(self, length: int, leave_out: Fused | None = None) -> dict[str, float]:
        """Seconds of a full batch's step by op, each op's launches of all layers in one graph.

        Slots hold `length` cached positions, or fewer to leave room for the new one. Matrices are
        not staged. With `leave_out`, of the ops that have this part, without it. No request or step
        may be running: slots are overwritten.
        """
        length = min(length, self._positions - 1)
        decode, bucket = self._decode, self._buckets[-1]
        self._sampling = {slot: without_options(own) for slot, own in self._sampling.items()}
        decode.sampling.copy_(torch.tensor(list(self._sampling.values()), dtype=torch.int32))
        self._mapped = []
        decode.slots.copy_(self._on_gpu(range(sum(bucket))))
        decode.spilled.copy_(self._on_gpu(self.cache.pretend(length + 1)))
        decode.lengths.fill_(length)
        found = {}
        for name, launches in decode.chains(bucket, leave_out).items():
            decode.lengths.fill_(length)
            if leave_out:
                launches[0]()  # no step loads its kernel
            found[name] = replay_seconds(lambda chain=launches: [launch() for launch in chain])  # type: ignore[misc]
        decode.lengths.fill_(IDLE)
        return found

    def _assign(self, rows: Sequence[Row]) -> Bucket:
        """Give every row a place in the smallest bucket that holds them all.

        Rows keep their places where all of them have one in it; the other places become idle.
        """
        positions = {row.slot: row.start for row in rows}
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
            if self._verify:
                self._verify.assign(len(mapped))
            self._mapped = mapped
        return bucket

    def _prefixes(self, slots: Iterable[int]) -> list[SharedPrefix]:
        """Prefixes that `slots` share, the largest saving first; none if they save too little."""
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
