"""The scheduler: fills slots with requests, alternates prefill and decode steps, collects tokens.

A request begins when a slot is free and the KV blocks of its tier suffice for all that run there,
to their ends. A step may be launched before the tokens of the previous step are known. Knows
neither files nor checkpoints, nor how the runner computes.
"""

import bisect
import itertools
import threading
import time
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

from dakrun.engine.admission import peak_blocks
from dakrun.engine.runner import Chosen, NextTokens, Row, Runner
from dakrun.engine.sampler import request_seed
from dakrun.errors import UsageError
from dakrun.geometry import KV_BLOCK, NO_TOKEN
from dakrun.plan import Plan, passes, requests_per_admission
from dakrun.requests import (
    Completion,
    Logprobs,
    Request,
    RowError,
    StopStrings,
    Tokenizer,
    TokenLogprob,
)
from dakrun.units import ceil_div


@dataclass
class EngineStats:
    """Totals of all runs so far; times are in seconds, by request or by decode step.

    `capped` counts the requests that ended at max_model_len, short of their max_tokens, and
    `restarted` those that gave up their KV blocks to others and began again.
    `step_rows` sums the requests of all decode steps, `kv_bytes_read` the KV bytes they read.
    """

    requests: int = 0
    capped: int = 0
    restarted: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0
    prefill_s: float = 0.0
    ttft_s: array = field(default_factory=lambda: array("d"))  # type: ignore[type-arg]
    tpot_s: array = field(default_factory=lambda: array("d"))  # type: ignore[type-arg]
    step_s: array = field(default_factory=lambda: array("d"))  # type: ignore[type-arg]
    step_rows: int = 0
    kv_bytes_read: int = 0


@dataclass
class _Running:
    """A request in its slot, of whose tokens `cached` are in the KV cache, or about to be.

    `launched` counts the new tokens, those being computed included; `limit` is their maximum.
    """

    request: Request
    slot: int
    stop: StopStrings | None
    seed: int
    limit: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[list[tuple[int, float]]] = field(default_factory=list)  # as in NextTokens
    cached: int = 0
    launched: int = 1
    started: float = 0.0
    first_token: float = 0.0
    ended: bool = False

    @property
    def remaining(self) -> int:
        """Positions that it still adds to the KV cache, at most."""
        return self.limit - self.launched


class Engine:
    """Runs requests on a `runner` whose weights and slots lie where `plan` put them."""

    def __init__(self, runner: Runner, plan: Plan, tokenizer: Tokenizer | None) -> None:
        self.runner, self.plan = runner, plan
        self.stats = EngineStats()
        self._tokenizer = tokenizer
        self._max_len = plan.workload.max_model_len
        self._eos = frozenset(plan.model.eos_token_ids)
        self._kv_bytes = plan.model.kv_bytes_per_token
        self._admitted_together = requests_per_admission(plan)
        self._order = {slot: number for number, slot in enumerate(runner.order)}
        self._free: list[int] = []  # slots, in the order in which to fill them
        self._running: list[_Running] = []  # in the order of their admission
        self._new: list[_Running] = []  # in their slots, before prefill
        self._returned: deque[Request] = deque()  # to begin before the waiting ones
        self._blocked = False  # until a request ends: no KV blocks for the next one
        self._one_run = threading.Lock()  # the slots serve one run at a time
        self._closed = False
        self._collected = 0.0  # time of the last collection
        self._steps: deque[tuple[float, list[_Running]]] = deque()  # launch time, requests

    def generate(self, requests: Iterable[Request | None]) -> Iterator[Completion | RowError]:
        """Completions in the order in which they finish; requests are taken as there is room.

        None in place of a request says that none has arrived: the others go on, and the next is
        asked for after a step. When nothing runs, `requests` should wait for one instead.

        While others run, requests begin in groups (see requests_per_admission), since a pass of
        prefill reads all weights and delays the decode steps. They begin at once if none is
        running, or none is there to wait for.
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
            waiting = iter(requests)
            self._free = list(self.runner.order)
            self._blocked = exhausted = False
            while True:
                if self._closed:
                    raise UsageError(
                        "this LLM was closed while it generated", hint="finish the stream first"
                    )
                none_now = exhausted
                while self._free and not (self._blocked or none_now):
                    try:
                        request = self._returned.popleft() if self._returned else next(waiting)
                    except StopIteration:
                        request, exhausted = None, True
                    if request is None:
                        none_now = True
                    elif not self._admit(request):
                        if self._running or self._new:
                            self._blocked = True
                            self._returned.appendleft(request)
                        else:
                            yield self._too_long(request)
                active = self._grown([r for r in self._running if r.remaining])
                if self._new and (none_now or not active or self._is_worth_a_pass(self._new)):
                    self._prefill(self._new)
                    self._running += self._new
                    self._new = []
                elif active and len(self._steps) < self.runner.ahead:
                    self._launch(active)
                    continue
                elif self._steps:
                    self._collect()
                elif exhausted and not self._returned:
                    return
                for r in list(self._running):
                    if reason := self._finish_reason(r):
                        self._release(r)
                        self._blocked = False
                        yield self._fail(r) if reason == "error" else self._complete(r, reason)
                exhausted = exhausted and not self._returned
        finally:
            self._steps.clear()
            self._running, self._new = [], []
            self._returned.clear()
            with suppress(RuntimeError):  # of a GPU that has failed
                self.runner.drop()
            self.runner.cache.release_all()
            self._one_run.release()

    def close(self) -> None:
        """End the current run, whose next completion raises UsageError, and wait for its steps."""
        self._closed = True
        with suppress(RuntimeError):  # of a GPU that has failed
            self.runner.drop()

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

    def _admit(self, request: Request) -> bool:
        """Give `request` a slot and the blocks of its prompt; False if there is no room.

        There is room in a tier if its blocks suffice for all its requests until they end, with as
        many new tokens as each may have.
        """
        length = len(request.prompt_ids)
        if not 0 < length < self._max_len:
            raise ValueError(f"expected a prompt of 1 to {self._max_len - 1} tokens, got {length}")
        params = request.params
        stop = None
        if params.stop:
            if self._tokenizer is None:
                raise ValueError("stop strings need a tokenizer")
            stop = StopStrings(params.stop, self._tokenizer.decode)
        seed = request_seed(params.seed, request.id)
        limit = min(params.max_tokens, self._max_len - length)
        cache = self.runner.cache
        first = {cache.tier(slot): slot for slot in reversed(self._free)}
        for slot in sorted(first.values(), key=self._order.__getitem__):
            r = _Running(request, slot, stop, seed, limit, cached=length)
            if self._has_room(r) and cache.reserve(slot, length):
                self._free.remove(slot)
                self._new.append(r)
                return True
        return False

    def _has_room(self, new: _Running) -> bool:
        """Whether the blocks of the tier suffice for its requests and `new`, to their ends."""
        cache = self.runner.cache
        tier = cache.tier(new.slot)
        others = itertools.chain(self._running, self._new)
        here = [new, *(r for r in others if cache.tier(r.slot) == tier)]
        ends = sum(ceil_div(r.cached + r.remaining, KV_BLOCK) for r in here)
        if ends <= cache.blocks[tier]:
            return True
        needed = peak_blocks([r.cached for r in here], [r.remaining for r in here])
        return needed <= cache.blocks[tier]

    def _grown(self, active: list[_Running]) -> list[_Running]:
        """Those of `active` that have a block for their next position, now or before.

        If none is free, the requests of the tier that began last give theirs up and begin again
        later. That is rare: requests of prompts that were computed later end later than _has_room
        expects.
        """
        cache = self.runner.cache
        for r in active:
            while not r.ended and not cache.reserve(r.slot, r.cached + 1):
                tier = cache.tier(r.slot)
                last = next(v for v in reversed(self._running) if cache.tier(v.slot) == tier)
                self._release(last)
                self._returned.appendleft(last.request)
                self._blocked = True
                self.stats.restarted += 1
        return [r for r in active if not r.ended]

    def _release(self, r: _Running) -> None:
        """Take `r` out of its slot; steps already launched for it have no effect."""
        r.ended = True
        self._running.remove(r)
        self.runner.cache.release(r.slot)
        bisect.insort(self._free, r.slot, key=self._order.__getitem__)

    def _too_long(self, request: Request) -> RowError:
        """The error of a request that the empty KV cache has too few blocks for."""
        prompt, most = len(request.prompt_ids), max(self.runner.cache.blocks) * KV_BLOCK
        new = min(request.params.max_tokens, self._max_len - prompt)
        return RowError(
            id=request.id,
            line=request.line,
            code="kv_cache_too_small",
            message=f"its {prompt} prompt and up to {new} new tokens do not fit in the KV cache: "
            f"the largest tier has room for {most} tokens; raise --hbm-budget or --host-budget, or "
            "lower --batch-size",
            reply=request.reply,
        )

    def _is_worth_a_pass(self, new: Sequence[_Running]) -> bool:
        """Whether the `new` requests are enough to begin while others run."""
        tokens = sum(len(r.request.prompt_ids) for r in new)
        return len(new) >= self._admitted_together or tokens >= self.runner.chunk_tokens

    def _prefill(self, new: Sequence[_Running]) -> None:
        """Cache the prompts of `new`, pass by pass, and sample their first tokens."""
        start = time.perf_counter()
        for r in new:
            r.started = start
        before: tuple[list[_Running], Chosen] | None = None  # first tokens of the previous pass
        by_slot = {r.slot: r for r in new}
        prompts = {r.slot: r.request.prompt_ids for r in new}
        lengths = {slot: len(prompt) for slot, prompt in prompts.items()}
        for segments in passes(lengths, self.runner.chunk_tokens):
            parts = (prompts[s.slot][s.start : s.start + s.length] for s in segments)
            logits = self.runner.prefill([t for part in parts for t in part], segments)
            ends = []
            for number, s in enumerate(segments):
                if s.start + s.length == lengths[s.slot]:
                    ends.append(number)
            done = [by_slot[segments[number].slot] for number in ends]
            rows = [Row(r.slot, r.cached, 0, r.request.params, r.seed) for r in done]
            chosen = Chosen(logits[ends[0] : ends[-1] + 1], rows) if ends else None
            self._begin(before)  # while the pass is computed
            before = (done, chosen) if chosen else None
        self._begin(before)
        self.stats.prefill_s += time.perf_counter() - start

    def _begin(self, ready: "tuple[list[_Running], Chosen] | None") -> None:
        """Record the first tokens of requests and hand them to the runner."""
        if ready is not None:
            done, chosen = ready
            found = chosen.collect()
            tokens = [max(token, 0) for token in found.tokens]  # NO_TOKEN has no embedding
            self.runner.begin([r.slot for r in done], tokens)
            self._record(done, found)

    def _launch(self, active: Sequence[_Running]) -> None:
        """Start a decode step of the requests `active`."""
        rows = [Row(r.slot, r.cached, r.launched, r.request.params, r.seed) for r in active]
        start = time.perf_counter()
        self.runner.launch(rows)
        self._steps.append((start, list(active)))
        self.stats.step_rows += len(rows)
        self.stats.kv_bytes_read += sum(r.cached for r in active) * self._kv_bytes
        for r in active:
            r.cached += 1
            r.launched += 1

    def _collect(self) -> None:
        """Record the tokens of the oldest step, except those of ended requests."""
        start, rows = self._steps.popleft()
        found = self.runner.collect()
        now = time.perf_counter()
        self.stats.step_s.append(now - max(start, self._collected))
        self._collected = now
        self._record(rows, found)

    def _record(self, rows: Sequence[_Running], found: NextTokens) -> None:
        now = time.perf_counter()
        for r, token in zip(rows, found.tokens, strict=True):
            if not r.ended:
                r.first_token = r.first_token or now
                r.tokens.append(token)
        for number, likeliest in found.logprobs.items():
            if not rows[number].ended:
                rows[number].logprobs.append(likeliest)

    def _finish_reason(self, r: _Running) -> Literal["stop", "length", "error"] | None:
        params = r.request.params
        if r.tokens[-1] == NO_TOKEN:
            return "error"
        if r.tokens[-1] in self._eos and not params.ignore_eos:
            return "stop"
        if r.stop is not None and r.stop.hit(r.tokens):
            return "stop"
        return "length" if len(r.tokens) == r.limit else None

    def _fail(self, r: _Running) -> RowError:
        """The error of a request whose newest token could not be chosen."""
        position = len(r.request.prompt_ids) + len(r.tokens) - 1
        cause = "the weights may be damaged"
        if self.plan.model.dtype == "float16":
            cause += ", or need --dtype bfloat16"
        return RowError(
            id=r.request.id,
            line=r.request.line,
            code="non_finite_logits",
            message=f"the logits of the token at position {position} (the first has position 0) "
            f"are NaN or infinite; {cause}",
            reply=r.request.reply,
        )

    def _complete(self, r: _Running, reason: Literal["stop", "length"]) -> Completion:
        further = len(r.tokens) - 1
        tpot = (time.perf_counter() - r.first_token) / further if further else 0.0
        stats = self.stats
        stats.requests += 1
        stats.capped += reason == "length" and len(r.tokens) < r.request.params.max_tokens
        stats.prompt_tokens += len(r.request.prompt_ids)
        stats.new_tokens += len(r.tokens)
        stats.ttft_s.append(r.first_token - r.started)
        if further:
            stats.tpot_s.append(tpot)
        text = self._tokenizer.decode(r.tokens) if self._tokenizer else None
        if text is not None and r.stop is not None:
            text = r.stop.cut(text)
        return Completion(
            id=r.request.id,
            text=text,
            token_ids=tuple(r.tokens),
            finish_reason=reason,
            prompt_tokens=len(r.request.prompt_ids),
            ttft_s=r.first_token - r.started,
            tpot_s=tpot,
            reply=r.request.reply,
            logprobs=self._logprobs(r),
        )

    def _logprobs(self, r: _Running) -> tuple[Logprobs, ...] | None:
        if r.request.params.logprobs is None:
            return None
        text = self._tokenizer.token_text if self._tokenizer else lambda _: None
        found = (
            [TokenLogprob(token, logprob, text(token)) for token, logprob in likeliest]
            for likeliest in r.logprobs
        )
        return tuple(Logprobs(chosen, tuple(top)) for chosen, *top in found)
