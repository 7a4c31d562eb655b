"""Prompt files, read as a stream: every row becomes a Request, or a RowError if it cannot be run.

Knows files and lines and holds one at a time; what a row may say is in rows.py.
"""

import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

from dakrun.config import SamplingParams
from dakrun.errors import CannotRun, UsageError
from dakrun.requests.ids import IdSet
from dakrun.requests.native_rows import (
    NATIVE,
    BadRow,
    Prompt,
    PromptRules,
    RowFormat,
    decode_utf8,
    id_of,
    json_object,
)
from dakrun.requests.openai_rows import BATCH, is_batch_row
from dakrun.requests.request import Request, RowError

Format = Literal["text", "jsonl"]

# Longer lines are skipped, not held: prompts are not that long, but a file that is no text may be.
MAX_LINE_BYTES = 2**24

_SUFFIXES: dict[str, Format] = {".txt": "text", ".jsonl": "jsonl"}


class _Line(NamedTuple):
    """A line that is not blank, without its end; `data` is None where it is too long to keep."""

    number: int
    data: bytes | None


class RequestReader:
    """The rows of a prompt file, to be read once.

    `source` is a path or "-" (standard input). Without `format`, .txt is text (a prompt a line),
    .jsonl is JSON Lines, and a file without suffix or standard input is JSON Lines if its first
    row begins with "{". JSON rows are native or OpenAI Batch rows, as the first of them is; the
    other kind is then an error. No two rows have one id: where an earlier row has it, the row is
    an error that is named after its line. `bytes_read` and `bytes_total` (None for a pipe) tell
    how far it is. Blank lines are skipped, but counted. Raises UsageError where the source cannot
    be opened, CannotRun where it breaks.
    """

    def __init__(
        self, source: str | Path, *, defaults: SamplingParams, format: Format | None = None
    ) -> None:
        self._name, self._defaults = str(source), defaults
        self._format = format or _format_of(self._name)
        self._file = _open(self._name)
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
        """Whether the first row's prompt is text. Reads that row and keeps it.

        False where there are no rows, or it cannot be understood: that is one bad row.
        """
        line = self._peek()
        if line is None or line.data is None:
            return False
        if self._row_format(line) == "text":
            return True
        try:
            row = json_object(line.data)
        except BadRow:
            return False
        return _kind_of(row).needs_tokenizer(row)

    def rows(self, rules: PromptRules) -> Iterator[Request | RowError]:
        """Every row as a Request, or as a RowError where `rules` or its format forbid it."""
        line = self._peek()
        if line is None:
            return
        row_format = self._row_format(line)
        while line is not None:
            self._first = None
            row = self._parse(line, row_format, rules)
            yield row if row_format == "text" else self._unique(row)  # lines have unique ids
            line = self._peek()
        self.close()

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
                raise BadRow("line_too_long", f"the line has more than {MAX_LINE_BYTES} bytes")
            if row_format == "text":
                prompt = Prompt(rules.encode(decode_utf8(line.data)), self._defaults)
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
                prompt = kind.parse(row, self._defaults, rules)
            if prompt.params.stop and rules.tokenizer is None:
                raise BadRow("no_tokenizer", "stop strings need the model's tokenizer")
        except BadRow as bad:
            return self._error(row_id, line.number, bad.code, str(bad))
        except UsageError as bad:
            return self._error(row_id, line.number, "invalid_field", f"{bad}; {bad.hint}")
        return Request(
            id=row_id,
            line=line.number,
            prompt_ids=prompt.ids,
            params=prompt.params,
            reply=prompt.reply,
        )

    def _error(self, row_id: str, line: int, code: str, message: str) -> RowError:
        reply = (self._row_kind or NATIVE).reply
        return RowError(id=row_id, line=line, code=code, message=message, reply=reply)

    def _unique(self, row: Request | RowError) -> Request | RowError:
        """`row`, or an error with an id of its own where an earlier row has the same id."""
        if self._ids.add(row.id):
            return row
        own = f"line-{row.line}"
        while not self._ids.add(own):
            own += "-duplicate"
        return self._error(own, row.line, "duplicate_id", f"an earlier row has the id {row.id!r}")

    def _read_lines(self) -> Iterator[_Line]:
        number = 0
        while data := self._read():
            number += 1
            if len(data) > MAX_LINE_BYTES:
                while data and not data.endswith(b"\n"):
                    data = self._read()
                yield _Line(number, None)
                continue
            if number == 1:
                data = data.removeprefix(b"\xef\xbb\xbf")  # byte order mark
            if data.strip():
                yield _Line(number, data.removesuffix(b"\n").removesuffix(b"\r"))

    def _read(self) -> bytes:
        """The next line, or as much of it as shows that it is too long."""
        try:
            data = self._file.readline(MAX_LINE_BYTES + 1)
        except OSError as problem:
            raise CannotRun(
                f"{self._name}: cannot be read any further ({problem.strerror})",
                hint="copy the file to another place and run again with --resume",
            ) from problem
        self.bytes_read += len(data)
        return data


def _kind_of(row: dict[str, Any]) -> RowFormat:
    return BATCH if is_batch_row(row) else NATIVE


def _format_of(name: str) -> Format | None:
    suffix = Path(name).suffix.lower()
    if name == "-" or not suffix:
        return None
    if suffix not in _SUFFIXES:
        raise UsageError(
            f"{name}: prompt files end in .txt or .jsonl",
            hint="a .txt file holds a prompt a line, a .jsonl file a JSON object a line",
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
