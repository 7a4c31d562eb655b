"""Results of a run on Ray: a folder of part files, each of which is there only when it is whole.

Rows that no part has yet lie in a hidden file, so that a kill loses none. Knows lines and ids of
result rows; knows neither prompts nor workers.
"""

import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Literal

import pyarrow.parquet as pq

from dakrun.errors import CannotRun, UsageError
from dakrun.interrupt import defer_signals
from dakrun.ray.part_files import give_optional, ids_of
from dakrun.requests import IdSet, InputRow
from dakrun.requests.arrow import arrow_row, result_table, well_formed
from dakrun.requests.files import OutputFile, replacement
from dakrun.requests.fingerprint import (
    Fingerprint,
    differences,
    not_compared,
    read_fingerprint,
    resumed,
    start_of,
    write_fingerprint,
)
from dakrun.requests.native_rows import NATIVE
from dakrun.requests.row_digests import RowDigests
from dakrun.requests.written_rows import WrittenRows

PartFormat = Literal["jsonl", "parquet"]
ROWS_PER_PART = 10_000
_PART = re.compile(r"part-([0-9]{5,})\.(jsonl|parquet)")
# Names that Parquet readers skip.
_HIDDEN, _LOCK, _RUN, _DIGESTS = ".rows.jsonl", ".lock", "_run.json", ".digests"
_OLD_RUN = "run.json"  # of older versions


class ResultParts:
    """Writes result rows to part-00000.jsonl (or .parquet), ... in `folder`; a context manager.

    The constructor changes nothing. It raises UsageError if the folder has parts (unless
    `overwrite` or `resume`), or if its path is that of a file. Entering locks the folder against
    other runs. With `overwrite` it removes the parts; with `resume` it reads which ids are done,
    errors included, of which `failed_before` counts the errors.

    Digests of the rows lie beside them, in .digests (requests/row_digests.py).

    folder/_run.json is the run's fingerprint (fingerprint.py). All Parquet parts have one schema. A
    write that fails raises CannotRun.
    """

    def __init__(
        self,
        folder: str,
        *,
        form: PartFormat = "jsonl",
        resume: bool = False,
        force: bool = False,
        overwrite: bool = False,
    ) -> None:
        self.folder, self._form = Path(folder), form
        self._resume, self._force, self._overwrite = resume, force, overwrite
        self.failed_before = 0
        self._ids = IdSet()
        self._next = self._count = 0  # number of the next part; rows in the hidden file
        self._fingerprint: Fingerprint | None = None
        self._lock: OutputFile | None = None
        self._file: OutputFile | None = None
        self._digests: RowDigests | None = None
        if overwrite and resume:
            raise UsageError("--overwrite and --resume exclude each other", hint="give one of them")
        if force and not resume:
            raise UsageError("--force needs --resume", hint="give both, or --overwrite alone")
        if folder == "-" or (self.folder.exists() and not self.folder.is_dir()):
            raise UsageError(
                f"{folder}: with --ray the output is a folder of part files",
                hint="give -o a folder, or run without --ray",
            )
        if self._has_results() and not (overwrite or resume):
            raise UsageError(
                f"{folder}: has results already",
                hint="--resume adds the rows that are missing, --overwrite starts afresh",
            )

    def identify(self, fingerprint: Fingerprint) -> str | None:
        """Say which run this is; call it before entering.

        Raises UsageError if the results to resume are of another run, unless `force` was given.
        Returns a note if they have no fingerprint.
        """
        self._fingerprint = fingerprint
        if fingerprint["format"] not in (None, NATIVE.name) and self._form == "parquet":
            raise _no_parquet()
        if not self._resume or not self._has_results():
            return None
        before = read_fingerprint(self.folder / _RUN) or read_fingerprint(self.folder / _OLD_RUN)
        self._fingerprint = resumed(fingerprint, before)
        if before is None:
            return not_compared(self.folder, self.folder / _RUN)
        different = differences(before, fingerprint)
        if different and not self._force:
            raise UsageError(
                f"{self.folder}: the results of another run: {'; '.join(different)}",
                hint="--resume with that run's model, options and files, --resume --force to go on "
                "all the same, or --overwrite to start afresh",
            )
        return None

    def compare(self, rows: Iterable[InputRow]) -> list[str]:
        """Compare the results to resume with the rows of the input; changes nothing.

        Returns notes for people. Raises UsageError if rows have changed since their results were
        written, unless `force` was given.
        """
        if not self._resume or not self._has_results():
            return []
        paths = [*self._parts().values(), *([self._hidden] if self._hidden.exists() else [])]
        written = (row_id for path in paths for row_id, _ in ids_of(path))
        try:
            comparison = RowDigests(self.folder / _DIGESTS).compare(written, rows)
        except OSError as problem:
            raise self._failure(problem) from problem
        return comparison.notes(
            self.folder,
            changed=False,
            force=self._force,
            hint="--resume --force keeps the old results; give -o another folder, or --overwrite, "
            "to run all rows again",
        )

    def __enter__(self) -> "ResultParts":
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = OutputFile(str(self.folder / _LOCK))
            if not self._lock.lock():
                raise CannotRun(
                    f"{self.folder}: another run is writing to it",
                    hint="wait until that has ended, or give -o another folder",
                )
            self._take_over()
            if self._fingerprint is not None:
                write_fingerprint(self._fingerprint, self.folder / _RUN)
                _remove_old_fingerprint(self.folder / _OLD_RUN)
            self._file = OutputFile(str(self._hidden))
            self._digests = RowDigests(self.folder / _DIGESTS)
            self._digests.begin(afresh=not self._resume)
        except BaseException as problem:
            self._close()
            if isinstance(problem, OSError):
                raise self._failure(problem) from problem
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._close()

    @property
    def started(self) -> datetime | None:
        """When the run began that `identify` told of, or the one that it resumes."""
        return start_of(self._fingerprint) if self._fingerprint else None

    @property
    def resume_hint(self) -> str:
        """How the user continues a run that was stopped."""
        return "to go on, run again with --resume" + (
            " instead of --overwrite" if self._overwrite else ""
        )

    def is_done(self, row_id: str) -> bool:
        """Whether the results that this run resumes have a row with this id."""
        return row_id in self._ids

    def write(self, lines: Sequence[bytes], rows: Iterable[InputRow] = ()) -> None:
        """Add result rows, those of the input's `rows`; on return they are on disk."""
        assert self._file and self._digests, "rows are written inside the `with` block"
        try:
            self._file.append(b"".join(lines))
            for row in rows:  # behind the results: see row_digests.py
                self._digests.add(row.id, row.digest)
            self._count += len(lines)
            if self._count >= ROWS_PER_PART:
                self.end_part()
        except OSError as problem:
            raise self._failure(problem) from problem

    def end_part(self) -> None:
        """Make a part of the rows that no other has."""
        if not self._count:
            return
        assert self._file is not None, "parts are made inside the `with` block"
        part = self.folder / f"part-{self._next:05}.{self._form}"
        try:
            if self._form == "parquet":
                rows = [arrow_row(line) for line in self._hidden.read_bytes().splitlines()]
                if any("custom_id" in row for row in rows):
                    raise _no_parquet()
                with replacement(part) as file:
                    pq.write_table(result_table(rows, from_file=True), file)
                self._file.truncate(0)
            else:
                with defer_signals():
                    done, self._file = self._file, None
                    done.close()
                    self._hidden.rename(part)
                    self._file = OutputFile(str(self._hidden))
        except OSError as problem:
            raise self._failure(problem) from problem
        self._next, self._count = self._next + 1, 0

    @property
    def _hidden(self) -> Path:
        return self.folder / _HIDDEN

    def _parts(self) -> dict[int, Path]:
        """The parts that are there, by number."""
        named = ((_PART.fullmatch(path.name), path) for path in self.folder.glob("part-*"))
        return {int(match[1]): path for match, path in sorted(named, key=str) if match}

    def _has_results(self) -> bool:
        hidden = self._hidden
        return bool(self._parts()) or (hidden.is_file() and hidden.stat().st_size > 0)

    def _take_over(self) -> None:
        """Read what is done, or remove it."""
        parts = self._parts()
        if self._overwrite:
            for path in (*parts.values(), self._hidden):
                path.unlink(missing_ok=True)
            return
        for path in parts.values():
            if path.suffix == ".parquet":
                give_optional(path)
            for row_id, failed in ids_of(path):
                self._ids.add(row_id)
                self.failed_before += failed
        self._next = max(parts, default=-1) + 1
        if not self._hidden.exists():
            return
        if self._form == "parquet":
            self._drop_surrogates()
        written = WrittenRows(str(self._hidden))
        rows = [(row.id, row.failed) for row in written]
        is_in_a_part = any(self.is_done(row_id) for row_id, _ in rows)  # killed after it was made
        os.truncate(self._hidden, 0 if is_in_a_part else written.size)
        if not is_in_a_part:
            self._count = len(rows)
            for row_id, failed in rows:
                self._ids.add(row_id)
                self.failed_before += failed

    def _drop_surrogates(self) -> None:
        """Drop rows with ids that Parquet cannot hold: they run again, under ids that it can.

        Older versions left such rows in the hidden file, and ended.
        """
        lines = [(row.id, row.line) for row in WrittenRows(str(self._hidden))]
        kept = [line for row_id, line in lines if well_formed(row_id) == row_id]
        if len(kept) < len(lines):
            with replacement(self._hidden) as file:
                file.write(b"".join(kept))

    def _close(self) -> None:
        for file in (self._file, self._digests, self._lock):
            if file is not None:
                file.close()
        self._file = self._digests = self._lock = None

    def _failure(self, problem: OSError) -> CannotRun:
        return CannotRun(
            f"{self.folder}: cannot be written ({problem.strerror})",
            hint=f"finished rows are kept: free some space, or make it writable; "
            f"{self.resume_hint}",
        )


def _no_parquet() -> UsageError:
    return UsageError(
        "results of OpenAI Batch rows cannot be Parquet",
        hint="use --part-format jsonl, or native rows; with --resume, finished rows are kept",
    )


def _remove_old_fingerprint(path: Path) -> None:
    """Remove a fingerprint with the name that older versions gave it; nothing else."""
    with suppress(UsageError):
        if read_fingerprint(path) is not None:
            path.unlink()
