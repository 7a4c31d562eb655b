"""The rows that have been read but not begun, the longest first: so none is left alone at the end.

Knows the rows' order, not their content, which lies in temporary files (spool.py). A row takes some
400 bytes of memory.
"""

import threading
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator

from dakrun.plan import first_that_fits
from dakrun.requests.input_rows import AheadRow, InputRows
from dakrun.requests.lengths import RowLengths
from dakrun.requests.spool import Spool

LOOK_AHEAD = 65_536  # rows
AHEAD_BYTES = 1 << 30  # of their content
MANY_ROWS = 256  # new rows: more are sorted with all others, fewer are inserted one by one


class LookAhead:
    """Iterates over `rows` in the order in which they should begin.

    Reads up to LOOK_AHEAD rows and AHEAD_BYTES of content ahead, and gives the first row only then.
    Where reading may wait for another program, a thread reads, and rows are given as they arrive.
    None instead of a row says that none has arrived; `wait` waits for one. If reading fails, the
    rows before are given, then the error is raised. At the end the input is closed.
    """

    def __init__(self, rows: InputRows) -> None:
        self._input, self._source = rows, iter(rows)
        self._rows: list[AheadRow] = []
        self._sorted = 0  # rows in the order in which they should begin
        self._chosen: AheadRow | None = None  # the next one, if not the first
        self._count = self._nbytes = 0
        self._spool = Spool()
        self._problem: Exception | None = None
        self._ended = self._closed = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        if rows.may_wait:
            self._thread = threading.Thread(target=self._read_all, name="prompts", daemon=True)
            self._thread.start()

    def __iter__(self) -> Iterator[AheadRow | None]:
        while True:
            self.fill()
            with self._changed:
                if self._rows:
                    self._sort()
                    at = bisect_left(self._rows, self._chosen) if self._chosen else 0
                    taken = self._rows.pop(at)
                    self._sorted, self._chosen = len(self._rows), None
                    taken = taken._replace(packed=self._spool.take(taken.address))
                    self._nbytes -= len(taken.packed)
                elif not self._ended:
                    taken = None
                elif self._problem is not None:
                    raise self._problem
                else:
                    break
                self._changed.notify_all()
            yield taken
        self.close()

    def choose(self, fits: Callable[[int, int], bool]) -> bool:
        """Let the next row be the first that `fits`, by its prompt and new tokens; if one does.

        A row of the first group, found by bisection. If the shortest does not fit, the next one is
        the first of all.
        """
        self.fill()
        with self._changed:
            self._sort()
            rows, self._chosen = self._rows, None
            last = bisect_left(rows, rows[0].group + 1, key=lambda row: row.group) if rows else 0
            found = first_that_fits(last, lambda i: fits(-rows[i].minus_prompt, -rows[i].minus_new))
            if found is None or not rows[found].choices:  # a row that cannot be run
                return False
            self._chosen = rows[found]
        return True

    def wait(self) -> None:
        """Return once there is a row to take, or the end."""
        with self._changed:
            while not (self._rows or self._ended):
                self._changed.wait()

    def fill(self) -> None:
        """Read as many rows ahead as allowed; do nothing where a thread reads."""
        if self._thread is None:
            while not self._ended and self._has_room():
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

    def lengths(self) -> Iterator[RowLengths]:
        """Lengths of the rows that were not taken yet."""
        return (row.lengths for row in self._rows)

    def close(self) -> None:
        """Free the disk space; close the input, unless the thread waits for it."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            self._spool.close()
        if self._thread is None or self._ended:
            self._input.close()

    def _sort(self) -> None:
        """Put the rows that were read since into the order of all."""
        if len(self._rows) - self._sorted > MANY_ROWS:
            self._rows.sort()
        else:
            new = self._rows[self._sorted :]
            del self._rows[self._sorted :]
            for row in new:
                insort(self._rows, row)
        self._sorted = len(self._rows)

    def _has_room(self) -> bool:
        return len(self._rows) < LOOK_AHEAD and self._nbytes < AHEAD_BYTES

    def _read_all(self) -> None:
        while not self._ended and not self._closed:
            self._read_one()
            with self._changed:
                while not (self._has_room() or self._closed):
                    self._changed.wait()
        if self._closed:  # else `close` closes the input
            self._input.close()

    def _read_one(self) -> None:
        """Read one more row, or note the end."""
        try:
            for row in self._source:
                with self._changed:
                    if not self._closed:
                        group, address = self._count // LOOK_AHEAD, self._spool.add(row.packed)
                        self._rows.append(row._replace(group=group, packed=b"", address=address))
                        self._nbytes += len(row.packed)
                        self._count += 1
                        self._changed.notify_all()
                return
        except Exception as problem:  # raised once the rows before it were taken
            self._problem = problem
        with self._changed:
            self._ended = True
            if self._count > LOOK_AHEAD:  # now the last two groups may be one
                first = min((row.group for row in self._rows), default=0)
                self._rows = [row._replace(group=first) for row in self._rows]
                self._sorted = 0
            self._changed.notify_all()
