"""The rows of an input: what a row's line says, its id, estimates of its lengths, and its Request.

Rows are read in the input's order, and begin in the order of look_ahead.py. When a row begins it
becomes a Request, in this process or in a worker to which the row was sent. The fields of rows are
in native_rows.py and openai_rows.py.
"""

import json
import marshal
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from dakrun.config import SamplingParams
from dakrun.errors import UsageError
from dakrun.requests.answer_forms import FormsAhead
from dakrun.requests.json_rows import id_of, json_kind, parse_json
from dakrun.requests.lengths import (
    NOTHING,
    PromptStarts,
    RowLengths,
    json_lengths,
    text_lengths,
)
from dakrun.requests.lines import Line, LineSource
from dakrun.requests.native_rows import NATIVE, ParsedRow, RowFormat
from dakrun.requests.openai_rows import BATCH, is_batch_row
from dakrun.requests.prompts import BadRow, PromptRules
from dakrun.requests.request import IdSet, Request, RowError
from dakrun.requests.row_digests import bytes_digest, json_digest

Format = Literal["text", "jsonl"]
_HELD = 1024  # rows before the first JSON row that wait for it at most
Content = dict[str, Any] | str | tuple[str, str]
"""The fields of a JSON row, a text, or the code and message of a line that is neither."""


class AheadRow(NamedTuple):
    """A row that has been read, but not made a Request. Rows begin in the order of these tuples.

    First come rows of an earlier group of LOOK_AHEAD rows, so that none waits for ever; then rows
    that may take the most decode steps; then rows with the longest prompts.

    `number` is the row's line, `id` the id of its result. `kind` is the format of the file's rows,
    None before the first JSON row. `packed` is the content as bytes that marshal writes, for
    processes of the same version of Python; `digest` is that of row_digests.py. LookAhead keeps
    `packed` in its spool, at `address`.
    """

    group: int
    minus_new: int
    minus_prompt: int
    number: int
    id: str
    choices: int
    shared: int
    nbytes: int
    kind: RowFormat | None
    digest: int = 0
    packed: bytes = b""
    address: int = 0

    @property
    def content(self) -> Content:
        """What the row's line says."""
        content: Content = marshal.loads(self.packed)
        return content

    @property
    def lengths(self) -> RowLengths:
        """The row's lengths, as they are estimated."""
        return RowLengths(-self.minus_prompt, -self.minus_new, self.choices, self.shared)


class InputRows:
    """Iterates over the rows of `lines`.

    The first JSON row decides whether all are native or OpenAI Batch rows; lines before it wait for
    it, unless reading may wait for a program at the other end. A row that repeats an
    earlier id gets another one, line-N by its line number. Lengths are those of a run with a
    maximum length of `max_model_len` tokens, and with `defaults` where a row lacks a parameter.
    `forms` takes the forms of answers that rows ask for.
    """

    def __init__(
        self,
        lines: LineSource,
        format: Format | None,
        defaults: SamplingParams,
        max_model_len: int,
        forms: FormsAhead | None = None,
    ) -> None:
        self._lines, self._format, self._forms = lines, format, forms
        self._limits = defaults.limit(max_model_len), max_model_len
        self._row_kind: RowFormat | None = None
        self._ids = IdSet()
        self._starts = PromptStarts()

    def __iter__(self) -> Iterator[AheadRow]:
        may_hold = self._format != "text" and not self.may_wait
        held = list[AheadRow]()  # those before the first JSON row
        for line in self._lines:
            content = content_of(line.data, self._format, self._lines.max_line_bytes)
            if self._forms is not None and isinstance(content, dict):
                self._forms.note(content)
            row = self._row(line, content)
            if may_hold and self._row_kind is None and len(held) < _HELD:
                held.append(row)
                continue
            yield from (early._replace(kind=self._row_kind) for early in held)
            held.clear()
            yield row
        yield from held

    @property
    def may_wait(self) -> bool:
        """Whether reading waits for a program at the other end."""
        return self._lines.may_wait

    def close(self) -> None:
        """Close the input."""
        self._lines.close()

    def _row(self, line: Line, content: Content) -> AheadRow:
        """Note the kind and id of the next row in the input, and estimate its lengths."""
        lengths, row_id = NOTHING, f"line-{line.number}"
        digest: int | None = None
        if self._format == "text":  # whose ids are unique
            if text := line.data and line.data.decode(errors="replace"):
                lengths = text_lengths(text, *self._limits, self._starts)
        elif isinstance(content, dict):
            kind = kind_of(content)
            self._row_kind = self._row_kind or kind
            with suppress(RecursionError):
                digest = json_digest(content, kind.id_field)
            with suppress(BadRow):
                row_id = id_of(content, kind.id_field) or row_id
                if kind is self._row_kind:
                    lengths = json_lengths(content, *self._limits, self._starts)
        if self._format != "text":
            row_id = self._unique(row_id, line.number)
        return AheadRow(
            group=0,
            minus_new=-lengths.new,
            minus_prompt=-lengths.prompt,
            number=line.number,
            id=row_id,
            choices=lengths.choices,
            shared=lengths.shared,
            nbytes=line.nbytes,
            kind=self._row_kind,
            digest=bytes_digest(line.data or b"") if digest is None else digest,
            packed=marshal.dumps(content),
        )

    def _unique(self, row_id: str, number: int) -> str:
        """`row_id`, or another id if an earlier row has that."""
        if self._ids.add(row_id):
            return row_id
        new = f"line-{number}"
        while not self._ids.add(new):
            new += "-duplicate"
        return new


def content_of(data: bytes | None, format: Format | None, max_line_bytes: int) -> Content:
    """What a line says, None if it is too long; its JSON is parsed here and nowhere else."""
    if data is None:
        return "line_too_long", f"the line has more than {max_line_bytes} bytes"
    try:
        text = data.decode()
    except UnicodeDecodeError as problem:
        at = problem.start
        return "invalid_utf8", f"not UTF-8: byte {data[at]:#04x} at {at + 1}"
    if format == "text":
        return text
    try:
        row = parse_json(text)
    except BadRow as bad:
        return bad.code, str(bad)
    except json.JSONDecodeError as problem:
        return "invalid_json", f"not JSON: {problem.msg} at column {problem.colno}"
    except (ValueError, RecursionError):
        return "invalid_json", "unreadable JSON: a number is too long, or it is nested too deep"
    if not isinstance(row, dict):
        return "invalid_json", f"the row is {json_kind(row)}, not an object"
    return row


def own_id(content: Content, number: int) -> str:
    """The id that the row on line `number` has by itself; line-N if it has none that is valid."""
    given = None
    if isinstance(content, dict):
        with suppress(BadRow):
            given = id_of(content, kind_of(content).id_field)
    return given or f"line-{number}"


def kind_of(fields: dict[str, Any]) -> RowFormat:
    """The format of a JSON row."""
    return BATCH if is_batch_row(fields) else NATIVE


def is_chat(fields: dict[str, Any]) -> bool:
    """Whether a JSON row is a chat, right or wrong."""
    given = fields.get("body") if is_batch_row(fields) else fields
    return isinstance(given, dict) and given.get("messages") is not None


def parse_row(row: AheadRow, defaults: SamplingParams, rules: PromptRules) -> Request | RowError:
    """The row as a Request, or its error if it is malformed or breaks `rules`.

    `defaults` are for parameters that the row lacks. A row whose `id` is not its own is an error:
    an earlier row has that.
    """
    content, is_integer = row.content, False
    try:
        if (own := own_id(content, row.number)) != row.id:
            raise BadRow("duplicate_id", f"an earlier row has the id {own!r}")
        if isinstance(content, tuple):
            raise BadRow(*content)
        if isinstance(content, str):
            parsed = [ParsedRow(rules.encode(content), defaults)]
        else:
            kind = kind_of(content)
            id_of(content, kind.id_field)
            is_integer = kind is NATIVE and isinstance(content.get("id"), int)
            if row.kind is not None and kind.name != row.kind.name:
                raise BadRow(
                    "mixed_formats",
                    f"the row is {kind.name}, the rows before it are {row.kind.name}",
                )
            parsed = kind.parse(content, defaults, rules)
        params = rules.checked_params(parsed[0].params)
        if params is not parsed[0].params:
            words = params.bad_words
            parsed = [one._replace(params=replace(one.params, bad_words=words)) for one in parsed]
    except BadRow as bad:
        return _error(row, bad.code, str(bad), is_integer)
    except UsageError as bad:
        return _error(row, "invalid_field", f"{bad}; {bad.hint}", is_integer)
    first, *further = (
        Request(
            id=row.id,
            line=row.number,
            nbytes=row.nbytes,
            digest=row.digest,
            prompt_ids=choice.prompt_ids,
            params=choice.params,
            reply=replace(choice.reply, integer_id=is_integer),
        )
        for choice in parsed
    )
    return replace(first, further=tuple(further))


def _error(row: AheadRow, code: str, message: str, is_integer: bool = False) -> RowError:
    return RowError(
        id=row.id,
        line=row.number,
        code=code,
        message=message,
        reply=replace((row.kind or NATIVE).reply, integer_id=is_integer),
        nbytes=row.nbytes,
        digest=row.digest,
    )
