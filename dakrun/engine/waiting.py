"""Requests of a run that wait for slots: first those that were preempted, then new ones.

Knows whether the run has more requests, not how their rows are computed.
"""

from collections.abc import Generator, Iterator, Sequence
from threading import Event

from dakrun.engine.admission import Admission
from dakrun.engine.answers import Answers
from dakrun.engine.preemption import Preemption
from dakrun.engine.progress import RequestState
from dakrun.engine.prompt_queue import PromptQueue
from dakrun.engine.results import refused, too_long
from dakrun.requests import BadRow, Request, RowError

_NO_MORE = object()  # instead of a request: the run has all of them


class Waiting:
    """The requests of `source`, and of `preemption`'s queue, until `admission` gives them slots.

    Prompts of requests with slots go to `prompts`. `source` gives None if no request has arrived.
    """

    def __init__(
        self, source: Iterator[Request | None], answers: Answers, admission: Admission,
        preemption: Preemption, prompts: PromptQueue,
    ) -> None:  # fmt: skip
        self._source, self._exhausted = source, False
        self._answers, self._admission = answers, admission
        self._preemption, self._prompts = preemption, prompts

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
            if queue:
                r = queue.popleft()
            else:
                request = next(self._source, _NO_MORE)
                self._exhausted = request is _NO_MORE
                if not isinstance(request, Request):
                    return True
                try:
                    r = self._answers.begin(request)
                except BadRow as bad:
                    yield refused(request, bad)
                    continue
            if self._admission.admit(r, running, self.beginning):
                if r.saved is None:
                    self._prompts.requests.append(r)
                else:
                    self._preemption.swap_in(r)
            elif self._admission.blocked:
                queue.appendleft(r)
            else:
                self._preemption.free_copies(r)
                yield too_long(r.request, r.limit, self._admission.most_positions)
        return self._exhausted and not queue
