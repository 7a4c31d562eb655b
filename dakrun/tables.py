"""Tables on a console: as many columns as fit, the most important ones first.

Titles wrap at spaces, and so do the cells of one column of text; a number stays on one line.
Nothing depends on colour.
"""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rich.console import Console

LONGEST_WORD = 20  # characters of text kept together; a path may be broken


@dataclass(frozen=True)
class Column:
    """A column: its title, its alignment, and whether its cells may wrap.

    Where the console is too narrow, columns are left out, those of the highest `rank` first; one
    of rank 0 is always shown.
    """

    title: str
    align: Literal["left", "right"] = "right"
    rank: int = 0
    wraps: bool = False

    def least_width(self, cells: Sequence[str]) -> int:
        """Least width in characters; titles and wrapping cells take as many lines as they need."""
        words = self.title.split()
        if not self.wraps:
            return self._unbroken(cells, words)
        words += [word for cell in cells for word in cell.split()]
        return min(LONGEST_WORD, max(map(len, words), default=0))

    def full_width(self, cells: Sequence[str]) -> int:
        """Width in characters at which neither the title nor a cell is wrapped."""
        return self._unbroken(cells, [self.title])

    def _unbroken(self, cells: Sequence[str], titles: Sequence[str]) -> int:
        lines = [line for cell in cells for line in cell.split("\n")]
        return max(map(len, [*lines, *titles]), default=0)


def print_table(
    console: "Console",
    columns: Sequence[Column],
    rows: Sequence[Sequence[str]],
    *,
    wide: bool = False,
    gap: int = 1,
) -> None:
    """Print `rows` of text under `columns`, `gap` spaces apart, within the console's width.

    Columns that do not fit are named below the table. With `wide` all of them are shown, in lines
    as long as that takes.
    """
    from rich.table import Table
    from rich.text import Text

    cells = [[row[number] for row in rows] for number in range(len(columns))]
    least = [column.least_width(texts) for column, texts in zip(columns, cells, strict=True)]
    full = [column.full_width(texts) for column, texts in zip(columns, cells, strict=True)]
    shown = list(range(len(columns)))

    def room(widths: Sequence[int]) -> int:
        """Characters that the console has beyond the shown columns, if they have `widths`."""
        return console.width - sum(widths[i] for i in shown) - gap * (len(shown) - 1)

    while not wide and room(least) < 0 and any(columns[i].rank for i in shown):
        shown.remove(max(shown, key=lambda i: (columns[i].rank, i)))
    spare = max(0, room(least))
    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0))
    table.show_header = any(columns[i].title for i in shown)
    for i in shown:
        width = full[i]
        if not wide and room(full) < 0:
            width = min(width, least[i] + spare) if columns[i].wraps else least[i]
        title = textwrap.fill(columns[i].title, max(1, width), break_on_hyphens=False)
        table.add_column(
            title,
            justify=columns[i].align,
            overflow="fold",
            width=width,
            no_wrap=not columns[i].wraps,
        )
    for row in rows:
        table.add_row(*(Text(row[i]) for i in shown))
    table.width = sum(column.width or 0 for column in table.columns) + gap * (len(shown) - 1)
    console.print(table, highlight=False, crop=False)
    if missing := [column.title for i, column in enumerate(columns) if i not in shown]:
        note = f"not shown in {console.width} columns: {', '.join(missing)}; --wide shows them"
        lines = textwrap.fill(note, console.width, break_on_hyphens=False)
        console.print(lines, soft_wrap=True, highlight=False, markup=False)
