"""What `dakrun evaluate` measures: points, their results, and where a figure shows them.

A point says what is measured, so that figures may share it; its time also depends on the machine,
the commit, and whether the run is quick, which the store keeps beside it. Imports no torch.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal

from dakrun.plan import Strategy

Source = Literal["measured", "predicted"]


@dataclass(frozen=True, kw_only=True)
class Point:
    """Something to measure. `kind` is its class in keys and in CSV."""

    kind: ClassVar[str]

    @property
    def key(self) -> str:
        """The point as text: equal keys, equal points."""
        return json.dumps({"kind": self.kind, **self.figures()}, sort_keys=True)

    def figures(self) -> dict[str, Any]:
        """The fields by name."""
        return {of.name: getattr(self, of.name) for of in fields(self)}


@dataclass(frozen=True, kw_only=True)
class StepPoint(Point):
    """A decode step of `model` for `batch_size` requests of `prompt_len` and `new_tokens` tokens.

    `ratio` of weight and KV bytes lie outside HBM (None: the planner's choice). `by` is dakrun or
    a rival; `without` names techniques that are switched off (see cases.ablated).
    """

    kind = "step"
    model: str
    batch_size: int = 8
    prompt_len: int = 32
    new_tokens: int
    ratio: float | None = 0.0
    transport: Literal["direct", "staged"] | None = None
    strategy: Strategy = "auto"
    hbm_budget: int | None = None
    remote: str = "host"
    without: tuple[str, ...] = ()
    by: str = "dakrun"


@dataclass(frozen=True, kw_only=True)
class ProductPoint(Point):
    """X [n, K] times the weight of the linear op `op` of `model`, `ratio` of its rows remote."""

    kind = "product"
    model: str
    op: str
    n: int
    ratio: float
    remote: str = "host"
    without: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class AttentionPoint(Point):
    """Decode attention of a layer of `model`: `batch_size` slots of `length` positions each."""

    kind = "attention"
    model: str
    batch_size: int
    length: int
    ratio: float
    remote: str = "host"
    without: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ReadPoint(Point):
    """A remote tier read by `sms` SMs with `in_flight` bytes, and HBM by `hbm_sms` others."""

    kind = "read"
    remote: str
    sms: int
    in_flight: int
    hbm_sms: int


@dataclass(frozen=True, kw_only=True)
class FilePoint(Point):
    """A whole file: `requests` of random lengths, with prompts and completions up to `longest`."""

    kind = "file"
    model: str
    requests: int
    longest: int
    ratio: float | None
    remote: str = "host"


@dataclass(frozen=True, kw_only=True)
class Result:
    """The figures of a point; None is what does not apply or was not measured.

    `seconds` is the median time of a step, a launch or a file; `predicted_s` the planner's.
    `ratio` is the one that was met, `read_bytes` what a step or launch reads in all,
    `remote_bytes` what it reads from remote tiers; `link_bytes` counts what crosses the link, with
    repetitions. `problem` says why there is no time, `short_of_memory` that the reason is a lack of
    memory, and `again` that a later run should try anew.
    """

    source: Source
    seconds: float | None = None
    predicted_s: float | None = None
    limit_s: float | None = None
    ratio: float | None = None
    required_ratio: float | None = None
    weight_bytes: float | None = None
    read_bytes: float | None = None
    remote_bytes: float | None = None
    link_bytes: float | None = None
    hbm_bytes_per_s: float | None = None
    remote_bytes_per_s: float | None = None
    tokens_per_s: float | None = None
    problem: str | None = None
    short_of_memory: bool | None = None
    again: bool | None = None

    @property
    def eb(self) -> float | None:
        """Effective bandwidth in bytes/s: weight bytes over the step's time."""
        if not self.seconds or not self.weight_bytes:
            return None
        return self.weight_bytes / self.seconds

    @property
    def rate(self) -> float | None:
        """Bytes read over the time."""
        if not self.seconds or not self.read_bytes:
            return None
        return self.read_bytes / self.seconds


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A point in a figure: its panel, the series (a line or colour of bars) and its place there.

    Entries of lower `rank` are measured first.
    """

    panel: str
    series: str
    x: float
    point: Point
    rank: int = 1


@dataclass(frozen=True)
class FigureData:
    """The entries of a figure and the results that are known by now."""

    entries: Sequence[Entry]
    results: "dict[str, Result]" = field(default_factory=dict)  # by the point's key

    def of(self, entry: Entry) -> Result | None:
        """The result of `entry`; None if it is not known yet."""
        return self.results.get(entry.point.key)

    def panels(self) -> list[str]:
        """The names of panels, in order."""
        return list(dict.fromkeys(entry.panel for entry in self.entries))

    def lines(self, panel: str) -> dict[str, list[tuple[Entry, Result]]]:
        """The series of a panel: entries with known results, problems included, in order of x."""
        lines: dict[str, list[tuple[Entry, Result]]] = {}
        for entry in self.entries:
            if entry.panel == panel:
                line = lines.setdefault(entry.series, [])
                if (result := self.of(entry)) is not None:
                    line.append((entry, result))
        return {name: sorted(line, key=lambda of: of[0].x) for name, line in lines.items()}

    def times(self, panel: str, series: str) -> list[tuple[float, float]]:
        """(x, seconds) of a series where there are any."""
        line = self.lines(panel).get(series, [])
        return [(entry.x, result.seconds) for entry, result in line if result.seconds]

    def problems(self) -> list[str]:
        """The reasons why entries have no time, each once."""
        known = (self.of(entry) for entry in self.entries)
        return list(dict.fromkeys(of.problem for of in known if of and of.problem))

    def errors(self) -> list[float]:
        """Predicted over measured time, less 1, of every entry of dakrun that has both."""
        known = (self.of(e) for e in self.entries if getattr(e.point, "by", "dakrun") == "dakrun")
        return [
            result.predicted_s / result.seconds - 1
            for result in known
            if result and result.source == "measured" and result.seconds and result.predicted_s
        ]
