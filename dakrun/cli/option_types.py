"""How values of options are written on the command line: sizes, counts and shares, or auto."""

from collections.abc import Callable
from typing import Any

import click

from dakrun.errors import UsageError
from dakrun.units import parse_bytes

MAX_COUNT = 10**9


class Auto(click.ParamType):
    """`auto` (None) or what `convert_value` makes of the text; it raises ValueError for the rest.

    `expected` completes "is not ..." in the message.
    """

    def __init__(self, name: str, expected: str, convert_value: Callable[[str], Any]) -> None:
        self.name, self.expected, self.convert_value = name, expected, convert_value

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        if value == "auto":
            return None
        try:
            return self.convert_value(value)
        except ValueError:
            self.fail(f"{value!r} is not {self.expected}.", param, ctx)


class Size(click.ParamType):
    """Bytes, written like 20GiB."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return parse_bytes(value)
        except UsageError as problem:
            self.fail(f"{problem}; {problem.hint}.", param, ctx)


def _count(text: str) -> int:
    if not 1 <= (number := int(text)) <= MAX_COUNT:
        raise ValueError
    return number


def _share(text: str) -> float:
    if not 0 <= (number := float(text)) <= 1:
        raise ValueError
    return number


COUNT = Auto("count", f"auto or an integer from 1 to {MAX_COUNT:,}", _count)
RATIO = Auto("ratio", "auto or a number from 0 to 1", _share)
