"""Consoles for tables and progress, and messages: data goes to stdout, all else to stderr."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.console import Console

WIDTH = 120  # columns, if the output is not a terminal


def stdout_console() -> "Console":
    """A console on stdout: as wide as the terminal, or WIDTH columns in pipes and files."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else WIDTH)


def stderr_console() -> "Console":
    """A console on stderr: as wide as the terminal, or WIDTH columns in pipes and files."""
    from rich.console import Console

    return Console(stderr=True, width=None if sys.stderr.isatty() else WIDTH)


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
