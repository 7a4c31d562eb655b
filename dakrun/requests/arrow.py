"""Arrow tables of native rows and of their results: columns in, columns out.

Knows the names and types of columns. Imports pyarrow, an extra.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from dakrun.requests.native_rows import NATIVE_FIELDS

_LOGPROB = [("token_id", pa.int32()), ("text", pa.string()), ("logprob", pa.float64())]
_USAGE = pa.struct([("prompt_tokens", pa.int64()), ("completion_tokens", pa.int64())])
_ERROR = [("code", pa.string()), ("message", pa.string())]
_FUNCTION = pa.struct([("name", pa.string()), ("arguments", pa.string())])
_CALL = [("id", pa.string()), ("type", pa.string()), ("function", _FUNCTION)]
_LOGPROBS = pa.list_(pa.struct([*_LOGPROB, ("top", pa.list_(pa.struct(_LOGPROB)))]))
_TEXT = [
    ("text", pa.string()),
    ("token_ids", pa.list_(pa.int32())),
    ("finish_reason", pa.string()),
]
_CALLS = pa.list_(pa.struct(_CALL))
_ANSWER = [("logprobs", _LOGPROBS), ("tool_calls", _CALLS), ("valid", pa.bool_())]
OPTIONAL = (
    *(pa.field(*column) for column in _ANSWER),
    pa.field("choices", pa.list_(pa.struct([("index", pa.int32()), *_TEXT, *_ANSWER]))),
    pa.field("prompt_logprobs", _LOGPROBS),
)  # columns that are null where a result has none, and that results of older versions may lack
_SURROGATE = re.compile("[\ud800-\udfff]")


def row_lines(table: pa.Table, columns: Sequence[str] = NATIVE_FIELDS) -> Iterable[bytes]:
    """Each row's `columns`, as a line of JSON without the null ones.

    Raises TypeError for values that JSON does not have.
    """
    known = table.select([name for name in table.column_names if name in columns])
    for row in known.to_pylist():
        given = {name: value for name, value in row.items() if value is not None}
        yield json.dumps(given, ensure_ascii=False).encode("utf-8", "surrogatepass")


def well_formed(text: str) -> str:
    """`text` with U+FFFD for each lone surrogate, which UTF-8, and so Arrow, does not have."""
    return _SURROGATE.sub("\ufffd", text)


def arrow_row(line: bytes) -> dict[str, Any]:
    """The result row on a line as Arrow can hold it."""
    row: dict[str, Any] = json.loads(line)
    if rb"\ud" in line:  # as the writer spells lone surrogates, which an error may quote
        row = json.loads(well_formed(json.dumps(row, ensure_ascii=False)))
    return row


def result_table(rows: Iterable[Mapping[str, Any]], *, from_file: bool) -> pa.Table:
    """Native result rows as a table; see OPTIONAL for columns with nulls.

    Rows `from_file` also have their ids, as strings, and errors the lines they are from.
    """
    error = pa.struct([*_ERROR, ("line", pa.int64())] if from_file else _ERROR)
    fields = [
        *([pa.field("id", pa.string())] if from_file else []),
        *(pa.field(*column) for column in _TEXT),
        pa.field("usage", _USAGE),
        pa.field("error", error),
        *OPTIONAL,
    ]
    if from_file:  # a column has one type
        rows = [{**row, "id": str(row["id"])} for row in rows]
    return pa.Table.from_pylist(list(rows), schema=pa.schema(fields))
