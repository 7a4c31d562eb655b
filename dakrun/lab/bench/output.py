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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dakrun
from dakrun import tables
from dakrun.errors import UsageError
from dakrun.hardware import HardwareProfile, cpu_name
from dakrun.lab.bench.ceilings import Ceilings
from dakrun.lab.probe.machine import driver, visible_gpus

if TYPE_CHECKING:
    from rich.console import Console

SCHEMA = 1
ABSENT = "-"
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


def head(
    subject: Mapping[str, Any],
    dtype: str,
    ceilings: Ceilings,
    profile: HardwareProfile,
    command: str,
) -> dict[str, Any]:
    """The header of a record measured now on torch's current GPU, or on this CPU.

    The device is the kind that `profile` describes. `subject` names the kernel, or the model and
    its lengths; `command` is the command line.
    """
    import torch

    from dakrun.kernels.runtime import gpu_name

    on_gpu = profile.device == "cuda"
    return {
        **subject,
        "command": command,
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
        "device": gpu_name() if on_gpu else cpu_name(),
        "driver": driver(visible_gpus()).finding if on_gpu else None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda if on_gpu else None,
        "dakrun": dakrun.__version__,
        "dtype": dtype,
        "ceilings_bytes_per_s": dict(ceilings.rates),
        "ceilings_measured": on_gpu,
        "copied_bytes_per_s": dict(ceilings.copied),
        "turning_point_ratio": ceilings.turning_point,
        "profile": profile.name,
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


def headline(record: Record) -> str:
    """The header in one line: model, device, date, commit, versions, ceilings and profile."""
    head = record.head
    versions = {"driver": head["driver"], "torch": head["torch"], "CUDA": head["cuda"]}
    versions |= {"dakrun": head["dakrun"], "commit": head["commit"]}
    ceilings = head["ceilings_bytes_per_s"]
    rates = [f"{tier} {rate / 1e9:,.1f} GB/s" for tier, rate in ceilings.items()]
    for tier, rate in head["copied_bytes_per_s"].items():
        rates.append(f"copy engine from {tier} {rate / 1e9:,.1f} GB/s")
    turning = f" (turning point {head['turning_point_ratio']:.2%})" if len(ceilings) > 1 else ""
    source = "" if head["ceilings_measured"] else " from the profile"
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
    """The model and its lengths; None for a kernel."""
    if "model" not in head:
        return None
    weights = ", random weights" if head["load_format"] == "dummy" else ""
    weights += f" in {head['format']}" if head["format"] != "auto" else ""
    return f"{head['model']}, {head['prompt_tokens']} + {head['new_tokens']} tokens{weights}"


def to_csv(record: Record) -> str:
    """The header as a comment, a line of keys, and a line of values per row."""
    out = io.StringIO()
    out.write(f"# {headline(record)}; {_command(record)}\n")
    writer = csv.DictWriter(out, fieldnames=list(record.rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(record.rows)
    return out.getvalue()


def to_json(record: Record) -> str:
    """One JSON object: the header's keys, and the rows as a list."""
    return json.dumps({"schema": SCHEMA, **record.head, "rows": list(record.rows)}, indent=1) + "\n"


def to_markdown(record: Record) -> str:
    """The header and the command line as a paragraph, and a table."""
    titles = [column.title for column in record.columns]
    rules = ["---", *["---:"] * (len(titles) - 1)]
    lines = [f"| {' | '.join(cells)} |" for cells in (titles, rules, *record.texts())]
    return "\n".join((f"{headline(record)}; `{_command(record)}`", "", *lines, ""))


_FORMATS: dict[str, Callable[[Record], str]] = {"csv": to_csv, "json": to_json, "md": to_markdown}


def as_text(record: Record, format: str) -> str:
    """The record as "csv", "json" or "md"."""
    return _FORMATS[format](record)


def check_output(path: Path) -> None:
    """Raise UsageError, before anything is measured, unless a record can be written to `path`."""
    if path.suffix.removeprefix(".") not in _FORMATS:
        raise UsageError(
            f"{path}: a benchmark is written as .csv, .json or .md",
            hint=f"write -o {path.stem or 'bench'}.csv",
        )
    if path.is_dir():
        raise UsageError(f"{path}: is a folder", hint="name a file, as in -o bench.csv")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"{path}: no such folder", hint="make it, or change -o")


def write(record: Record, path: Path) -> None:
    """Write `record` to `path` in the format of its suffix."""
    path.write_text(as_text(record, path.suffix.removeprefix(".")), encoding="utf-8")


def render(record: Record, console: "Console", *, wide: bool = False) -> None:
    """Print the header and a table within the console's width; `wide` has all columns."""
    for text in (headline(record), _command(record)):
        lines = textwrap.fill(text, console.width, break_on_hyphens=False)
        console.print(lines, soft_wrap=True, highlight=False, markup=False)
    console.print("")
    columns = [
        tables.Column(c.title, "right" if number else "left", c.rank)
        for number, c in enumerate(record.columns)
    ]
    tables.print_table(console, columns, record.texts(), wide=wide)


def _command(record: Record) -> str:
    """The command on one line, whatever whitespace its arguments contain."""
    return " ".join(record.head["command"].split())


def microseconds(seconds: float) -> str:
    """Seconds as microseconds, for a column whose title has the unit."""
    return f"{seconds * 1e6:.2f}"
