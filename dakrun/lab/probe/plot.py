"""A profile as a picture: its sweeps, if it has any, and its roofline."""

import math
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from dakrun.hardware import HardwareProfile
from dakrun.lab.panel import Panel, Series, png
from dakrun.lab.panel import draw as draw_panel
from dakrun.lab.probe.table import Grid, grids, short_bytes
from dakrun.plan.show.picture import VERMILION, caption, check_target, draw_roofs, merged, roofs
from dakrun.units import format_decimal

COLOURS_FROM = 0.75  # fraction of the best rate; a heat map's colours start there or lower


def draw(profile: HardwareProfile, path: Path) -> None:
    """Write a PNG of `profile` to `path`.

    Raises CannotRun without matplotlib, UsageError if `path` cannot be written.
    """
    check_target(path)
    panels: list[Callable[[Any], None]] = [partial(_draw_grid, grid=g) for g in grids(profile)]
    if curves(profile):
        panels.append(partial(_draw_curves, profile=profile))
    panels.append(partial(_draw_roofline, profile=profile))
    if chains(profile):
        panels.append(partial(_draw_chains, profile=profile))
    source = profile.provenance
    title = f"{profile.name}\n{profile.device_name} ({source.kind}, {source.date})"
    png(panels, path, title=title)


def curves(profile: HardwareProfile) -> dict[str, list[tuple[float, float]]]:
    """(bytes in flight, bytes/s) of all points of the sweeps of HBM and each remote tier alone.

    For L2 the first figure is the size of the working set.
    """
    found: dict[str, list[tuple[float, float]]] = {}
    sizes = {"HBM": ("hbm", ("ctas", "chunk_bytes", "stages")), "L2": ("l2", ("set_bytes",))}
    for tier in profile.remote:
        sizes[tier.name] = (f"{tier.name} direct", ("sms", "chunk_bytes", "stages"))
    for label, (name, factors) in sizes.items():
        if name in profile.sweeps:
            points = profile.sweeps[name].points(*factors, "bytes_per_s")
            found[label] = sorted((math.prod(sizes), rate) for *sizes, rate in points)
    return {label: points for label, points in found.items() if points}


def best_by_doubling(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The fastest of the (bytes, bytes/s) points near each power of two, by bytes."""
    best: dict[int, tuple[float, float]] = {}
    for size, rate in points:
        power = round(math.log2(size))
        best[power] = max(best.get(power, (size, 0.0)), (size, rate), key=lambda point: point[1])
    return sorted(best.values())


def chains(profile: HardwareProfile) -> dict[bool, list[tuple[float, float]]]:
    """(bytes of an op, fraction of HBM's rate) in chains of ops; True: with PDL."""
    if (sweep := profile.sweeps.get("chain")) is None:
        return {}
    found: dict[bool, list[tuple[float, float]]] = {}
    for pdl, size, rate in sweep.points("overlap", "op_bytes", "bytes_per_s"):
        found.setdefault(bool(pdl), []).append((size, rate / profile.hbm_bytes_per_s))
    return {kind: sorted(found[kind]) for kind in sorted(found, reverse=True)}


def _draw_grid(axes: Any, grid: Grid) -> None:
    size = len(grid.sms), len(grid.in_flight)
    lowest = min(*grid.total.values(), COLOURS_FROM * grid.best) / 1e9
    cells = [[grid.total.get((s, f), math.nan) / 1e9 for f in grid.in_flight] for s in grid.sms]
    image = axes.imshow(
        cells, cmap="cividis", vmin=lowest, vmax=grid.best / 1e9, origin="lower", aspect="auto"
    )
    font = min(9.0, 80 / size[1], 150 / size[0])
    for (sms, in_flight), rate in grid.total.items():
        dark = rate / 1e9 < (lowest + grid.best / 1e9) / 2
        axes.text(
            grid.in_flight.index(in_flight), grid.sms.index(sms), f"{rate / 1e9:.0f}",
            fontsize=font, ha="center", va="center", color="white" if dark else "black",
        )  # fmt: skip
    row, column = grid.sms.index(grid.chosen[0]), grid.in_flight.index(grid.chosen[1])
    corners = [(-0.5, -0.5), (0.5, -0.5), (0.5, 0.5), (-0.5, 0.5), (-0.5, -0.5)]
    axes.plot(
        [column + x for x, _ in corners], [row + y for _, y in corners], color=VERMILION, lw=2.6,
        clip_on=False, zorder=5,
    )  # fmt: skip
    axes.plot(column, row + 0.3, "*", ms=11, mfc=VERMILION, mec="white", mew=0.4, zorder=6)
    axes.figure.colorbar(image, ax=axes, label="total GB/s", pad=0.02)
    axes.set_xticks(range(size[1]), [short_bytes(n) for n in grid.in_flight], fontsize=font)
    axes.set_yticks(range(size[0]), [str(n) for n in grid.sms], fontsize=font)
    caption(
        axes, f"{grid.tier} and HBM read together\n★ {grid.chosen_text}",
        f"bytes of {grid.tier} in flight, over all its SMs", f"SMs that read {grid.tier}",
    )  # fmt: skip
    axes.grid(False)


def _draw_curves(axes: Any, profile: HardwareProfile) -> None:
    """The best of each doubling as lines, all other points faintly, and the profile's windows."""
    found, series = curves(profile), []
    for label, points in found.items():
        highest = format_decimal(max(rate for _, rate in points), "B/s")
        best = [(size, rate / 1e9) for size, rate in best_by_doubling(points)]
        series.append(Series(name=f"{label}: up to {highest}", points=best))
    _draw_sizes(axes, Panel(
        title="Bandwidth of each tier read alone", y="GB/s", series=series, log_x=True, log_y=True,
        x="bytes in flight (L2: working set); lines: best of each doubling",
    ))  # fmt: skip
    for line, points in zip(list(axes.lines), found.values(), strict=True):
        every = zip(*((size, rate / 1e9) for size, rate in points), strict=True)
        axes.plot(*every, line.get_marker(), ms=3, color=line.get_color(), mew=0, alpha=0.35)
    windows = [(t.window_bytes, t.direct_bytes_per_s / 1e9) for t in profile.remote
               if t.name in found]  # fmt: skip
    label = "window and direct rate in the profile"
    axes.plot(*(zip(*windows, strict=True) if windows else ([], [])), "*", ms=14, mfc="white",
              mec="black", zorder=5, label=label)  # fmt: skip
    axes.yaxis.set_major_formatter(lambda rate, _: f"{rate:,g}")
    axes.legend(fontsize=8, framealpha=0.95)


def _draw_sizes(axes: Any, panel: Panel) -> None:
    """Draw a panel whose x axis has bytes."""
    draw_panel(panel, axes)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda size, _: short_bytes(round(size)))


def _draw_roofline(axes: Any, profile: HardwareProfile) -> None:
    peaks = _peaks(profile)
    slopes = roofs(profile, [tier.name for tier in profile.remote])
    highest, slowest = peaks[0][1], slopes[-1][1]
    low, high = highest / slopes[0][1] / 30, highest / slowest * 4
    bottom, room = slowest * low / 2, 0.06 + 0.045 * (len(slopes) + len(peaks) + 2)
    top = highest * (highest / bottom) ** (room / (1 - room))  # room: the legend's fraction
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(bottom, top))
    draw_roofs(axes, slopes, peaks, profile.hbm_bytes_per_s)
    ridges = [highest / rate for _, rate in slopes]
    texts = (f"{ridge:,.0f}" if ridge >= 100 else f"{ridge:.3g}" for ridge in ridges)
    label = f"ridge{'s, from left to right' * (len(ridges) > 1)}: {', '.join(texts)} FLOP/B"
    axes.plot(
        ridges, [highest] * len(ridges), "o", ms=5, mfc="white", mec="black", zorder=5, label=label
    )
    axes.legend(loc="upper left", fontsize=8, framealpha=0.95)
    caption(axes, "Roofline", "arithmetic intensity (FLOP per byte)", "FLOP/s")


def _peaks(profile: HardwareProfile) -> list[tuple[str, float]]:
    """(dtypes, peak FLOP/s) of the 16-bit dtypes, or of all if there are none; highest first."""
    rates = {str(dtype): rate.peak for dtype, rate in profile.compute.items()}
    rates = {k: v for k, v in rates.items() if k in ("float16", "bfloat16")} or rates
    return [(f"{names} compute peak", rate) for names, rate in merged(rates.items(), " and ")]


def _draw_chains(axes: Any, profile: HardwareProfile) -> None:
    names = {True: "programmatic dependent launch", False: "plain launches"}
    series = [Series(name=names[pdl], points=points) for pdl, points in chains(profile).items()]
    _draw_sizes(axes, Panel(
        title="Chains of dependent ops", x="bytes that one op reads",
        y="rate over that of HBM alone", series=series, log_x=True,
    ))  # fmt: skip
    rate = format_decimal(profile.hbm_bytes_per_s, "B/s")
    axes.axhline(1, color="black", ls=":", lw=1.2, label=f"HBM read alone: {rate}")
    axes.set_ylim(0, 1.1)
    axes.legend(loc="lower right", fontsize=8, framealpha=0.95)
