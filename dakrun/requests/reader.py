"""Prompt files, read as a stream: every row becomes a Request, or a RowError if it cannot be run.

Knows files and lines, and holds one line at a time; the fields of a row are in native_rows.py and
openai_rows.py.
"""

import os
import stat
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

from dakrun.config import SamplingParams
from dakrun.errors import CannotRun, UsageError
from dakrun.requests.gzip_files import GZIP_ERRORS, unpacked, without_gz
from dakrun.requests.lengths import (
    NOTHING,
    RowLengths,
    WorkloadLengths,
    json_lengths,
    text_lengths,
)
from dakrun.requests.native_rows import (
    NATIVE,
    ParsedRow,
    RowFormat,
    decode_utf8,
    id_of,
    json_object,
)
from dakrun.requests.openai_rows import BATCH, is_batch_row
from dakrun.requests.prompts import BadRow, PromptRules
from dakrun.requests.request import IdSet, Request, RowError

Format = Literal["text", "jsonl"]

LOOK_AHEAD = 65_536  # rows
_SUFFIXES: dict[str, Format] = {".txt": "text", ".jsonl": "jsonl"}


class _Line(NamedTuple):
    """A line that is not blank, without its line end; `data` is None if it is too long to keep."""

    number: int
    data: bytes | None


class RequestReader:
    """The rows of a prompt file, read once, in order; a context manager that closes the file.

    `source` is a path or "-" (standard input), plain or gzip, as its first bytes tell. Without
    `format`, .txt and .txt.gz are text (one prompt a line), .jsonl and .jsonl.gz are JSON Lines; a
    file without suffix, or standard input, is JSON Lines if its first row begins with "{". The
    first JSON row decides whether all are native or OpenAI Batch rows; the other kind is an error.
    A row that repeats an earlier id becomes an error called line-N by its line number. Blank lines
    are skipped, but counted. A line of more than `max_line_bytes`, as in a binary file, is an error
    and is not held in memory.

    `bytes_read` of the file's `bytes_total` (None for a pipe) have been read. Raises UsageError if
    the source cannot be opened, CannotRun if reading fails later.
    """

    def __init__(
        self,
        source: str | Path,
        *,
        defaults: SamplingParams,
        format: Format | None = None,
        max_line_bytes: int = 2**24,
    ) -> None:
        self._name, self._defaults = str(source), defaults
        self._format = format or _format_of(self._name)
        self._max_line_bytes = max_line_bytes
        self._file = _open(self._name)
        self._unpacked: BinaryIO | None = None
        self.bytes_read = 0
        self.bytes_total = None if self._name == "-" else _size(self._file)
        self._lines = self._read_lines()
        self._first: _Line | None = None
        self._row_kind: RowFormat | None = None
        self._ids = IdSet()

    def __enter__(self) -> "RequestReader":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; standard input stays open."""
        if self._name != "-":
            self._file.close()

    def needs_tokenizer(self) -> bool:
        """Whether the first row's prompt is text; reads that row ahead.

        False if there are no rows or the first one cannot be parsed.
        """
        row = self._first_row()
        return row == "text" or (isinstance(row, dict) and _kind_of(row).needs_tokenizer(row))

    def row_format(self) -> str | None:
        """The format of the results: that of the first row, "native" for text; reads it ahead.

        None if there are no rows or the first one cannot be parsed.
        """
        row = self._first_row()
        return _kind_of(row).name if isinstance(row, dict) else row and NATIVE.name

    def lengths(self, max_model_len: int) -> WorkloadLengths | None:
        """Lengths of the file's requests for a model of `max_model_len` tokens; None for a pipe.

        Looks at the first LOOK_AHEAD rows. A longer file is taken to go on like these: the number
        of its requests follows from its bytes.
        """
        if self.bytes_total is None:
            return None
        ahead = RequestReader(
            self._name,
            defaults=self._defaults,
            format=self._format,
            max_line_bytes=self._max_line_bytes,
        )
        seen = []
        with ahead, suppress(CannotRun):  # reading the rows meets it again
            for line in islice(ahead._lines, LOOK_AHEAD):
                seen.append(ahead._lengths(line, max_model_len))
        share = ahead.bytes_read / max(1, self.bytes_total)
        return WorkloadLengths.of(seen, share or 1.0)

    def _lengths(self, line: _Line, max_model_len: int) -> RowLengths:
        limits = self._defaults.max_tokens, max_model_len
        if line.data is None:
            return NOTHING
        if self._row_format(line) == "text":
            return text_lengths(line.data.decode(errors="replace"), *limits)
        try:
            return json_lengths(json_object(line.data), *limits)
        except BadRow:
            return NOTHING

    def rows(self, rules: PromptRules) -> Iterator[Request | RowError]:
        """Every row as a Request, or as a RowError if it is malformed or breaks `rules`."""
        line = self._peek()
        if line is None:
            return
        row_format = self._row_format(line)
        while line is not None:
            self._first = None
            row = self._parse(line, row_format, rules)
            yield row if row_format == "text" else self._unique(row)  # text rows' ids are unique
            line = self._peek()
        self.close()

    def _first_row(self) -> dict[str, Any] | Literal["text"] | None:
        line = self._peek()
        if line is None or line.data is None:
            return None
        if self._row_format(line) == "text":
            return "text"
        try:
            return json_object(line.data)
        except BadRow:
            return None

    def _peek(self) -> _Line | None:
        self._first = self._first or next(self._lines, None)
        return self._first

    def _row_format(self, first: _Line) -> Format:
        if self._format is None:
            is_json = first.data is not None and first.data.lstrip().startswith(b"{")
            self._format = "jsonl" if is_json else "text"
        return self._format

    def _parse(self, line: _Line, row_format: Format, rules: PromptRules) -> Request | RowError:
        row_id = f"line-{line.number}"
        try:
            if line.data is None:
                raise BadRow(
                    "line_too_long", f"the line has more than {self._max_line_bytes} bytes"
                )
            if row_format == "text":
                parsed = [ParsedRow(rules.encode(decode_utf8(line.data)), self._defaults)]
            else:
                row = json_object(line.data)
                kind = _kind_of(row)
                self._row_kind = self._row_kind or kind
                row_id = id_of(row, kind.id_field) or row_id
                if kind is not self._row_kind:
                    raise BadRow(
                        "mixed_formats",
                        f"the row is {kind.name}, the rows before it are {self._row_kind.name}",
                    )
                parsed = kind.parse(row, self._defaults, rules)
            rules.check_stop(parsed[0].params)
        except BadRow as bad:
            return self._error(row_id, line.number, bad.code, str(bad))
        except UsageError as bad:
            return self._error(row_id, line.number, "invalid_field", f"{bad}; {bad.hint}")
        first, *further = (
            Request(id=row_id, line=line.number, **choice._asdict()) for choice in parsed
        )
        return replace(first, further=tuple(further))

    def _error(self, row_id: str, line: int, code: str, message: str) -> RowError:
        reply = (self._row_kind or NATIVE).reply
        return RowError(id=row_id, line=line, code=code, message=message, reply=reply)

    def _unique(self, row: Request | RowError) -> Request | RowError:
        """`row`, or an error with a new id if an earlier row has the same id."""
        if self._ids.add(row.id):
            return row
        new = f"line-{row.line}"
        while not self._ids.add(new):
            new += "-duplicate"
        return self._error(new, row.line, "duplicate_id", f"an earlier row has the id {row.id!r}")

    def _read_lines(self) -> Iterator[_Line]:
        number = 0
        while data := self._read():
            number += 1
            if len(data) > self._max_line_bytes:
                while data and not data.endswith(b"\n"):
                    data = self._read()
                yield _Line(number, None)
                continue
            if number == 1:
                data = data.removeprefix(b"\xef\xbb\xbf")  # byte order mark
            if data.strip():
                yield _Line(number, data.removesuffix(b"\n").removesuffix(b"\r"))

    def _read(self) -> bytes:
        """The next line, or the start of one that is too long."""
        try:
            self._unpacked = self._unpacked or unpacked(self._file)
            data = self._unpacked.readline(self._max_line_bytes + 1)
        except GZIP_ERRORS as problem:
            raise CannotRun(
                f"{self._name}: a damaged gzip file ({problem})",
                hint="copy or pack the file again, then run again with --resume",
            ) from problem
        except OSError as problem:
            raise CannotRun(
                f"{self._name}: reading failed ({problem.strerror})",
                hint="copy the file to another disk, then run again with --resume",
            ) from problem
        if self.bytes_total is None or self._unpacked is self._file:
            self.bytes_read += len(data)
        else:
            self.bytes_read = self._file.tell()
        return data


def _kind_of(row: dict[str, Any]) -> RowFormat:
    return BATCH if is_batch_row(row) else NATIVE


def _format_of(name: str) -> Format | None:
    suffix = Path(without_gz(name)).suffix.lower()
    if name == "-" or not suffix:
        return None
    if suffix not in _SUFFIXES:
        raise UsageError(
            f"{name}: prompt files end in .txt or .jsonl, with or without .gz",
            hint="a .txt file holds one prompt a line, a .jsonl file one JSON object a line",
        )
    return _SUFFIXES[suffix]


def _open(name: str) -> BinaryIO:
    if name == "-":
        if sys.stdin is None:
            raise UsageError("standard input is closed", hint="give -i a file, or pipe prompts in")
        return sys.stdin.buffer
    try:
        return open(name, "rb")
    except OSError as problem:
        raise UsageError(
            f"{name}: cannot be read ({problem.strerror})",
            hint="give a .txt or .jsonl file of prompts, or - for standard input",
        ) from None


def _size(file: BinaryIO) -> int | None:
    info = os.fstat(file.fileno())
    return info.st_size if stat.S_ISREG(info.st_mode) else None
