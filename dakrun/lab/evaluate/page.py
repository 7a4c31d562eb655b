"""The page of an evaluation: one HTML file with its pictures that asks for nothing from elsewhere.

Knows figures and their results; measures nothing.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from dakrun.lab.evaluate import svg
from dakrun.lab.evaluate.charts import Chart, Entry
from dakrun.lab.evaluate.figures import Figure
from dakrun.lab.evaluate.points import Result
from dakrun.lab.evaluate.scope import Scope
from dakrun.lab.evaluate.tables import ceilings
from dakrun.units import format_rate

PAGE = Path(__file__).with_name("page.html")
COLUMNS = ("panel", "series", "x", "source", "time (us)", "predicted (us)", "ratio (%)", "note")


def page(figures: Sequence[Figure], scope: Scope, run: Mapping[str, Any]) -> str:
    """The whole file. `run` is what run.json has."""
    links = " · ".join(
        f'<a href="#{of.name}">{escape(of.title.partition(":")[0])}</a>' for of in figures
    )
    known = {e.point.key: (e, of.of(e)) for of in figures for e in of.entries}
    return Template(PAGE.read_text(encoding="utf-8")).substitute(
        title=escape(f"The evaluation of DAK on {scope.profile.device_name}"),
        warning=warning(scope, [result for _, result in known.values()]),
        facts=facts(scope, known.values(), run),
        links=links,
        sections="\n".join(section(figure, run) for figure in figures),
    )


def warning(scope: Scope, points: Sequence[Result | None]) -> str:
    """What must be known before any number: predictions, or points that are missing."""
    known = [result for result in points if result is not None]
    predicted = sum(of.source == "predicted" for of in known)
    missing, failed = len(points) - len(known), sum(of.problem is not None for of in known)
    texts = []
    if scope.predict or (predicted and predicted == len(known)):
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
        short = sum(bool(of.short_of_memory) for of in known)
        memory = f", {short} of them for lack of memory" if short else ""
        texts.append(f"{failed} of {len(points)} points have no time{memory}; markers say why.")
    return "".join(f'<p class="notice">{text}</p>' for text in texts)


def facts(
    scope: Scope, points: Iterable[tuple[Entry, Result | None]], run: Mapping[str, Any]
) -> str:
    """Machine, versions, ceilings and the deviation of predictions."""
    versions = run.get("versions", {}).items()
    rows = {
        "Machine": run.get("machine") or scope.profile.description,
        "Profile": f"{scope.profile.name}, remote tier {scope.remote}",
        "Models": ", ".join(scope.models),
        "Note": run.get("why_no_kernels"),
        "Versions": ", ".join(f"{name} {of}" for name, of in versions),
        "Date": run.get("date"),
        "Commit": run.get("commit"),
        "Ceilings": ", ".join(ceilings(scope, run)),
        "Predicted against measured": deviation(points),
    }
    cells = "".join(f"<dt>{k}</dt><dd>{escape(str(text))}</dd>" for k, text in rows.items() if text)
    command = run.get("command")
    code = f"<dt>Command</dt><dd><code>{escape(str(command))}</code></dd>" if command else ""
    return f'<dl class="facts">{cells}{code}</dl>'


def deviation(points: Iterable[tuple[Entry, Result | None]]) -> str:
    """Median and worst deviation of predicted from measured times of dakrun."""
    errors = [
        result.predicted_s / result.seconds - 1
        for entry, result in points
        if result and result.source == "measured" and result.seconds and result.predicted_s
        and getattr(entry.point, "by", "dakrun") == "dakrun"
    ]  # fmt: skip
    if not errors:
        return "no point has both"
    median, worst = statistics.median(map(abs, errors)), max(errors, key=abs)
    return f"median {median:.1%}, worst {worst:+.1%}, over {len(errors)} points"


def section(figure: Figure, run: Mapping[str, Any]) -> str:
    """One figure: what the paper shows, the pictures, the finding, the claim and the points."""
    notes = "".join(f"<li>{escape(note)}</li>" for note in figure.notes())
    differences = f"<h3>Where this differs</h3><ul>{notes}</ul>" if notes else ""
    points = [
        cells(chart, entry, figure.of(entry), figure.scope.near)
        for chart in figure.charts
        for entry in chart.entries
    ]
    return f"""<section id="{figure.name}">
<h2>{escape(figure.title)}</h2>
<p class="paper"><b>Paper</b> {escape(figure.paper)}</p>
<div class="panels">
{"".join(map(svg.figure, figure.panels()))}
</div>
{table(figure.table())}
<p class="finding"><b>{"Predicted" if figure.scope.predict else "Here"}</b> \
{escape(figure.finding())}</p>
<p class="claim"><b>Claim</b> {escape(figure.claim())}</p>
{differences}
<p class="again">Again: <code>{escape(command(figure, run))}</code></p>
<details><summary>{len(points)} points</summary>
{table([list(COLUMNS), *points])}
</details>
</section>"""


def command(figure: Figure, run: Mapping[str, Any]) -> str:
    """The command that makes this figure again."""
    words = str(run.get("command") or "dakrun evaluate -o DIR").split()
    kept = [
        word
        for before, word in zip(["", *words], words, strict=False)
        if "--only" not in (before, word) and not word.startswith("--only=")
    ]
    place = kept.index("evaluate") + 1 if "evaluate" in kept else len(kept)
    return " ".join([*kept[:place], "--only", figure.name, *kept[place:]])


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows as a table, the first of them its header; numbers are set to the right."""
    if not rows:
        return ""

    def cell(text: str) -> str:
        number = text[:1].isdigit() and " " not in text
        return f"<td{' class=n' if number else ''}>{escape(text)}</td>"

    head, *body = rows
    titles = "".join(f'<th scope="col">{escape(title)}</th>' for title in head)
    lines = "".join(f"<tr>{''.join(map(cell, row))}</tr>" for row in body)
    return (
        f'<div class="scroll"><table><thead><tr>{titles}</tr></thead>'
        f"<tbody>{lines}</tbody></table></div>"
    )


def cells(chart: Chart, entry: Entry, result: Result | None, near: str) -> list[str]:
    """A point as a row of the table of points; `near` is the name of the local tier."""
    place = [chart.name, entry.series, f"{entry.x:,.6g}"]
    if result is None:
        return [*place, "", "", "", "", "not measured yet"]
    numbers = [
        "" if value is None else f"{value * scale:,.{digits}f}"
        for value, scale, digits in (
            (result.seconds, 1e6, 1), (result.predicted_s, 1e6, 1), (result.ratio, 100, 2),
        )
    ]  # fmt: skip
    rates = [(near, result.hbm_bytes_per_s), ("link", result.remote_bytes_per_s)]
    note = ", ".join(f"{name} {format_rate(rate)}" for name, rate in rates if rate)
    return [*place, result.source, *numbers, result.problem or note]
