"""Rows of a prompt file as Requests, one by one; so small that other processes may have it.

Knows the row formats, and no files. The fields are in native_rows.py and openai_rows.py.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

from dakrun.config import SamplingParams
from dakrun.errors import UsageError
from dakrun.requests.json_rows import decode_utf8, id_of, json_object
from dakrun.requests.look_ahead import AheadRow
from dakrun.requests.native_rows import NATIVE, ParsedRow, RowFormat
from dakrun.requests.openai_rows import BATCH, is_batch_row
from dakrun.requests.prompts import BadRow, PromptRules
from dakrun.requests.request import Request, RowError

Format = Literal["text", "jsonl"]


@dataclass(frozen=True)
class RowParser:
    """Parses the rows of an input of `format`; `defaults` are for parameters that a row lacks."""

    format: Format
    defaults: SamplingParams
    max_line_bytes: int

    def parse(self, row: AheadRow, data: bytes | None, rules: PromptRules) -> Request | RowError:
        """The row whose line is `data`, or its error if it is malformed or breaks `rules`.

        `data` is None for a line that is too long. A row whose id an earlier row has is an error.
        """
        parsed = self._parse(row, data, rules)
        if row.new_id is None:
            return parsed
        message = f"an earlier row has the id {parsed.id!r}"
        return _error(row, row.new_id, "duplicate_id", message)

    def row_id(self, row: AheadRow, data: bytes | None) -> str:
        """The id of the row's result."""
        if row.new_id is not None:
            return row.new_id
        found = None
        if self.format == "jsonl" and data is not None:
            try:
                parsed = json_object(data)
                found = id_of(parsed, kind_of(parsed).id_field)
            except BadRow:
                pass
        return found or _line_id(row)

    def _parse(self, row: AheadRow, data: bytes | None, rules: PromptRules) -> Request | RowError:
        """The row, whether or not its id is an earlier row's."""
        row_id, is_integer = _line_id(row), False
        try:
            if data is None:
                limit = self.max_line_bytes
                raise BadRow("line_too_long", f"the line has more than {limit} bytes")
            if self.format == "text":
                parsed = [ParsedRow(rules.encode(decode_utf8(data)), self.defaults)]
            else:
                fields = json_object(data)
                kind = kind_of(fields)
                row_id = id_of(fields, kind.id_field) or row_id
                is_integer = kind is NATIVE and isinstance(fields.get("id"), int)
                if row.kind is not None and kind.name != row.kind.name:
                    raise BadRow(
                        "mixed_formats",
                        f"the row is {kind.name}, the rows before it are {row.kind.name}",
                    )
                parsed = kind.parse(fields, self.defaults, rules)
            rules.check_stop(parsed[0].params)
        except BadRow as bad:
            return _error(row, row_id, bad.code, str(bad), is_integer)
        except UsageError as bad:
            return _error(row, row_id, "invalid_field", f"{bad}; {bad.hint}", is_integer)
        first, *further = (
            Request(
                id=row_id,
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


def kind_of(fields: dict[str, Any]) -> RowFormat:
    """The format of a JSON row."""
    return BATCH if is_batch_row(fields) else NATIVE


def _line_id(row: AheadRow) -> str:
    return f"line-{row.number}"


def _error(
    row: AheadRow, row_id: str, code: str, message: str, is_integer: bool = False
) -> RowError:
    return RowError(
        id=row_id,
        line=row.number,
        code=code,
        message=message,
        reply=replace((row.kind or NATIVE).reply, integer_id=is_integer),
        nbytes=row.nbytes,
        digest=row.digest,
    )
