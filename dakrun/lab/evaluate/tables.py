"""The pictures of an evaluation as Markdown tables, for documents.

Knows figures and their panels; measures nothing.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dakrun.hardware import LOCAL
from dakrun.lab.evaluate.scope import Scope
from dakrun.lab.output import markdown
from dakrun.lab.panel import Panel
from dakrun.units import format_rate

Run = Mapping[str, Any]
if TYPE_CHECKING:
    from dakrun.lab.evaluate.figures import Figure

MARKS = {"measured": "", "predicted": " (predicted)"}


def tables(figures: "Sequence[Figure]", scope: Scope, run: Mapping[str, Any]) -> str:
    """A table for each panel, below its figure's title and finding. Bounds are left out."""
    rates = ", ".join(ceilings(scope, run))
    facts = [str(run[name]) for name in ("machine", "date", "commit") if run.get(name)]
    lines = ["; ".join([*facts, *([f"ceilings: {rates}"] if rates else [])])]
    if why := run.get("why_no_kernels"):
        lines.append(f"{why}; all figures below are those of the kernels, if they ran there")
    if command := run.get("command"):
        lines.append(f"`{command}`")
    for figure in figures:
        lines += [f"\n#### {figure.title}\n", figure.finding()]
        for panel in figure.panels(parts=False):
            if table := rows(panel):
                lines += [f"\n{panel.title}: {panel.y}\n", *markdown(table[0], table[1:])]
    return "\n".join(lines) + "\n"


def ceilings(scope: Scope, run: Mapping[str, Any]) -> list[str]:
    """The rates of run.json, with the local tier's name."""
    rates = run.get("ceilings", {})
    names = {LOCAL: LOCAL if scope.near == "HBM" else scope.near}
    return [f"{names.get(name, name)} {format_rate(rate)}" for name, rate in rates.items() if rate]


def rows(panel: Panel) -> list[list[str]]:
    """A row for each x, a column for each series with markers or bars.

    The first row has their names; no rows if there are no points.
    """
    columns = [series for series in panel.series if series.kind in MARKS and series.points]
    places = sorted({x for series in columns for x, _ in series.points})
    known = [dict(series.points) for series in columns]
    body = [
        [panel.categories[int(x)] if panel.categories else f"{x:,.4g}",
         *(digits(of[x]) if x in of else "-" for of in known)]
        for x in places
    ]  # fmt: skip
    head = [panel.x, *(series.name + MARKS[series.kind] for series in columns)]
    return [head, *body] if body else []


def digits(value: float) -> str:
    """The value with four digits, or with all digits before the point if there are more."""
    return f"{value:,.4g}" if abs(value) < 9999.5 else f"{value:,.0f}"
