"""Errors that reach the user: one line of what is wrong, one line of what to do about it.

Every error carries the exit code of the command line; only error_lines.py shows it and exits.
"""

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_CANNOT_RUN = 3


class DakrunError(Exception):
    """An error with a `hint` for the user and the process's `exit_code`."""

    exit_code = EXIT_FAILED

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


class UsageError(DakrunError):
    """The command line or an input file named on it is wrong (exit code 2)."""

    exit_code = EXIT_USAGE


class CannotRun(DakrunError):
    """The request is well formed, but this model or machine does not allow it (exit code 3)."""

    exit_code = EXIT_CANNOT_RUN


class GpuFailed(CannotRun):
    """CUDA failed: from then on every call of this process to it fails, those of exit included."""
