"""The page of an evaluation: one HTML file with its pictures that asks for nothing from elsewhere.

Knows figures and their results; measures nothing.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from dakrun.lab.evaluate.chart import svg
from dakrun.lab.evaluate.figures.base import Figure
from dakrun.lab.evaluate.points import Entry, FigureData, Result
from dakrun.lab.evaluate.scope import Scope
from dakrun.lab.evaluate.style import STYLE
from dakrun.units import format_rate

COLUMNS = ("panel", "series", "x", "source", "time (us)", "predicted (us)", "ratio (%)", "note")
ORIGIN = "Lin, Guo, Lin 2026"


def page(
    figures: Sequence[Figure],
    data: Mapping[str, FigureData],
    scope: Scope,
    run: Mapping[str, Any],
) -> str:
    """The whole file. `data` has the results by figure name, `run` what run.json has."""
    shown = [figure for figure in figures if figure.name in data]
    parts = "\n".join(section(figure, data[figure.name], scope, run) for figure in shown)
    links = " · ".join(f'<a href="#{of.name}">{escape(label(of))}</a>' for of in shown)
    title = f"The evaluation of DAK on {scope.profile.device_name}"
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(title)}</title>
<style>{STYLE}</style>
</head>
<body>
<header>
<h1>{escape(title)}</h1>
<p>Every figure of the paper on direct access to weights across memory tiers ({ORIGIN}), made
again with dakrun, beside the paper's claim.</p>
{warning(scope, data.values())}
{facts(scope, data.values(), run)}
{legend()}
<nav>{links}</nav>
</header>
<main>
{parts}
</main>
</body>
</html>
"""


def label(figure: Figure) -> str:
    """The figure's numbers, such as "Figures 1 and 8"."""
    return figure.title.partition(":")[0]


def warning(scope: Scope, data: Iterable[FigureData]) -> str:
    """What must be known before any number: predictions, or points that are missing."""
    known = [(of.of(entry), entry) for of in data for entry in of.entries]
    points = {entry.point.key: result for result, entry in known}
    predicted = sum(r is not None and r.source == "predicted" for r in points.values())
    missing = sum(r is None for r in points.values())
    failed = sum(r is not None and r.problem is not None for r in points.values())
    short = sum(r is not None and bool(r.short_of_memory) for r in points.values())
    texts = []
    if scope.predict or (predicted and predicted == len(points) - missing):
        texts.append(
            "<strong>Nothing on this page was measured.</strong> Every point is the planner's "
            f"prediction for the profile {escape(scope.profile.name)}."
        )
    elif predicted:
        texts.append(
            f"<strong>{predicted} of {len(points)} points are predictions</strong> of the planner."
        )
    if missing:
        texts.append(f"{missing} of {len(points)} points are not there yet: run it again.")
    if failed:
        memory = f", {short} of them for lack of memory" if short else ""
        texts.append(f"{failed} of {len(points)} points have no time{memory}; markers say why.")
    return "".join(f'<p class="notice">{text}</p>' for text in texts)


def facts(scope: Scope, data: Iterable[FigureData], run: Mapping[str, Any]) -> str:
    """Machine, versions, ceilings and the deviation of predictions."""
    rows = [
        ("Machine", str(run.get("machine") or scope.profile.description)),
        ("Profile", f"{scope.profile.name}, remote tier {scope.remote}"),
        ("Models", ", ".join(scope.models)),
    ]
    if why := run.get("why_no_kernels"):
        rows.append(("Note", str(why)))
    if versions := run.get("versions"):
        rows.append(("Versions", ", ".join(f"{name} {of}" for name, of in versions.items())))
    rows += [(name.capitalize(), str(run[name])) for name in ("date", "commit") if run.get(name)]
    if ceilings := run.get("ceilings"):
        texts = [f"{name} {format_rate(rate)}" for name, rate in ceilings.items() if rate]
        rows.append(("Ceilings", ", ".join(texts)))
    rows.append(("Predicted against measured", deviation(data)))
    cells = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in rows)
    command = run.get("command")
    code = f"<dt>Command</dt><dd><code>{escape(str(command))}</code></dd>" if command else ""
    return f'<dl class="facts">{cells}{code}</dl>'


def deviation(data: Iterable[FigureData]) -> str:
    """Median and worst deviation of predicted from measured times, over all points."""
    points: dict[str, tuple[Entry, Result]] = {}
    for of in data:
        for entry in of.entries:
            if (result := of.of(entry)) is not None:
                points[entry.point.key] = (entry, result)
    errors = FigureData([entry for entry, _ in points.values()],
                   {key: result for key, (_, result) in points.items()}).errors()  # fmt: skip
    if not errors:
        return "no point has both"
    median = statistics.median(map(abs, errors))
    worst = max(errors, key=abs)
    return f"median {median:.1%}, worst {worst:+.1%}, over {len(errors)} points"


def legend() -> str:
    """How to read markers and lines."""
    return (
        '<p class="legend">Filled markers and bars are measured, hollow ones with dashed lines '
        "predicted. Hollow markers without a line are points that have no time, with the reason. "
        "Lines without markers are bounds.</p>"
    )


def section(figure: Figure, data: FigureData, scope: Scope, run: Mapping[str, Any]) -> str:
    """One figure: what the paper shows, the pictures, the finding, the claim and the points."""
    pictures = "\n".join(
        f"<figure>{svg(panel, name=f'{figure.name}-{number}')}</figure>"
        for number, panel in enumerate(figure.panels(data, scope))
    )
    notes = "".join(f"<li>{escape(note)}</li>" for note in figure.notes(scope))
    differences = f"<h3>Where this differs</h3><ul>{notes}</ul>" if notes else ""
    return f"""<section id="{figure.name}">
<h2>{escape(figure.title)}</h2>
<p class="paper"><b>Paper</b> {escape(figure.paper)}</p>
<div class="panels">
{pictures}
</div>
{table(figure.table(data, scope))}
<p class="finding"><b>{"Predicted" if scope.predict else "Here"}</b> \
{escape(figure.finding(data, scope))}</p>
<p class="claim"><b>Claim</b> {escape(figure.claim(data, scope))}</p>
{differences}
<p class="again">Again: <code>{escape(command(figure, run))}</code></p>
<details><summary>{len(data.entries)} points</summary>
{table([list(COLUMNS), *(cells(entry, data.of(entry)) for entry in data.entries)])}
</details>
</section>"""


def command(figure: Figure, run: Mapping[str, Any]) -> str:
    """The command that makes this figure again."""
    words = str(run.get("command") or "dakrun evaluate -o DIR").split()
    kept, skip = [], False
    for word in words:
        if not skip and word != "--only" and not word.startswith("--only="):
            kept.append(word)
        skip = word == "--only"
    place = kept.index("evaluate") + 1 if "evaluate" in kept else len(kept)
    return " ".join([*kept[:place], "--only", figure.name, *kept[place:]])


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows as a table, the first of them its header."""
    if not rows:
        return ""
    head, *body = rows
    titles = "".join(f'<th scope="col">{escape(title)}</th>' for title in head)
    lines = "".join(
        f"<tr>{''.join(f'<td{right(cell)}>{escape(cell)}</td>' for cell in row)}</tr>"
        for row in body
    )
    return (
        f'<div class="scroll"><table><thead><tr>{titles}</tr></thead>'
        f"<tbody>{lines}</tbody></table></div>"
    )


def right(cell: str) -> str:
    """The class of a cell with a number, which is set to the right."""
    return ' class="n"' if cell[:1].isdigit() and cell.replace(",", "").count(" ") == 0 else ""


def cells(entry: Entry, result: Result | None) -> list[str]:
    """A point as a row of the table of points."""
    place = [entry.panel, entry.series, f"{entry.x:,.6g}"]
    if result is None:
        return [*place, "", "", "", "", "not measured yet"]
    numbers = [
        "" if value is None else f"{value * scale:,.{digits}f}"
        for value, scale, digits in (
            (result.seconds, 1e6, 1),
            (result.predicted_s, 1e6, 1),
            (result.ratio, 100, 2),
        )
    ]
    rates = [
        f"{name} {format_rate(rate)}"
        for name, rate in (
            ("HBM", result.hbm_bytes_per_s),
            ("link", result.remote_bytes_per_s),
        )
        if rate
    ]
    return [*place, result.source, *numbers, result.problem or ", ".join(rates)]
