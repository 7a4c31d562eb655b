"""Errors for the user, each with a hint on what to do, and checks of arguments that raise them.

Each error has the exit code of the command line; only cli/errors.py prints errors and exits.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
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

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without the constructor, which has further arguments."""
        return _unpickled, (type(self), str(self)), self.__dict__


def _unpickled(kind: type[DakrunError], message: str) -> DakrunError:
    return kind.__new__(kind, message)


class UsageError(DakrunError):
    """The command line or an input file named on it is wrong (exit code 2)."""

    exit_code = EXIT_USAGE


class CannotRun(DakrunError):
    """The request is well formed, but the model or the machine does not allow it (exit code 3).

    Also raised for files that cannot be read or written, or are damaged.
    """

    exit_code = EXIT_CANNOT_RUN


class OutOfGpuMemory(CannotRun):
    """The GPU's memory ran out, by `missing` bytes, or 0 where that is not known."""

    def __init__(self, message: str, *, hint: str, missing: int = 0) -> None:
        super().__init__(message, hint=hint)
        self.missing = missing


class GpuFailed(CannotRun):
    """A CUDA error that makes all later CUDA calls of this process fail, also those at exit."""


def check_count(
    name: str, value: object, minimum: int = 1, *, or_one_of: Sequence[str | None] = ()
) -> Any:
    """Return `value` as an int if it is an integer (NumPy's too) of at least `minimum`.

    A value in `or_one_of` is returned unchanged. Raises UsageError for anything else.
    """
    if not isinstance(value, bool) and isinstance(value, Integral) and int(value) >= minimum:
        return int(value)
    return _one_of(name, value, f"an integer of at least {minimum}", or_one_of)


def check_number(
    name: str,
    value: object,
    low: float,
    high: float = math.inf,
    *,
    or_one_of: Sequence[str | None] = (),
) -> Any:
    """Return `value` as an int or float if it is a finite number (NumPy's too), `low` to `high`.

    A value in `or_one_of` is returned unchanged. Raises UsageError for anything else.
    """
    if not isinstance(value, bool) and isinstance(value, Real):
        number = int(value) if isinstance(value, Integral) else float(value)
        if low <= number <= high and number < math.inf:
            return number
    limits = f"of at least {low:g}" if high == math.inf else f"from {low:g} to {high:g}"
    return _one_of(name, value, f"a number {limits}", or_one_of)


def check_file_name(name: object) -> None:
    """Raise UsageError if `name` has a NUL character, which no file's name can have."""
    if "\0" in str(name):
        raise UsageError(
            f"{str(name)!r} has a NUL character, which no file name can have",
            hint="take it out of the name",
        )


def check_new_file(path: Path, suffixes: Sequence[str], said: str, *, option: str) -> None:
    """Raise UsageError, before any work, unless `option` may name `path` as a file to write.

    `said` is the error for a suffix that is none of `suffixes`.
    """
    if path.is_dir():
        hint = f"name a file, as in {option} result{suffixes[0]}"
        raise UsageError(f"{path}: is a folder", hint=hint)
    if path.suffix.lower() not in suffixes:
        hint = f"write {option} {path.stem or 'result'}{suffixes[0]}"
        raise UsageError(f"{path}: {said}", hint=hint)
    if not path.absolute().parent.is_dir():
        raise UsageError(f"{path}: no such folder", hint=f"make it, or change {option}")


def check_choice(name: str, value: object, choices: Sequence[str | None]) -> None:
    """Raise UsageError unless `value` is one of `choices`."""
    if not isinstance(value, str | None) or value not in choices:
        raise invalid_value(name, value, " or ".join(map(str, choices)))


def is_neutral(name: str, value: object, table: Mapping[str, tuple[object, ...]]) -> bool:
    """Whether an unsupported option changes nothing: 0 and 0.0 are equal, false is not."""
    return any(
        value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
        for neutral in table.get(name, ())
    )


def refuse_unsupported(
    given: Mapping[str, object],
    neutral: Mapping[str, tuple[object, ...]],
    supported: Iterable[str],
) -> None:
    """Raise UsageError that names the first option in `given` which is not None or `neutral`."""
    for name, value in given.items():
        if value is None or is_neutral(name, value, neutral):
            continue
        hint = f"leave it out; the options are {', '.join(supported)}"
        if same := neutral.get(name):
            hint = f"leave it out, or give {same[0]!r}, which changes nothing"
        raise UsageError(f"{name} is not supported", hint=hint)


def invalid_value(name: str, value: object, expected: str) -> UsageError:
    """The error for an argument `name` whose `value` is not as `expected`."""
    return UsageError(f"{name} is {value!r}", hint=f"{name} must be {expected}")


def _one_of(name: str, value: object, expected: str, or_one_of: Sequence[str | None]) -> object:
    if isinstance(value, str | None) and value in or_one_of:
        return value
    raise invalid_value(name, value, " or ".join([expected, *map(str, or_one_of)]))
