"""Prompt files, read as a stream: every row becomes a Request, or a RowError if it cannot be run.

Knows the text and JSON Lines formats and what the model can take; holds one row at a time and
knows nothing of outputs.
"""

import io
import json
import os
import stat
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

from dakrun.config import SamplingParams
from dakrun.engine.request import Request, RowError
from dakrun.engine.tokenizer import Tokenizer
from dakrun.errors import CannotRun, UsageError

Format = Literal["text", "jsonl"]

# Longer lines are skipped, not held: prompts are not that long, but a file that is no text may be.
MAX_LINE_BYTES = 2**24

_SUFFIXES: dict[str, Format] = {".txt": "text", ".jsonl": "jsonl"}
_SAMPLING_FIELDS = ("max_tokens", "temperature", "top_k", "top_p", "seed")
_NATIVE_FIELDS = ("id", "prompt", "prompt_token_ids", *_SAMPLING_FIELDS, "stop", "ignore_eos")
_JSON_NAMES = {dict: "an object", list: "an array", str: "a string", bool: "a boolean"}


class BadRow(Exception):
    """Why a row cannot be run: `code` for programs, the message for people."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(kw_only=True)
class PromptRules:
    """What the model takes as a prompt. Lengths are in tokens."""

    vocab_size: int
    max_model_len: int
    max_positions: int
    tokenizer: Tokenizer | None = None

    def encode(self, text: str) -> tuple[int, ...]:
        """The checked token ids of a text prompt; raises BadRow."""
        if self.tokenizer is None:
            raise BadRow("no_tokenizer", "the model has no tokenizer; give prompt_token_ids")
        try:
            text.encode()
        except UnicodeEncodeError as problem:
            at = problem.start + 1
            raise BadRow(
                "invalid_prompt", f"the prompt has half a surrogate pair at character {at}"
            ) from None
        return self.check(self.tokenizer.encode(text))

    def check(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        """`ids`, if they are a prompt that fits the model; raises BadRow."""
        if not ids:
            raise BadRow("invalid_prompt", "the prompt has no tokens")
        limit = self.max_model_len - 1
        if len(ids) > limit:
            remedy = "the model has no more positions"
            if self.max_model_len < self.max_positions:
                remedy = f"raise --max-model-len, at most to {self.max_positions}"
            raise BadRow(
                "prompt_too_long",
                f"the prompt has {len(ids)} tokens, but only {limit} fit beside a new one into "
                f"a length of {self.max_model_len}; {remedy}",
            )
        if min(ids) < 0 or max(ids) >= self.vocab_size:
            bad = next(t for t in ids if not 0 <= t < self.vocab_size)
            raise BadRow(
                "invalid_prompt",
                f"token id {bad} is not in the model's vocabulary of {self.vocab_size}",
            )
        return ids


@dataclass(frozen=True)
class RowFormat:
    """One kind of JSON row: the field with its id, and what turns the row into a prompt.

    `parse` gets the row, the default parameters and the rules; it raises BadRow or UsageError.
    """

    id_field: str
    parse: Callable[
        [dict[str, Any], SamplingParams, PromptRules], tuple[tuple[int, ...], SamplingParams]
    ]


def parse_native(
    row: dict[str, Any], defaults: SamplingParams, rules: PromptRules
) -> tuple[tuple[int, ...], SamplingParams]:
    """Prompt and parameters of a row {"prompt" | "prompt_token_ids", "max_tokens"?, ...}.

    A field that is null counts as absent. Raises BadRow, or UsageError for parameters.
    """
    unknown = [name for name in row if name not in _NATIVE_FIELDS]
    if unknown:
        names, known = ", ".join(map(repr, unknown)), ", ".join(_NATIVE_FIELDS)
        raise BadRow("unsupported_field", f"unsupported {names}; the fields are {known}")
    given = {name: value for name, value in row.items() if value is not None}
    changes = {name: given[name] for name in _SAMPLING_FIELDS if name in given}
    if "stop" in given:
        stop = given["stop"]
        if not isinstance(stop, str | list):
            raise BadRow("invalid_field", f"stop is {_kind(stop)}, not a string or an array")
        changes["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
    if "ignore_eos" in given:
        flag = given["ignore_eos"]
        if not isinstance(flag, bool):
            raise BadRow("invalid_field", f"ignore_eos is {_kind(flag)}, not true or false")
        changes["ignore_eos"] = flag
    return _native_prompt(given, rules), replace(defaults, **changes)


def _native_prompt(given: dict[str, Any], rules: PromptRules) -> tuple[int, ...]:
    if ("prompt" in given) == ("prompt_token_ids" in given):
        raise BadRow("invalid_prompt", "exactly one of prompt and prompt_token_ids is needed")
    if "prompt" in given:
        if not isinstance(given["prompt"], str):
            raise BadRow("invalid_prompt", f"prompt is {_kind(given['prompt'])}, not a string")
        return rules.encode(given["prompt"])
    ids = given["prompt_token_ids"]
    if not isinstance(ids, list) or not all(type(token) is int for token in ids):
        raise BadRow("invalid_prompt", "prompt_token_ids is not an array of integers")
    return rules.check(tuple(ids))


NATIVE = RowFormat("id", parse_native)


class _Line(NamedTuple):
    """A line that is not blank, without its end; `data` is None where it is too long to keep."""

    number: int
    data: bytes | None


class RequestReader:
    """Iterates over the rows of a prompt file, once: `Request` or `RowError` for each.

    `source` is a path or "-" (standard input). Without `format`, .txt is text (a prompt a line),
    .jsonl is JSON Lines, and a file without suffix or standard input is JSON Lines if its first
    row begins with "{". `max_model_len` is for prompt and completion, `max_positions` the most
    that the model allows. `tokenizer` may be set later, before the first row is taken.
    `bytes_read` and `bytes_total` (None if unknown) tell how far it is. Blank lines are skipped,
    but counted. Raises UsageError where the source cannot be opened, CannotRun where it breaks.
    """

    def __init__(
        self,
        source: str | Path,
        *,
        defaults: SamplingParams,
        vocab_size: int,
        max_model_len: int,
        max_positions: int,
        tokenizer: Tokenizer | None = None,
        format: Format | None = None,
    ) -> None:
        self._name, self._defaults = str(source), defaults
        self._rules = PromptRules(
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            max_positions=max_positions,
            tokenizer=tokenizer,
        )
        self._format = format or _format_of(self._name)
        self._file = _open(self._name)
        self.bytes_read, self.bytes_total = 0, _size(self._file)
        self._lines = self._read_lines()
        self._first: _Line | None = None

    @property
    def tokenizer(self) -> Tokenizer | None:
        """What encodes text prompts."""
        return self._rules.tokenizer

    @tokenizer.setter
    def tokenizer(self, tokenizer: Tokenizer | None) -> None:
        self._rules.tokenizer = tokenizer

    def close(self) -> None:
        """Close the file; standard input stays open."""
        if self._name != "-":
            self._file.close()

    def needs_tokenizer(self) -> bool:
        """Whether the first row is a text prompt, or one that cannot be understood.

        Reads that row and keeps it. False where there are no rows.
        """
        line = self._peek()
        if line is None:
            return False
        if self._row_format(line) == "text" or line.data is None:
            return True
        try:
            row = _json_object(line.data)
        except BadRow:
            return True
        return row.get("prompt_token_ids") is None

    def __iter__(self) -> Iterator[Request | RowError]:
        line = self._peek()
        if line is None:
            return
        row_format = self._row_format(line)
        while line is not None:
            self._first = None
            yield self._parse(line, row_format)
            line = self._peek()

    def _peek(self) -> _Line | None:
        self._first = self._first or next(self._lines, None)
        return self._first

    def _row_format(self, first: _Line) -> Format:
        if self._format is None:
            is_json = first.data is not None and first.data.lstrip().startswith(b"{")
            self._format = "jsonl" if is_json else "text"
        return self._format

    def _parse(self, line: _Line, row_format: Format) -> Request | RowError:
        row_id = f"line-{line.number}"
        try:
            if line.data is None:
                raise BadRow("line_too_long", f"the line has more than {MAX_LINE_BYTES} bytes")
            if row_format == "text":
                ids, params = self._rules.encode(_utf8(line.data)), self._defaults
            else:
                row = _json_object(line.data)
                row_id = _id_of(row, NATIVE.id_field) or row_id
                ids, params = NATIVE.parse(row, self._defaults, self._rules)
            if params.stop and self.tokenizer is None:
                raise BadRow("no_tokenizer", "stop strings need the model's tokenizer")
        except BadRow as bad:
            return RowError(id=row_id, line=line.number, code=bad.code, message=str(bad))
        except UsageError as bad:
            message = f"{bad}; {bad.hint}"
            return RowError(id=row_id, line=line.number, code="invalid_field", message=message)
        return Request(id=row_id, line=line.number, prompt_ids=ids, params=params)

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
        return sys.stdin.buffer
    try:
        return open(name, "rb")
    except OSError as problem:
        raise UsageError(
            f"{name}: cannot be read ({problem.strerror})",
            hint="give a .txt or .jsonl file of prompts, or - for standard input",
        ) from None


def _size(file: BinaryIO) -> int | None:
    try:
        info = os.fstat(file.fileno())
    except (OSError, io.UnsupportedOperation):
        return None
    return info.st_size if stat.S_ISREG(info.st_mode) else None


def _utf8(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as problem:
        raise BadRow(
            "invalid_utf8", f"not UTF-8: byte {data[problem.start]:#04x} at {problem.start + 1}"
        ) from None


def _json_object(data: bytes) -> dict[str, Any]:
    try:
        row = json.loads(_utf8(data))
    except json.JSONDecodeError as problem:
        raise BadRow("invalid_json", f"not JSON: {problem.msg} at column {problem.colno}") from None
    except (ValueError, RecursionError):
        raise BadRow("invalid_json", "not JSON that can be read: too long or too deep") from None
    if not isinstance(row, dict):
        raise BadRow("invalid_json", f"the row is {_kind(row)}, not an object")
    return row


def _id_of(row: dict[str, Any], name: str) -> str | None:
    """The row's id as a string; None where it has none."""
    value = row.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise BadRow("invalid_field", f"{name} is not a string or an integer, or is empty")
    return str(value)


def _kind(value: object) -> str:
    """What a JSON value is, for messages."""
    return _JSON_NAMES.get(type(value), "null" if value is None else "a number")
