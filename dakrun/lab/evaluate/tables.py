"""The pictures of an evaluation as Markdown tables, for documents.

Knows figures and their panels; measures nothing.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dakrun.lab.evaluate.charts import FigureData
from dakrun.lab.evaluate.figures import Figure
from dakrun.lab.evaluate.page import ceilings
from dakrun.lab.evaluate.scope import Scope
from dakrun.lab.panel import Panel

MARKS = {"measured": "", "predicted": " (predicted)"}


def tables(
    figures: Sequence[Figure], data: Mapping[str, FigureData], scope: Scope, run: Mapping[str, Any]
) -> str:
    """A table for each panel, below its figure's title and finding. Bounds are left out."""
    rates = ", ".join(ceilings(scope, run))
    facts = [str(run[name]) for name in ("machine", "date", "commit") if run.get(name)]
    lines = ["; ".join([*facts, *([f"ceilings: {rates}"] if rates else [])])]
    if why := run.get("why_no_kernels"):
        lines.append(f"{why}; all figures below are those of the kernels, if they ran there")
    if command := run.get("command"):
        lines.append(f"`{command}`")
    for figure in figures:
        if (of := data.get(figure.name)) is not None:
            lines += [f"\n#### {figure.title}\n", figure.finding(of)]
            lines += [line for panel in of.panels(parts=False) for line in _table(panel)]
    return "\n".join(lines) + "\n"


def _table(panel: Panel) -> Iterator[str]:
    """A row for each place on the x axis, a column for each series with markers or bars."""
    columns = [series for series in panel.series if series.kind in MARKS and series.points]
    places = sorted({x for series in columns for x, _ in series.points})
    if not places:
        return
    yield f"\n{panel.title}: {panel.y}\n"
    yield _row([panel.x, *(series.name + MARKS[series.kind] for series in columns)])
    yield _row(["---", *("---:" for _ in columns)])
    for x in places:
        values = (dict(series.points).get(x) for series in columns)
        where = panel.categories[int(x)] if panel.categories else f"{x:,.4g}"
        yield _row([where, *("-" if y is None else f"{y:,.4g}" for y in values)])


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "/").replace("\n", " ") for cell in cells) + " |"
