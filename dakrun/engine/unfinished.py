"""Rows that have begun: their requests, to begin them again, and the choices that have finished.

Knows nothing of slots and steps.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from dakrun.requests import Completion, Request, RowError


class Unfinished:
    """The requests of `rows` for all choices, each taken once.

    A second iteration begins with those that have not finished.
    """

    def __init__(self, rows: Iterable[Request | None]) -> None:
        self._rows = iter(rows)
        # By row and choice; a caller of `stream` may use an id again.
        self._taken: dict[tuple[str, int], list[Request]] = {}
        self._finished: dict[str, list[Completion | RowError]] = {}  # of rows that lack some, by id

    def __iter__(self) -> Iterator[Request | None]:
        yield from [request for alike in self._taken.values() for request in alike]
        for row in self._rows:
            requests = (row, *row.further) if row else ()
            for request in requests:
                self._taken.setdefault((request.id, request.reply.choice), []).append(request)
            yield from requests or (None,)

    def finish(self, result: Completion | RowError) -> Completion | RowError | None:
        """Note the result of a request. With the last one of a row, return the row's result.

        That is the completion of the first choice, with the others as `further`. An error of a
        choice is the row's error. None while choices are missing.
        """
        key = (result.id, result.reply.choice)
        self._taken[key].pop(0)
        if not self._taken[key]:
            del self._taken[key]
        choices = self._finished.pop(result.id, [])
        choices.append(result)
        if len(choices) < result.reply.choices:
            self._finished[result.id] = choices
            return None
        choices.sort(key=lambda one: one.reply.choice)
        completions = list[Completion]()
        for one in choices:
            if isinstance(one, RowError):
                where = f"choice {one.reply.choice}: " if len(choices) > 1 else ""
                return replace(one, message=where + one.message)
            completions.append(one)
        first, *further = completions
        return replace(first, further=tuple(further)) if further else first
