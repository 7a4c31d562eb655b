"""One part of a run on Ray: its ids, and the columns that it has.

Knows one file; parts.py knows the folder.
"""

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from dakrun.errors import UsageError
from dakrun.requests.arrow import OPTIONAL
from dakrun.requests.files import replacement
from dakrun.requests.written_rows import WrittenRows


def ids_of(part: Path) -> Iterator[tuple[str, bool]]:
    """The id of each row of a part, and whether it is an error."""
    if part.suffix == ".jsonl":  # the hidden file, too
        for row in WrittenRows(str(part)):
            yield row.id, row.failed
        return
    try:
        table = pq.read_table(part, columns=["id", "error"])
    except (OSError, pa.ArrowException) as problem:
        raise _unreadable(part, problem) from None
    yield from zip(
        table["id"].to_pylist(),
        (error is not None for error in table["error"].to_pylist()),
        strict=True,
    )


def give_optional(part: Path) -> None:
    """Add the columns OPTIONAL to a part of an older version, where a part may lack them."""
    try:
        names = pq.read_schema(part).names
        if not (lacking := [field for field in OPTIONAL if field.name not in names]):
            return
        table = pq.read_table(part, partitioning=None)
    except (OSError, pa.ArrowException) as problem:
        raise _unreadable(part, problem) from None
    for field in lacking:
        table = table.append_column(field, pa.nulls(len(table), field.type))
    with replacement(part) as file:
        pq.write_table(table, file)


def _unreadable(part: Path, problem: Exception) -> UsageError:
    return UsageError(
        f"{part}: cannot be read ({problem})", hint="remove it; its rows are then done again"
    )
