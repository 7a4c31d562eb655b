"""A prompt file through a model: rows in, completions out, progress on the way.

Reads and writes rows one by one; how many there are never matters for memory.
"""

import json
import os
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from dakrun.errors import CannotRun, UsageError
from dakrun.interrupt import Interrupted
from dakrun.llm import LLM
from dakrun.requests import Request, RequestReader, ResultWriter, RowError, same_file


@dataclass
class Counts:
    """Rows that finished, failed, or were skipped as the output had them.

    It had `failed_before` error rows, whether the input still asks for them or not.
    """

    failed_before: int
    done: int = 0
    failed: int = 0
    skipped: int = 0

    def __str__(self) -> str:
        text = f"{self.done} rows done, {self.failed} failed, {self.skipped} skipped"
        return text + (f"; {self.failed_before} failed before" if self.failed_before else "")


def generate(
    llm: LLM, reader: RequestReader, writer: ResultWriter, console: Console | None
) -> Counts:
    """Run every row of `reader` that is not done yet and write its result as soon as it is there.

    Progress goes to `console`, where there is one. SIGINT (Ctrl-C) raises Interrupted; so does
    SIGTERM under interrupt.raise_on_sigterm.
    """
    try:
        return _generate(llm, reader, writer, console)
    except KeyboardInterrupt as stop:
        raise Interrupted(
            f"the rows that had finished are in {writer.name}", hint=writer.resume_hint, cause=stop
        ) from None


def _generate(
    llm: LLM, reader: RequestReader, writer: ResultWriter, console: Console | None
) -> Counts:
    counts = Counts(writer.failed_before)

    def requests() -> Iterator[Request]:
        for row in reader.rows(llm.rules):
            if writer.is_done(row.id):
                counts.skipped += 1
            elif isinstance(row, RowError):
                writer.write_error(row)
                counts.failed += 1
            else:
                yield row

    with _progress(console) if console else nullcontext() as progress:
        task = progress.add_task("rows", total=reader.bytes_total) if progress else None
        for completion in llm.stream(requests()):
            writer.write(completion)
            counts.done += 1
            if progress and task is not None:
                speed = llm.engine.stats.new_tokens
                progress.update(
                    task,
                    completed=reader.bytes_read,
                    description=f"{counts.done} done, {counts.failed} failed, {speed} tokens",
                )
    return counts


def count_rows(source: str | Path, limit: int) -> int:
    """Lines in a regular file, at most `limit`; `limit` where that cannot be known yet."""
    path = Path(source)
    if str(source) == "-" or not path.is_file():
        return limit
    lines, last = 0, b"\n"
    with path.open("rb") as file:
        while lines < limit and (block := file.read(1 << 20)):
            lines += block.count(b"\n")
            last = block[-1:]
    return max(1, min(lines + (last != b"\n"), limit))


def check_report(report: str, *, source: str, output: str, profile: str) -> None:
    """Raise UsageError where `report` cannot be meant for the report of a run with these files."""
    hint = "give --report a file of its own that ends in .json"
    if report in ("", "-"):
        raise UsageError(f"{report!r} names no file for the report", hint=hint)
    if os.path.isdir(report):
        raise UsageError(f"{report}: is a directory", hint=hint)
    folder = os.path.dirname(os.path.realpath(report))
    if not os.path.isdir(folder):
        raise UsageError(f"{folder}: no such folder", hint="make it, or change --report")
    if same_file(output, report):
        raise UsageError(f"{report}: the report is the file that the rows go to", hint=hint)
    if same_file(report, source):
        raise UsageError(f"{report}: the report is the file that the prompts come from", hint=hint)
    if profile != "auto" and same_file(report, profile):
        raise UsageError(f"{report}: the report is the profile", hint=hint)


def write_report(report: dict[str, Any], path: Path) -> None:
    """Write `report` as JSON; CannotRun where that fails."""
    try:
        path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    except OSError as problem:
        raise CannotRun(
            f"{path}: the report cannot be written ({problem.strerror})",
            hint="all results are in the output; give --report a place that can be written",
        ) from None


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("ETA"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )
