"""A model's benchmark as a picture: effective bandwidth and decode step over the offload ratio.

Knows a record's keys; matplotlib is imported when drawing starts.
"""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dakrun.lab.output import Record
from dakrun.plan.show.picture import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    caption,
    new_figure,
    save,
)

COLOURS = (BLUE, VERMILION, GREEN, ORANGE, PURPLE, SKY)
MARKERS = ("o", "s", "^", "D", "v", "P")
STEPS = 400  # line segments of an ideal curve
MARGIN = 1.06  # an ideal curve ends at this multiple of the largest measured ratio

Row = Mapping[str, Any]


def draw(record: Record, path: Path) -> None:
    """Write a PNG of all measured rows to `path`; UsageError if that fails."""
    head = record.head
    figure = new_figure(13, 5.6)
    left, right = figure.subplots(1, 2)
    figure.subplots_adjust(left=0.065, right=0.985, top=0.87, bottom=0.115, wspace=0.17)
    figure.suptitle(
        f"{head['model']}, {head['dtype']}, {head['prompt_tokens']} + {head['new_tokens']} tokens "
        f"on {head['device']}, {head['date']}",
        fontsize=12,
    )
    rows = [row for row in record.rows if row["problem"] is None]
    (_, local), *remote = head["ceilings_bytes_per_s"].items()
    copied = head["copied_bytes_per_s"]
    fastest = [max(rate, copied.get(name, 0.0)) for name, rate in remote]
    rates = [local, sum(fastest)] if remote else [local]
    panels = (
        (left, "eb_bytes_per_s", 1e-9, "Effective bandwidth",
         "EB: weight bytes per step time (GB/s)"),
        (right, "step_s", 1e3, "Decode step", "decode step (ms)"),
    )  # fmt: skip
    for axes, key, factor, title, unit in panels:
        _draw_ideals(axes, rows, rates, key, factor)
        for (name, line), colour, marker in zip(
            lines(rows).items(), itertools.cycle(COLOURS), itertools.cycle(MARKERS)
        ):
            ratios, values = zip(*((100 * r["ratio"], factor * r[key]) for r in line), strict=True)
            axes.plot(ratios, values, marker=marker, color=colour, lw=0.9, ms=6, label=name)
        axes.set(yscale="log")
        axes.legend(fontsize=8, framealpha=0.95)
        caption(axes, title, "weight and KV bytes outside HBM (%)", unit)
    save(figure, path)


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


def _draw_ideals(
    axes: Any, rows: Sequence[Row], rates: Sequence[float], key: str, factor: float
) -> None:
    """Draw the ideal of each batch size; they differ in the KV bytes of a step."""
    last = min(1.0, MARGIN * max(row["ratio"] for row in rows))
    by_batch = {row["batch_size"]: row for row in rows}
    for number, row in enumerate(by_batch.values()):
        ratios = [last * step / STEPS for step in range(STEPS + 1)]
        nbytes = row["hbm_read_bytes"] + row["remote_read_bytes"]
        times = [ideal_s(nbytes, ratio, rates) for ratio in ratios]
        values = times if key == "step_s" else [row["weight_bytes"] / s for s in times]
        axes.plot(
            [100 * ratio for ratio in ratios], [factor * value for value in values], "--",
            color=GREY, lw=1.0, zorder=1, label=None if number else "ideal: all tiers at full rate",
        )  # fmt: skip
