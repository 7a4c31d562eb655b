"""A Plan as a picture: its ops on the machine's roofline, and the speed by offload ratio.

Plans again at fixed ratios. matplotlib is imported when drawing starts.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dakrun.errors import CannotRun
from dakrun.plan.plan import Plan
from dakrun.plan.planner import make_plan
from dakrun.plan.policy import Strategy
from dakrun.plan.roofline import matmul_rows
from dakrun.plan.show import picture
from dakrun.plan.show.picture import BLUE, GREY, ORANGE, SAME, VERMILION
from dakrun.units import format_rate

CLOSE = 1.5  # ops whose coordinates differ by less than this factor share a label


@dataclass(frozen=True)
class RooflinePoint:
    """One op on the roofline: FLOPs per byte, predicted FLOP/s, offload ratio."""

    name: str
    category: str
    intensity: float
    flops_per_s: float
    ratio: float


def plot_plan(plan: Plan, path: Path, *, steps: int = 40) -> None:
    """Write a PNG of `plan` to `path`; the curves are planned at `steps` + 1 ratios.

    Raises CannotRun without matplotlib, UsageError where `path` cannot be written.
    """
    picture.check_target(path)
    figure = picture.new_figure(13, 5.6)
    left, right = figure.subplots(1, 2)
    figure.subplots_adjust(left=0.065, right=0.985, top=0.87, bottom=0.115, wspace=0.17)
    profile, work = plan.profile, plan.workload
    figure.suptitle(
        f"{plan.model.name}, {plan.model.dtype}, batch {work.batch_size}, "
        f"{work.prompt_len} + {work.new_tokens} tokens on {profile.name} "
        f"({profile.provenance.kind}, {profile.provenance.date})",
        fontsize=12,
    )
    _draw_roofline(left, plan)
    _draw_ratios(right, plan, steps)
    picture.save(figure, path)


def points(plan: Plan) -> list[RooflinePoint]:
    """Points of the ops of `plan` that do arithmetic, over all their layers."""
    return [
        RooflinePoint(
            name=op.op.name,
            category=op.op.category,
            intensity=op.op.arithmetic_intensity,
            flops_per_s=op.op.layers * op.op.flops / sum(op.predicted_s),
            ratio=op.ratio,
        )
        for op in plan.ops
        if op.op.flops
    ]


def clusters(found: Iterable[RooflinePoint]) -> list[list[RooflinePoint]]:
    """Groups of points that are too close together for a label each, from left to right."""
    groups: list[list[RooflinePoint]] = []
    for point in sorted(found, key=lambda p: p.intensity):
        for group in groups:
            if _close(point, group[-1]):
                group.append(point)
                break
        else:
            groups.append([point])
    return groups


def ratio_curve(plan: Plan, strategy: Strategy, steps: int) -> list[tuple[float, float, float]]:
    """(offload ratio, bound EB, predicted EB) of plans at fixed ratios from 0 to 1.

    EB is in bytes/s. Ratios that exceed a budget are left out; without remote tiers 0 is the only
    one.
    """
    curve = []
    for step in range(steps + 1 if len(plan.tiers) > 1 else 1):
        policy = replace(plan.policy, offload_ratio=step / steps, strategy=strategy)
        try:
            other = make_plan(plan.model, plan.workload, plan.profile, policy)
        except CannotRun:
            continue
        weights = other.weight_bytes
        curve.append((other.ratio, weights / other.bound_s, weights / other.predicted_s))
    return sorted(curve)


def _close(one: RooflinePoint, other: RooflinePoint) -> bool:
    factors = one.intensity / other.intensity, one.flops_per_s / other.flops_per_s
    return all(1 / CLOSE < factor < CLOSE for factor in factors)


def _draw_roofline(axes: Any, plan: Plan) -> None:
    found, slopes = points(plan), picture.roofs(plan.profile, plan.tiers[1:])
    rate = plan.profile.compute[plan.model.dtype]
    at_batch = rate.at(matmul_rows(plan.workload.batch_size, plan.profile))
    ridge = rate.peak / plan.profile.hbm_bytes_per_s
    intensities = [point.intensity for point in found]
    low, high = min(*intensities, ridge) / 6, max(*intensities, ridge) * 6
    bottom = min(slopes[-1][1] * low, *(point.flops_per_s / 4 for point in found))
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(bottom, rate.peak * 12))
    peaks = [("compute peak", rate.peak)]
    if not 1 / SAME < rate.peak / at_batch < SAME:
        peaks.append(("compute at this batch", at_batch))
    picture.draw_roofs(axes, slopes, peaks, plan.profile.hbm_bytes_per_s)
    shapes = {"linear": ("o", VERMILION), "experts": ("s", BLUE), "attention": ("D", ORANGE)}
    for category, (marker, colour) in shapes.items():
        alike = [point for point in found if point.category == category]
        if not alike:
            continue
        axes.plot(
            [point.intensity for point in alike], [point.flops_per_s for point in alike],
            marker, ms=7, mfc=colour, mec="black", mew=0.7, alpha=0.85, zorder=5,
            label=f"{category} ops, predicted",
        )  # fmt: skip
    axes.legend(loc="lower right", fontsize=8, framealpha=0.95)
    axes.figure.canvas.draw()
    _label_clusters(axes, clusters(found))
    picture.caption(
        axes, "Roofline of a decode step", "arithmetic intensity (FLOP per byte)", "FLOP/s"
    )


def _label_clusters(axes: Any, groups: Sequence[Sequence[RooflinePoint]]) -> None:
    """Label every group of ops, with a leader line, at the nearest position that covers the least.

    Costs keep a label off other labels, the legend, ops and the frame, then off lines.
    """
    taken = [axes.get_legend().get_window_extent()]
    ink = [spot for line in axes.lines for spot in _spots(axes, line)]
    marks = axes.transData.transform([(p.intensity, p.flops_per_s) for g in groups for p in g])
    for group in sorted(groups, key=lambda group: -group[0].flops_per_s):
        position = max((point.intensity, point.flops_per_s) for point in group)
        start = axes.transData.transform(position)
        label = axes.annotate(
            f"{', '.join(point.name for point in group)}\n{_ratio_text(group)}", position,
            xytext=(0, 0), textcoords="offset points", va="center", fontsize=8.5, zorder=6,
            arrowprops={"arrowstyle": "-", "color": GREY, "lw": 0.8, "shrinkB": 4},
            bbox={"boxstyle": "round,pad=0.2", "fc": "white", "ec": "none", "alpha": 0.8},
        )  # fmt: skip
        costs = {}
        for place in itertools.product((-14, 14, -40, 40), range(-96, 100, 8)):
            box = _moved(label, place)
            covered = 1000 * sum(box.overlaps(other) for other in taken)
            covered += 100 * sum(box.contains(*spot) for spot in marks)
            covered += 1000 * (not all(axes.bbox.contains(*corner) for corner in box.corners()))
            covered += 2 * sum(box.contains(*spot) for spot in ink)
            leader = _between(start, ((box.x0 + box.x1) / 2, (box.y0 + box.y1) / 2), 20)
            covered += 30 * sum(other.contains(*spot) for other in taken for spot in leader)
            costs[place] = covered + math.hypot(*place)
        taken.append(_moved(label, min(costs, key=lambda place: costs[place])))


def _moved(label: Any, place: tuple[int, int]) -> Any:
    """The bounding box in pixels of `label` at `place`, in points from its op."""
    from matplotlib.text import Text

    label.set_position(place)
    label.set_horizontalalignment("left" if place[0] > 0 else "right")
    label.update_positions(label.figure.canvas.get_renderer())
    return Text.get_window_extent(label).padded(4)  # Annotation's own box includes the leader


def _spots(axes: Any, line: Any) -> list[Any]:
    """Pixels along a line of two ends; none for markers."""
    if line.get_linestyle() == "None":
        return []
    start, end = axes.transData.transform(line.get_xydata())
    return _between(start, end, 150)


def _between(start: Any, end: Any, steps: int) -> list[Any]:
    """Pixels in even steps from `start` to `end`."""
    (x0, y0), (x1, y1) = start, end
    fractions = (step / steps for step in range(steps + 1))
    return [(x0 + (x1 - x0) * f, y0 + (y1 - y0) * f) for f in fractions]


def _ratio_text(group: Sequence[RooflinePoint]) -> str:
    low, high = min(p.ratio for p in group), max(p.ratio for p in group)
    if high - low < 0.005:
        return f"{high:.1%} remote"
    return f"{low:.1%} to {high:.1%} remote"


def _draw_ratios(axes: Any, plan: Plan, steps: int) -> None:
    bound, predicted = plan.weight_bytes / plan.bound_s, plan.weight_bytes / plan.predicted_s
    highest = bound
    styles: tuple[tuple[Strategy, str, float], ...] = (
        ("greedy", BLUE, 2.4), ("uniform", ORANGE, 1.3),
    )  # fmt: skip
    for strategy, colour, width in styles:
        curve = ratio_curve(plan, strategy, steps)
        if strategy == plan.strategy:
            curve = sorted([*curve, (plan.ratio, bound, predicted)])
        percents = [100 * ratio for ratio, _, _ in curve]
        for column, style, kind in ((1, "--", "bound"), (2, "-", "predicted")):
            speeds = [point[column] / 1e9 for point in curve]
            axes.plot(percents, speeds, style, color=colour, lw=width, label=f"{strategy}, {kind}")
        highest = max([highest, *(point[1] for point in curve)])
    chosen = (100 * plan.ratio, predicted / 1e9)
    axes.plot(
        *chosen, "*", ms=15, mfc=VERMILION, mec="black", zorder=5,
        label=f"chosen: {plan.ratio:.1%} outside HBM, EB {format_rate(predicted)}",
    )  # fmt: skip
    if plan.required_ratio > 0:
        axes.axvspan(
            0, 100 * plan.required_ratio, color="#eeeeee", zorder=0,
            label=f"does not fit: {plan.required_ratio:.1%} must leave HBM",
        )  # fmt: skip
    axes.set(xlim=(-2, 102), ylim=(0, highest / 1e9 * 1.45))
    axes.legend(loc="upper right", fontsize=8, framealpha=0.95)
    picture.caption(
        axes, "Effective bandwidth against the offload ratio",
        "weight and KV bytes outside HBM (%)", "EB: weight bytes per step time (GB/s)",
    )  # fmt: skip
