"""Requests of a run that wait for slots: first those that were preempted, then new ones.

Knows whether the run has more requests, not how their rows are computed.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from threading import Event

from dakrun.engine.admission import Admission
from dakrun.engine.answers import Answers
from dakrun.engine.preemption import Preemption
from dakrun.engine.progress import RequestState
from dakrun.engine.prompt_queue import PromptQueue
from dakrun.engine.results import refused, too_long
from dakrun.requests import BadRow, Request, RowError

MOST_REFUSED = 2  # requests that seemed to fit and did not, so that others are not tried
_NO_MORE = object()  # instead of a request: the run has all of them
Choose = Callable[[Callable[[int, int], bool]], bool]
"""Lets about the longest request be next that fits, by its prompt and new tokens, if one does."""


class Waiting:
    """The requests of `source`, and of `preemption`'s queue, until `admission` gives them slots.

    Prompts of requests with slots go to `prompts`. `source` gives None if no request has arrived.
    Where KV blocks do not suffice for the request that is next, others begin meanwhile that
    `choose` finds in `source`: the longest ones for which they do. When as many have begun before
    it as there are slots, it is waited for.
    """

    def __init__(
        self, source: Iterator[Request | None], answers: Answers, admission: Admission,
        preemption: Preemption, prompts: PromptQueue, choose: Choose | None = None,
    ) -> None:  # fmt: skip
        self._source, self._exhausted = source, False
        self._answers, self._admission = answers, admission
        self._preemption, self._prompts, self._choose = preemption, prompts, choose
        self._passed: tuple[RequestState | None, int] = (None, 0)  # how many began before which

    @property
    def beginning(self) -> list[RequestState]:
        """The requests that have slots and do not run yet."""
        return [*self._prompts.requests, *self._preemption.swapping_in]

    @property
    def is_over(self) -> bool:
        """Whether no request waits or begins, and none will arrive."""
        return self._exhausted and not (self._preemption.queue or self.beginning)

    def admit(
        self, running: Sequence[RequestState], closed: Event
    ) -> Generator[RowError, None, bool]:
        """Give slots to requests while there is room and the run is not `closed`.

        Their prompts are then computed, or their saved KV blocks copied back. Yields the errors of
        requests that cannot begin or need a larger KV cache. Returns whether no request waits: the
        source had none when asked, or is exhausted.
        """
        queue = self._preemption.queue
        while self._admission.is_open and not closed.is_set():
            r = queue.popleft() if queue else (yield from self._take())
            if r is None:
                return True
            if self._admission.admit(r, running, self.beginning):
                if r.saved is None:
                    self._prompts.requests.append(r)
                else:
                    self._preemption.swap_in(r)
            elif self._admission.blocked:
                queue.appendleft(r)
                if not r.tokens:  # one that ran before keeps others from taking its blocks
                    yield from self._begin_shorter(r, running)
            else:
                self._preemption.free_copies(r)
                yield too_long(r.request, r.limit, self._admission.most_positions)
        return self._exhausted and not queue

    def _take(self) -> Generator[RowError, None, RequestState | None]:
        """The next request of the source that can begin; None if it has none now."""
        while True:
            request = next(self._source, _NO_MORE)
            self._exhausted = request is _NO_MORE
            if not isinstance(request, Request):
                return None
            try:
                return self._answers.begin(request)
            except BadRow as bad:
                yield refused(request, bad)

    def _begin_shorter(
        self, first: RequestState, running: Sequence[RequestState]
    ) -> Generator[RowError, None, None]:
        """Begin the longest requests of the source for which there are slots and KV blocks.

        `first` is next, and waits for blocks.
        """
        if self._choose is None:
            return
        queue, admission = self._preemption.queue, self._admission
        passed = self._passed[1] if self._passed[0] is first else 0
        rooms = admission.rooms_ahead(running, self.beginning)
        while passed < admission.slots and len(queue) <= MOST_REFUSED and self._choose(rooms.fit):
            if (r := (yield from self._take())) is None:
                return
            if admission.admit(r, running, self.beginning, rooms):
                self._prompts.requests.append(r)
                passed += 1
            else:  # its row's lengths were estimated, before its prompt was tokenized
                queue.append(r)
        self._passed = first, passed
        self._choose(_none_fits)  # the source may not have given the row that was chosen


def _none_fits(*_: int) -> bool:
    return False
