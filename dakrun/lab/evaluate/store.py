"""Results on disk: points.jsonl, of measured ones, a CSV for each figure, run.json.

A measured result survives a crash of the machine; a torn last line is ignored.
"""

import datetime
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dakrun.lab.evaluate.points import Point, Result
from dakrun.lab.output import commit, csv_text, write_text

if TYPE_CHECKING:
    from dakrun.lab.evaluate.figures import Figure

RESULT_FIELDS = tuple(of.name for of in fields(Result))


class Store:
    """The results in `folder` of one `origin`, a machine and a profile, by runs as `quick`.

    Those that are to be tried `again` do not count. Predictions are not kept on disk: the profile
    may change under its name, or dakrun. `others` are the origins of other results there.
    """

    def __init__(self, folder: Path, origin: str, *, quick: bool = False) -> None:
        self.folder, self.origin, self.quick = folder, origin, quick
        self._path, self._commit = folder / "points.jsonl", commit()
        folder.mkdir(parents=True, exist_ok=True)
        self.results: dict[str, Result] = {}  # by key
        self._sittings: dict[str, tuple[str | None, str | None]] = {}  # date and commit, by key
        self.others: set[str] = set()
        self._read()

    def add(self, point: Point, result: Result) -> None:
        """Keep `result` of `point`, on disk before this returns if it was measured."""
        date = datetime.date.today().isoformat()
        if result.source == "measured":
            known = {name: value for name, value in asdict(result).items() if value is not None}
            by = {"origin": self.origin, "quick": self.quick, "commit": self._commit}
            line = {"key": point.key, **by, "date": date, "result": known}
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
                file.flush()
                os.fsync(file.fileno())
        self.results[point.key] = result
        self._sittings[point.key] = date, self._commit

    def sittings(self, points: Iterable[Point]) -> dict[str, str]:
        """The dates and the commits of the results of `points`."""
        known = [of for point in points if (of := self._sittings.get(point.key))]
        found = zip(("date", "commit"), zip(*known, strict=True), strict=False)
        return {name: ", ".join(sorted(filter(None, {*of}))) for name, of in found}

    def _read(self) -> None:
        """Read what is there; cut off a torn last line, so that lines may follow."""
        if not self._path.exists():
            return
        whole, _, torn = self._path.read_bytes().rpartition(b"\n")
        if torn:
            os.truncate(self._path, len(whole) + 1 if whole else 0)
        for text in whole.splitlines():
            try:
                line = json.loads(text)
                if line["origin"] != self.origin:
                    self.others.add(line["origin"])
                elif line.get("quick", False) == self.quick:
                    result = Result(**line["result"])
                    if result.source == "measured" and not result.again:
                        self.results[line["key"]] = result
                        self._sittings[line["key"]] = line.get("date"), line.get("commit")
            except (ValueError, KeyError, TypeError):
                continue  # damaged, or of another version: measured again


def write_run(folder: Path, run: Mapping[str, Any]) -> None:
    """Write run.json."""
    write_text(folder / "run.json", json.dumps(run, indent=2) + "\n")


def read_run(folder: Path) -> dict[str, Any]:
    """The run.json in `folder`; empty if there is none that can be read."""
    try:
        run = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return run if isinstance(run, dict) else {}


def write_csv(path: Path, figure: "Figure") -> None:
    """Write a figure's entries, with points and results that are known, as rows.

    Some names are a point's and a result's: the point's, what was asked for, begin with point_.
    """
    entries = [(chart.name, entry) for chart in figure.charts for entry in chart.entries]
    names = dict.fromkeys(f"point_{name}" for _, e in entries for name in e.point.figures())
    rows = []
    for panel, entry in entries:
        asked = {
            f"point_{name}": "+".join(of) if isinstance(of, tuple) else of
            for name, of in entry.point.figures().items()
        }
        place = {"panel": panel, "series": entry.series, "x": entry.x, "kind": entry.point.kind}
        result = figure.of(entry)
        rows.append({**place, **asked, **(asdict(result) if result else {})})
    header = ["panel", "series", "x", "kind", *names, *RESULT_FIELDS]
    write_text(path, csv_text(header, rows))
