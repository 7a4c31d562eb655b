"""Requests that have begun and not ended, to begin them again. Knows nothing of slots and steps."""

from collections.abc import Iterable, Iterator

from dakrun.requests import Completion, Request, RowError


class Unfinished:
    """Requests, each taken once. A second iteration begins with those that have not finished."""

    def __init__(self, requests: Iterable[Request | None]) -> None:
        self._new = iter(requests)
        # By row and choice; a caller of `stream` may use an id again.
        self._taken: dict[tuple[str, int], list[Request]] = {}

    def __iter__(self) -> Iterator[Request | None]:
        yield from [request for alike in self._taken.values() for request in alike]
        for request in self._new:
            if request is not None:
                self._taken.setdefault((request.id, request.reply.choice), []).append(request)
            yield request

    def drop(self, result: Completion | RowError) -> None:
        """Forget a request that has finished."""
        key = (result.id, result.reply.choice)
        self._taken[key].pop(0)
        if not self._taken[key]:
            del self._taken[key]
