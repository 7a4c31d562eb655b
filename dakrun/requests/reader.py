"""Prompt files, read as a stream: every row becomes a Request, or a RowError if it cannot be run.

A row goes one way: lines.py reads its line, input_rows.py takes content and id from the line,
look_ahead.py puts the longest rows first, input_rows.py makes a Request of the row.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import cached_property
from pathlib import Path

from dakrun.config import SamplingParams
from dakrun.errors import UsageError
from dakrun.plan import ExpectedRun
from dakrun.requests.answer_forms import FormsAhead
from dakrun.requests.gzip_files import without_gz
from dakrun.requests.input_rows import (
    Content,
    Format,
    InputRows,
    content_of,
    is_chat,
    kind_of,
    parse_row,
)
from dakrun.requests.lengths import RowLengths
from dakrun.requests.lines import Lines, LineSource
from dakrun.requests.look_ahead import LookAhead
from dakrun.requests.native_rows import NATIVE
from dakrun.requests.parquet_files import ParquetLines, is_parquet
from dakrun.requests.prompts import PromptRules
from dakrun.requests.request import Request, RowError
from dakrun.requests.row_digests import InputRow

MAX_LINE_BYTES = 2**24
_SUFFIXES: dict[str, Format] = {".txt": "text", ".jsonl": "jsonl", ".parquet": "jsonl"}
_ROWS = 'a .jsonl file holds one JSON object a line, such as {"prompt": "..."}'
_FROM_ARRAY = f"{_ROWS}; make one: jq -c '.[]' ARRAY.json > ROWS.jsonl"
_TO_ROWS = (
    "make it one: python -c \"import pandas; pandas.read_csv('{}').to_json('ROWS.jsonl', "
    "orient='records', lines=True)\""
)


class RequestReader:
    """The rows of a prompt file, the longest first; a context manager that closes the file.

    `source` is a path or "-" (standard input), plain or gzip, as its first bytes tell; or lines of
    another kind, which are JSON Lines unless `format` or their first byte says otherwise. Without
    `format`, .txt and .txt.gz are text (one prompt a line), .jsonl and .jsonl.gz are JSON Lines, as
    are the rows of a .parquet file; a file without suffix, or standard input, is JSON Lines if its
    first row begins with "{". The first JSON row decides whether all are native or OpenAI Batch
    rows; the other kind is an error. A row that repeats an earlier id becomes an error called
    line-N by its line number. Blank lines are skipped, but counted. A line of more than
    `max_line_bytes`, as in a binary file, is an error and is not held in memory.

    JSON is parsed when a row is read, for its id and lengths; the prompt is tokenized when its turn
    comes (see look_ahead.py). Raises UsageError if the source cannot be opened, CannotRun if
    reading fails later.
    """

    def __init__(
        self,
        source: str | Path | LineSource,
        *,
        defaults: SamplingParams,
        format: Format | None = None,
        max_line_bytes: int = MAX_LINE_BYTES,
    ) -> None:
        self._defaults = defaults
        if isinstance(source, str | Path):
            name = str(source)
            open_lines = ParquetLines if is_parquet(name) else Lines
            source, format = open_lines(name, max_line_bytes), format or format_of(name)
        self._format, self._lines = format, source
        self._ahead: LookAhead | None = None
        self._forms = FormsAhead()

    def __enter__(self) -> "RequestReader":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def bytes_read(self) -> int:
        """Bytes read so far, those of rows ahead included."""
        return self._lines.bytes_read

    @property
    def bytes_total(self) -> int | None:
        """The file's size in bytes; None for a pipe or standard input."""
        return self._lines.bytes_total

    def close(self) -> None:
        """Close the file; standard input stays open."""
        (self._ahead or self._lines).close()

    def needs_tokenizer(self) -> bool:
        """Whether the first row's prompt is text; reads that row ahead.

        False if there are no rows or the first one cannot be parsed.
        """
        first = self._first_row
        return isinstance(first, str) or (
            isinstance(first, dict) and kind_of(first).needs_tokenizer(first)
        )

    def row_format(self) -> str | None:
        """The format of the results: that of the first row, "native" for text; reads it ahead.

        None if there are no rows or the first one cannot be parsed.
        """
        first = self._first_row
        if isinstance(first, dict):
            return kind_of(first).name
        return NATIVE.name if isinstance(first, str) else None

    def expected_run(self, max_model_len: int) -> ExpectedRun | None:
        """The run of the file's rows by a model of `max_model_len` tokens; None for a pipe.

        Looks at the first LOOK_AHEAD rows. A longer file is taken to go on like these: the number
        of its requests follows from its bytes. Of a pipe it only begins to read.
        """
        ahead = self.unparsed_rows(max_model_len)
        if self.bytes_total is None:
            return None
        ahead.fill()
        return self.run_of(list(ahead.lengths()), ended=ahead.ended)

    def run_of(self, rows: Sequence[RowLengths], *, ended: bool) -> ExpectedRun:
        """The run of a file that goes on like `rows`, which were read of it, unless it `ended`."""
        total = max(1, self.bytes_read, self.bytes_total or 0)
        share = 1.0 if ended else max(1, self.bytes_read) / total
        return ExpectedRun.of(rows, share, self._defaults)

    def rows(self, rules: PromptRules) -> Iterator[Request | RowError | None]:
        """Every row as a Request, or as a RowError if it is malformed or breaks `rules`.

        None if no row has arrived of a pipe; `wait` waits for one.
        """
        for row in self.unparsed_rows(rules.max_model_len):
            yield row and parse_row(row, self._defaults, rules)

    def unparsed_rows(self, max_model_len: int) -> LookAhead:
        """Every row as parse_row takes it, for a model of `max_model_len` tokens; see `rows`."""
        if self._ahead is None:
            self._ahead = LookAhead(self._input_rows(max_model_len))
        return self._ahead

    def left(self) -> int | None:
        """How many rows `unparsed_rows` has yet to give; None before the input's end is near."""
        ahead = self._ahead
        return ahead.count() if ahead is not None and ahead.ended else None

    @property
    def rows_total(self) -> int | None:
        """How many rows the input has; None before its end is near."""
        ahead = self._ahead
        return ahead.seen if ahead is not None and ahead.ended else None

    def input_rows(self) -> Iterator[InputRow] | None:
        """The ids and digests of all rows, read beside this reader; None for a pipe."""
        if self._lines.bytes_total is None:
            return None
        _ = self._first_row  # which sets the format
        return self._read_again()

    def in_order(self, rules: PromptRules) -> Iterator[tuple[RowLengths, Request | RowError]]:
        """All rows in the file's order, with their lengths; called instead of `rows`."""
        for row in self._input_rows(rules.max_model_len):
            yield row.lengths, parse_row(row, self._defaults, rules)

    def prepare(self, rules: PromptRules) -> None:
        """Begin, beside other work, what rows will need.

        That is the forms of answers, which are compiled as rows are read, and the process that
        renders chats, if the first row is one.
        """
        self._forms.compile(rules.grammars)
        first = self._first_row
        if isinstance(first, dict) and is_chat(first) and rules.tokenizer is not None:
            rules.tokenizer.start_chats()

    def choose(self, fits: Callable[[int, int], bool]) -> bool:
        """Let `rows` give about the longest row next that `fits`, by its prompt and new tokens.

        False if there is none; then the next one is the longest of all.
        """
        return self._ahead is not None and self._ahead.choose(fits)

    def wait(self) -> None:
        """Return once `rows` has something else than None to give."""
        if self._ahead is not None:
            self._ahead.wait()

    def _input_rows(self, max_model_len: int) -> InputRows:
        _ = self._first_row  # which sets the format
        return InputRows(self._lines, self._format, self._defaults, max_model_len, self._forms)

    def _read_again(self) -> Iterator[InputRow]:
        with closing(InputRows(self._lines.reopened(), self._format, self._defaults, 0)) as again:
            for row in again:
                yield InputRow(row.id, row.number, row.digest)

    @cached_property
    def _first_row(self) -> Content | None:
        """The content of the first row, which also tells the format; None if there are no rows."""
        line = self._lines.first()
        if line is None:
            return None
        self._check_no_array(line.data or b"")
        if self._format is None:
            is_json = line.data is not None and line.data.lstrip().startswith(b"{")
            self._format = "jsonl" if is_json else "text"
        return content_of(line.data, self._format, self._lines.max_line_bytes)

    def _check_no_array(self, data: bytes) -> None:
        """Raise UsageError if the first line shows that the input is one JSON array."""
        start = data.strip()
        if self._format == "jsonl":
            is_array = start.startswith(b"[")
        else:  # text may begin with "[", as in "[INST]"
            rest = start.removeprefix(b"[").lstrip()
            is_array = start == b"[" or (start != rest and rest.startswith(b'{"'))
        if is_array and self._format != "text":
            raise UsageError(
                f"{self._lines.name}: a JSON array, not one JSON object a line", hint=_FROM_ARRAY
            )


def format_of(name: str) -> Format | None:
    """The format that a file's name tells; None without a suffix. Raises UsageError."""
    suffix = Path(without_gz(name)).suffix.lower()
    if name == "-" or not suffix:
        return None
    if suffix not in _SUFFIXES:
        raise UsageError(
            f"{name}: prompt files end in .txt or .jsonl, with or without .gz, or in .parquet",
            hint=conversion_hint(name)
            or "a .txt file holds one prompt a line, a .jsonl file one JSON object a line",
        )
    return _SUFFIXES[suffix]


def conversion_hint(name: str) -> str:
    """How to make a .jsonl file of the table or array called `name`; empty for other files."""
    suffix = Path(without_gz(name)).suffix.lower()
    if suffix == ".json":
        return _FROM_ARRAY
    return f"{_ROWS}; {_TO_ROWS.format(name)}" if suffix == ".csv" else ""
