"""The step loop: takes requests, launches steps, collects their tokens, completes requests.

A step carries a row of every running request and parts of the prompts of new ones. It may be
launched before the tokens of the previous step are known. waiting.py lets requests begin,
admission.py gives them slots and the KV blocks of their prompts, preemption.py gives KV blocks to
the next rows, prompt_queue.py cuts prompts into parts, ended.py queues ended requests for results.
Knows neither files nor checkpoints, nor how the runner computes.
"""

import threading
import time
from collections import deque
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from dakrun.config import OFF, Speculation
from dakrun.engine.admission import Admission
from dakrun.engine.answers import Answers, Reason
from dakrun.engine.draft_choice import DraftChoice
from dakrun.engine.ended import Ended
from dakrun.engine.preemption import Preemption
from dakrun.engine.progress import EngineStats, RequestState
from dakrun.engine.prompt_queue import PromptQueue
from dakrun.engine.runner import Runner
from dakrun.engine.step import Accepted, Row, Step
from dakrun.engine.waiting import Choose, Waiting
from dakrun.errors import UsageError
from dakrun.geometry import KV_BLOCK
from dakrun.grammars import Grammars
from dakrun.plan import Plan, PromptGroups, draft_forecasts
from dakrun.requests import Completion, Request, RowError, Tokenizer


@dataclass(frozen=True)
class _Launched:
    """A step launched at time `start`, with room for `drafts` a row; the requests of its rows."""

    start: float
    step: Step
    requests: Sequence[RequestState]
    drafts: int


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
        self.speculate(speculation)
        if self._drafts.forecasts:
            runner.draft(self._drafts.forecasts)
        self.stats, self.prompts_first = EngineStats(), False
        self.answers = Answers(plan, tokenizer, grammars)
        self._kv_bytes = plan.model.kv_bytes_per_token
        chunk = runner.chunk_tokens
        beside = max(1, chunk // 2, chunk - runner.cache.slots)  # of prompts, in a step
        self.admission = Admission(runner.cache, runner.order, beside, runner.ahead)
        self._running: list[RequestState] = []  # in the order in which they began
        self.preemption = Preemption(runner, plan, self.admission, self._running)
        self.prompts = PromptQueue(runner, self.admission, PromptGroups.of(plan))
        self._one_run = threading.Lock()  # the slots serve one run at a time
        self._closed = threading.Event()
        self._collected = 0.0  # time of the last collection
        self._steps: deque[_Launched] = deque()
        self._ended = Ended(self.answers)

    def generate(
        self,
        requests: Iterable[Request | None],
        *,
        may_wait: bool = False,
        choose: Choose | None = None,
    ) -> Generator[Completion | RowError, None, None]:
        """Completions in the order in which they finish; requests are taken as there is room.

        Results are made and yielded while the device computes, since the caller may take its time.

        None instead of a request says that none has arrived: the others go on, and the next is
        asked for after a step. When nothing runs, `requests` should wait for one instead. If it
        `may_wait` at other times too, perhaps for a result, it is asked once all results are given.

        Requests begin in their order. Where KV blocks do not suffice for the next one, `choose` may
        let a shorter one be next (see Waiting).

        While others run, requests begin in groups (see PromptGroups), since a step with
        prompts costs more than its tokens. They begin at once if none is running, or none is there
        to wait for; if all that run are about to end, when these have ended.
        A request ends in a RowError where the model's logits are NaN or infinite, if the KV cache
        is too small for it, or if it has or names a token that is not in the vocabulary.
        Raises UsageError, at the first completion, while another run is active.
        """
        if not self._one_run.acquire(blocking=False):
            raise UsageError(
                "this LLM is still generating for another stream or thread",
                hint="finish or close that stream first, and give each thread its own LLM",
            )
        try:
            self.admission.reset()
            waiting = Waiting(
                iter(requests), self.answers, self.admission, self.preemption, self.prompts, choose
            )
            while True:
                while self._steps and not (self._running or waiting.beginning):
                    self._collect()  # steps of ended requests alone: `source` may take its time
                at_once = may_wait and self.admission.is_open
                while self._ended and (at_once or not self._steps or self._ended.is_late):
                    yield self._ended.next_result(self.stats)
                none_now = yield from waiting.admit(self._running, self._closed)
                if self._closed.is_set():
                    raise UsageError(
                        "this LLM was closed while it generated", hint="finish the stream first"
                    )
                if self._launch(none_now=none_now):
                    continue
                if self._ended and not self.runner.has_ended():
                    # The device still computes, and no further step can be launched now.
                    yield self._ended.next_result(self.stats)
                elif self._steps:
                    self._collect()
                elif waiting.is_over:
                    return
        except Exception:  # finished results come first
            while self._ended:
                yield self._ended.next_result(self.stats)
            raise
        finally:
            self._drop_all()
            self._one_run.release()

    def speculate(self, speculation: Speculation) -> None:
        """Let steps carry other drafts from now on, no more than the runner is prepared for."""
        self._drafts = DraftChoice(speculation, draft_forecasts(self.plan, speculation))

    def close(self) -> None:
        """End the current run, which gives finished results, then raises UsageError."""
        self._closed.set()
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
        self._ended.clear()
        self.stats.running_tokens = 0
        for r in self._running:
            self.preemption.free_copies(r)
        self._running.clear()
        self.preemption.clear()
        self.prompts.clear()
        with suppress(RuntimeError):  # of a GPU that has failed
            self.preemption.swap.wait_for_copies()
            self.runner.drop()
        self.runner.cache.release_all()

    def _launch(self, *, none_now: bool) -> bool:
        """Launch a step, and return True; False if there is nothing to compute, or it must wait.

        With `none_now` there are no waiting requests whose prompts could join those of this step.
        """
        if len(self._steps) >= self.runner.ahead:
            return False
        drafts = self._drafts.next(self._running)
        decoding, parts = self._next_rows(drafts, none_now=none_now)
        if not (decoding or parts):
            return False
        if parts and self._drafts.tries:
            drafts = 0  # the time of the step will say nothing
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
        if decode and parts:
            self.prompts.count_launch(time.perf_counter() - launched.start)
        self._steps.append(launched)
        if decode and not parts:
            self._drafts.launched(drafts)
        if decode:
            self.stats.count_rows(launched.step, self._kv_bytes_read(launched))
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

        There are neither if there is nothing to compute, or if blocks or the ends of requests must
        be waited for. Rows have up to `drafts` drafts. Prompts begin if they are worth a pass, or
        if no others can join them (`none_now`).
        """
        new = self.prompts.requests
        idle = not (self._running or new or self._steps)
        self._running += self.preemption.resume(idle=idle)
        rows = [] if self.prompts_first and new else self._running
        decoding = self.preemption.make_room(
            [r for r in rows if r.cached < r.end], drafts, self.stats, wait=bool(self._steps)
        )
        if decoding is None:
            return (), ()
        if new and self._ends_soon() and not (none_now or self.prompts.fills_a_pass):
            return (), ()  # others can then begin with these
        begins = none_now or not decoding or self.prompts.is_worth_a_pass(len(self._running))
        if not (new and begins):
            return decoding, ()
        beside = self.runner.tokens_beside([r.slot for r in decoding], 1 + drafts)
        return decoding, self.prompts.take_parts(beside)

    def _ends_soon(self) -> bool:
        """Whether all that run have decoded, and end with the steps in flight."""
        decoded = any(r.cached > len(r.prompt) for r in self._running)
        return bool(self._steps) and decoded and all(r.cached >= r.end for r in self._running)

    def _kv_bytes_read(self, launched: _Launched) -> int:
        """KV bytes that the decode rows of a step read; a block that rows share counts once."""
        cache = self.runner.cache
        of = zip(launched.step.decode, launched.requests, strict=False)
        positions = sum(row.start - r.shared for row, r in of)
        shared = sum(map(cache.borrowed, range(len(cache.counts)))) * KV_BLOCK
        return (positions + shared) * self._kv_bytes

    def _collect(self) -> None:
        """Record the tokens of the oldest step, and end the requests that end with them.

        Tokens of requests that ended before are dropped.
        """
        launched = self._steps.popleft()
        accepted, now = self.runner.collect(), time.perf_counter()
        self._count_step(launched, accepted, now)
        ending: list[tuple[RequestState, Reason]] = []
        requests, finish_reason = launched.requests, self.answers.finish_reason
        for r, tokens in zip(requests, accepted.tokens, strict=True):
            if r.ended or not tokens:
                continue
            r.first_token, r.last_token = r.first_token or now, now
            for token in tokens:
                r.tokens.append(token)
                self.stats.running_tokens += 1
                if reason := finish_reason(r):
                    ending.append((r, reason))
                    break
        for r, likeliest in zip(requests, accepted.logprobs, strict=False):
            if not r.ended:
                r.logprobs += likeliest[: len(r.tokens) - len(r.logprobs)]
        for r, scores in zip(requests, accepted.scores, strict=False):
            r.scores += scores
        for r, reason in ending:
            self._end(r, reason)

    def _count_step(self, launched: _Launched, accepted: Accepted, now: float) -> None:
        """Add a step to the totals, and correct the positions of rows by their accepted drafts."""
        seconds = now - max(launched.start, self._collected)
        self._collected = now
        self.stats.count_time(launched.step, seconds)
        if not self._drafts.forecasts:
            return
        decode, prompts = launched.step
        requests = launched.requests[: len(decode)]
        self._drafts.record(requests, accepted, launched.drafts, None if prompts else seconds)
        if launched.drafts:
            for r, row, tokens in zip(launched.requests, decode, accepted.tokens, strict=False):
                r.cached += len(tokens) - 1
                r.drafted -= row.length - 1
        self.stats.count_drafts(accepted)
        self.stats.draft_lost_s = self._drafts.rejected_s

    def _end(self, r: RequestState, reason: Reason) -> None:
        """Take `r` out of its slot; its result is made later."""
        r.ended = True
        self._running.remove(r)
        self.admission.release(r)
        self.preemption.free_copies(r)
        if reason != "error":
            self.admission.count_end(r)
        self._ended.add(r, reason)
