"""The requests that run at a step of a simulated run, and whether KV blocks suffice to their ends.

Counts them by their last steps, so that a step costs the same however many run.
"""

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from dakrun.geometry import KV_BLOCK
from dakrun.units import ceil_div


class RequestLengths(NamedTuple):
    """Tokens of a request: its prompt, new ones at most, and those of the prompt that it shares.

    The KV blocks of the shared ones are computed by earlier requests.
    """

    prompt: int
    new: int
    shared: int = 0


@dataclass
class BegunRequest:
    """A request that has begun: the tokens of its prompt left to compute, and its last step."""

    lengths: RequestLengths
    left: int
    end: int = 0

    @property
    def own(self) -> int:
        """Tokens of its prompt that it computes."""
        return self.lengths.prompt - self.lengths.shared

    @property
    def steps(self) -> int:
        """Steps from its first new token to its last."""
        return self.lengths.new - 1

    @property
    def blocks_at_end(self) -> int:
        """KV blocks of its own at its last step."""
        return ceil_div(self.own + self.steps, KV_BLOCK)


def first_that_fits(count: int, fits: Callable[[int], bool]) -> int | None:
    """The first of `count` requests for which `fits` holds; None if the last does not fit.

    The longest come first, so that those behind one that fits mostly fit, too: found by bisection.
    """
    if not count or not fits(count - 1):
        return None
    low, high = 0, count - 1
    while low < high:
        middle = (low + high) // 2
        if fits(middle):
            high = middle
        else:
            low = middle + 1
    return low


class RunningRequests:
    """The requests that have begun; those whose prompts are computed have a row of each step.

    A request whose last step is e, with E positions of its own, has E + t - e of them at step t. So
    the number of requests and the sum of E - e, by e, give the positions of all at any later step.
    """

    def __init__(self, most_steps: int) -> None:
        """`most_steps` is the most that a request takes after its first new token."""
        import numpy as np  # late, for a quick start of commands that do not get here

        self.rows = self.positions = self.shared = 0  # cached positions, and shared ones
        self._step, self._blocks_at_end = 0, 0
        self._by_end: defaultdict[int, list[BegunRequest]] = defaultdict(list)
        self._ends: list[int] = []  # a heap
        self._waiting: dict[int, BegunRequest] = {}  # for their prompts to be computed, by id()
        self._late = False  # they are counted with ends that are too early
        # By e modulo the length: whenever they are read, no e is more than `most_steps` ahead.
        self._counts = np.zeros(most_steps + 1, dtype=np.int64)
        self._offsets = np.zeros_like(self._counts)
        self._later = np.arange(most_steps, -1, -1)  # steps from now

    @property
    def steps_left(self) -> int:
        """Steps to the next one that is a request's last, if no other prompt is computed."""
        return self._ends[0] - self._step

    def begin(self, lengths: RequestLengths) -> BegunRequest:
        """Count a request as if its prompt were computed now."""
        r = BegunRequest(lengths, lengths.prompt - lengths.shared)
        self._waiting[id(r)] = r
        self._count_now(r)
        return r

    def has_room(self, lengths: RequestLengths, blocks: int) -> bool:
        """Whether so many KV blocks suffice if another request begins."""
        r = self.begin(lengths)
        fits = self.fit(blocks)
        del self._waiting[id(r)]
        self._count(r, -1)
        return fits

    def advance(self, computed: Iterable[BegunRequest], steps: int = 1) -> bool:
        """Do a step in which also `computed` prompts end; whether it is any request's last.

        Or so many `steps`, up to `steps_left`, in the last of which they end.
        """
        self._step += steps
        self.positions += self.rows * steps
        for r in computed:
            del self._waiting[id(r)]
            self._count(r, -1)
            self._count_now(r)
            if r.end not in self._by_end:
                heapq.heappush(self._ends, r.end)
            self._by_end[r.end].append(r)
            self.rows += 1
            self.positions += r.own
            self.shared += r.lengths.shared
        ended = self._by_end.pop(self._step, ())
        if ended:
            heapq.heappop(self._ends)
        for r in ended:
            self._count(r, -1)
            self.rows -= 1
            self.positions -= r.own + r.steps
            self.shared -= r.lengths.shared
        self._late = True
        return bool(ended)

    def fit(self, blocks: int) -> bool:
        """Whether so many KV blocks suffice to the ends of all, with half of each last one full."""
        if self._blocks_at_end <= blocks:
            return True
        if self._late:
            for r in self._waiting.values():
                self._count(r, -1)
                self._count_now(r)
            self._late = False
        ends = self._step + self._later
        entries = ends % len(self._counts)
        counts = self._counts[entries].cumsum()  # of those that end then or after it
        positions = self._offsets[entries].cumsum() + counts * ends
        return bool((positions <= KV_BLOCK * (blocks - counts / 2)).all())

    def _count_now(self, r: BegunRequest) -> None:
        """Count `r`, with the end that it has if its prompt is computed now."""
        r.end = self._step + r.steps
        self._count(r, 1)

    def _count(self, r: BegunRequest, by: int) -> None:
        entry = r.end % len(self._counts)
        self._blocks_at_end += by * r.blocks_at_end
        self._counts[entry] += by
        self._offsets[entry] += by * (r.own + r.steps - r.end)
