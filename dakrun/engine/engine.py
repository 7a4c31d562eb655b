"""The engine: keeps all slots busy with requests until there are none left.

`generate` alternates prefill of new requests and decode steps; a slot that finishes is refilled
at once. Knows neither files nor checkpoints.
"""

import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from dakrun.engine.kvcache import KVCache
from dakrun.engine.request import Completion, Request
from dakrun.engine.sampler import request_seed, sample
from dakrun.engine.tokenizer import StopStrings
from dakrun.models.layers import Decoder, Segment
from dakrun.plan.ops import PREFILL_CHUNK_TOKENS
from dakrun.plan.planner import Plan

Detokenize = Callable[[Sequence[int]], str]


@dataclass
class EngineStats:
    """What a run measured so far; times in seconds, bytes as really read by decode steps."""

    requests: int = 0
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
    """A request in its slot. `cached` positions of it are in the KV cache."""

    request: Request
    slot: int
    started: float
    stop: StopStrings | None
    seed: int
    tokens: list[int] = field(default_factory=list)
    cached: int = 0
    first_token: float = 0.0


class Engine:
    """Runs requests on a decoder whose operands and cache lie where `plan` put them."""

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        plan: Plan,
        device: torch.device,
        detokenize: Detokenize | None,
    ) -> None:
        self.decoder, self.cache, self.plan, self.device = decoder, cache, plan, device
        self.stats = EngineStats()
        self._detokenize = detokenize
        self._max_len = plan.workload.max_model_len
        self._eos = frozenset(plan.model.eos_token_ids)

    def generate(self, requests: Iterable[Request]) -> Iterator[Completion]:
        """Completions in the order in which they finish; requests are taken as slots free up."""
        waiting = iter(requests)
        free = list(range(self.cache.slots - 1, -1, -1))
        running: list[_Running] = []
        exhausted = False
        while True:
            new: list[_Running] = []
            while free and not exhausted:
                request = next(waiting, None)
                if request is None:
                    exhausted = True
                else:
                    new.append(self._admit(request, free.pop()))
            if new:
                self._prefill(new)
            elif running:
                self._decode(running)
            else:
                return
            running += new
            finished = [(r, reason) for r in running if (reason := self._finish_reason(r))]
            for r, reason in finished:
                running.remove(r)
                free.append(r.slot)
                yield self._complete(r, reason)

    def _admit(self, request: Request, slot: int) -> _Running:
        length = len(request.prompt_ids)
        if not 0 < length < self._max_len:
            raise ValueError(f"expected a prompt of 1 to {self._max_len - 1} tokens, got {length}")
        params = request.params
        if params.stop and self._detokenize is None:
            raise ValueError("stop strings need a tokenizer")
        stop = StopStrings(params.stop, self._detokenize) if params.stop else None  # type: ignore[arg-type]
        seed = request_seed(params.seed, request.id)
        return _Running(request, slot, time.perf_counter(), stop, seed)

    @torch.inference_mode()
    def _prefill(self, new: Sequence[_Running]) -> None:
        """Cache the prompts of `new`, chunk by chunk, and sample their first tokens."""
        start = time.perf_counter()
        for chunk in _chunks(new):
            ids = [r.request.prompt_ids[s.start : s.start + s.length] for r, s in chunk]
            tokens = torch.tensor([t for part in ids for t in part], device=self.device)
            hidden = self.decoder.prefill(tokens, [s for _, s in chunk], self.cache)
            ends = torch.tensor([s.length for _, s in chunk]).cumsum(0) - 1
            done = []
            for (r, s), end in zip(chunk, ends.tolist(), strict=True):
                r.cached += s.length
                if r.cached == len(r.request.prompt_ids):
                    done.append((r, end))
            if done:
                last = torch.tensor([end for _, end in done], device=self.device)
                self._take(self.decoder.logits(hidden[last]), [r for r, _ in done])
        self.stats.prefill_s += time.perf_counter() - start

    @torch.inference_mode()
    def _decode(self, running: Sequence[_Running]) -> None:
        """One decode step: every running request's newest token goes in, its next comes out."""
        start = time.perf_counter()
        tokens = torch.tensor([r.tokens[-1] for r in running], device=self.device)
        positions = [r.cached for r in running]
        logits = self.decoder.decode(tokens, positions, [r.slot for r in running], self.cache)
        for r in running:
            r.cached += 1
        self._take(logits, running)
        self.stats.step_s.append(time.perf_counter() - start)
        self.stats.step_rows += len(running)
        self.stats.kv_bytes_read += sum(positions) * self.plan.model.kv_bytes_per_token

    def _take(self, logits: torch.Tensor, rows: Sequence[_Running]) -> None:
        chosen = sample(
            logits,
            [r.request.params for r in rows],
            [r.seed for r in rows],
            [len(r.tokens) for r in rows],
        ).tolist()
        now = time.perf_counter()
        for r, token in zip(rows, chosen, strict=True):
            r.first_token = r.first_token or now
            r.tokens.append(token)

    def _finish_reason(self, r: _Running) -> Literal["stop", "length"] | None:
        params = r.request.params
        if r.tokens[-1] in self._eos and not params.ignore_eos:
            return "stop"
        if r.stop is not None and r.stop.hit(r.tokens):
            return "stop"
        full = len(r.request.prompt_ids) + len(r.tokens) >= self._max_len
        return "length" if full or len(r.tokens) >= params.max_tokens else None

    def _complete(self, r: _Running, reason: Literal["stop", "length"]) -> Completion:
        further = len(r.tokens) - 1
        tpot = (time.perf_counter() - r.first_token) / further if further else 0.0
        stats = self.stats
        stats.requests += 1
        stats.prompt_tokens += len(r.request.prompt_ids)
        stats.new_tokens += len(r.tokens)
        stats.ttft_s.append(r.first_token - r.started)
        if further:
            stats.tpot_s.append(tpot)
        text = self._detokenize(r.tokens) if self._detokenize else None
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
        )


def _chunks(new: Sequence[_Running]) -> Iterator[list[tuple[_Running, Segment]]]:
    """The prompts of `new` as passes of at most PREFILL_CHUNK_TOKENS tokens."""
    chunk: list[tuple[_Running, Segment]] = []
    room = PREFILL_CHUNK_TOKENS
    for r in new:
        start, end = 0, len(r.request.prompt_ids)
        while start < end:
            length = min(end - start, room)
            chunk.append((r, Segment(r.slot, start, length)))
            start, room = start + length, room - length
            if room == 0:
                yield chunk
                chunk, room = [], PREFILL_CHUNK_TOKENS
    if chunk:
        yield chunk
