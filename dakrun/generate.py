"""A prompt file through a model: rows left to do, results as they finish, and the report file.

Rows are read and written one by one, so memory does not grow with their number.
"""

import json
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from dakrun.errors import CannotRun, UsageError, check_file_name
from dakrun.interrupt import Interrupted
from dakrun.llm import LLM
from dakrun.plan import ExpectedRun, RunForecast
from dakrun.requests import (
    Completion,
    InputRow,
    Request,
    RequestReader,
    ResultWriter,
    RowError,
    digests_path,
    fingerprint_path,
    same_file,
)
from dakrun.terminal.progress import RunEstimate, RunProgress
from dakrun.units import counted


@dataclass(frozen=True)
class _Begun:
    """A row that has begun: its bytes and digest, and its new tokens at most."""

    nbytes: int
    digest: int
    limit: int


@dataclass
class Counts:
    """Numbers of rows that finished, failed, or were skipped because the output already had them.

    `failed_before` counts the error rows that the output had when the run began.
    """

    failed_before: int
    done: int = 0
    failed: int = 0
    skipped: int = 0

    def __str__(self) -> str:
        return self.summary()

    def summary(self, *, can_retry: bool = True, retried: bool = False) -> str:
        """One line for people.

        `can_retry` says whether --retry-failed may be given, `retried` whether it was given. If it
        was, rows in `failed_before` are not in the input.
        """
        text = f"{counted(self.done, 'row')} done, {self.failed} failed, {self.skipped} skipped"
        if not self.done + self.failed + self.skipped:
            text += "; the input has no rows"
        if self.failed_before:
            text += f"; {self.failed_before} failed before"
            if retried:
                text += ", not in the input"
            elif can_retry:
                text += ", which --retry-failed runs again"
        return text


class BatchJob:
    """The rows of `reader` that `writer` does not have yet, to be completed by `llm`.

    A context manager that shows progress on `console`, if there is one; the time left follows from
    the `expected` run and its `forecast`, as far as they are known:

        with BatchJob(llm, reader, writer, console) as job:
            job.run()

    Inside it SIGINT (Ctrl-C) raises Interrupted; so do SIGTERM and SIGHUP under
    interrupt.raise_on_signals.
    """

    def __init__(
        self,
        llm: LLM,
        reader: RequestReader,
        writer: ResultWriter,
        console: Console | None,
        *,
        expected: ExpectedRun | None = None,
        forecast: RunForecast | None = None,
    ) -> None:
        self._llm, self._reader, self._writer = llm, reader, writer
        self._running: dict[str, _Begun] = {}  # the rows that have begun, by id
        self._bytes_done = 0
        self._tokens = 0
        self._rows_expected = None if expected is None else expected.row_count
        left = 1 - min(1, writer.rows / (self._rows_expected or 1))  # others are skipped
        self._estimate = RunEstimate(
            tokens=None if expected is None else expected.mean_new * expected.requests,
            forecast_s=None if forecast is None else forecast.seconds * left,
            began=time.perf_counter(),
        )
        self._progress = RunProgress(
            console, self._estimate, rows=self._all_rows, tokens=self._new_tokens
        )
        self.counts = Counts(writer.failed_before)

    def __enter__(self) -> "BatchJob":
        self._progress.__enter__()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._progress.__exit__()
        if isinstance(error, KeyboardInterrupt):
            raise Interrupted(self._on_disk(), hint=self._writer.resume_hint, cause=error) from None

    def _on_disk(self) -> str:
        """How many rows are in the output, of how many if that is known."""
        rows, total = self._writer.rows, self._reader.rows_total
        of = f"{rows} of {counted(total, 'row')}" if total and total >= rows else None
        return f"{of or counted(rows, 'row')} {self._writer.place}"

    def run(self) -> None:
        """Complete the rows that are left to do; on return all results are on disk."""
        for result in self._llm.run(self._requests(), choose=self._reader.choose):
            self._finish(result)

    def _requests(self) -> Iterator[Request | None]:
        """The rows that are left to do; writes the errors of rows that cannot be run.

        None while others run and no more have arrived.
        """
        for row in self._reader.rows(self._llm.rules):
            if row is None:
                if self._running:
                    yield None
                else:
                    self._reader.wait()
                continue
            self._writer.expect(row.id, row.line)
            begun = self._running[row.id] = _Begun(row.nbytes, row.digest, self._limit(row))
            is_done = self._writer.is_done(row.id, InputRow(row.id, row.line, row.digest))
            self.counts.failed_before = self._writer.failed_before
            if is_done:
                self.counts.skipped += 1
                self._end(row.id)
                self._estimate.skip(limit=begun.limit)
                continue
            self._estimate.begin()
            if isinstance(row, RowError):
                self._finish(row)
            else:
                yield row

    def _finish(self, result: Completion | RowError) -> None:
        """Write the result of a row; on return it is on disk."""
        begun = self._running[result.id]
        self._writer.write(result, digest=begun.digest)
        failed = isinstance(result, RowError)
        choices = () if isinstance(result, RowError) else result.choices
        self.counts.failed += failed
        self.counts.done += not failed
        self._end(result.id)
        tokens = sum(len(one.token_ids) for one in choices)
        self._estimate.end(limit=begun.limit, tokens=tokens, failed=failed)

    def _end(self, row_id: str) -> None:
        """Forget a row that has ended."""
        self._bytes_done += self._running.pop(row_id).nbytes

    def _limit(self, row: Request | RowError) -> int:
        """New tokens that a row may have at most, in all its choices; 0 if it cannot be run."""
        if isinstance(row, RowError):
            return 0
        most = self._llm.rules.max_model_len
        requests = (row, *row.further)
        return sum(r.params.limit(most - len(r.prompt_ids)) for r in requests)

    def _all_rows(self) -> tuple[int, bool] | None:
        """How many rows there are, and whether the number is exact; None if it is not known."""
        if (total := self._reader.rows_total) is not None:
            return total, True
        return None if self._rows_expected is None else (self._rows_expected, False)

    def _new_tokens(self) -> int:
        """New tokens of the run so far, those of running rows included."""
        with suppress(UsageError):  # the model is being loaded again
            self._tokens = max(self._tokens, self._llm.engine.stats.tokens_so_far)
        return self._tokens


def check_report(report: str, *, source: str, output: str, profile: str) -> None:
    """Raise UsageError if `report` is no file name, or would overwrite another file of the run."""
    hint = "give --report another file that ends in .json"
    if report in ("", "-"):
        raise UsageError(f"{report!r} is not a file name for the report", hint=hint)
    check_file_name(report)
    if os.path.isdir(report):
        raise UsageError(f"{report}: is a directory", hint=hint)
    folder = os.path.dirname(os.path.realpath(report))
    if not os.path.isdir(folder):
        raise UsageError(f"{folder}: no such folder", hint="make it, or change --report")
    if same_file(output, report):
        raise UsageError(f"{report}: the report would overwrite the results (-o)", hint=hint)
    if output != "-":
        for path, what in (
            (fingerprint_path(output), "the run's fingerprint"),
            (digests_path(output), "the digests of its rows"),
        ):
            if same_file(str(path), report):
                raise UsageError(f"{report}: the report would overwrite {what}", hint=hint)
    if same_file(report, source):
        raise UsageError(f"{report}: the report would overwrite the prompts (-i)", hint=hint)
    if profile != "auto" and same_file(report, profile):
        raise UsageError(f"{report}: the report would overwrite the profile", hint=hint)


def is_report_of(path: str, rows: int) -> bool:
    """Whether there is a report at `path` of a run over so many rows, those skipped included."""
    try:
        counts = json.loads(Path(path).read_text(encoding="utf-8"))["rows"]
        return bool(counts["done"] + counts["failed"] + counts["skipped"] == rows)
    except (OSError, ValueError, LookupError, TypeError):
        return False


def write_report(report: dict[str, Any], path: Path) -> None:
    """Write `report` as JSON. Raises CannotRun."""
    try:
        path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    except OSError as problem:
        raise CannotRun(
            f"{path}: the report cannot be written ({problem.strerror})",
            hint="all results are in the output; give --report a writable file",
        ) from None
