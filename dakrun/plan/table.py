"""The plan as tables on a rich console: what `dakrun plan` shows to people.

Knows layout only; the texts come from present.py. Nothing depends on colour.
"""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dakrun.plan.planner import Plan
from dakrun.plan.present import COLUMNS, op_rows, summary_rows

WIDTH = 120
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
    console.print(f"{LEGEND}\n", highlight=False)
    summary = Table.grid(padding=(0, 2, 0, 0))
    for title, text in summary_rows(plan):
        summary.add_row(title, Text(text))
    console.print(summary, highlight=False)
