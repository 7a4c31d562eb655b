"""The plan as tables on a rich console: what `dakrun plan` shows to people.

Knows layout only; the texts come from present.py. Nothing depends on colour.
"""

import textwrap

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dakrun.plan.planner import Plan
from dakrun.plan.present import COLUMNS, op_rows, summary_rows

TITLE_WIDTH = 15
LEGEND = (
    "FLOP/B: arithmetic intensity; ridge: peak FLOP/s over HBM bytes/s; between the offload ratios "
    "a and b an op is at its fastest; bytes, units and times are for all its layers."
)


def render(plan: Plan, console: Console) -> None:
    """Print the ops of `plan`, then its summary."""
    ops = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for title, numeric in COLUMNS:
        ops.add_column(title, justify="right" if numeric else "left", overflow="fold")
    for row in op_rows(plan):
        ops.add_row(*map(Text, row))
    console.print(ops, highlight=False)
    console.print(_wrapped(LEGEND, console.width), end="\n\n", soft_wrap=True, highlight=False)
    for title, text in summary_rows(plan):
        line = _wrapped(text, console.width, title)
        console.print(line, soft_wrap=True, highlight=False, markup=False)


def _wrapped(text: str, width: int, title: str = "") -> str:
    """`text` beside its title, in lines of at most `width` columns."""
    indent = TITLE_WIDTH if title else 0
    return textwrap.fill(
        text, width, initial_indent=f"{title:<{indent}}", subsequent_indent=" " * indent
    )
