"""The step loop: takes requests, launches steps, collects their tokens, completes requests.

A step carries a row of every running request and parts of the prompts of new ones. It may be
launched before the tokens of the previous step are known. admission.py gives requests their slots
and KV blocks, preemption.py keeps the requests that gave theirs up, prompt_queue.py cuts prompts
into parts. Knows neither files nor checkpoints, nor how the runner computes.
"""

import threading
import time
from collections import deque
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal

from dakrun.config import OFF, Speculation
from dakrun.engine.adjustments import History
from dakrun.engine.admission import Admission
from dakrun.engine.answers import guidance_of, has_form
from dakrun.engine.draft_choice import DraftChoice
from dakrun.engine.preemption import Preemption
from dakrun.engine.progress import NO_SLOT, EngineStats, RequestState
from dakrun.engine.prompt_queue import PromptQueue
from dakrun.engine.results import completion, no_score, no_token, too_long
from dakrun.engine.runner import Runner
from dakrun.engine.sampler import request_seed
from dakrun.engine.step import Accepted, Row, Sampling, Step
from dakrun.errors import UsageError
from dakrun.geometry import KV_BLOCK
from dakrun.grammars import Grammars
from dakrun.plan import Plan, requests_per_admission
from dakrun.requests import Completion, Request, RowError, StopStrings, Tokenizer

Reason = Literal["stop", "length", "error"]  # why a request ends


@dataclass(frozen=True)
class _Launched:
    """A step launched at time `start`, with room for `drafts` a row; the requests of its rows."""

    start: float
    step: Step
    requests: Sequence[RequestState]
    drafts: int


class _Source:
    """The requests of a run, as Engine.generate takes them; `exhausted` once there are no more."""

    def __init__(self, requests: Iterable[Request | None]) -> None:
        self._requests = iter(requests)
        self.exhausted = False

    def take(self) -> Request | None:
        """The next request; None if none has arrived, or there are no more."""
        if not self.exhausted:
            for request in self._requests:
                return request
            self.exhausted = True
        return None


class Engine:
    """Runs requests on a `runner` whose weights and slots lie where `plan` put them.

    With `prompts_first` no step carries rows beside prompts, so that requests which begin together
    also decode together: for measurements.
    """

    def __init__(
        self,
        runner: Runner,
        plan: Plan,
        tokenizer: Tokenizer | None,
        grammars: Grammars | None = None,
        speculation: Speculation = OFF,
    ) -> None:
        self.runner, self.plan = runner, plan
        self._drafts = DraftChoice(speculation)
        if speculation.most:
            runner.draft(speculation.most)
        self.stats, self.prompts_first = EngineStats(), False
        self._tokenizer, self._grammars = tokenizer, grammars
        self._max_len = plan.workload.max_model_len
        self._eos = frozenset(plan.model.eos_token_ids)
        self._kv_bytes = plan.model.kv_bytes_per_token
        self.admission = Admission(runner.cache, runner.order)
        self.preemption = Preemption(runner, plan)
        self.prompts = PromptQueue(runner, self.admission, requests_per_admission(plan))
        self._running: list[RequestState] = []  # in the order in which they began
        self._one_run = threading.Lock()  # the slots serve one run at a time
        self._closed = False
        self._collected = 0.0  # time of the last collection
        self._steps: deque[_Launched] = deque()

    def generate(
        self, requests: Iterable[Request | None]
    ) -> Generator[Completion | RowError, None, None]:
        """Completions in the order in which they finish; requests are taken as there is room.

        None in place of a request says that none has arrived: the others go on, and the next is
        asked for after a step. When nothing runs, `requests` should wait for one instead.

        While others run, requests begin in groups (see requests_per_admission), since a step with
        prompts takes longer to launch. They begin at once if none is running, or none is there to
        wait for.
        A request ends in a RowError where the model's logits are NaN or infinite, or if the KV
        cache is too small for it.
        Raises UsageError, at the first completion, while another run is active.
        """
        if not self._one_run.acquire(blocking=False):
            raise UsageError(
                "this LLM is still generating for another stream or thread",
                hint="finish or close that stream first, and give each thread its own LLM",
            )
        try:
            self.admission.reset()
            source = _Source(requests)
            while True:
                while self._steps and not (self._running or self._beginning()):
                    self._collect()  # steps of ended requests alone: `source` may take its time
                none_now = yield from self._admit_waiting(source)
                if self._closed:
                    raise UsageError(
                        "this LLM was closed while it generated", hint="finish the stream first"
                    )
                if self._launch(none_now=none_now):
                    continue
                if self._steps:
                    for r, reason in self._collect():
                        yield self._end(r, reason)
                elif source.exhausted and not (self.preemption.queue or self._beginning()):
                    return
        finally:
            self._drop_all()
            self._one_run.release()

    def close(self) -> None:
        """End the current run, whose next completion raises UsageError, and wait for its steps."""
        self._closed = True
        with suppress(RuntimeError):  # of a GPU that has failed
            self.runner.drop()
            self.preemption.swap.wait_for_copies()
        self.preemption.swap.close()

    def op_seconds(self, length: int) -> Mapping[str, float]:
        """Seconds of a decode step by op (see Runner.op_seconds); empty during a run.

        Measuring may overwrite slots.
        """
        if not self._one_run.acquire(blocking=False):
            return {}
        try:
            return self.runner.op_seconds(length)
        finally:
            self._one_run.release()

    def _drop_all(self) -> None:
        """Forget all requests, and free their KV blocks and copies."""
        self._steps.clear()
        self.stats.running_tokens = 0
        for r in self._running:
            self.preemption.free_copies(r)
        self._running = []
        self.preemption.clear()
        self.prompts.clear()
        with suppress(RuntimeError):  # of a GPU that has failed
            self.preemption.swap.wait_for_copies()
            self.runner.drop()
        self.runner.cache.release_all()

    def _state_of(self, request: Request) -> RequestState:
        """`request` as it arrives, not in a slot yet."""
        length = len(request.prompt_ids)
        if not 0 < length < self._max_len:
            raise ValueError(f"expected a prompt of 1 to {self._max_len - 1} tokens, got {length}")
        params = request.params
        stop = None
        if params.stop:
            if self._tokenizer is None:
                raise ValueError("stop strings need a tokenizer")
            is_chat = request.reply.is_chat
            added = self._tokenizer.continuation(request.prompt_ids, is_chat=is_chat)
            stop = StopStrings(params.stop, added.spelled, request.reply.thought, params.min_tokens)
        if any(isinstance(word, str) for word in params.bad_words):
            raise ValueError("expected bad_words as token ids")
        limit, tokens = params.limit(self._max_len - length), list[int]()
        history = History(request.prompt_ids, tokens, self._eos)
        seed, guidance = request_seed(params.seed, request.id), guidance_of(request, self._grammars)
        sampling = Sampling(params, seed, history, limit, guidance)
        return RequestState(request, stop, sampling, limit, request.prompt_ids, tokens=tokens)

    def _admit_waiting(self, source: _Source) -> Generator[RowError, None, bool]:
        """Give slots to waiting requests while there is room, first to those that were preempted.

        Yields the errors of those for which the KV cache is too small. Returns whether none waits:
        none was there when `source` was asked, or it is exhausted.
        """
        queue = self.preemption.queue
        while self.admission.is_open and not self._closed:
            if queue:
                r = queue.popleft()
            elif (request := source.take()) is not None:
                r = self._state_of(request)
            else:
                return True
            if self._admit(r):
                continue
            if self.admission.blocked:
                queue.appendleft(r)
            else:
                self.preemption.free_copies(r)
                yield too_long(r.request, r.limit, self.admission.most_positions)
        return source.exhausted and not queue

    def _admit(self, r: RequestState) -> bool:
        """Give `r` a slot if there is room; its prompt, or its saved blocks, will follow."""
        if not self.admission.admit(r, self._running, self._beginning()):
            return False
        if r.saved is None:
            self.prompts.requests.append(r)
        else:
            self.preemption.swap_in(r)
        return True

    def _beginning(self) -> list[RequestState]:
        """The requests in slots that do not run yet."""
        return [*self.prompts.requests, *self.preemption.swapping_in]

    def _launch(self, *, none_now: bool) -> bool:
        """Launch a step, and return True; False if there is nothing to compute, or it must wait.

        With `none_now` there are no waiting requests whose prompts could join those of this step.
        """
        if len(self._steps) >= self.runner.ahead:
            return False
        drafts = self._drafts.next(len(self._running))
        decoding, parts = self._next_rows(drafts, none_now=none_now)
        if not (decoding or parts):
            return False
        decode = [Row(r.slot, r.cached, r.sampling) for r in decoding]
        if drafts:
            pairs = zip(decode, decoding, strict=True)
            decode = [row._replace(length=self._row_length(r, drafts)) for row, r in pairs]
        launched = _Launched(
            time.perf_counter(),
            Step(decode, [row for _, row in parts]),
            [*decoding, *(r for r, _ in parts)],
            drafts,
        )
        self.runner.launch(launched.step)
        self._steps.append(launched)
        self._count_launch(launched)
        for r in decoding:
            r.cached += 1
        if drafts:
            for r, row in zip(decoding, decode, strict=True):
                r.drafted += row.length - 1
        for r, row in parts:
            r.cached += row.length
        self._running += self.prompts.take_begun(parts)
        return True

    def _row_length(self, r: RequestState, drafts: int) -> int:
        """Tokens of `r` in a step with up to `drafts` drafts: as many as it may need and hold."""
        room = min(r.end, self.runner.cache.room(r.slot))
        return 1 + max(0, min(drafts, room - 1 - r.cached))

    def _next_rows(
        self, drafts: int, *, none_now: bool
    ) -> tuple[Sequence[RequestState], Sequence[tuple[RequestState, Row]]]:
        """The requests that decode in the next step, and the parts of prompts in it.

        There are neither if there is nothing to compute, or if blocks must be waited for. Rows have
        up to `drafts` drafts. Prompts begin if they are worth a pass, or if no others can join them
        (`none_now`).
        """
        new = self.prompts.requests
        idle = not (self._running or new or self._steps)
        self._running += self.preemption.resume(idle=idle)
        rows = [] if self.prompts_first and new else self._running
        decoding = self._reserve_or_preempt([r for r in rows if r.cached < r.end], drafts)
        if decoding is None:
            return (), ()
        begins = none_now or not decoding or self.prompts.is_worth_a_pass(len(self._running))
        return decoding, self.prompts.take_parts(len(decoding)) if new and begins else ()

    def _reserve_or_preempt(
        self, active: list[RequestState], drafts: int
    ) -> list[RequestState] | None:
        """Take KV blocks for the next position of each of `active`, and for `drafts` if they fit.

        Returns the requests of `active` that can go on. Where no block is free, requests of that
        tier are preempted, the youngest first; they are the first to get a slot when one is free.
        But None while steps are in flight: requests that end there give their blocks back.
        """
        cache = self.runner.cache
        for r in active:
            if (r.cached % KV_BLOCK and not (drafts or r.drafted)) or r.slot == NO_SLOT:
                continue
            next_one = min(r.end, r.cached + r.drafted + 1)
            wanted, room = min(r.end, next_one + drafts), cache.room(r.slot)
            if wanted <= room or (drafts and cache.reserve(r.slot, wanted)) or next_one <= room:
                continue
            while r.slot != NO_SLOT and not cache.reserve(r.slot, next_one):
                last = self._youngest(cache.tier(r.slot))
                if self._steps:
                    self.preemption.save_ahead(last, self._running)
                    return None
                self._preempt(last)
        return [r for r in active if r.slot != NO_SLOT]

    def _youngest(self, tier: int) -> RequestState:
        """The running request of a tier that began last; there must be one."""
        cache = self.runner.cache
        return next(r for r in reversed(self._running) if cache.tier(r.slot) == tier)

    def _preempt(self, r: RequestState) -> None:
        """Let `r` give its slot up to the other running requests. No step of it is in flight."""
        self.stats.preempted += 1
        self.stats.swapped += self.preemption.preempt(r, self._running)
        self._running.remove(r)
        self.admission.release(r)
        self.admission.blocked = bool(self._running or self._beginning())

    def _count_launch(self, launched: _Launched) -> None:
        """Add the rows of a step, and the KV bytes that they read, to the totals."""
        decode, prompts = launched.step
        if not decode:
            return
        cache = self.runner.cache
        of = zip(decode, launched.requests, strict=False)
        positions = sum(row.start - r.shared for row, r in of)
        shared = sum(map(cache.borrowed, range(len(cache.counts)))) * KV_BLOCK
        kv_bytes = (positions + shared) * self._kv_bytes
        if prompts:
            self.stats.mixed_kv_bytes += kv_bytes
        else:
            self.stats.step_rows += len(decode)
            self.stats.kv_bytes_read += kv_bytes

    def _collect(self) -> list[tuple[RequestState, Reason]]:
        """Record the tokens of the oldest step; returns the requests that end with them, and why.

        Tokens of requests that ended before are dropped.
        """
        launched, stats = self._steps.popleft(), self.stats
        accepted = self.runner.collect()
        now = time.perf_counter()
        seconds = now - max(launched.start, self._collected)
        self._collected = now
        if launched.step.prompts:
            stats.prefill_s += seconds
            stats.prefill_steps += 1
            stats.mixed_steps += bool(launched.step.decode)
        else:
            stats.step_s.append(seconds)
        if self._drafts.most:
            self._count_drafts(launched, accepted, seconds)
        return self._record(launched.requests, accepted, now)

    def _count_drafts(self, launched: _Launched, accepted: Accepted, seconds: float) -> None:
        """Correct the positions of rows by their accepted drafts, and add these to the totals."""
        decode, prompts = launched.step
        if not prompts:
            count = sum(map(len, accepted.tokens))
            self._drafts.record(len(decode), launched.drafts, seconds, count)
        rows = zip(launched.requests, decode, accepted.tokens, strict=False)
        for r, row, tokens in rows:
            r.cached += len(tokens) - 1
            r.drafted -= row.length - 1
        for count, tokens in zip(accepted.drafted, accepted.tokens, strict=False):
            if tokens:
                self.stats.drafts[count] += 1
                self.stats.accepted_drafts[count] += len(tokens) - 1
        self.stats.draft_lost_s = self._drafts.lost_s

    def _record(
        self, requests: Sequence[RequestState], accepted: Accepted, now: float
    ) -> list[tuple[RequestState, Reason]]:
        ending: list[tuple[RequestState, Reason]] = []
        for r, tokens in zip(requests, accepted.tokens, strict=True):
            if r.ended or not tokens:
                continue
            r.first_token, r.last_token = r.first_token or now, now
            for token in tokens:
                r.tokens.append(token)
                self.stats.running_tokens += 1
                if reason := self._finish_reason(r):
                    ending.append((r, reason))
                    break
        for r, likeliest in zip(requests, accepted.logprobs, strict=False):
            if not r.ended:
                r.logprobs += likeliest[: len(r.tokens) - len(r.logprobs)]
        for r, scores in zip(requests, accepted.scores, strict=False):
            r.scores += scores
        return ending

    def _finish_reason(self, r: RequestState) -> Reason | None:
        """Why `r` ends with the newest of its tokens, or None."""
        params, token = r.request.params, r.tokens[-1]
        if token < 0:
            return "error"
        if not r.limit:
            return "length"
        if token in self._eos and (not params.ignore_eos or params.structured_outputs):
            return "stop"
        if token in params.stop_token_ids:
            return "stop"
        if r.stop is not None and r.stop.hit(r.tokens):
            return "stop"
        return "length" if len(r.tokens) == r.limit else None

    def _end(self, r: RequestState, reason: Reason) -> Completion | RowError:
        """Take `r` out of its slot, and give its result."""
        r.ended = True
        self._running.remove(r)
        self.admission.release(r)
        self.preemption.free_copies(r)
        self.stats.running_tokens -= len(r.tokens)
        if reason == "error":
            return no_token(r, self.plan.model.dtype)
        if error := no_score(r, self.plan.model.dtype):
            return error
        del r.tokens[r.limit :], r.logprobs[r.limit :]
        self.admission.count_end(r)
        result, stats = completion(r, reason, self._tokenizer), self.stats
        if r.request.params.structured_outputs is not None and self._grammars is not None:
            ended = not self._eos.isdisjoint(r.tokens[-1:])
            valid = has_form(result, r.request, self._grammars, ended=ended)
            result = replace(result, valid=valid)
        stats.requests += 1
        stats.structured += result.valid is not None
        stats.valid += bool(result.valid)
        asked = r.request.params.max_tokens
        stats.capped += reason == "length" and asked is not None and len(r.tokens) < asked
        stats.prompt_tokens += result.prompt_tokens
        stats.shared_tokens += min(r.shared, result.prompt_tokens)
        stats.new_tokens += len(r.tokens)
        stats.ttft_s.append(result.ttft_s)
        if len(r.tokens) > 1:
            stats.tpot_s.append(result.tpot_s)
        return result
