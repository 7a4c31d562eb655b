"""Parquet files: rows read from one as lines of JSON, and results that become one at the end.

Knows columns and files; arrow.py has the types of results. Imports pyarrow, an extra, late.
"""

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from dakrun.errors import CannotRun, UsageError
from dakrun.requests.destination import check_destination
from dakrun.requests.files import replacement, same_file
from dakrun.requests.lines import Line, LineSource, open_input
from dakrun.requests.native_rows import NATIVE, NATIVE_FIELDS, PROMPT_FIELDS
from dakrun.requests.openai_rows import ROW_FIELDS
from dakrun.requests.written_rows import WrittenRows

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

SUFFIX = ".parquet"
ROWS = 1024  # read together
ROW_GROUP_BYTES = 1 << 26  # of Arrow tables that are written together


def is_parquet(name: str) -> bool:
    """Whether `name` is that of a Parquet file."""
    return name.lower().endswith(SUFFIX)


class ParquetLines(LineSource):
    """Iterates over the rows of the Parquet file `name`, each as a line of JSON.

    Raises UsageError if the file cannot be opened, CannotRun if pyarrow is missing or reading fails
    later. `bytes_read` is the share of the file's bytes that the rows are which have been read.
    """

    may_wait = False

    def __init__(self, name: str, max_line_bytes: int) -> None:
        _check_pyarrow(name)
        self.name, self.max_line_bytes = name, max_line_bytes
        self._file = open_input(name)
        self._table = _opened(name, self._file)
        self.bytes_total: int = os.fstat(self._file.fileno()).st_size
        self.bytes_read = 0
        self._rest = self._read()

    def reopened(self) -> "ParquetLines":
        """The same file from its first row, beside this one."""
        return ParquetLines(self.name, self.max_line_bytes)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _read(self) -> Iterator[Line]:
        with _reading(self.name):
            rows = self._table.metadata.num_rows
            for line in parquet_lines(self.name, self._table, self.max_line_bytes):
                before = self.bytes_read
                self.bytes_read = self.bytes_total * line.number // rows
                yield line._replace(nbytes=self.bytes_read - before)


def parquet_lines(name: str, table: "pq.ParquetFile", max_line_bytes: int) -> Iterator[Line]:
    """The rows of a Parquet file: its columns that are fields of rows, as JSON; `nbytes` are 0.

    Raises UsageError for columns that rows cannot have, OSError and pyarrow's errors.
    """
    import pyarrow as pa

    from dakrun.requests.arrow import row_lines

    names = set(table.schema_arrow.names)
    is_batch = "body" in names and not names & set(PROMPT_FIELDS)
    columns = sorted(names & set(ROW_FIELDS if is_batch else NATIVE_FIELDS))
    if not set(columns) & {*PROMPT_FIELDS, "body"}:
        raise UsageError(
            f"{name}: has no column {', '.join(PROMPT_FIELDS)} or body",
            hint="rename the column of the prompts",
        )
    _check_once(name, table, columns)
    number = 0
    for batch in table.iter_batches(ROWS, columns=columns):
        try:
            for data in row_lines(pa.Table.from_batches([batch]), columns):
                number += 1
                yield Line(number, data if len(data) <= max_line_bytes else None, 0)
        except (TypeError, ValueError) as problem:  # also text that is not UTF-8
            raise UsageError(
                f"{name}: row {number + 1}: {problem}",
                hint="columns must have the types of native rows",
            ) from None


class ParquetOutput:
    """Results that become the Parquet file `name`: until all are there they lie in `rows`.

    `rows` is the name of a JSON Lines file, for a ResultWriter that puts them in the input's order.
    `convert` makes the Parquet file of it. If the prompts come from a Parquet file `source`, each
    row also has its columns that are no fields of rows.

    The constructor changes nothing. It raises UsageError if the file cannot be written, or if
    results have a column of `source`, too; CannotRun if pyarrow is missing.
    """

    def __init__(self, name: str, *, source: str, overwrite: bool, resume: bool) -> None:
        _check_pyarrow(name)
        self.name, self.rows = name, f"{name}.jsonl"
        self._source, self._resume = source, resume
        check_destination(name, overwrite=overwrite, resume=resume, suffixes=(SUFFIX,))
        if same_file(name, source):
            raise UsageError(
                f"{name}: the output is the file that the prompts come from",
                hint="give another file to -o",
            )
        self._carried = _carried(source) if is_parquet(source) else []

    def begin(self, row_format: str | None) -> None:
        """Prepare for rows of this format; call it before the ResultWriter reads `rows`.

        If a run has ended whose results are to be resumed, make `rows` of them again. Raises
        UsageError for OpenAI Batch rows, and if the file to resume has no results.
        """
        if row_format not in (None, NATIVE.name):
            instead = Path(self.name).with_suffix(".jsonl").name
            raise self._no_batch(f"give -o {instead}, or native rows")
        if self._resume and os.path.exists(self.name) and not os.path.exists(self.rows):
            self._restore()

    def _restore(self) -> None:
        import pyarrow as pa

        from dakrun.requests.arrow import result_table, row_lines

        columns = result_table([], from_file=True).schema.names
        with open_input(self.name) as file, _reading(self.name):
            table = _opened(self.name, file)
            if not set(columns) <= set(table.schema_arrow.names):
                raise UsageError(
                    f"{self.name}: not the results of a run, so it cannot be resumed",
                    hint="give -o the output of the run to resume, or --overwrite to start afresh",
                )
            with replacement(Path(self.rows)) as lines:
                for batch in table.iter_batches(ROWS, columns=columns):
                    for data in row_lines(pa.Table.from_batches([batch]), columns):
                        lines.write(data + b"\n")

    def convert(self) -> None:
        """Make the Parquet file of `rows`, which are all there in the input's order; remove `rows`.

        On an error, or a kill, both files are as they were. Raises CannotRun.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            tables = self._tables()
            first = next(tables)
            with (
                replacement(Path(os.path.realpath(self.name))) as file,
                pq.ParquetWriter(file, first.schema) as writer,
            ):
                held = [first]
                for table in tables:
                    if sum(one.nbytes for one in held) >= ROW_GROUP_BYTES:
                        writer.write_table(pa.concat_tables(held))
                        held = []
                    held.append(table)
                writer.write_table(pa.concat_tables(held))
            os.unlink(self.rows)
        except (OSError, pa.ArrowException) as problem:
            raise CannotRun(
                f"{self.name}: cannot be made of {self.rows}, which has all rows ({problem})",
                hint="free as much disk space as it takes; to go on, run again with --resume",
            ) from None

    def _tables(self) -> Iterator["pa.Table"]:
        """The results as tables; the first has no rows."""
        from dakrun.requests.arrow import arrow_row, result_table

        def tabled(lines: Iterable[bytes]) -> "pa.Table":
            return result_table(map(arrow_row, lines), from_file=True)

        lines = self._lines()
        fields = self._carried
        yield _beside(tabled([]), fields)
        if fields:
            with open_input(self._source) as file:
                table = _opened(self._source, file)
                for batch in table.iter_batches(ROWS, columns=[field.name for field in fields]):
                    yield _beside(tabled(islice(lines, batch.num_rows)), fields, batch)
        while chunk := list(islice(lines, ROWS)):  # of rows that the input does not have: no values
            yield _beside(tabled(chunk), fields)

    def _lines(self) -> Iterator[bytes]:
        for row in WrittenRows(self.rows):
            if row.is_batch:  # behind a first row that was no JSON
                raise self._no_batch(f"they are in {self.rows}")
            yield row.line

    def _no_batch(self, hint: str) -> UsageError:
        return UsageError(f"{self.name}: results of OpenAI Batch rows cannot be Parquet", hint=hint)


def _beside(
    table: "pa.Table", fields: list["pa.Field"], batch: "pa.RecordBatch | None" = None
) -> "pa.Table":
    """`table` with the columns `fields` of `batch`, null without one."""
    import pyarrow as pa

    for field in fields:
        values = pa.nulls(len(table), field.type) if batch is None else batch[field.name]
        table = table.append_column(field, values)
    return table


def _carried(source: str) -> list["pa.Field"]:
    """The columns of a Parquet file that are no fields of rows; UsageError if results have them."""
    from dakrun.requests.arrow import result_table

    with open_input(source) as file:
        table = _opened(source, file)
        fields = [field for field in table.schema_arrow if field.name not in NATIVE_FIELDS]
        _check_once(source, table, [field.name for field in fields])
    results = set(result_table([], from_file=True).schema.names)
    if taken := [field.name for field in fields if field.name in results]:
        raise UsageError(
            f"{source}: has the column {taken[0]}, which results have, too",
            hint="rename it, or give -o a .jsonl file, which gets no columns of the input",
        )
    return [field.with_nullable(True) for field in fields]


def _check_once(name: str, table: "pq.ParquetFile", columns: Iterable[str]) -> None:
    """Raise UsageError if the file has one of `columns` several times."""
    counts = Counter(table.schema_arrow.names)
    if twice := [column for column in columns if counts[column] > 1]:
        raise UsageError(
            f"{name}: has the column {twice[0]} {counts[twice[0]]} times",
            hint="rename or drop all but one of them",
        )


def _check_pyarrow(name: str) -> None:
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError:
        raise CannotRun(
            f"{name}: Parquet files need pyarrow, which is not installed",
            hint="pip install 'dakrun[parquet]'",
        ) from None


def _opened(name: str, file: BinaryIO) -> "pq.ParquetFile":
    """The Parquet file `file`; raises UsageError if it is none."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.ParquetFile(file)
    except (OSError, pa.ArrowException) as problem:
        raise UsageError(
            f"{name}: not a Parquet file ({problem})", hint="give a file that is whole"
        ) from None


@contextmanager
def _reading(name: str) -> Iterator[None]:
    """Raise CannotRun for errors of the disk and of pyarrow in the block."""
    import pyarrow as pa

    try:
        yield
    except (OSError, pa.ArrowException) as problem:
        raise CannotRun(
            f"{name}: reading failed ({problem})", hint="check the file, then run with --resume"
        ) from None
