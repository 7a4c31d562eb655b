"""Files as the system sees them: which names lead to the same one, folders synced, files locked.

Knows paths and standard streams; knows nothing of what is in the files.
"""

import fcntl
import os
import stat
import sys
from pathlib import Path
from typing import Any


def same_file(output: str, source: str) -> bool:
    """Whether both names lead to one regular file, by whatever links or redirections.

    "-" is standard output for `output` and standard input for `source`.
    """
    first, second = _stat(output, sys.stdout), _stat(source, sys.stdin)
    if first and second:
        return stat.S_ISREG(first.st_mode) and os.path.samestat(first, second)
    return "-" not in (output, source) and os.path.realpath(output) == os.path.realpath(source)


def lock(fd: int) -> bool:
    """Keep a file that is open from other runs until it is closed; False where one has it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        pass
    return True


def fsync_folder(folder: Path) -> None:
    """Have the names in `folder` on disk; OSError where its file system cannot do that."""
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
