"""Errors that reach the user: one line of what is wrong, one line of what to do about it.

Every error carries the exit code of the command line; only error_lines.py shows it and exits.
"""

import math
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

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


def check_count(
    name: str, value: object, least: int = 1, *, besides: Sequence[str | None] = ()
) -> Any:
    """`value` as an int of at least `least`, or one of `besides` as it is; UsageError for others.

    NumPy's numbers are taken, too.
    """
    if not isinstance(value, bool) and isinstance(value, Integral) and int(value) >= least:
        return int(value)
    return _one_of(name, value, f"an integer of at least {least}", besides)


def check_number(
    name: str,
    value: object,
    low: float,
    high: float = math.inf,
    *,
    besides: Sequence[str | None] = (),
) -> Any:
    """`value` as a finite int or float from `low` to `high`; for the rest see `check_count`."""
    if not isinstance(value, bool) and isinstance(value, Real):
        number = int(value) if isinstance(value, Integral) else float(value)
        if low <= number <= high and number < math.inf:
            return number
    limits = f"of at least {low:g}" if high == math.inf else f"from {low:g} to {high:g}"
    return _one_of(name, value, f"a number {limits}", besides)


def check_choice(name: str, value: object, choices: Sequence[str | None]) -> None:
    """UsageError unless `value` is one of `choices`."""
    if not isinstance(value, str | None) or value not in choices:
        raise wrong(name, value, " or ".join(map(str, choices)))


def wrong(name: str, value: object, expected: str) -> UsageError:
    """The error for a `value` that is not what was `expected`."""
    return UsageError(f"{name} is {value!r}", hint=f"{name} must be {expected}")


def _one_of(name: str, value: object, expected: str, besides: Sequence[str | None]) -> object:
    if isinstance(value, str | None) and value in besides:
        return value
    raise wrong(name, value, " or ".join([expected, *map(str, besides)]))
