"""The rows of an input in its order: each with its content, its id, and estimates of its lengths.

Knows lines and what they say. look_ahead.py has the order in which rows begin, row_parser.py makes
Requests of them.
"""

import json
import marshal
from collections.abc import Iterator
from contextlib import suppress
from typing import Literal

from dakrun.config import SamplingParams
from dakrun.requests.answer_forms import FormsAhead
from dakrun.requests.json_rows import id_of, json_kind
from dakrun.requests.lengths import NOTHING, PromptStarts, json_lengths, text_lengths
from dakrun.requests.lines import Line, LineSource
from dakrun.requests.native_rows import RowFormat
from dakrun.requests.prompts import BadRow
from dakrun.requests.request import IdSet
from dakrun.requests.row_digests import bytes_digest, json_digest
from dakrun.requests.row_parser import AheadRow, Content, kind_of

Format = Literal["text", "jsonl"]


class InputRows:
    """Iterates over the rows of `lines`.

    The first JSON row decides whether all are native or OpenAI Batch rows. A row that repeats an
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
        for line in self._lines:
            content = content_of(line.data, self._format, self._lines.max_line_bytes)
            if self._forms is not None and isinstance(content, dict):
                self._forms.note(content)
            yield self._row(line, content)

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
        row = json.loads(text)
    except json.JSONDecodeError as problem:
        return "invalid_json", f"not JSON: {problem.msg} at column {problem.colno}"
    except (ValueError, RecursionError):
        return "invalid_json", "unreadable JSON: a number is too long, or it is nested too deep"
    if not isinstance(row, dict):
        return "invalid_json", f"the row is {json_kind(row)}, not an object"
    return row
