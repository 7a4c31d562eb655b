"""Output files: whether two names are one file, and appends that are on disk or not done at all.

Knows paths, file descriptors and standard streams; knows nothing of the rows in the files.
"""

import errno
import fcntl
import io
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from dakrun.interrupt import defer_signals

_NO_FSYNC = (errno.EINVAL, errno.ENOTSUP, errno.EROFS)


def same_file(output: str, source: str) -> bool:
    """Whether both names lead to one regular file, through links or redirections.

    "-" is standard output for `output` and standard input for `source`.
    """
    first, second = _stat(output, sys.stdout), _stat(source, sys.stdin)
    if first and second:
        return stat.S_ISREG(first.st_mode) and os.path.samestat(first, second)
    return "-" not in (output, source) and os.path.realpath(output) == os.path.realpath(source)


class OutputFile:
    """A file, or standard output ("-"), opened for appending. All methods raise OSError."""

    def __init__(self, name: str) -> None:
        self._name, self._is_stdout = name, name == "-"
        self._fd = _stdout_fd() if self._is_stdout else _open_for_append(name)
        self._is_regular = self._fd >= 0 and stat.S_ISREG(os.fstat(self._fd).st_mode)
        self._fsync = self._fd >= 0
        self._size: int | None = None  # after the last append

    @property
    def can_be_truncated(self) -> bool:
        """Whether this is a regular file other than standard output."""
        return self._is_regular and not self._is_stdout

    def lock(self) -> bool:
        """Lock the file against other runs until it is closed.

        False if another run has it, or has replaced it since it was opened.
        """
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:  # a file system without locks
            pass
        now = _stat(self._name, None)
        return now is not None and os.path.samestat(os.fstat(self._fd), now)

    def truncate(self, size: int) -> None:
        """Cut the file to its first `size` bytes."""
        os.ftruncate(self._fd, size)
        self._size = size

    def check(self) -> None:
        """Raise OSError (ESTALE) if another program deleted, replaced or changed the file."""
        if not self.can_be_truncated:
            return
        own, now = os.fstat(self._fd), _stat(self._name, None)
        if now is None:
            raise OSError(errno.ESTALE, "another program deleted or moved it")
        if not os.path.samestat(own, now):
            raise OSError(errno.ESTALE, "another program replaced it")
        if self._size is not None and own.st_size != self._size:
            raise OSError(errno.ESTALE, "another program changed it")

    def append(self, data: bytes) -> None:
        """Append `data`; on return it is on disk.

        If that fails, a regular file is left as it was. Signals wait for the end (defer_signals).
        """
        if self._fd < 0:
            sys.stdout.write(data.decode())
            sys.stdout.flush()
        elif self._is_regular:
            with defer_signals():
                self.check()
                self._append_or_undo(data)
                self._size = os.fstat(self._fd).st_size
        else:
            self._write(data)
            self._sync()

    def close(self) -> None:
        """Close the file; standard output stays open."""
        if not self._is_stdout:
            os.close(self._fd)

    def _append_or_undo(self, data: bytes) -> None:
        before = os.fstat(self._fd).st_size
        try:
            self._write(data)
            self._sync()
        except OSError:
            os.ftruncate(self._fd, before)
            raise

    def _write(self, data: bytes) -> None:
        written = 0
        while written < len(data):  # a pipe, or a full disk, takes only as much as it has room for
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


@contextmanager
def replacement(path: Path) -> Iterator[BinaryIO]:
    """A new file that replaces `path` in one step, on disk, when the block ends.

    If the block raises, or a signal stops it, `path` stays as it was. Raises OSError.
    """
    new = path.with_name(f".{path.name}.new")
    try:
        with new.open("wb") as file:
            with suppress(FileNotFoundError):
                os.fchmod(file.fileno(), stat.S_IMODE(path.stat().st_mode))
            yield file
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    with suppress(OSError):  # some file systems cannot sync a folder
        _fsync_folder(path.parent)


def _stdout_fd() -> int:
    """The file descriptor of standard output; -1 if it was replaced by an object without one."""
    sys.stdout.flush()
    try:
        return sys.stdout.fileno()
    except io.UnsupportedOperation:
        return -1


def _open_for_append(name: str) -> int:
    """Open or create a file; a new file's name is on disk on return."""
    is_new = not os.path.exists(name)
    fd = os.open(name, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    if is_new:
        with suppress(OSError):  # some file systems cannot sync a folder
            _fsync_folder(Path(name).parent)
    return fd


def _fsync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _stat(name: str, standard: Any) -> os.stat_result | None:
    try:
        return os.fstat(standard.fileno()) if name == "-" else os.stat(name)
    except (OSError, AttributeError):  # a standard stream that is closed is None
        return None
