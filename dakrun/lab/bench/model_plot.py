"""A model's benchmark as a picture: effective bandwidth and decode step over the offload ratio.

Knows a record's keys.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dakrun.lab.output import Record
from dakrun.lab.panel import Panel, Series, png

STEPS = 400  # line segments of an ideal curve
MARGIN = 1.06  # an ideal curve ends at this multiple of the largest measured ratio
IDEAL = "ideal: all tiers at full rate"

Row = Mapping[str, Any]


def draw(record: Record, path: Path) -> None:
    """Write a PNG of all measured rows to `path`; UsageError if that fails."""
    head = record.head
    rows = [row for row in record.rows if row["problem"] is None]
    (_, local), *remote = head["ceilings_bytes_per_s"].items()
    copied = head["copied_bytes_per_s"]
    fastest = [max(rate, copied.get(name, 0.0)) for name, rate in remote]
    rates = [local, sum(fastest)] if remote else [local]
    last = min(1.0, MARGIN * max(row["ratio"] for row in rows))
    panels = []
    for key, factor, title, unit in (
        ("eb_bytes_per_s", 1e-9, "Effective bandwidth", "EB: weight bytes per step time (GB/s)"),
        ("step_s", 1e3, "Decode step", "decode step (ms)"),
    ):
        series = [
            Series(name=name, points=[(100 * row["ratio"], factor * row[key]) for row in line])
            for name, line in lines(rows).items()
        ]
        # Batch sizes differ in the KV bytes of a step, and in their ideals.
        for row in {row["batch_size"]: row for row in rows}.values():
            nbytes, points = row["hbm_read_bytes"] + row["remote_read_bytes"], []
            for ratio in (last * step / STEPS for step in range(STEPS + 1)):
                s = ideal_s(nbytes, ratio, rates)
                points.append((100 * ratio, factor * (s if key == "step_s" else
                                                      row["weight_bytes"] / s)))  # fmt: skip
            series.append(Series(name=IDEAL, points=points, kind="line"))
        x = "weight and KV bytes outside HBM (%)"
        panels.append(Panel(title=title, x=x, y=unit, series=series, log_y=True))
    lengths = f"{head['prompt_tokens']} + {head['new_tokens']} tokens"
    title = f"{head['model']}, {head['dtype']}, {lengths} on {head['device']}, {head['date']}"
    png(panels, path, title=title)


def lines(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows of each line, sorted by ratio: one line per batch size, transport and strategy."""
    found: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: (row["batch_size"], row["asked_transport"])):
        strategy = "" if row["strategy"] == "auto" else f", {row['strategy']}"
        name = f"batch {row['batch_size']}, {row['asked_transport']}{strategy}"
        found.setdefault(name, []).append(row)
    return {name: sorted(line, key=lambda row: row["ratio"]) for name, line in found.items()}


def ideal_s(nbytes: float, ratio: float, rates: Sequence[float]) -> float:
    """Seconds of a step that reads `nbytes`, `ratio` of them remote, with all tiers at full rate.

    `rates` are bytes/s of the local tier and the sum of the remote tiers, each with its faster
    transport; without remote tiers, of the local tier alone.
    """
    parts = (1 - ratio, ratio) if len(rates) > 1 else (1.0,)
    return max(nbytes * part / rate for part, rate in zip(parts, rates, strict=True))
