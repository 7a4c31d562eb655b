"""The output of a run: one JSON line a row, on disk as soon as it is written.

Knows the native row format, what a previous run has left behind, and how to stop without leaving
half a row; knows neither prompts nor the engine. OpenAI's row format is in openai_batch.py.
"""

import errno
import io
import json
import os
import stat
import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from dakrun.errors import CannotRun, UsageError
from dakrun.interrupt import put_off
from dakrun.requests import openai_rows as openai_batch
from dakrun.requests.files import fsync_folder, lock, same_file
from dakrun.requests.ids import IdSet
from dakrun.requests.request import Completion, RowError

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_FSYNC = (errno.EINVAL, errno.ENOTSUP, errno.EROFS)
# How every row begins, so also how one that was cut off begins.
_ROW_START = b'{"id":'


def completion_row(completion: Completion) -> dict[str, Any]:
    """The output row of a finished request, in the format that its reply asks for."""
    if completion.reply.kind != "native":
        return openai_batch.completion_row(completion)
    return {
        "id": completion.id,
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "usage": {
            "prompt_tokens": completion.prompt_tokens,
            "completion_tokens": len(completion.token_ids),
        },
    }


def error_row(error: RowError) -> dict[str, Any]:
    """The output row of a row that could not be run, in the format that its reply asks for."""
    if error.reply.kind != "native":
        return openai_batch.error_row(error)
    detail = {"code": error.code, "message": error.message, "line": error.line}
    return {"id": error.id, "error": detail}


class ResultWriter:
    """Appends result rows to `destination` (a path or "-", standard output); a context manager.

    The constructor changes nothing and raises UsageError where the destination cannot be meant:
    it holds something (unless `overwrite` or `resume`), it is the `source` of the prompts, or its
    folder is missing. Entering keeps other runs off the file; it truncates with `overwrite`; with
    `resume` it drops a last row that was cut off and remembers which ids are done, errors included:
    each id is written once.
    A write that fails raises CannotRun and leaves whole rows only. `failed_before` counts the error
    rows that were there.
    """

    def __init__(
        self,
        destination: str | Path,
        *,
        source: str | Path | None = None,
        overwrite: bool = False,
        resume: bool = False,
    ) -> None:
        self.failed_before = 0
        self._name, self._overwrite, self._resume = str(destination), overwrite, resume
        self._ids = IdSet()
        self._fd = -1
        self._regular = self._fsync = False
        if overwrite and resume:
            raise UsageError("--overwrite and --resume exclude each other", hint="give one of them")
        if source is not None and same_file(self._name, str(source)):
            raise UsageError(
                f"{self._name}: the output is the file that the prompts come from",
                hint="give another file to -o",
            )
        self._check_destination()

    def __enter__(self) -> "ResultWriter":
        with ExitStack() as opened:
            opened.push(self)
            try:
                self._fd = self._open()
                self._regular = self._fd >= 0 and stat.S_ISREG(os.fstat(self._fd).st_mode)
                if self._regular and self._name != "-":
                    self._take_over()
            except OSError as problem:
                raise self._failure(problem) from problem
            opened.pop_all()
        self._fsync = self._fd >= 0
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._name == "-" or self._fd < 0:
            return
        fd, self._fd = self._fd, -1
        try:
            os.close(fd)
        except OSError as problem:
            if error is None:
                raise self._failure(problem) from problem

    @property
    def name(self) -> str:
        """What messages call the destination."""
        return "standard output" if self._name == "-" else self._name

    @property
    def go_on(self) -> str:
        """How the user continues a run that was stopped."""
        if self._name == "-" or (os.path.exists(self._name) and not os.path.isfile(self._name)):
            return "give -o a file to be able to go on with --resume"
        instead = " instead of --overwrite" if self._overwrite else ""
        return f"to go on, run again with --resume{instead}"

    def is_done(self, request_id: str) -> bool:
        """Whether the output that this run resumes already has a row with this id."""
        return request_id in self._ids

    def write(self, completion: Completion) -> None:
        """Append a finished request; on return it is on disk. Raises CannotRun."""
        self._write(completion_row(completion))

    def write_error(self, error: RowError) -> None:
        """Append a row that could not be run; on return it is on disk. Raises CannotRun."""
        self._write(error_row(error))

    def _write(self, row: dict[str, Any]) -> None:
        data = _encode(row)
        if self._fd < 0:  # standard output was replaced by something that is no file
            sys.stdout.write(data.decode())
            sys.stdout.flush()
            return
        try:
            if self._regular:
                with put_off():
                    self._write_whole(data)
            else:
                self._write_bytes(data)
                self._sync()
        except OSError as problem:
            raise self._failure(problem) from problem

    def _write_whole(self, data: bytes) -> None:
        before = os.fstat(self._fd).st_size
        try:
            self._write_bytes(data)
            self._sync()
        except OSError:
            os.ftruncate(self._fd, before)
            raise

    def _write_bytes(self, data: bytes) -> None:
        written = os.write(self._fd, data)
        if self._regular and written < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        while written < len(data):  # a pipe takes what it has room for
            written += os.write(self._fd, data[written:])

    def _sync(self) -> None:
        if not self._fsync:
            return
        try:
            os.fsync(self._fd)
        except OSError as problem:
            if problem.errno not in _NO_FSYNC:
                raise
            self._fsync = False  # a pipe or a terminal

    def _check_destination(self) -> None:
        if self._name == "-":
            if self._resume:
                raise UsageError(
                    "standard output cannot be resumed", hint="give -o a file, or drop --resume"
                )
            return
        name = self._name
        folder = os.path.dirname(os.path.realpath(name) if os.path.islink(name) else name) or "."
        if not name:
            raise UsageError("the output has no name", hint="give -o a file that ends in .jsonl")
        if os.path.isdir(name):
            raise UsageError(f"{name}: is a directory", hint="give -o a file that ends in .jsonl")
        if not os.path.isdir(folder):
            raise UsageError(f"{folder}: no such directory", hint=f"create it: mkdir -p '{folder}'")
        if not os.path.exists(name):
            return
        if self._resume and not os.path.isfile(name):
            raise UsageError(f"{name}: is no file that can be resumed", hint="drop --resume")
        if os.path.getsize(name) and not (self._overwrite or self._resume):
            raise UsageError(
                f"{name}: exists and is not empty",
                hint="--resume adds the rows that are missing, --overwrite starts afresh",
            )

    def _open(self) -> int:
        """The file descriptor to write to; -1 where standard output has none."""
        if self._name == "-":
            sys.stdout.flush()
            try:
                return sys.stdout.fileno()
            except io.UnsupportedOperation:
                return -1
        is_new = not os.path.exists(self._name)
        fd = os.open(self._name, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        if is_new:
            with suppress(OSError):  # some file systems cannot sync a folder
                fsync_folder(Path(self._name).parent)
        return fd

    def _take_over(self) -> None:
        """Keep other runs off the output, and keep of it what this one goes on with."""
        if not lock(self._fd):
            raise CannotRun(
                f"{self._name}: another run is writing to it",
                hint="wait until that has ended, or give -o another file",
            )
        self._check_destination()  # another run may have ended meanwhile
        if self._overwrite or self._resume:
            os.ftruncate(self._fd, self._read_done() if self._resume else 0)

    def _read_done(self) -> int:
        """Learn the rows in the output; the size of the whole ones in bytes. Raises UsageError."""
        whole = 0
        try:
            with open(self._name, "rb") as file:
                for number, line in enumerate(file, 1):
                    if line.endswith(b"\n"):
                        self._add_done(line, number)
                        whole += len(line)
                    elif not _is_cut_off(line):
                        raise self._not_ours(number)
        except OSError as problem:
            raise CannotRun(
                f"{self._name}: cannot be read ({problem.strerror})", hint="give -o another file"
            ) from problem
        return whole

    def _add_done(self, line: bytes, number: int) -> None:
        with suppress(ValueError, TypeError, KeyError, RecursionError):
            row = json.loads(line)
            request_id = row["custom_id" if "custom_id" in row else "id"]
            if isinstance(request_id, str) and ("finish_reason" in row or "error" in row):
                self._ids.add(request_id)
                self.failed_before += row.get("error") is not None
                return
        raise self._not_ours(number)

    def _not_ours(self, number: int) -> UsageError:
        return UsageError(
            f"{self._name}: line {number} is no result row, so it cannot be resumed",
            hint="give -o the output of the run to resume, or --overwrite to start afresh",
        )

    def _failure(self, problem: OSError) -> CannotRun:
        if isinstance(problem, BrokenPipeError):
            hint = "the program that reads the rows has ended; give -o a file to keep them"
        elif problem.errno in _DISK_FULL:
            hint = f"finished rows are kept: free some space; {self.go_on}"
        else:
            hint = f"finished rows are kept: see that it can be written; {self.go_on}"
        return CannotRun(f"{self.name}: cannot be written ({problem.strerror})", hint=hint)


def _encode(row: dict[str, Any]) -> bytes:
    try:
        text = json.dumps(row, ensure_ascii=False, separators=(",", ":"))
        return text.encode() + b"\n"
    except UnicodeEncodeError:  # an id with half a surrogate pair
        return json.dumps(row, separators=(",", ":")).encode() + b"\n"


def _is_cut_off(line: bytes) -> bool:
    """Whether a line without end is what a kill (part of a row) or a crash (zeros) leaves."""
    return _ROW_START.startswith(line[: len(_ROW_START)]) or not line.strip(b"\0")
