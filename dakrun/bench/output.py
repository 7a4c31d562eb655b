"""What a benchmark found, as a table for people, Markdown, CSV and JSON.

Knows heads, columns and rows, and no kernel. Keys carry units; nothing depends on colour.
"""

import csv
import io
import json
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dakrun.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

SCHEMA = 1
ABSENT = "-"


@dataclass(frozen=True)
class Column:
    """A column of tables: the key of its figures in rows, its title, and a figure as text."""

    key: str
    title: str
    text: Callable[[Any], str] = str


@dataclass(frozen=True)
class Record:
    """What was measured: `head` on what and how (header.py), and a row of figures for every case.

    All rows have the same keys, and all of them are in CSV and JSON; tables show `columns`. None
    stands for what was not measured.
    """

    head: Mapping[str, Any]
    columns: tuple[Column, ...]
    rows: tuple[Mapping[str, Any], ...]

    def texts(self) -> list[list[str]]:
        """The rows of a table."""
        return [
            [ABSENT if row[c.key] is None else c.text(row[c.key]) for c in self.columns]
            for row in self.rows
        ]


def headline(record: Record) -> str:
    """The head in a line: what and on what, date, versions, ceilings, profile."""
    head = record.head
    versions = {"driver": head["driver"], "torch": head["torch"], "CUDA": head["cuda"]}
    versions["dakrun"] = head["dakrun"]
    ceilings = head["ceilings_bytes_per_s"]
    rates = [f"{tier} {rate / 1e9:,.1f} GB/s" for tier, rate in ceilings.items()]
    for tier, rate in head["copied_bytes_per_s"].items():
        rates.append(f"copy engine from {tier} {rate / 1e9:,.1f} GB/s")
    turning = f" (turning point {head['turning_point_ratio']:.2%})" if len(ceilings) > 1 else ""
    source = "" if head["ceilings_measured"] else " by the profile"
    facts = (
        _model(head),
        f"{head['device']}, {head['date']}",
        ", ".join(f"{name} {version}" for name, version in versions.items() if version),
        head["dtype"],
        f"ceilings{source}: {', '.join(rates)}{turning}",
        f"predicted by profile {head['profile']}",
    )
    return "; ".join(filter(None, facts))


def _model(head: Mapping[str, Any]) -> str | None:
    """Which model was measured, on what; None where it was a kernel."""
    if "model" not in head:
        return None
    weights = ", random weights" if head["load_format"] == "dummy" else ""
    return f"{head['model']}, {head['prompt_tokens']} + {head['new_tokens']} tokens{weights}"


def to_csv(record: Record) -> str:
    """Comma-separated values under a line of keys, after the head as a comment."""
    out = io.StringIO()
    out.write(f"# {headline(record)}; {_command(record)}\n")
    writer = csv.DictWriter(out, fieldnames=list(record.rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(record.rows)
    return out.getvalue()


def to_json(record: Record) -> str:
    """An object of the head and the rows."""
    return json.dumps({"schema": SCHEMA, **record.head, "rows": list(record.rows)}, indent=1) + "\n"


def to_markdown(record: Record) -> str:
    """The head as a paragraph, and a table."""
    titles = [column.title for column in record.columns]
    rules = ["---", *["---:"] * (len(titles) - 1)]
    lines = [f"| {' | '.join(cells)} |" for cells in (titles, rules, *record.texts())]
    return "\n".join((f"{headline(record)}; `{_command(record)}`", "", *lines, ""))


_FORMS: dict[str, Callable[[Record], str]] = {"csv": to_csv, "json": to_json, "md": to_markdown}


def as_text(record: Record, form: str) -> str:
    """The record as "csv", "json" or "md"."""
    return _FORMS[form](record)


def check_target(path: Path) -> None:
    """Raise UsageError, before anything is measured, where `path` is no file to write to."""
    if path.suffix.removeprefix(".") not in _FORMS:
        raise UsageError(
            f"{path}: a benchmark is written as .csv, .json or .md",
            hint=f"write -o {path.stem or 'bench'}.csv",
        )
    if path.is_dir():
        raise UsageError(f"{path}: is a folder", hint="name a file, as in -o bench.csv")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"{path}: no such folder", hint="make it, or change -o")


def write(record: Record, path: Path) -> None:
    """Write `record` in the form that the suffix of `path` names."""
    path.write_text(as_text(record, path.suffix.removeprefix(".")), encoding="utf-8")


def render(record: Record, console: "Console") -> None:
    """Print the head and a table that fit the console's width."""
    from rich.table import Table
    from rich.text import Text

    for text in (headline(record), _command(record)):
        lines = textwrap.fill(text, console.width, break_on_hyphens=False)
        console.print(lines, soft_wrap=True, highlight=False, markup=False)
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for number, column in enumerate(record.columns):
        title = column.title.replace(" ", "\n")  # no wider than its words, for figures' sake
        table.add_column(title, justify="right" if number else "left", overflow="fold")
    for row in record.texts():
        table.add_row(*map(Text, row))
    console.print("")
    console.print(table, highlight=False)


def _command(record: Record) -> str:
    return " ".join(record.head["command"].split())
