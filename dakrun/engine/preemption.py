"""Preemption: requests that gave up their slot and KV blocks to others, until they run again.

They go on from copies of their blocks in host memory, or compute them again. The engine decides
which request gives up its slot, and when it gets one again.
"""

from collections import deque
from collections.abc import Iterable

import torch

from dakrun.engine.prefix_cache import block_names
from dakrun.engine.progress import RequestState
from dakrun.engine.runner import Runner
from dakrun.engine.step import Row
from dakrun.engine.swap import Saved, SwapSpace, swap_beats_recompute
from dakrun.geometry import KV_BLOCK
from dakrun.plan import Plan
from dakrun.units import ceil_div


class Preemption:
    """The requests that wait for a slot again, in `queue`, and those whose copies are under way.

    `swap` has room for copies of KV blocks.
    """

    def __init__(self, runner: Runner, plan: Plan) -> None:
        self._runner, self._plan = runner, plan
        self.swap = SwapSpace.of(runner.cache, plan)
        self.queue: deque[RequestState] = deque()
        self._swapping_in: list[
            tuple[RequestState, torch.cuda.Event | None]
        ] = []  # until copies are done

    @property
    def swapping_in(self) -> list[RequestState]:
        """Requests in a slot again, whose blocks are being copied back."""
        return [r for r, _ in self._swapping_in]

    def save_ahead(self, r: RequestState, running: Iterable[RequestState]) -> None:
        """Start to copy the full blocks of `r`, which has to give up soon, beside its steps."""
        known = len(r.request.prompt_ids) + len(r.tokens) - 1  # positions before the newest token
        self._save(r, known // KV_BLOCK, running)

    def preempt(self, r: RequestState, running: Iterable[RequestState]) -> bool:
        """Queue `r`, of which no step is in flight, as the next to run; it must leave its slot now.

        Its blocks are copied to the swap space. If there is no room, or that takes longer, it
        computes its prompt and tokens again, and the result is False. Full blocks are also kept as
        long as others leave room for them.
        """
        known = (*r.request.prompt_ids, *r.tokens)
        r.prompt = known[: r.cached]  # all but the newest token
        self._runner.cache.publish(r.slot, block_names(r.prompt))
        saved = self._save(r, ceil_div(r.cached, KV_BLOCK), running)
        if saved:
            self.swap.wait_for_copies()
        else:
            self.free_copies(r)
            r.prompt = known
        self.queue.appendleft(r)
        return saved

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

    def _save(self, r: RequestState, blocks: int, running: Iterable[RequestState]) -> bool:
        """Start to copy the first `blocks` of `r` to the swap space.

        Others that are `running` have none there then. False if there is no room, or computing the
        blocks again is predicted to be faster.
        """
        if not swap_beats_recompute(self._plan, r.cached):
            return False
        self.swap.open()
        for other in running:
            if other is not r:
                self.free_copies(other)
        r.saved = r.saved or Saved()
        return self.swap.save(r.saved, r.slot, blocks)
