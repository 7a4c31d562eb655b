"""Steps on the project's kernels: a replay of a CUDA graph, or a pass over parts of prompts.

Steps with drafts have graphs of their own. The layers of a small step with parts of prompts are a
graph, too; larger ones are launched op by op. Knows rows and slots. row_map.py says which rows of
the batch the slots have, slot_sampling.py how their tokens are chosen. step_graphs.py has the
graphs, buckets.py the numbers of rows that they are captured for, decode_step.py the launches of a
decode step, verify_step.py those of a step with drafts, prefill.py those of prompts.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dakrun.engine.adjustments import History
from dakrun.engine.buckets import Bucket, buckets, fill_order
from dakrun.engine.decode_step import IDLE, DecodeStep
from dakrun.engine.expert_copies import ExpertCopies
from dakrun.engine.expert_moves import ExpertMoves
from dakrun.engine.expert_use import ExpertUse
from dakrun.engine.kv_cache import KVCache
from dakrun.engine.logprobs import Scores
from dakrun.engine.prefill import Prefill
from dakrun.engine.replays import Replays
from dakrun.engine.row_map import RowMap
from dakrun.engine.runner import Chosen
from dakrun.engine.slot_sampling import SlotSampling
from dakrun.engine.step import Accepted, Row, Sampling, Step
from dakrun.engine.step_graphs import StepGraphs
from dakrun.engine.verify_step import VerifyStep
from dakrun.geometry import GRAPHED_ROWS, KV_BLOCK
from dakrun.kernels.attention import KVShape
from dakrun.kernels.runtime import replay_seconds
from dakrun.memory.device import upload
from dakrun.models.modules import Fused
from dakrun.plan import DraftForecast, drafts_of


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
        self._decode, self._backend, self._prefill = step, step.backend, prefill
        self.cache, self._positions = cache, shape.blocks * KV_BLOCK
        self._buckets, self._shape = buckets(cache.counts), shape
        self._verify: VerifyStep | None = None
        self._rows = RowMap(step, cache, self._buckets, shape.layer_bytes)
        self._steps: deque[_Launched] = deque()
        self._last: _Launched | None = None  # the step collected last
        self._sampling = SlotSampling(step, range(cache.slots), self.ahead)
        self._masks = self._sampling.masks
        self.graphs = StepGraphs(step, self._buckets)
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
        moved = {"expert_moves": self._moves.report()} if self._moves else {}
        return {**self.replays.report(), **moved}

    @torch.inference_mode()
    def draft(self, forecasts: Sequence[DraftForecast]) -> None:
        """Capture steps of rows with drafts, of the buckets that are small enough."""
        drafts = {bucket: drafts_of(forecasts, sum(bucket)) for bucket in self._buckets}
        widths = {bucket: 1 + n for bucket, n in drafts.items() if n}
        cost = forecasts[-1].cost
        made = VerifyStep(self._decode, self.cache, self._shape, widths, cost)
        self._decode.lengths.fill_(IDLE)
        self._rows.forget()
        self.graphs.add_drafts(made)
        self._verify = made
        self._masks.ahead, self._masks.forces = self.ahead * made.width, True

    @torch.inference_mode()
    def rehearse(self) -> None:
        """Run a request, so that no later one waits for kernels that are used outside graphs."""
        slot, prompt, tokens = self.order[0], (0,), list[int]()
        sampling = Sampling(history=History(prompt, tokens), limit=8)
        if not self.cache.reserve(slot, sampling.limit):
            return
        steps = [Step([], [Row(slot, 0, sampling, tokens=prompt)])]
        for drafts in (1, 0) if self._verify else (0,):
            steps.append(Step([Row(slot, 0, sampling, 1 + drafts)]))
        for step in steps:
            start = len(tokens)
            self.launch(step._replace(decode=[row._replace(start=start) for row in step.decode]))
            tokens += self.collect().tokens[0]
        self.drop()
        self.cache.release(slot)
        self._rows.forget()
        self._decode.lengths.fill_(IDLE)
        self._last, self.replays = None, Replays()
        if self._verify:
            self._verify.forget()
        if self.expert_use is not None:
            self.expert_use.clear()

    def tokens_beside(self, slots: Sequence[int], width: int) -> int:
        """Tokens of the bucket of rows of `slots`; their drafts may be fewer than `width` says."""
        if not slots:
            return 0
        bucket, verify = self._rows.bucket(slots), self._verify
        drafted = verify.widths.get(bucket, 1) if verify else 1
        return sum(bucket) * min(width, drafted)

    @torch.inference_mode()
    def launch(self, step: Step) -> None:
        """Start a step in the smallest bucket that holds all decode rows."""
        self.cache.flush()
        rows, prompts = step
        verify = self._verify
        bucket: Bucket = ()
        if rows:
            bucket, changed = self._rows.assign(rows)
            if verify and changed:
                verify.assign(sum(bucket))
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        ended = [row for row in prompts if row.wanted]
        drafting = self._drafts(step, bucket, len(ended))
        width = drafting.widths[bucket] if drafting else 1
        if self.expert_use is not None:
            self.expert_use.begin_step(len(rows), prompts=bool(prompts), width=width)
        tokens_in = sum(bucket) * width + sum(row.length for row in prompts)
        self._move_experts(tokens_in, prompts=bool(prompts))
        chosen = scores = None
        if prompts:
            self._sampling.begin(ended)
        else:
            self.graphs.fill(tokens_in)
        if drafting:
            drafting.limit(rows, self._masks.forced())
        start.record()
        if prompts:
            if not rows:
                self._rows.forget()  # slots may get other requests before they have rows again
            logits, tokens, hidden = self._pass(bucket, prompts, ended, drafting)
            if any(row.scored for row in prompts):
                scores = self._prefill.scores(step, hidden)
        else:
            self.replays.add(sum(bucket), len(rows))
            if drafting:
                self.graphs.verifying[bucket].replay()
                logits, tokens = drafting.backend.logits, drafting.chosen
            else:
                self.graphs.replay(bucket)
                logits, tokens = self._backend.logits, self._decode.tokens
        if verify and rows and not drafting:
            verify.keep(sum(bucket))
        if verify and prompts:
            verify.begin(ended, chosen=True)
        if any(row.sampling.params.logprobs is not None for row in step.choosing):
            firsts = [self._rows.slots.index(row.slot) * width for row in rows]
            numbers = [first + i for first in firsts for i in range(width)]
            numbers += range(sum(bucket) * width, sum(bucket) * width + len(ended))
            counts = [width] * len(rows) + [1] * len(ended)
            chosen = Chosen(logits, step, tokens, counts, numbers)
        end.record()
        self._steps.append(_Launched(step, start, end, chosen, scores))

    @torch.inference_mode()
    def resume(self, row: Row) -> None:
        """Let the token of `row` be the newest of its slot."""
        self._sampling.begin([row])
        (token,) = row.tokens
        self._decode.newest[row.slot].fill_(token)
        self._rows.forget()  # the slot's row may be another request's
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
            self.graphs.capture_ahead(len(self._rows.slots))  # while the CPU would wait
        launched.end.synchronize()
        self._masks.check()
        if self._last is not None:
            self.replays.gaps_s.append(self._last.end.elapsed_time(launched.start) / 1e3)
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

    def drop(self) -> None:
        """Wait for all launched steps and discard their tokens."""
        self._masks.release_all()
        while self._steps:
            self.collect()
        if self._copies:
            self._copies.finish()

    def _move_experts(self, tokens: int, *, prompts: bool) -> None:
        """Go on with exchanges of experts before a pass of `tokens` tokens, maybe of `prompts`.

        The first copies for a step that stages experts are made in such a step before it, so none
        move between the two. Before the first one all that are under way are completed.
        """
        if not (self._moves and self._copies):
            return
        stages = self._prefill.stages_experts if prompts else self._backend.stagings.has_experts
        settle = stages(tokens)
        moves = self.moves_experts and (prompts or not settle)
        if not (moves or (settle and self._moves.away)):
            return
        self._copies.allow(None if settle else self._step_s)
        self._moves.between_steps(settle=settle)

    def _drafts(self, step: Step, bucket: Bucket, ends: int) -> VerifyStep | None:
        """The runner's steps with drafts, if `step` is one; `ends` of its prompts end in it."""
        verify = self._verify
        if not verify or bucket not in verify.widths or all(r.length == 1 for r in step.decode):
            return None
        tokens = verify.tokens(bucket) + sum(row.length for row in step.prompts)
        fits = tokens <= self._prefill.most_tokens and verify.fits(bucket, ends)
        return verify if fits or not step.prompts else None

    def _pass(
        self,
        bucket: Bucket,
        parts: Sequence[Row],
        ended: Sequence[Row],
        drafting: VerifyStep | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Compute a step of the rows of `bucket` and `parts` of prompts, of which `ended` end.

        The rows may be `drafting`. Returns logits and next tokens: those of the bucket's rows, then
        those of `ended`; and the last layer's output after the tokens of `parts`.
        """
        self.graphs.filled = None
        n, decode = sum(bucket), self._decode
        kind = "drafts" if drafting else decode.cascades
        launches = (bucket, kind) if n <= GRAPHED_ROWS else None
        if drafting:
            rows = drafting.draft(bucket)
            n, tokens = len(rows.ids), drafting.chosen[: len(rows.ids)]
            room = drafting.backend.logits
            logits, hidden = self._prefill.logits(parts, rows, room, launches)
            drafting.accept(bucket, logits[:n])
        else:
            tokens = decode.tokens[:n]
            rows_of = decode.rows(bucket) if n else None
            logits, hidden = self._prefill.logits(parts, rows_of, None, launches)
            if n:
                decode.select(n, logits[:n])
        if ended:
            slots = self._on_gpu([row.slot for row in ended])
            positions = self._on_gpu([row.last for row in ended])
            first = decode.first_tokens(logits[n:], slots, positions)
            tokens = torch.cat((tokens, first))
        return logits, tokens, hidden

    @torch.inference_mode()
    def op_seconds(self, length: int, leave_out: Fused | None = None) -> dict[str, float]:
        """Seconds of a full batch's step by op, each op's launches of all layers in one graph.

        Slots hold `length` cached positions, or fewer to leave room for the new one. Matrices are
        not staged. With `leave_out`, of the ops that have this part, without it. No request or step
        may be running: slots are overwritten.
        """
        length = min(length, self._positions - 1)
        decode, bucket = self._decode, self._buckets[-1]
        self._sampling.drop_options()
        self._rows.forget()
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

    def _on_gpu(self, numbers: Sequence[int]) -> torch.Tensor:
        """int32 on the GPU, without waiting for it."""
        return upload(torch.tensor(numbers, dtype=torch.int32), self._backend.like.device)
