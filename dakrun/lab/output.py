"""A benchmark's record: its header, columns and rows, as a table, Markdown, CSV and JSON.

Knows no kernels and no models. Keys carry units; nothing depends on colour.
"""

import csv
import datetime
import io
import json
import os
import subprocess
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dakrun
from dakrun import tables
from dakrun.hardware import HardwareProfile, cpu_name
from dakrun.lab.ceilings import Ceilings

if TYPE_CHECKING:
    from rich.console import Console

SCHEMA = 1
ABSENT = "-"
FORMATS = (".csv", ".json", ".md")
CHECKOUT = Path(dakrun.__file__).resolve().parent.parent


@dataclass(frozen=True)
class Column:
    """A table's column: the key of its figures in the rows, its title, and a figure's format.

    A console that is too narrow leaves out the columns of the highest `rank` (see tables.Column).
    """

    key: str
    title: str
    text: Callable[[Any], str] = str
    rank: int = 0


@dataclass(frozen=True)
class Record:
    """The result of a benchmark: a header (see `head`) and one row of figures per case.

    All rows have the same keys. CSV and JSON have all of them, tables those of `columns`. None is
    a figure that was not measured.
    """

    head: Mapping[str, Any]
    columns: tuple[Column, ...]
    rows: tuple[Mapping[str, Any], ...]

    def texts(self) -> list[list[str]]:
        """The cells of a table, row by row."""
        return [
            [ABSENT if row[c.key] is None else c.text(row[c.key]) for c in self.columns]
            for row in self.rows
        ]

    @property
    def command(self) -> str:
        """The command on one line, whatever whitespace its arguments contain."""
        return " ".join(self.head["command"].split())

    @property
    def headline(self) -> str:
        """The header in one line: model, device, date, commit, versions, ceilings and profile."""
        head = self.head
        versions = {"driver": head["driver"], "torch": head["torch"], "CUDA": head["cuda"]}
        versions |= {"dakrun": head["dakrun"], "commit": head["commit"]}
        ceilings = head["ceilings_bytes_per_s"]
        rates = [f"{tier} {rate / 1e9:,.1f} GB/s" for tier, rate in ceilings.items()]
        for tier, rate in head["copied_bytes_per_s"].items():
            rates.append(f"copy engine from {tier} {rate / 1e9:,.1f} GB/s")
        turning = f" (turning point {head['turning_point_ratio']:.2%})" * (len(ceilings) > 1)
        source = "" if head["ceilings_measured"] else " from the profile"
        facts = [
            f"{head['device']}, {head['date']}",
            ", ".join(f"{name} {version}" for name, version in versions.items() if version),
            head["dtype"],
            f"ceilings{source}: {', '.join(rates)}{turning}",
            f"predicted by profile {head['profile']}",
        ]
        if "model" in head:
            weights = ", random weights" if head["load_format"] == "dummy" else ""
            weights += f" in {head['format']}" if head["format"] != "auto" else ""
            lengths = f"{head['prompt_tokens']} + {head['new_tokens']} tokens"
            facts.insert(0, f"{head['model']}, {lengths}{weights}")
        return "; ".join(facts)


def head(
    subject: Mapping[str, Any], dtype: str, ceilings: Ceilings, profile: HardwareProfile,
    command: str,
) -> dict[str, Any]:  # fmt: skip
    """The header of a record measured now on torch's current GPU, or on this CPU.

    The device is the kind that `profile` describes. `subject` names the kernel, or the model and
    its lengths; `command` is the command line.
    """
    return {
        **subject,
        "command": command,
        **machine_facts(profile),
        "dtype": dtype,
        "ceilings_bytes_per_s": dict(ceilings.rates),
        "ceilings_measured": profile.device == "cuda",
        "copied_bytes_per_s": dict(ceilings.copied),
        "turning_point_ratio": ceilings.turning_point,
        "profile": profile.name,
    }


def machine_facts(profile: HardwareProfile) -> dict[str, Any]:
    """Commit, date, device and versions of what is measured now, on the kind of `profile`."""
    import torch

    from dakrun.doctor.machine import driver, visible_gpus
    from dakrun.kernels.runtime import gpu_name

    on_gpu = profile.device == "cuda"
    return {
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
        "device": gpu_name() if on_gpu else cpu_name(),
        "driver": driver(visible_gpus()).finding if on_gpu else None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda if on_gpu else None,
        "dakrun": dakrun.__version__,
    }


def commit(checkout: Path = CHECKOUT) -> str | None:
    """The short hash of the commit that dakrun runs from, with "-dirty" if files were changed.

    The environment variable DAKRUN_COMMIT takes precedence: a copy of the checkout may lack its
    history. None for an installed package, or without git.
    """
    if named := os.environ.get("DAKRUN_COMMIT"):
        return named
    if not (checkout / ".git").exists():
        return None
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return run.stdout.strip() or None


def csv_text(names: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    """A line of `names`, and a line of values per row; empty where a row lacks a name."""
    out = io.StringIO()
    writer = csv.DictWriter(out, fieldnames=names, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def markdown(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table whose first column is text and all others are numbers."""
    rules = ["---", *["---:"] * (len(titles) - 1)]
    lines = ([cell.replace("|", "/").replace("\n", " ") for cell in row] for row in rows)
    return [f"| {' | '.join(cells)} |" for cells in (titles, rules, *lines)]


def as_text(record: Record, format: str) -> str:
    """The record as "csv" (the header in a comment), "json" (one object) or "md"."""
    if format == "csv":
        table = csv_text(list(record.rows[0]), record.rows)
        return f"# {record.headline}; {record.command}\n{table}"
    if format == "json":
        whole = {"schema": SCHEMA, **record.head, "rows": list(record.rows)}
        return json.dumps(whole, indent=1) + "\n"
    table = "\n".join(markdown([column.title for column in record.columns], record.texts()))
    return f"{record.headline}; `{record.command}`\n\n{table}\n"


def write(record: Record, path: Path) -> None:
    """Write `record` to `path` in the format of its suffix."""
    write_text(path, as_text(record, path.suffix.removeprefix(".")))


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def render(record: Record, console: "Console", *, wide: bool = False) -> None:
    """Print the header and a table within the console's width; `wide` has all columns."""
    for text in (record.headline, record.command):
        lines = textwrap.fill(text, console.width, break_on_hyphens=False)
        console.print(lines, soft_wrap=True, highlight=False, markup=False)
    console.print("")
    columns = [
        tables.Column(c.title, "right" if number else "left", c.rank)
        for number, c in enumerate(record.columns)
    ]
    tables.print_table(console, columns, record.texts(), wide=wide)


def microseconds(seconds: float) -> str:
    """Seconds as microseconds, for a column whose title has the unit."""
    return f"{seconds * 1e6:.2f}"
