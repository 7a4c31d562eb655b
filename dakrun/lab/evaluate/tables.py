"""The pictures of an evaluation as Markdown tables, for documents.

Knows figures and their panels; measures nothing.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dakrun.lab.evaluate.figures.base import Figure
from dakrun.lab.evaluate.panel import Panel
from dakrun.lab.evaluate.points import FigureData
from dakrun.lab.evaluate.scope import Scope
from dakrun.units import format_rate

MARKS = {"measured": "", "predicted": " (predicted)"}


def tables(
    figures: Sequence[Figure], data: Mapping[str, FigureData], scope: Scope, run: Mapping[str, Any]
) -> str:
    """A table for each panel, below its figure's title and finding. Bounds are left out."""
    return "\n".join(_text(figures, data, scope, run)) + "\n"


def _text(
    figures: Sequence[Figure], data: Mapping[str, FigureData], scope: Scope, run: Mapping[str, Any]
) -> Iterator[str]:
    ceilings = [f"{name} {format_rate(rate)}" for name, rate in run.get("ceilings", {}).items()]
    facts = [str(run[name]) for name in ("machine", "date", "commit") if run.get(name)]
    yield "; ".join([*facts, *([f"ceilings: {', '.join(ceilings)}"] if ceilings else [])])
    if why := run.get("why_no_kernels"):
        yield f"{why}; all figures below are those of the kernels, if they ran there"
    if command := run.get("command"):
        yield f"`{command}`"
    for figure in figures:
        if figure.name not in data:
            continue
        yield f"\n#### {figure.title}\n"
        yield figure.finding(data[figure.name], scope)
        for panel in figure.panels(data[figure.name], scope):
            yield from _table(panel)


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
