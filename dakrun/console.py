"""Where commands print: data on stdout, talk on stderr."""

import sys
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.console import Console

WIDTH = 120  # columns of tables that do not go to a terminal


def stdout_console() -> "Console":
    """A console on stdout: as wide as the terminal, or of a fixed width in pipes and files."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else WIDTH)


def tell(text: str) -> None:
    """A line on stderr."""
    click.echo(text, err=True)
