"""Where commands print: data on stdout, talk on stderr."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.console import Console

WIDTH = 120  # columns of tables that do not go to a terminal


def stdout_console() -> "Console":
    """A console on stdout: as wide as the terminal, or of a fixed width in pipes and files."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else WIDTH)


@contextmanager
def quiet_stderr() -> Iterator[None]:
    """Within it, what is said on stderr and cannot be written is dropped, and all after it."""
    try:
        yield
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def eprint(text: str) -> None:
    """A line on stderr, if that can be written."""
    with quiet_stderr():
        click.echo(text, err=True)
