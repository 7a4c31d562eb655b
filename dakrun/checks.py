"""Checks of what is given from outside: a UsageError says what was expected."""

import math
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

from dakrun.errors import UsageError


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
