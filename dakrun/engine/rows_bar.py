"""A bar in the terminal for calls of the Python API. Knows only how many rows there are."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


@contextmanager
def rows_bar(total: int, *, shown: bool) -> Iterator[Callable[[], None]]:
    """Show rows done of `total` on stderr if it is a terminal; gone at the end.

    Yields the function to call when a row is done.
    """
    if not shown or not total or sys.stderr is None or not sys.stderr.isatty():
        yield lambda: None
        return
    columns = (
        *(TextColumn("rows"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()),
        *(TextColumn("ETA"), TimeRemainingColumn()),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("rows", total=total)
        yield lambda: bar.advance(task)
