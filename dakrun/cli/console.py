"""Consoles for tables and progress, and messages: data goes to stdout, all else to stderr."""

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

import click

if TYPE_CHECKING:
    from rich.console import Console

WIDTH = 120  # columns, if the output is not a terminal


def stdout_console() -> "Console":
    """A console on stdout, of `width` columns."""
    from rich.console import Console

    return Console(width=width(sys.stdout))


def stderr_console() -> "Console":
    """A console on stderr, of `width` columns."""
    from rich.console import Console

    return Console(stderr=True, width=width(sys.stderr))


def width(stream: TextIO) -> int:
    """Columns of `stream`: the variable COLUMNS, or the terminal's, or WIDTH in pipes and files."""
    if re.fullmatch("[1-9][0-9]{0,4}", columns := os.environ.get("COLUMNS", "")):
        return int(columns)
    try:
        return os.get_terminal_size(stream.fileno()).columns or WIDTH
    except (OSError, ValueError):  # no terminal, or a stream in memory
        return WIDTH


@contextmanager
def quiet_stderr() -> Iterator[None]:
    """Ignore a failed write to stderr in the block, and discard all later output to stderr."""
    try:
        yield
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def eprint(text: str) -> None:
    """Print a line on stderr; ignore a failed write."""
    with quiet_stderr():
        click.echo(text, err=True)
