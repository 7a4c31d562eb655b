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

END_BINS = 512  # in which the last steps of requests are counted


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


def _blocks_at_end(lengths: RequestLengths) -> int:
    """KV blocks of its own that a request has at its last step."""
    return ceil_div(lengths.prompt - lengths.shared + lengths.new - 1, KV_BLOCK)


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
    They are counted in END_BINS bins of consecutive steps, and as if they were the last of a bin.
    """

    def __init__(self, most_steps: int, blocks: int) -> None:
        """Requests take up to `most_steps` after their first new token, and `blocks` in all."""
        import numpy as np  # late, for a quick start of commands that do not get here

        self.rows = self.positions = self.shared = 0  # cached positions, and shared ones
        self._step, self._blocks, self._blocks_at_end = 0, blocks, 0
        self._by_end: defaultdict[int, list[BegunRequest]] = defaultdict(list)
        self._ends: list[int] = []  # a heap
        self._waiting: dict[int, BegunRequest] = {}  # for their prompts to be computed, by id()
        self._late = False  # they are counted with ends that are too early
        # By the bin of e, modulo their number: when they are read, no e is more than `most_steps`
        # ahead.
        self._bin_steps = ceil_div(most_steps + 1, END_BINS)
        bins = most_steps // self._bin_steps + 2
        self._counts = np.zeros(bins, dtype=np.int64)
        self._offsets = np.zeros_like(self._counts)
        self._later = np.arange(bins - 1, -1, -1)  # bins from now
        self._room: list[float] = []  # see _rooms; empty if it is not known

    @property
    def steps_left(self) -> int:
        """Steps to the next one that is a request's last, if no other prompt is computed."""
        return self._ends[0] - self._step

    def begin(self, lengths: RequestLengths) -> BegunRequest:
        """Count a request as if its prompt were computed now."""
        r = BegunRequest(lengths, lengths.prompt - lengths.shared)
        self._waiting[id(r)] = r
        self._count_now(r)
        self._room = []
        return r

    def has_room(self, lengths: RequestLengths) -> bool:
        """Whether the KV blocks suffice until another request ends that begins now."""
        own = lengths.prompt - lengths.shared
        if self._blocks_at_end + _blocks_at_end(lengths) <= self._blocks:
            return True
        if not self._room:
            self._room = self._rooms()
        step, end = self._step, self._step + lengths.new - 1
        room = self._room[end // self._bin_steps - step // self._bin_steps]
        return own <= room

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
        self._late, self._room = True, []
        return bool(ended)

    def _rooms(self) -> list[float]:
        """The most positions of its own that another request may begin with, by the bin of its end.

        Half of the last block of each request is full.
        """
        import numpy as np

        if self._late:
            for r in self._waiting.values():
                self._count(r, -1)
                self._count_now(r)
            self._late = False
        bins = self._step // self._bin_steps + self._later
        entries, ends = bins % len(self._counts), (bins + 1) * self._bin_steps - 1
        counts = self._counts[entries].cumsum()  # of those that end then or after it
        positions = self._offsets[entries].cumsum() + counts * ends
        free = KV_BLOCK * (self._blocks - (counts + 1) / 2) - positions - (ends - self._step)
        rooms: list[float] = np.minimum.accumulate(free[::-1]).tolist()
        return rooms

    def _count_now(self, r: BegunRequest) -> None:
        """Count `r`, with the end that it has if its prompt is computed now."""
        r.end = self._step + r.steps
        self._count(r, 1)

    def _count(self, r: BegunRequest, by: int) -> None:
        entry = r.end // self._bin_steps % len(self._counts)
        self._blocks_at_end += by * _blocks_at_end(r.lengths)
        self._counts[entry] += by
        self._offsets[entry] += by * (r.own + r.steps - r.end)
