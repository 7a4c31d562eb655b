"""Preemption: KV blocks for the next rows, taken from other requests where no block is free.

A preempted request goes on from copies of its blocks in host memory, or computes them again. The
engine decides when it gets a slot again.
"""

from collections import deque

import torch

from dakrun.engine.admission import Admission
from dakrun.engine.prefix_cache import block_names
from dakrun.engine.progress import NO_SLOT, EngineStats, RequestState
from dakrun.engine.runner import Runner
from dakrun.engine.step import Row
from dakrun.engine.swap import Saved, SwapSpace, swap_beats_recompute
from dakrun.geometry import KV_BLOCK
from dakrun.plan import Plan
from dakrun.units import ceil_div


class Preemption:
    """The requests that wait for a slot again, in `queue`, and those whose copies are under way.

    `running` are the requests that run, in the order in which they began; those that give up their
    slots are taken out. `swap` has room for copies of KV blocks.
    """

    def __init__(
        self, runner: Runner, plan: Plan, admission: Admission, running: list[RequestState]
    ) -> None:
        self._runner, self._plan, self._admission = runner, plan, admission
        self._running = running
        self.swap = SwapSpace.of(runner.cache, plan)
        self.queue: deque[RequestState] = deque()
        self._swapping_in: list[
            tuple[RequestState, torch.cuda.Event | None]
        ] = []  # until copies are done

    @property
    def swapping_in(self) -> list[RequestState]:
        """Requests in a slot again, whose blocks are being copied back."""
        return [r for r, _ in self._swapping_in]

    def make_room(
        self, active: list[RequestState], drafts: int, stats: EngineStats, *, wait: bool
    ) -> list[RequestState] | None:
        """Take KV blocks for the next position of each of `active`, and for `drafts` if they fit.

        Returns the requests of `active` that can go on. Where no block is free, requests of that
        tier are preempted, the youngest first; they are the first to get a slot when one is free.
        With `wait`, since steps are in flight, it preempts none and returns None: requests that end
        in these steps give blocks back.
        """
        cache = self._runner.cache
        for r in active:
            if (r.cached % KV_BLOCK and not (drafts or r.drafted)) or r.slot == NO_SLOT:
                continue
            next_one = min(r.end, r.cached + r.drafted + 1)
            wanted, room = min(r.end, next_one + drafts), cache.room(r.slot)
            if wanted <= room or (drafts and cache.reserve(r.slot, wanted)) or next_one <= room:
                continue
            while r.slot != NO_SLOT and not cache.reserve(r.slot, next_one):
                tier = cache.tier(r.slot)
                last = next(one for one in reversed(self._running) if cache.tier(one.slot) == tier)
                if wait:  # copy the full blocks of `last` beside its steps
                    known = len(last.request.prompt_ids) + len(last.tokens) - 1
                    self._save(last, known // KV_BLOCK)
                    return None
                stats.preempted += 1
                stats.swapped += self._preempt(last)
        return [r for r in active if r.slot != NO_SLOT]

    def swap_in(self, r: RequestState) -> None:
        """Start to copy the saved blocks of `r` to the slot that it has again."""
        assert r.saved is not None
        copied = self.swap.restore(r.saved, r.slot, r.shared // KV_BLOCK)
        r.saved, r.cached = None, len(r.prompt)
        self._swapping_in.append((r, copied))

    def resume(self, *, idle: bool) -> list[RequestState]:
        """The requests that run again, since their blocks are there.

        If the engine is `idle`, wait for the first of them.
        """
        waiting: list[tuple[RequestState, torch.cuda.Event | None]] = []
        ready: list[RequestState] = []
        for r, copied in self._swapping_in:
            wait = idle and not ready
            if copied is not None and not wait and not copied.query():
                waiting.append((r, copied))
                continue
            if copied is not None:
                self.swap.wait_for_copies()
            self._runner.resume(Row(r.slot, r.cached, r.sampling, tokens=r.tokens[-1:]))
            ready.append(r)
        self._swapping_in = waiting
        return ready

    def free_copies(self, r: RequestState) -> None:
        """Free the swap space of `r`, if it has any."""
        if r.saved is not None:
            self.swap.drop(r.saved)
            r.saved = None

    def clear(self) -> None:
        """Forget all requests."""
        for r in self.queue:
            self.free_copies(r)
        self.queue.clear()
        self._swapping_in = []

    def _preempt(self, r: RequestState) -> bool:
        """Let `r`, of which no step is in flight, give its slot up; it is the next to get one.

        Its blocks are copied to the swap space. If that has no room, or copying takes longer than
        computing, `r` computes its prompt and tokens again, and the result is False. Full blocks
        also stay in the prefix cache, as long as others leave room for them.
        """
        known = (*r.request.prompt_ids, *r.tokens)
        r.prompt = known[: r.cached]  # all but the newest token
        self._runner.cache.publish(r.slot, block_names(r.prompt))
        saved = self._save(r, ceil_div(r.cached, KV_BLOCK))
        if saved:
            self.swap.wait_for_copies()
        else:
            self.free_copies(r)
            r.prompt = known
        self.queue.appendleft(r)
        self._running.remove(r)
        self._admission.release(r)
        self._admission.block()
        return saved

    def _save(self, r: RequestState, blocks: int) -> bool:
        """Start to copy the first `blocks` of `r` to the swap space.

        Frees the copies of all other running requests first. False if there is no room, or
        computing the blocks again is predicted to be faster.
        """
        if not swap_beats_recompute(self._plan, r.cached):
            return False
        self.swap.open()
        for other in self._running:
            if other is not r:
                self.free_copies(other)
        r.saved = r.saved or Saved()
        return self.swap.save(r.saved, r.slot, blocks)
