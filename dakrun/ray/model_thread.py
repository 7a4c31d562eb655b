"""An LLM in a thread of its own, which computes rows as they come, the longest first.

Knows neither Ray nor files.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from heapq import heappop, heappush

from dakrun.config import SamplingParams
from dakrun.errors import UsageError
from dakrun.llm import LLM
from dakrun.requests import AheadRow, Completion, Request, RowError, parse_row

Result = Completion | RowError  # of a row, with all its choices
OnResult = Callable[[int, Result], None]  # takes a row's number


class ModelThread:
    """Computes rows with the LLM that `make` returns; all of its work is done in one thread.

    `on_result(number, result)` is called there for each row, in the order in which rows finish, and
    `on_end(problem)` at the end, with the exception that stopped the thread, if one did. Rows begin
    in the order of their AheadRow, whose numbers must differ. Of rows with the same id one runs at
    a time. `defaults` are for parameters that a row lacks.
    """

    def __init__(
        self,
        make: Callable[[], LLM],
        defaults: SamplingParams,
        on_result: OnResult,
        on_end: Callable[[BaseException | None], None],
    ) -> None:
        self._make, self._defaults = make, defaults
        self._on_result, self._on_end = on_result, on_end
        self._rows: list[AheadRow] = []  # a heap
        self._numbers: dict[str, int] = {}  # of the rows that run, by id
        self._same_id: defaultdict[str, list[AheadRow]] = defaultdict(
            list
        )  # wait for one that runs
        self._closed = False
        self._changed = threading.Condition()
        self._loaded = threading.Event()
        self._llm: LLM | None = None
        self._thread = threading.Thread(target=self._run, name="dakrun", daemon=True)

    def start(self) -> None:
        """Begin to load the model."""
        self._thread.start()

    def loaded(self) -> LLM | None:
        """Wait until the model is loaded, and return it; None if it cannot be."""
        self._loaded.wait()
        return self._llm

    def add(self, rows: Iterable[AheadRow]) -> None:
        """Hand rows over."""
        with self._changed:
            for row in rows:
                heappush(self._rows, row)
            self._changed.notify()

    def close(self) -> None:
        """End once the rows that have begun are finished, and give all memory back."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        problem: BaseException | None = None
        try:
            with self._make() as llm:
                self._llm = llm
                self._loaded.set()
                for result in llm.run(self._requests(llm)):
                    self._finish(result)
        except BaseException as error:
            problem = error
        self._loaded.set()
        self._on_end(problem)

    def _requests(self, llm: LLM) -> Iterator[Request | None]:
        """Requests of the rows; None while others run and none has come. Ends when closed."""
        while True:
            with self._changed:
                while not (self._rows or self._closed or self._numbers):
                    self._changed.wait()
                if self._closed:
                    return
                next_row = heappop(self._rows) if self._rows else None
            if next_row is None:
                yield None
                continue
            number = next_row.number
            parsed = parse_row(next_row, self._defaults, llm.rules)
            if isinstance(parsed, RowError):
                self._on_result(number, parsed)
            elif parsed.id in self._numbers:
                self._same_id[parsed.id].append(next_row)
            else:
                self._numbers[parsed.id] = number
                yield parsed

    def _finish(self, result: Result) -> None:
        self._on_result(self._numbers.pop(result.id), result)
        self.add(self._same_id.pop(result.id, ()))


def no_longer(problem: BaseException | None) -> BaseException:
    """The exception for rows that a thread, which ended with `problem`, has left undone."""
    return problem or UsageError("the model was closed", hint="make another DakrunProcessor")
