"""The rows that an output already has, plain or gzip, and where the last whole one ends.

Knows the fields that tell a result row from other lines; knows neither prompts nor the engine.
"""

import json
import zlib
from collections.abc import Iterator
from contextlib import suppress
from typing import BinaryIO, NamedTuple

from dakrun.errors import CannotRun, UsageError
from dakrun.requests.gzip_files import CutOff, is_gzip, members
from dakrun.requests.native_rows import NATIVE
from dakrun.requests.openai_rows import BATCH

# The first bytes of every result row, so also of one that was cut off.
_ROW_START = b'{"id":'


class WrittenRow(NamedTuple):
    """A row's id, whether it is an error, whether it is an OpenAI Batch row, and its line."""

    id: str
    failed: bool
    is_batch: bool
    line: bytes


class WrittenRows:
    """Iterates over the rows of an output; a part of a row at its end is left out.

    `size` is the number of bytes up to the end of the last row that was returned. `is_gzip` says
    whether the file is gzip, by its first bytes, whatever its name.

    Iterating raises UsageError for a line that is no result row and for a damaged gzip file,
    CannotRun if reading fails.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._number = 0
        self.size = 0
        with self._open() as file:
            self.is_gzip = is_gzip(file.read(2).rstrip(b"\0"))

    def __iter__(self) -> Iterator[WrittenRow]:
        self._number = self.size = 0
        try:
            with self._open() as file:
                yield from self._packed(file) if self.is_gzip else self._plain(file)
        except OSError as problem:
            raise self._unreadable(problem) from problem

    def row_format(self) -> str | None:
        """The format of the first row that is no error; None without one."""
        kinds = (row.is_batch for row in self if not row.failed)
        first = next(kinds, None)
        return None if first is None else BATCH.name if first else NATIVE.name

    def _open(self) -> BinaryIO:
        try:
            return open(self._name, "rb")
        except OSError as problem:
            raise self._unreadable(problem) from problem

    def _plain(self, file: BinaryIO) -> Iterator[WrittenRow]:
        for line in file:
            self._number += 1
            if line.endswith(b"\n"):
                row = self._row(line)
                self.size += len(line)
                yield row
            elif not _is_cut_off(line):
                raise self._not_a_result()

    def _packed(self, file: BinaryIO) -> Iterator[WrittenRow]:
        """The rows of a gzip file, where the end of a member is also the end of a row.

        One row is held back, since its member may turn out to be cut off; then the row is dropped
        with the member. If such a member has earlier rows, which were returned already, the file
        counts as damaged.
        """
        line, held, new = b"", None, 0  # new rows since `size`
        try:
            for block, end in members(file):
                *whole, line = (line + block).split(b"\n")
                for text in whole:
                    if held is not None:
                        yield held
                    self._number += 1
                    new += 1
                    held = self._row(text + b"\n")
                if end is not None and not line:
                    self.size, new = end, 0
                    if held is not None:
                        yield held
                    held = None
            if line:
                self._number += 1
                raise self._not_a_result()
        except CutOff:
            if new > 1 or (new == 0 and not _is_cut_off(line)):
                how = "its last member is cut off and holds several rows, or none"
                raise self._damaged(how) from None
        except zlib.error as problem:
            raise self._damaged(str(problem)) from None

    def _row(self, line: bytes) -> WrittenRow:
        with suppress(ValueError, TypeError, KeyError, RecursionError):
            row = json.loads(line)
            is_batch = "custom_id" in row
            id = row["custom_id" if is_batch else "id"]
            if type(id) is int and not is_batch:  # 7 and "7" are one id
                id = str(id)
            failed = row.get("error") is not None
            done = "finish_reason" in row or "choices" in row
            is_result = "error" in row if is_batch else failed or done
            if isinstance(id, str) and is_result:
                return WrittenRow(id, failed, is_batch, line)
        raise self._not_a_result()

    def _not_a_result(self) -> UsageError:
        return UsageError(
            f"{self._name}: line {self._number} is not a result row, so the file cannot be resumed",
            hint="give -o the output of the run to resume, or --overwrite to start afresh",
        )

    def _damaged(self, how: str) -> UsageError:
        return UsageError(
            f"{self._name}: damaged as a gzip file ({how}), so it cannot be resumed",
            hint="unpack its whole rows into a .jsonl file with zcat and resume that",
        )

    def _unreadable(self, problem: OSError) -> CannotRun:
        return CannotRun(
            f"{self._name}: cannot be read ({problem.strerror})", hint="give -o another file"
        )


def _is_cut_off(line: bytes) -> bool:
    """Whether a line without line end was left by a kill (part of a row) or a crash (zeros)."""
    return _ROW_START.startswith(line[: len(_ROW_START)]) or not line.strip(b"\0")
