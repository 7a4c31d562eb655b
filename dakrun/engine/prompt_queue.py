"""Prompts of requests that have a slot: when they are computed, and how they are cut into parts.

Knows neither which requests get a slot nor how steps are launched.
"""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from dakrun.engine.admission import Admission
from dakrun.engine.buckets import LARGE_BUCKET_STEP
from dakrun.engine.progress import RequestState
from dakrun.engine.runner import Runner
from dakrun.engine.step import Row
from dakrun.geometry import KV_BLOCK
from dakrun.plan import PromptGroups
from dakrun.units import ceil_div

LAUNCHES = 9  # of prompts beside rows, whose median counts
# Of what the plan expects: a launch that takes less has replayed a graph, one that takes more has
# waited for the device.
SHORTEST_LAUNCH, LONGEST_LAUNCH = 0.25, 4


class PromptQueue:
    """The `requests` in slots, before the end of their prefill.

    While others run, they begin in groups of about `together` (see PromptGroups).
    """

    def __init__(self, runner: Runner, admission: Admission, groups: PromptGroups) -> None:
        self._runner, self._admission, self._groups = runner, admission, groups
        self._launches: deque[float] = deque(maxlen=LAUNCHES)  # seconds of the last ones
        self.together = groups.best()
        self.requests: list[RequestState] = []
        self._left = 0  # requests of the last group that have prompt tokens left

    def clear(self) -> None:
        """Forget all requests."""
        self.requests, self._left = [], 0

    def is_worth_a_pass(self, running: int) -> bool:
        """Whether the requests are enough to begin, or to go on with, while `running` others run.

        Where KV blocks leave slots empty, a group is smaller, in proportion to the slots in use.
        """
        new = len(self.requests)
        return self.fills_a_pass or new * self._runner.cache.slots >= self.together * (
            running + new
        )

    def count_launch(self, seconds: float) -> None:
        """Note how long the CPU took to launch prompts beside rows; groups are chosen by it."""
        expected = self._groups.launch_s
        if not expected or seconds < SHORTEST_LAUNCH * expected:
            return
        self._launches.append(min(seconds, LONGEST_LAUNCH * expected))
        if len(self._launches) == LAUNCHES:
            self.together = replace(self._groups, launch_s=median(self._launches)).best()

    @property
    def fills_a_pass(self) -> bool:
        """Whether no other request could join these, or a group of them has begun."""
        tokens = sum(len(r.prompt) - r.cached for r in self.requests)
        return self._left > 0 or tokens >= self._runner.chunk_tokens

    def take_parts(self, beside: int) -> list[tuple[RequestState, Row]]:
        """The parts of prompts of the next step, with `beside` tokens of rows, idle ones included.

        Together with these they have up to chunk_tokens tokens, or half of that at least, so that
        no launch has a few tokens alone, behind the many that one multiplies. A request waits for
        the next step if this one computes its next block already, for another request of its tier.
        """
        most, now, parts = self._runner.chunk_tokens, time.perf_counter(), []
        room = max(most // 2, most - ceil_div(beside, LARGE_BUCKET_STEP) * LARGE_BUCKET_STEP)
        computed: set[tuple[int, bytes]] = set()  # tiers and names of blocks, in this step
        for r in self.requests:
            if not room:
                break
            prompt, tier = r.prompt, self._runner.cache.tier(r.slot)
            if r.cached == r.shared:
                self._admission.share_more(r)
                number = r.shared // KV_BLOCK
                usable = r.names[: (len(prompt) - 1) // KV_BLOCK]
                if number < len(usable) and (tier, usable[number]) in computed:
                    continue
            tokens = prompt[r.cached : r.cached + room]
            end = r.cached + len(tokens)
            room -= len(tokens)
            r.started = r.started or now
            names = r.names[r.cached // KV_BLOCK : ceil_div(end, KV_BLOCK)]
            computed.update((tier, name) for name in names)
            ends = end == len(prompt)
            row = Row(
                r.slot, r.cached, r.sampling, len(tokens), tokens, wanted=int(ends),
                scored=prompt[r.cached + 1 : end + 1] if r.is_scored else (),
            )  # fmt: skip
            parts.append((r, row))
        return parts

    def take_begun(self, parts: Sequence[tuple[RequestState, Row]]) -> list[RequestState]:
        """Take out and return the requests whose prompts end with `parts`, once launched."""
        for r, _ in parts:
            self._runner.cache.publish(r.slot, r.names[: r.cached // KV_BLOCK])
        begun = [r for r, part in parts if part.wanted]
        if parts:
            self._left = len(self.requests) - len(begun)
            ended = set(map(id, begun))
            self.requests = [r for r in self.requests if id(r) not in ended]
        return begun
