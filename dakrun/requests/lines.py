"""The lines of a prompt file, a pipe or standard input, plain or gzip, read once and in order.

Knows bytes, no rows. Holds one line at a time.
"""

import os
import stat
import sys
from collections.abc import Iterator
from typing import IO, Any, BinaryIO, NamedTuple

from dakrun.errors import CannotRun, UsageError, check_file_name
from dakrun.requests.gzip_files import GZIP_ERRORS, unpacked

_CHECKED_BYTES = 4096  # at the start of a file, for another encoding than UTF-8
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")


class Line(NamedTuple):
    """A line that is not blank, without its line end; `data` is None if it is too long to keep.

    `nbytes` counts what was read of the file since the line before; with gzip packed bytes, often
    0.
    """

    number: int
    data: bytes | None
    nbytes: int


class LineSource:
    """Iterates over the lines of an input, once and in order; a subclass makes `_rest`.

    `bytes_read` of the input's `bytes_total` (None for a pipe) have been read. With `may_wait`,
    reading waits for a program at the other end.
    """

    name: str
    max_line_bytes: int
    may_wait: bool
    bytes_total: int | None
    bytes_read: int
    _rest: Iterator[Line]
    _first: Line | None = None

    def __iter__(self) -> Iterator[Line]:
        first, self._first = self._first, None
        if first:
            yield first
        yield from self._rest

    def first(self) -> Line | None:
        """The first line, which an iteration that begins later gives too; None without lines."""
        self._first = self._first or next(self._rest, None)
        return self._first

    def reopened(self) -> "LineSource":
        """The same input from its first line, beside this one; not for a pipe."""
        raise NotImplementedError

    def close(self) -> None:
        """Close the input."""
        raise NotImplementedError


class Lines(LineSource):
    """Iterates over the lines of `name`, a path or "-", or of `file`; `close` closes the file.

    A byte order mark is left out; blank lines are skipped, but counted. `bytes_read` of the file's
    `bytes_total` (None for a pipe) have been read. Raises UsageError if the file cannot be opened,
    CannotRun if reading fails later. With `may_wait`, reading waits for a program at the other end.
    """

    def __init__(self, name: str, max_line_bytes: int, file: BinaryIO | None = None) -> None:
        self.name, self.max_line_bytes = name, max_line_bytes
        self._file = file or open_input(name)
        info = _stat(self._file)
        is_regular = info is not None and stat.S_ISREG(info.st_mode)
        self.may_wait = info is not None and not is_regular
        self.bytes_total = info.st_size if info and is_regular and name != "-" else None
        self.bytes_read = 0
        self._unpacked: BinaryIO | None = None
        self._position = 0  # in the unpacked file
        self._rest = self._read_lines()

    def reopened(self) -> "Lines":
        """The same file from its first line, beside this one; not for a pipe."""
        return Lines(self.name, self.max_line_bytes)

    def close(self) -> None:
        """Close the file; standard input stays open. No other thread may be reading."""
        if _stat(self._file) is not None:
            self._file.close()

    def _read_lines(self) -> Iterator[Line]:
        number = before = 0
        while data := self._read():
            number += 1
            start = self._position - len(data)
            self._check_encoding(data, start)
            if is_long := len(data) > self.max_line_bytes and not data.endswith(b"\n"):
                while data and not data.endswith(b"\n"):
                    data = self._read()
            elif number == 1 and data.startswith(b"\xef\xbb\xbf"):  # byte order mark
                data = data[3:]
            if is_long or data.strip():
                kept = None if is_long else data.removesuffix(b"\n").removesuffix(b"\r")
                yield Line(number, kept, self.bytes_read - before)
                before = self.bytes_read

    def _check_encoding(self, data: bytes, start: int) -> None:
        """Raise UsageError if a line at `start` shows that the file is UTF-16 or binary."""
        if b"\0" in data[: max(0, _CHECKED_BYTES - start)] or (
            start == 0 and data.startswith(_UTF16_MARKS)
        ):
            # Characters below U+0100 have their NUL first in big-endian files, else second.
            places = [start + at for at, byte in enumerate(data[:_CHECKED_BYTES]) if byte == 0]
            marked = start == 0 and data.startswith(_UTF16_MARKS)
            side = "BE" if 2 * sum(at % 2 for at in places) < len(places) else "LE"
            raise UsageError(
                f"{self.name}: not UTF-8, but UTF-16 or binary",
                hint="make UTF-8 of UTF-16: iconv -f UTF-16"
                f"{'' if marked else side} -t UTF-8 OLD > NEW",
            )

    def _read(self) -> bytes:
        """The next line, or the start of one that is too long."""
        try:
            self._unpacked = self._unpacked or unpacked(self._file)
            data = self._unpacked.readline(self.max_line_bytes + 1)
        except GZIP_ERRORS as problem:
            raise CannotRun(
                f"{self.name}: a damaged gzip file ({problem})",
                hint="copy or pack the file again, then run again with --resume",
            ) from problem
        except OSError as problem:
            raise CannotRun(
                f"{self.name}: reading failed ({problem.strerror})",
                hint="copy the file to another disk, then run again with --resume",
            ) from problem
        self._position += len(data)
        is_packed = self.bytes_total is not None and self._unpacked is not self._file
        self.bytes_read = self._file.tell() if is_packed else self._position
        return data


def open_input(name: str) -> BinaryIO:
    """Open `name`, a path or "-", to read bytes. Raises UsageError."""
    if name == "-":
        if sys.stdin is None:
            raise UsageError("standard input is closed", hint="give -i a file, or pipe prompts in")
        if _stat(sys.stdin) is None:
            return sys.stdin.buffer
        # Not sys.stdin.buffer, which must not be in use by a thread when Python ends.
        return open(sys.stdin.fileno(), "rb", closefd=False)
    check_file_name(name)
    try:
        return open(name, "rb")
    except OSError as problem:
        raise UsageError(
            f"{name}: cannot be read ({problem.strerror})",
            hint="give a .txt, .jsonl or .parquet file of prompts, or - for standard input",
        ) from None


def _stat(file: IO[Any]) -> os.stat_result | None:
    """What the file is; None for a stream in memory."""
    try:
        return os.fstat(file.fileno())
    except (OSError, ValueError):
        return None
