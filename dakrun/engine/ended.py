"""Requests that have ended and have no result yet: launching steps comes before making results."""

import time
from collections import deque

from dakrun.engine.answers import Answers, Reason
from dakrun.engine.progress import EngineStats, RequestState
from dakrun.requests import Completion, RowError

RESULT_DELAY_S = 0.5  # the most that a result waits for steps to be launched first


class Ended:
    """A queue of ended requests, the first to end first; `answers` makes their results."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self._requests: deque[tuple[RequestState, Reason]] = deque()  # and why they ended

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, r: RequestState, reason: Reason) -> None:
        """Append `r`, which ended for `reason`."""
        self._requests.append((r, reason))

    def clear(self) -> None:
        """Forget all requests."""
        self._requests.clear()

    @property
    def is_late(self) -> bool:
        """Whether the oldest result has waited for RESULT_DELAY_S."""
        r, _ = self._requests[0]
        return time.perf_counter() - r.last_token > RESULT_DELAY_S

    def next_result(self, stats: EngineStats) -> Completion | RowError:
        """Take out the request that ended first, count it in `stats`, and return its result."""
        r, reason = self._requests.popleft()
        stats.running_tokens -= len(r.tokens)
        result = self._answers.result(r, reason)
        if isinstance(result, Completion):
            stats.count_end(r, result)
        return result
