"""Kinds of command line options: values that they take, and how they are declared."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import click

from dakrun.errors import UsageError
from dakrun.units import parse_bytes

Command = Callable[..., int | None]
Decorator = Callable[[Any], Any]
MAX_COUNT = 10**9


class Auto(click.ParamType):
    """`auto` (None), or the result of `convert_value`, which raises ValueError for other texts.

    `expected` completes the error message "... is not".
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


def _ratio(text: str) -> float:
    if not 0 <= (number := float(text)) <= 1:
        raise ValueError
    return number


COUNT = Auto("count", f"auto or an integer from 1 to {MAX_COUNT:,}", _count)
RATIO = Auto("ratio", "auto or a number from 0 to 1", _ratio)


def together(*options: Decorator) -> Decorator:
    """A decorator that adds all `options` to a command, in this order."""

    def decorate(command: Any) -> Any:
        return functools.reduce(lambda decorated, add: add(decorated), reversed(options), command)

    return decorate


def option(*names: str, help: str, **settings: Any) -> Decorator:
    """An option whose help shows its default."""
    return click.option(*names, help=help, show_default=True, **settings)


def count_option(*names: str, help: str, minimum: int = 1, **settings: Any) -> Decorator:
    """An option that takes an integer of at least `minimum`."""
    return option(*names, help=help, type=click.IntRange(min=minimum), metavar="N", **settings)


def choice_option(*names: str, choices: Sequence[str], help: str, **settings: Any) -> Decorator:
    """An option that takes one of `choices`; the default is the first of them."""
    settings = {"default": choices[0], **settings}
    return option(*names, help=help, type=click.Choice(choices), **settings)


def auto_option(name: str, kind: Auto, metavar: str, help: str, **settings: Any) -> Decorator:
    """An option that takes auto, its default, or a value of `kind`."""
    return option(name, help=help, type=kind, metavar=metavar, default="auto", **settings)
