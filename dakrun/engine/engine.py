"""The step loop: takes requests, launches steps, collects their tokens, completes requests.

A step carries a row of every running request and parts of the prompts of new ones. It may be
launched before the tokens of the previous step are known. admission.py gives requests their slots
and KV blocks, preemption.py keeps those that gave them up, prompt_queue.py cuts prompts into parts.
Knows neither files nor checkpoints, nor how the runner computes.
"""

import threading
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from dakrun.engine.admission import Admission
from dakrun.engine.preemption import Preemption
from dakrun.engine.progress import NO_SLOT, EngineStats, RequestState
from dakrun.engine.prompt_queue import PromptQueue
from dakrun.engine.results import completion, not_finite, too_long
from dakrun.engine.runner import NextTokens, PromptPart, Row, Runner
from dakrun.engine.sampler import request_seed
from dakrun.errors import UsageError
from dakrun.geometry import KV_BLOCK, NO_TOKEN
from dakrun.plan import Plan, requests_per_admission
from dakrun.requests import Completion, Request, RowError, StopStrings, Tokenizer


@dataclass(frozen=True)
class _Step:
    """A launched step. Its tokens are those of `requests`, of which the first are decode rows."""

    start: float
    requests: Sequence[RequestState]
    decode_rows: int
    prefills: bool


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

    def __init__(self, runner: Runner, plan: Plan, tokenizer: Tokenizer | None) -> None:
        self.runner, self.plan = runner, plan
        self.stats, self.prompts_first = EngineStats(), False
        self._tokenizer = tokenizer
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
        self._steps: deque[_Step] = deque()  # launched

    def generate(self, requests: Iterable[Request | None]) -> Iterator[Completion | RowError]:
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
                if self._launch_next(none_now=none_now):
                    continue
                if self._steps:
                    self._collect()
                elif source.exhausted and not (self.preemption.queue or self._beginning()):
                    return
                for r in list(self._running):
                    if reason := self._finish_reason(r):
                        yield self._end(r, reason)
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
            stop = StopStrings(params.stop, added.spelled)
        limit = params.limit(self._max_len - length)
        seed = request_seed(params.seed, request.id)
        return RequestState(request, stop, seed, limit, request.prompt_ids)

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

    def _launch_next(self, *, none_now: bool) -> bool:
        """Launch a step, and return True; False if there is nothing to compute, or it must wait.

        Prompts are in it if they are worth it, or if `none_now` waits that they could wait for.
        """
        if len(self._steps) >= self.runner.ahead:
            return False
        new = self.prompts.requests
        idle = not (self._running or new or self._steps)
        self._running += self.preemption.resume(idle=idle)
        rows = [] if self.prompts_first and new else self._running
        active = self._reserve_or_preempt([r for r in rows if r.remaining])
        if active is None:
            return False
        begins = new and (
            none_now or not active or self.prompts.is_worth_a_pass(len(self._running))
        )
        if not (active or begins):
            return False
        self._launch(active, self.prompts.take_parts(len(active)) if begins else [])
        return True

    def _reserve_or_preempt(self, active: list[RequestState]) -> list[RequestState] | None:
        """Take a KV block for the next position of each of `active`, where it needs one.

        If there is none, the requests of the tier that began last are preempted, and the others are
        the result; they are the first to get a slot when one ends. But None while steps are in
        flight: requests that end there give their blocks back.
        """
        cache = self.runner.cache
        for r in active:
            while r.slot != NO_SLOT and not cache.reserve(r.slot, r.cached + 1):
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
        """Let `r`, of which no step is in flight, give its slot up to the others that run."""
        self.stats.preempted += 1
        self.stats.swapped += self.preemption.preempt(r, self._running)
        self._running.remove(r)
        self.admission.release(r)
        self.admission.blocked = bool(self._running or self._beginning())

    def _launch(
        self, active: Sequence[RequestState], parts: Sequence[tuple[RequestState, PromptPart]]
    ) -> None:
        """Start a step of the requests `active` and of `parts` of new requests' prompts."""
        rows = [Row(r.slot, r.cached, r.request.params, r.seed) for r in active]
        start = time.perf_counter()
        self.runner.launch(rows, [part for _, part in parts])
        begun = self.prompts.take_begun(parts)
        self._running += begun
        self._steps.append(_Step(start, [*active, *begun], len(rows), bool(parts)))
        borrowed = sum(map(self.runner.cache.borrowed, range(len(self.runner.cache.counts))))
        positions = sum(r.cached - r.shared for r in active) + borrowed * KV_BLOCK
        kv_bytes = positions * self._kv_bytes if active else 0
        if parts:
            self.stats.mixed_kv_bytes += kv_bytes
        else:
            self.stats.step_rows += len(rows)
            self.stats.kv_bytes_read += kv_bytes
        for r in active:
            r.cached += 1
            r.launched += 1

    def _collect(self) -> None:
        """Record the tokens of the oldest step, except those of ended requests."""
        step, stats = self._steps.popleft(), self.stats
        found = self.runner.collect()
        now = time.perf_counter()
        seconds = now - max(step.start, self._collected)
        self._collected = now
        if step.prefills:
            stats.prefill_s += seconds
            stats.prefill_steps += 1
            stats.mixed_steps += step.decode_rows > 0
        else:
            stats.step_s.append(seconds)
        self._record(step.requests, found)

    def _record(self, rows: Sequence[RequestState], found: NextTokens) -> None:
        now = time.perf_counter()
        for r, token in zip(rows, found.tokens, strict=True):
            if not r.ended:
                r.first_token, r.last_token = r.first_token or now, now
                r.tokens.append(token)
                self.stats.running_tokens += 1
        for number, likeliest in found.logprobs.items():
            if not rows[number].ended:
                rows[number].logprobs.append(likeliest)

    def _finish_reason(self, r: RequestState) -> Literal["stop", "length", "error"] | None:
        params = r.request.params
        if not r.tokens:  # the step of its prompt is still running
            return None
        if r.tokens[-1] == NO_TOKEN:
            return "error"
        if r.tokens[-1] in self._eos and not params.ignore_eos:
            return "stop"
        if r.tokens[-1] in params.stop_token_ids:
            return "stop"
        if r.stop is not None and r.stop.hit(r.tokens):
            return "stop"
        return "length" if len(r.tokens) == r.limit else None

    def _end(
        self, r: RequestState, reason: Literal["stop", "length", "error"]
    ) -> Completion | RowError:
        """Take `r` out of its slot, and give its result."""
        r.ended = True
        self._running.remove(r)
        self.admission.release(r)
        self.preemption.free_copies(r)
        self.stats.running_tokens -= len(r.tokens)
        if reason == "error":
            return not_finite(r, self.plan.model.dtype)
        self.admission.count_end(r)
        found, stats = completion(r, reason, self._tokenizer), self.stats
        stats.requests += 1
        asked = r.request.params.max_tokens
        stats.capped += reason == "length" and asked is not None and len(r.tokens) < asked
        stats.prompt_tokens += found.prompt_tokens
        stats.shared_tokens += min(r.shared, found.prompt_tokens)
        stats.new_tokens += len(r.tokens)
        stats.ttft_s.append(found.ttft_s)
        if len(r.tokens) > 1:
            stats.tpot_s.append(found.tpot_s)
        return found
