"""The scheduler: fills slots with requests, launches steps, collects their tokens.

A request begins when a slot is free and the KV blocks of its tier suffice for all that run there,
to their expected ends; where these come later, the youngest give up their blocks and go on when
there is room: from copies in host memory, or by computing them again. A step carries a row of every
running request and parts of the prompts of new ones. It may be launched before the tokens of the
previous step are known. Knows neither files nor checkpoints, nor how the runner computes.
"""

import bisect
import itertools
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

import torch

from dakrun.engine.decode_step import LARGE_BUCKET_STEP
from dakrun.engine.prefixes import block_names
from dakrun.engine.progress import NO_SLOT, EngineStats, Running
from dakrun.engine.runner import NextTokens, PromptPart, Row, Runner
from dakrun.engine.sampler import request_seed
from dakrun.engine.swap import Saved, SwapSpace, is_faster
from dakrun.errors import UsageError
from dakrun.geometry import KV_BLOCK, NO_TOKEN
from dakrun.plan import Plan, peak_blocks, requests_per_admission
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

ENDED_TO_EXPECT = 32  # requests that have ended before others are expected to end like them


@dataclass(frozen=True)
class _Step:
    """A launched step. Its tokens are those of `requests`, of which the first are decode rows."""

    start: float
    requests: Sequence[Running]
    decode_rows: int
    prefills: bool


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
        self._admitted_together = requests_per_admission(plan)
        self._order = {slot: number for number, slot in enumerate(runner.order)}
        self._free: list[int] = []  # slots, in the order in which to fill them
        self._running: list[Running] = []  # in the order of their admission
        self._new: list[Running] = []  # in their slots, before prefill
        self._beginning = 0  # requests in `_new` of a group that has begun
        self._returned: deque[Running] = deque()  # to begin before the waiting ones
        self._restored: list[tuple[Running, torch.cuda.Event | None]] = []  # until copies are done
        self.swap = SwapSpace.of(runner.cache, plan)
        self._ended, self._ended_parts = 0, 0.0  # requests that might end early: see _expected_part
        self._at_ends: list[int] = []  # blocks by tier, if all requests there ended at once
        self._blocked = False  # until a request ends: no KV blocks for the next one
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
            waiting = iter(requests)
            self._free = list(self.runner.order)
            self._at_ends = [0] * len(self.runner.cache.counts)
            self._ended, self._ended_parts = 0, 0.0
            self._blocked = exhausted = False
            while True:
                none_now = exhausted
                while self._free and not (self._blocked or none_now or self._closed):
                    try:
                        r = self._returned.popleft() if self._returned else None
                        if r is None and (request := next(waiting)) is not None:
                            r = self._run_of(request)
                    except StopIteration:
                        exhausted = True
                    if r is None:
                        none_now = True
                    elif not self._admit(r):
                        if self._running or self._new or self._restored:
                            self._blocked = True
                            self._returned.appendleft(r)
                        else:
                            yield self._too_long(r.request)
                if self._closed:
                    raise UsageError(
                        "this LLM was closed while it generated", hint="finish the stream first"
                    )
                if len(self._steps) < self.runner.ahead:
                    self._resume()
                    rows = [] if self.prompts_first and self._new else self._running
                    active = self._grown([r for r in rows if r.remaining])
                    begins = self._new and (none_now or not active or self._is_worth_a_pass())
                    if active is not None and (active or begins):
                        self._launch(active, self._begin(len(active)) if begins else [])
                        continue
                if self._steps:
                    self._collect()
                elif exhausted and not self._returned and not self._restored:
                    return
                for r in list(self._running):
                    if reason := self._finish_reason(r):
                        self._release(r)
                        self._forget_copies(r)
                        self._blocked = False
                        yield self._fail(r) if reason == "error" else self._complete(r, reason)
                exhausted = exhausted and not self._returned
        finally:
            self._steps.clear()
            for r in (*self._running, *self._returned):
                self._forget_copies(r)
            self._running, self._new, self._restored, self._beginning = [], [], [], 0
            self._returned.clear()
            with suppress(RuntimeError):  # of a GPU that has failed
                self.swap.settle()
                self.runner.drop()
            self.runner.cache.release_all()
            self._one_run.release()

    def close(self) -> None:
        """End the current run, whose next completion raises UsageError, and wait for its steps."""
        self._closed = True
        with suppress(RuntimeError):  # of a GPU that has failed
            self.runner.drop()
            self.swap.settle()
        self.swap.close()

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

    def _run_of(self, request: Request) -> Running:
        """A run of `request`, not in a slot yet."""
        length = len(request.prompt_ids)
        if not 0 < length < self._max_len:
            raise ValueError(f"expected a prompt of 1 to {self._max_len - 1} tokens, got {length}")
        params = request.params
        stop = None
        if params.stop:
            if self._tokenizer is None:
                raise ValueError("stop strings need a tokenizer")
            stop = StopStrings(params.stop, self._tokenizer.decode)
        limit = min(params.max_tokens, self._max_len - length)
        seed = request_seed(params.seed, request.id)
        return Running(request, stop, seed, limit, request.prompt_ids)

    def _admit(self, r: Running) -> bool:
        """Give `r` a slot and the blocks of its prompt; False if there is no room.

        There is room in a tier if its blocks suffice for all its requests until they end, with as
        many new tokens as each is expected to have.
        """
        cache = self.runner.cache
        r.cached, names = len(r.prompt) - (r.saved is not None), block_names(r.prompt)
        tried: set[int] = set()  # tiers
        for slot in self._free:
            if cache.tier(slot) in tried:
                continue
            tried.add(cache.tier(slot))
            r.slot, r.names, r.away = slot, names, 0
            self._share(r)
            found = self._has_room(r) and cache.reserve(slot, r.cached)
            if not found:
                cache.release(slot)
                found = self._spans(r) and cache.reserve(slot, r.cached)
            if found:
                self._free.remove(slot)
                if r.saved is None:
                    self._new.append(r)
                else:
                    copied = self.swap.restore(r.saved, slot, r.shared // KV_BLOCK)
                    r.saved, r.launched = None, len(r.tokens)
                    self._restored.append((r, copied))
                self._at_ends[cache.tier(slot)] += r.blocks_at_end
                return True
            cache.release(slot)
            if len(tried) == len(cache.counts):
                break
        r.slot = NO_SLOT
        return False

    def _has_room(self, new: Running) -> bool:
        """Whether the blocks of the tier suffice for its requests and `new`, to expected ends."""
        cache = self.runner.cache
        tier = cache.tier(new.slot)
        room = self._room(tier)
        if self._at_ends[tier] + new.blocks_at_end <= room:
            return True
        restored = (r for r, _ in self._restored)
        others = itertools.chain(self._running, self._new, restored)
        here = [new, *(r for r in others if cache.tier(r.slot) == tier)]
        part = self._expected_part()
        needed = peak_blocks([r.own_positions for r in here], [_expected(r, part) for r in here])
        return needed <= room

    def _expected_part(self) -> float:
        """The part of its limit that a request is expected to have at its end, if it may end early.

        It is the tokens of all requests so far, as parts of their limits, over the number of those
        that have ended (if these came at a constant rate, that is the likeliest mean). 1 until
        some have ended.
        """
        if self._ended < ENDED_TO_EXPECT:
            return 1.0
        running = sum(r.launched / r.limit for r in self._running if r.may_end_early)
        return min(1.0, (self._ended_parts + running) / self._ended)

    def _room(self, tier: int) -> int:
        """Blocks of a tier for requests in its slots, besides those that are shared by now."""
        cache = self.runner.cache
        return cache.blocks[tier] - cache.borrowed(tier) - (cache.spill if tier == 1 else 0)

    def _spans(self, new: Running) -> bool:
        """Put leading blocks of `new`, for which its tier has no room, into the remote tier.

        They are as few as possible. False if that is not planned for, or has no room now.
        """
        cache = self.runner.cache
        if not cache.spill or cache.tier(new.slot):
            return False
        new.names, new.shared, new.launched_prompt = (), 0, 0
        missing = new.blocks_at_end - max(0, self._room(0) - self._at_ends[0])
        if missing <= 0 or not cache.span(new.slot, missing):
            return False
        new.away = missing
        return True

    def _share(self, r: Running) -> None:
        """Let `r`, of whose prompt nothing is computed, have the blocks that others computed.

        Its last token is computed in any case: the first new one follows from it.
        """
        usable = r.names[: (len(r.prompt) - 1) // KV_BLOCK]
        r.shared = r.launched_prompt = self.runner.cache.share(r.slot, usable) * KV_BLOCK

    def _grown(self, active: list[Running]) -> list[Running] | None:
        """Those of `active` that have a block for their next position, now or before.

        If one has none, None while steps are in flight: requests that end there give theirs back.
        Else the requests of the tier that began last give theirs up. They are the first to get a
        slot when one ends.
        """
        cache = self.runner.cache
        for r in active:
            while r.slot != NO_SLOT and not cache.reserve(r.slot, r.cached + 1):
                last = self._youngest(cache.tier(r.slot))
                if self._steps:
                    self._save(last, last.cached // KV_BLOCK)  # beside the steps: full blocks
                    return None
                self._set_back(last)
        return [r for r in active if r.slot != NO_SLOT]

    def _youngest(self, tier: int) -> Running:
        """The running request of a tier that began last; there must be one."""
        cache = self.runner.cache
        return next(r for r in reversed(self._running) if cache.tier(r.slot) == tier)

    def _save(self, r: Running, blocks: int) -> bool:
        """Start to copy the first `blocks` of `r` to the swap space.

        Others that run have none there then. False if there is no room, or computing the blocks
        again is predicted to be faster.
        """
        if not is_faster(self.plan, r.cached):
            return False
        self.swap.open()
        for other in self._running:
            if other is not r:
                self._forget_copies(other)
        r.saved = r.saved or Saved()
        return self.swap.save(r.saved, r.slot, blocks)

    def _forget_copies(self, r: Running) -> None:
        """Free the swap space of `r`, if it has any."""
        if r.saved is not None:
            self.swap.drop(r.saved)
            r.saved = None

    def _resume(self) -> None:
        """Let requests run whose blocks have been copied back; wait if no other one runs."""
        waiting: list[tuple[Running, torch.cuda.Event | None]] = []
        for r, copied in self._restored:
            idle = not (self._running or self._new or self._steps)
            if copied is not None and not idle and not copied.query():
                waiting.append((r, copied))
                continue
            if copied is not None:
                self.swap.settle()
            row = Row(r.slot, r.cached, r.request.params, r.seed)
            self.runner.resume(row, r.tokens[-1])
            self._running.append(r)
        self._restored = waiting

    def _set_back(self, r: Running) -> None:
        """Take `r`, of which no step is in flight, out of its slot, to go on later.

        Its blocks are copied to the swap space. If there is no room, or that takes longer, it
        computes its prompt and tokens again. Full blocks are also kept as long as others leave
        room for them.
        """
        r.prompt, r.launched = (*r.request.prompt_ids, *r.tokens), len(r.tokens) + 1
        cached = (len(r.prompt) - 1) // KV_BLOCK  # in full blocks; the last token is not
        self.runner.cache.publish(r.slot, block_names(r.prompt)[:cached])
        if self._save(r, ceil_div(r.cached, KV_BLOCK)):
            self.swap.settle()
            self.stats.swapped += 1
        else:
            self._forget_copies(r)
        self._release(r)
        r.ended, r.slot = False, NO_SLOT
        self._returned.appendleft(r)
        self._blocked = True
        self.stats.restarted += 1

    def _release(self, r: Running) -> None:
        """Take `r` out of its slot; steps already launched for it have no effect."""
        cache = self.runner.cache
        r.ended = True
        self._running.remove(r)
        cache.release(r.slot)
        self._at_ends[cache.tier(r.slot)] -= r.blocks_at_end
        bisect.insort(self._free, r.slot, key=self._order.__getitem__)

    def _too_long(self, request: Request) -> RowError:
        """The error of a request that the empty KV cache has too few blocks for."""
        prompt, cache = len(request.prompt_ids), self.runner.cache
        most = max(*cache.blocks, cache.blocks[0] + cache.spill) * KV_BLOCK
        new = min(request.params.max_tokens, self._max_len - prompt)
        return RowError(
            id=request.id,
            line=request.line,
            code="kv_cache_too_small",
            message=f"its {prompt} prompt and up to {new} new tokens do not fit in the KV cache: "
            f"there is room for {most} tokens; raise --hbm-budget or --host-budget, or "
            "lower --batch-size",
            reply=request.reply,
        )

    def _is_worth_a_pass(self) -> bool:
        """Whether the new requests are enough to begin, or to go on with, while others run.

        Where KV blocks are fewer than slots need, a group is the same share of those that run.
        """
        there = len(self._running) + len(self._new)
        tokens = sum(len(r.prompt) - r.launched_prompt for r in self._new)
        return (
            self._beginning > 0
            or len(self._new) * self.runner.cache.slots >= self._admitted_together * there
            or tokens >= self.runner.chunk_tokens
        )

    def _begin(self, rows: int) -> list[tuple[Running, PromptPart]]:
        """The parts of new requests' prompts that the next step computes beside `rows` rows.

        Together they have up to chunk_tokens, which is as many as a product's launch may multiply.
        A request waits for the next step if its next block is one that an earlier part computes.
        """
        most, now, parts = self.runner.chunk_tokens, time.perf_counter(), []
        room = max(most // 2, most - ceil_div(rows, LARGE_BUCKET_STEP) * LARGE_BUCKET_STEP)
        computed: set[bytes] = set()  # names of blocks, in this step
        for r in self._new:
            if not room:
                break
            prompt = r.prompt
            if r.launched_prompt == r.shared:
                before = r.blocks_at_end
                self._share(r)
                if r.blocks_at_end < before:
                    self._at_ends[self.runner.cache.tier(r.slot)] += r.blocks_at_end - before
                    self._blocked = False
                number = r.shared // KV_BLOCK
                usable = r.names[: (len(prompt) - 1) // KV_BLOCK]
                if number < len(usable) and usable[number] in computed:
                    continue
            start = r.launched_prompt
            tokens = prompt[start : start + room]
            r.started = r.started or now
            r.launched_prompt += len(tokens)
            room -= len(tokens)
            computed.update(r.names[start // KV_BLOCK : ceil_div(r.launched_prompt, KV_BLOCK)])
            row = Row(r.slot, len(prompt) - 1, r.request.params, r.seed)
            ends = r.launched_prompt == len(prompt)
            parts.append((r, PromptPart(row, start, tokens, ends)))
        return parts

    def _launch(
        self, active: Sequence[Running], parts: Sequence[tuple[Running, PromptPart]]
    ) -> None:
        """Start a step of the requests `active` and of `parts` of new requests' prompts."""
        rows = [Row(r.slot, r.cached, r.request.params, r.seed) for r in active]
        start = time.perf_counter()
        self.runner.launch(rows, [part for _, part in parts])
        for r, _ in parts:
            self.runner.cache.publish(r.slot, r.names[: r.launched_prompt // KV_BLOCK])
        begun = [r for r, part in parts if part.ends]
        if parts:
            self._beginning = len(self._new) - len(begun)
            ended = set(map(id, begun))
            self._new = [r for r in self._new if id(r) not in ended]
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

    def _record(self, rows: Sequence[Running], found: NextTokens) -> None:
        now = time.perf_counter()
        for r, token in zip(rows, found.tokens, strict=True):
            if not r.ended:
                r.first_token = r.first_token or now
                r.tokens.append(token)
        for number, likeliest in found.logprobs.items():
            if not rows[number].ended:
                rows[number].logprobs.append(likeliest)

    def _finish_reason(self, r: Running) -> Literal["stop", "length", "error"] | None:
        params = r.request.params
        if not r.tokens:  # the step of its prompt is still running
            return None
        if r.tokens[-1] == NO_TOKEN:
            return "error"
        if r.tokens[-1] in self._eos and not params.ignore_eos:
            return "stop"
        if r.stop is not None and r.stop.hit(r.tokens):
            return "stop"
        return "length" if len(r.tokens) == r.limit else None

    def _fail(self, r: Running) -> RowError:
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

    def _complete(self, r: Running, reason: Literal["stop", "length"]) -> Completion:
        if r.may_end_early:
            self._ended += 1
            self._ended_parts += len(r.tokens) / r.limit
        further = len(r.tokens) - 1
        tpot = (time.perf_counter() - r.first_token) / further if further else 0.0
        stats = self.stats
        stats.requests += 1
        stats.capped += reason == "length" and len(r.tokens) < r.request.params.max_tokens
        stats.prompt_tokens += len(r.request.prompt_ids)
        stats.shared_tokens += min(r.shared, len(r.request.prompt_ids))
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

    def _logprobs(self, r: Running) -> tuple[Logprobs, ...] | None:
        if r.request.params.logprobs is None:
            return None
        text = self._tokenizer.token_text if self._tokenizer else lambda _: None
        found = (
            [TokenLogprob(token, logprob, text(token)) for token, logprob in likeliest]
            for likeliest in r.logprobs
        )
        return tuple(Logprobs(chosen, tuple(top)) for chosen, *top in found)


def _expected(r: Running, part: float) -> int:
    """Positions that `r` is expected to add, if it ends when it has `part` of its limit.

    If it is beyond that already, a block more.
    """
    if not r.may_end_early:
        return r.remaining
    return min(r.remaining, max(KV_BLOCK, round(part * r.limit) - r.launched))
