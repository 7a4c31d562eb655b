"""The rows that have been read but not begun, the longest first: so none is left alone at the end.

Knows lines and lengths, not what the rows say. Keeps some 250 bytes a row; their text stays in the
file, or in temporary files (spool.py) where the input cannot be read again.
"""

import threading
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from dakrun.requests.lengths import RowLengths
from dakrun.requests.lines import Line, LineSource
from dakrun.requests.native_rows import RowFormat
from dakrun.requests.spool import Spool

LOOK_AHEAD = 65_536  # rows


class Look(NamedTuple):
    """The findings of a first look at a row, in the order of the input.

    `kind` is that of the file's rows, None before the first JSON row. `new_id` is the row's if an
    earlier row has its own. `digest` is of what it says (row_digests.py).
    """

    lengths: RowLengths
    kind: RowFormat | None = None
    new_id: str | None = None
    digest: int = 0


class AheadRow(NamedTuple):
    """A row that was looked at. Rows begin in the order of these tuples.

    First come those of an earlier group of LOOK_AHEAD rows, so that none waits for ever; then those
    that may take the most decode steps; then the longest prompts.
    """

    group: int
    minus_new: int
    minus_prompt: int
    number: int
    choices: int
    place: int
    length: int | None  # None if the line is too long
    nbytes: int
    kind: RowFormat | None
    new_id: str | None
    shared: int
    digest: int = 0

    @classmethod
    def of(cls, line: Line, look: Look, group: int = 0, place: int = 0) -> "AheadRow":
        """The row on `line`, whose data lie at `place`."""
        return cls(
            group,
            -look.lengths.new,
            -look.lengths.prompt,
            line.number,
            look.lengths.choices,
            place,
            None if line.data is None else len(line.data),
            line.nbytes,
            look.kind,
            look.new_id,
            look.lengths.shared,
            look.digest,
        )


class LookAhead:
    """Iterates over the rows of `lines` and their data, None for a line that is too long.

    Looks at up to LOOK_AHEAD rows beyond those that were taken. Of a file these are read before the
    first one is taken. Where reading waits for another program, a thread reads, and what has
    arrived is taken as it comes: None in place of a row says that none has, and `wait` waits for
    one. If reading fails, the rows before are taken, then the error is raised.
    """

    def __init__(self, lines: LineSource, look: Callable[[Line], Look]) -> None:
        self._lines, self._look = lines, look
        self._source = iter(lines)
        self._rows: list[AheadRow] = []  # a heap
        self._count = 0
        self._spool = Spool()
        self._problem: Exception | None = None
        self._ended = self._closed = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        if lines.may_wait:
            self._thread = threading.Thread(target=self._read_all, name="prompts", daemon=True)
            self._thread.start()

    def __iter__(self) -> Iterator[tuple[AheadRow, bytes | None] | None]:
        while True:
            self.fill()
            with self._changed:
                if self._rows:
                    found = self._take()
                elif not self._ended:
                    found = None
                elif self._problem is not None:
                    raise self._problem
                else:
                    return
                self._changed.notify_all()
            yield found

    def wait(self) -> None:
        """Return once there is a row to take, or the end."""
        with self._changed:
            while not (self._rows or self._ended):
                self._changed.wait()

    def fill(self) -> None:
        """Look at as many rows as may be; where a thread reads, do nothing."""
        if self._thread is None:
            while not self._ended and len(self._rows) < LOOK_AHEAD:
                self._read_one()

    @property
    def ended(self) -> bool:
        """Whether the input has no more rows to look at."""
        return self._ended

    @property
    def seen(self) -> int:
        """The number of rows that were looked at so far."""
        return self._count

    def count(self) -> int:
        """The number of rows that were looked at and not taken."""
        return len(self._rows)

    def lengths(self, without: frozenset[int] = frozenset()) -> Iterator[RowLengths]:
        """Lengths of the rows that were not taken yet, but for the line numbers `without`."""
        return (
            RowLengths(-row.minus_prompt, -row.minus_new, row.choices, row.shared)
            for row in self._rows
            if row.number not in without
        )

    def close(self) -> None:
        """Free the disk space; close the input, unless the thread waits for it."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            self._spool.close()
        if self._thread is None or self._ended:
            self._lines.close()

    def _take(self) -> tuple[AheadRow, bytes | None]:
        row = heappop(self._rows)
        if row.length is None:
            return row, None
        keeper = self._lines.again if self._lines.can_seek else self._spool.take
        return row, keeper(row.place, row.length)

    def _read_all(self) -> None:
        while not self._ended and not self._closed:
            self._read_one()
            with self._changed:
                while len(self._rows) >= LOOK_AHEAD and not self._closed:
                    self._changed.wait()
        if self._closed:  # else `close` closes the input
            self._lines.close()

    def _read_one(self) -> None:
        """Look at one more row, or note the end."""
        try:
            if (line := next(self._source, None)) is not None:
                self._add(line, self._look(line))
                return
        except Exception as problem:  # raised once the rows before it were taken
            self._problem = problem
        with self._changed:
            self._ended = True
            if self._count > LOOK_AHEAD:  # now the last two groups may be one
                first = min((row.group for row in self._rows), default=0)
                self._rows = [row._replace(group=first) for row in self._rows]
                heapify(self._rows)
            self._changed.notify_all()

    def _add(self, line: Line, look: Look) -> None:
        with self._changed:
            if self._closed:
                return
            place = line.start
            if line.data is not None and not self._lines.can_seek:
                place = self._spool.add(line.data)
            row = AheadRow.of(line, look, self._count // LOOK_AHEAD, place)
            heappush(self._rows, row)
            self._count += 1
            self._changed.notify_all()
