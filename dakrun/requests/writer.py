"""The output of a run: one JSON row for each input row, on disk as soon as it is written.

Knows the outputs that may be written and how to resume one; knows neither prompts nor the engine.
The rows' formats are in native_rows.py and openai_results.py.
"""

import errno
import json
import os
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path

from dakrun.errors import CannotRun, UsageError
from dakrun.interrupt import defer_signals
from dakrun.requests import native_rows, openai_results
from dakrun.requests.destination import check_destination, check_output
from dakrun.requests.files import OutputFile
from dakrun.requests.fingerprint import (
    Fingerprint,
    differences,
    fingerprint_path,
    not_compared,
    read_fingerprint,
    resumed,
    start_of,
    write_fingerprint,
)
from dakrun.requests.gzip_files import pack
from dakrun.requests.input_order import InputOrder, put_in_order
from dakrun.requests.request import Completion, IdSet, RowError, id_hash
from dakrun.requests.row_digests import InputRow, RowDigests, digests_path, rows_changed
from dakrun.requests.written_rows import WrittenRows

_CHANGED_HINT = "--resume --changed runs changed rows again, --resume --force keeps the old results"
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


class ResultWriter:
    """Appends result rows to `destination` (a path or "-", standard output); a context manager.

    The output is gzip if its name ends in .gz, unless it is resumed: then it stays as it is. In
    gzip each row is a member of its own, so that it is on disk when it is written.

    The constructor changes nothing. It raises UsageError if the destination is not empty (unless
    `overwrite` or `resume`), is the `source` of the prompts, lies in a folder that is missing, or
    is a file that is not named .jsonl, .jsonl.gz or without a suffix.

    Entering locks the file against other runs. With `overwrite` it truncates the file. With
    `resume` it drops a last row that was cut off and reads which ids are done, errors included, so
    that each id is written once; `failed_before` counts the error rows that it found and
    that are not run again. `rows` counts the rows that are on disk and are not run again.

    Digests of the rows are kept beside the output (row_digests.py). A row that has changed since
    its result was written is refused; with `changed` it is run again, with `force` it keeps the
    result. With `retry_failed` error rows are run again. A result that is replaced stays until the
    new one is on disk; `finish` then drops it.

    A write that fails raises CannotRun and leaves whole rows only.

    With `ordered`, `put_in_order` writes the rows anew in the order of the lines in `expect` calls.

    The run's fingerprint, if `identify` gives one, is kept beside the output (fingerprint.py).
    """

    def __init__(
        self,
        destination: str | Path,
        *,
        source: str | Path | None = None,
        overwrite: bool = False,
        resume: bool = False,
        force: bool = False,
        ordered: bool = False,
        changed: bool = False,
        retry_failed: bool = False,
    ) -> None:
        self._changed, self._retry_failed = changed, retry_failed
        self._digests: RowDigests | None = None
        self._failed: set[int] = set()  # hashes of ids of failed rows that are not yet run again
        self._replaced = False  # whether the output has ids twice
        self._order = InputOrder() if ordered else None
        self.failed_before = self.rows = 0
        self._force = force
        self._fingerprint: Fingerprint | None = None
        self._name, self._overwrite, self._resume = str(destination), overwrite, resume
        self._is_packed = self._name.lower().endswith(".gz")
        self._ids = IdSet()
        self._file: OutputFile | None = None
        check_output(
            self._name, source, overwrite=overwrite, resume=resume, force=force, ordered=ordered,
            changed=changed, retry_failed=retry_failed,
        )  # fmt: skip

    def __enter__(self) -> "ResultWriter":
        try:
            self._file = OutputFile(self._name)
            if self._file.can_be_truncated:
                self._take_over(self._file)
        except BaseException as problem:
            self._close(silent=True)
            if isinstance(problem, OSError):
                raise self._failure(problem) from problem
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._close(silent=error is not None)

    def identify(self, fingerprint: Fingerprint) -> str | None:
        """Say which run this is; call it before entering.

        Raises UsageError if the output to resume is of another run, unless `force` was given, and
        if OUT.run.json is something else. Returns a note if there is no OUT.run.json.
        """
        self._fingerprint = fingerprint
        try:
            return self._check_run()
        except OSError as problem:
            raise self._failure(problem) from problem

    @property
    def started(self) -> datetime | None:
        """When the run began that `identify` told of, or the one that it resumes."""
        return start_of(self._fingerprint) if self._fingerprint else None

    @property
    def name(self) -> str:
        """The destination's name in messages."""
        return "standard output" if self._name == "-" else self._name

    @property
    def place(self) -> str:
        """Where its rows are, in messages."""
        return f"{'written to' if self._name == '-' else 'on disk in'} {self.name}"

    @property
    def resume_hint(self) -> str:
        """How the user continues a run that was stopped."""
        if self._name == "-" or (os.path.exists(self._name) and not os.path.isfile(self._name)):
            return "give -o a file to be able to go on with --resume"
        instead = " instead of --overwrite" if self._overwrite else ""
        return f"to go on, run again with --resume{instead}"

    def compare(self, rows: Iterable[InputRow]) -> tuple[list[str], int | None]:
        """Compare the output to resume with the rows of the input; changes nothing.

        Returns notes for people, and the number of rows if the output is finished: all have a
        known result, none of which is to be replaced or moved. Raises UsageError if rows have
        changed since their results were written, unless `changed` or `force` was given, and
        CannotRun if reading fails.
        """
        if not self._resume or not os.path.isfile(self._name):
            return [], None
        try:
            digests = RowDigests(digests_path(self._name))
        except OSError as problem:
            raise self._failure(problem) from problem
        written = (
            row.id for row in WrittenRows(self._name) if not (row.failed and self._retry_failed)
        )
        found = digests.compare(written, rows)
        notes = found.notes(
            self._name, changed=self._changed, force=self._force, hint=_CHANGED_HINT
        )
        replaces = self._changed or self._retry_failed or self._order is not None
        finished = found.done == found.rows > 0 and not (replaces or found.unknown)
        return notes, found.rows if finished else None

    def expect(self, request_id: str, line: int) -> None:
        """Note the line of a row in the input, for --ordered."""
        if self._order is not None:
            self._order.add(request_id, line)

    def finish(self) -> None:
        """Put rows in the input's order for --ordered, and drop results that were replaced.

        Nothing can be written afterwards. A kill or an error leaves all rows in the output, in
        order or not, and old results before new ones. Raises CannotRun.
        """
        if self._file is None:
            return
        try:
            self._file.check()
        except OSError as problem:
            raise self._failure(problem) from problem
        if self._order is None and not self._replaced:
            return
        try:
            put_in_order(self._name, self._order)
        except OSError as problem:
            lack = "in order" if self._order else "without the results that were replaced"
            raise CannotRun(
                f"{self.name}: all rows are in it, but not {lack} ({problem.strerror})",
                hint=f"free as much disk space as it takes; {self.resume_hint}",
            ) from problem
        self._close(silent=False)

    def is_done(self, request_id: str, row: InputRow | None = None) -> bool:
        """Whether the output that this run resumes already has a row with this id.

        With the input's `row`, raises UsageError if it has the result of another one, unless
        `changed` or `force` was given.
        """
        if request_id not in self._ids:
            if id_hash(request_id) in self._failed:
                self._run_again(request_id)
            return False
        known = self._digests.find(request_id) if self._digests else None
        if row is None or known in (None, row.digest) or self._force:
            return True
        if not self._changed:
            raise rows_changed(self._name, 1, row, _CHANGED_HINT)
        self._replaced = True
        self._run_again(request_id)
        return False

    def write(self, result: Completion | RowError, *, digest: int = 0) -> None:
        """Append the result of a row; on return it is on disk. Raises CannotRun.

        `digest` is that of the input's row, 0 if it is not known.
        """
        assert self._file is not None, "rows are written inside the `with` block"
        data = result_line(result)
        try:
            with defer_signals():
                self._file.append(pack(data) if self._is_packed else data)
                if self._digests is not None and digest:  # behind the result: see row_digests.py
                    self._digests.add(result.id, digest)
                self.rows += 1
        except OSError as problem:
            raise self._failure(problem) from problem

    def _close(self, *, silent: bool) -> None:
        file, self._file = self._file, None
        if file is None:
            return
        try:
            if self._digests is not None:
                self._digests.close()
            file.close()
        except OSError as problem:
            if not silent:
                raise self._failure(problem) from problem

    def _take_over(self, file: OutputFile) -> None:
        """Lock the output; truncate it to the rows that this run continues from."""
        if not file.lock():
            raise CannotRun(
                f"{self._name}: another run is writing to it",
                hint="wait until that has ended, or give -o another file",
            )
        # Again: another run may have filled it before the lock.
        check_destination(self._name, overwrite=self._overwrite, resume=self._resume)
        self._check_run()
        kept = self._read_done() if self._resume else 0  # bytes
        if self._overwrite or self._resume:
            file.truncate(kept)
        # Only now, after the truncation: an old output must not get a new fingerprint.
        path = fingerprint_path(self._name)
        with defer_signals():
            if self._fingerprint is None:
                if self._overwrite:
                    path.unlink(missing_ok=True)
            elif self._fingerprint != read_fingerprint(path):
                write_fingerprint(self._fingerprint, path)
            self._digests = RowDigests(digests_path(self._name))
            self._digests.begin(afresh=not kept)

    def _check_run(self) -> str | None:
        """Compare the fingerprint with that of the output to resume; see `identify`."""
        if self._name == "-" or self._fingerprint is None:
            return None
        if os.path.exists(self._name) and not os.path.isfile(self._name):
            return None
        path = fingerprint_path(self._name)
        before = read_fingerprint(path)
        if not self._resume or not os.path.exists(self._name) or not os.path.getsize(self._name):
            return None
        known = before or {"format": WrittenRows(self._name).row_format()}
        different = differences(known, self._fingerprint, lengths_may_differ=self._retry_failed)
        if different and not self._force:
            raise UsageError(
                f"{self._name}: the output of another run: {'; '.join(different)}",
                hint="--resume with that run's model and options, --resume --force to go on all "
                "the same, or --overwrite to start afresh",
            )
        self._fingerprint = resumed(self._fingerprint, before)
        if before is None:
            return not_compared(self._name, path)
        return None

    def _read_done(self) -> int:
        """Read the ids of the rows in the output; returns the size of all whole rows in bytes.

        Of several rows of an id the last counts: a run that was to replace the others was killed.
        """
        rows, seen = WrittenRows(self._name), IdSet()
        failed: set[int] = set()
        for row in rows:
            self._replaced |= not seen.add(row.id)
            (failed.add if row.failed else failed.discard)(id_hash(row.id))
        if self._retry_failed:
            for row in rows:
                if id_hash(row.id) not in failed:
                    self._ids.add(row.id)
            self._replaced |= bool(failed)
        else:
            self._ids = seen
        self._failed, self.failed_before, self.rows = failed, len(failed), len(seen)
        if rows.size:
            self._is_packed = rows.is_gzip
        return rows.size

    def _run_again(self, request_id: str) -> None:
        """Stop counting the result of a row: a new one will replace it."""
        hashed = id_hash(request_id)
        self.failed_before -= hashed in self._failed
        self._failed.discard(hashed)
        self.rows -= 1

    def _failure(self, problem: OSError) -> CannotRun:
        if isinstance(problem, BrokenPipeError):
            hint = "the program that reads the rows has ended; give -o a file to keep them"
        elif problem.errno == errno.ESTALE:
            hint = "let no other program change the output, in which rows may be missing now; "
            hint += self.resume_hint
        elif problem.errno in _DISK_FULL:
            hint = f"finished rows are kept: free some space; {self.resume_hint}"
        elif problem.errno == errno.EFBIG:
            hint = f"finished rows are kept: raise the limit (ulimit -f); {self.resume_hint}"
        else:
            hint = f"finished rows are kept: make the output writable; {self.resume_hint}"
        return CannotRun(f"{self.name}: cannot be written ({problem.strerror})", hint=hint)


def result_line(result: Completion | RowError) -> bytes:
    """The line of a row's result in the output: of its error, or of all its choices."""
    rows = native_rows if result.reply.kind == "native" else openai_results
    if isinstance(result, RowError):
        row = rows.error_row(result)
    else:
        row = rows.completion_row(result)
    try:
        text = json.dumps(row, ensure_ascii=False, separators=(",", ":"))
        return text.encode() + b"\n"
    except UnicodeEncodeError:  # an id with half a surrogate pair
        return json.dumps(row, separators=(",", ":")).encode() + b"\n"
