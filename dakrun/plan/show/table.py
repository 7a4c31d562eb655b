"""The plan as tables on a rich console: what `dakrun plan` shows to people.

Knows layout only; the texts come from texts.py. Nothing depends on colour.
"""

import textwrap
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dakrun.plan.show.overview import Overview
from dakrun.plan.show.texts import (
    CHOICES,
    NEEDS,
    choice_legend,
    choice_rows,
    need_legend,
    need_rows,
    summary_rows,
)

TITLE_WIDTH = 15


def render(shown: Overview, console: Console) -> None:
    """Print what the ops need, what the plan does with them, then its summary."""
    plan = shown.chosen.plan
    _print_table(console, "What each op needs", NEEDS, need_rows(plan), need_legend())
    legend = choice_legend(plan)
    _print_table(console, "What the plan does with it", CHOICES, choice_rows(plan), legend)
    for title, text in summary_rows(shown):
        line = _wrapped(text, console.width, title)
        console.print(line, soft_wrap=True, highlight=False, markup=False)


def _print_table(
    console: Console,
    title: str,
    columns: Sequence[tuple[str, bool]],
    rows: Iterable[tuple[str, ...]],
    legend: str,
) -> None:
    """A table between its title and its legend, and an empty line."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for heading, numeric in columns:
        table.add_column(heading, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(title, highlight=False)
    console.print(table, highlight=False)
    console.print(_wrapped(legend, console.width), end="\n\n", soft_wrap=True, highlight=False)


def _wrapped(text: str, width: int, title: str = "") -> str:
    """`text` beside its title, in lines of at most `width` columns."""
    indent = TITLE_WIDTH if title else 0
    return textwrap.fill(
        text,
        width,
        initial_indent=f"{title:<{indent}}",
        subsequent_indent=" " * indent,
        break_on_hyphens=False,
    )
