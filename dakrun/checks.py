"""Checks of what is given from outside: a UsageError says what was expected."""

import math
from collections.abc import Sequence

from dakrun.errors import UsageError


def check_count(
    name: str, value: object, least: int = 1, *, besides: Sequence[object] = ()
) -> None:
    """UsageError unless `value` is an integer of at least `least`, or one of `besides`."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= least:
        return
    _check_besides(name, value, f"an integer of at least {least}", besides)


def check_number(
    name: str,
    value: object,
    low: float,
    high: float = math.inf,
    *,
    besides: Sequence[object] = (),
) -> None:
    """UsageError unless `value` is a finite number from `low` to `high`, or one of `besides`."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and low <= value <= high and value < math.inf:  # type: ignore[operator]
        return
    limits = f"of at least {low:g}" if high == math.inf else f"from {low:g} to {high:g}"
    _check_besides(name, value, f"a number {limits}", besides)


def check_choice(name: str, value: object, choices: Sequence[object]) -> None:
    """UsageError unless `value` is one of `choices`."""
    if value not in choices:
        raise wrong(name, value, " or ".join(map(str, choices)))


def wrong(name: str, value: object, expected: str) -> UsageError:
    """The error for a `value` that is not what was `expected`."""
    return UsageError(f"{name} is {value!r}", hint=f"{name} must be {expected}")


def _check_besides(name: str, value: object, expected: str, besides: Sequence[object]) -> None:
    if value not in besides:
        raise wrong(name, value, " or ".join([expected, *map(str, besides)]))
