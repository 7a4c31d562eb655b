"""Figure 12: ablations of the congestion window and of wave alignment."""

from collections.abc import Iterator
from typing import ClassVar

from dakrun.lab.evaluate.figures.base import (
    STEP_AXIS,
    US_AXIS,
    Figure,
    factor,
    microseconds,
    milliseconds,
    panel_of,
    sentence,
)
from dakrun.lab.evaluate.panel import Panel
from dakrun.lab.evaluate.points import (
    AttentionPoint,
    Entry,
    FigureData,
    Point,
    ProductPoint,
    StepPoint,
)
from dakrun.lab.evaluate.scope import Scope

ALL = "with both"
VARIANTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (ALL, ()),
    ("without the window", ("window",)),
    ("without alignment", ("alignment",)),
)
ATTENTION = (32, 1024)  # slots and positions
BATCHES = (8, 512)  # for the GEMM of few rows, and for the tiled one


class Ablations(Figure):
    """Figure 12."""

    name = "fig12"
    title = "Figure 12: without the congestion window, without wave alignment"
    paper = (
        "The window limits bytes in flight over the link, which keeps HBM at its full rate. "
        "Alignment rounds each tier's part to whole waves of its SMs, so that no wave is partly "
        "idle."
    )
    step: ClassVar[str] = "whole models, batch 8"

    def entries(self, scope: Scope) -> list[Entry]:
        return [
            Entry(panel=panel, series=series, x=x, rank=rank, point=point)
            for series, without in VARIANTS
            for panel, x, rank, point in self.points(scope, without)
        ]

    def ratio(self, scope: Scope) -> float:
        """The ratio with most to lose: HBM and the link take the same time."""
        return round(min(scope.turning_point, 0.5), 4)

    def points(
        self, scope: Scope, without: tuple[str, ...]
    ) -> Iterator[tuple[str, int, int, Point]]:
        """(panel, number of the category, rank, point)."""
        ratio, model = self.ratio(scope), next(iter(scope.models))
        for n in BATCHES:
            for x, op in enumerate(scope.products(model, n=n)):
                product = ProductPoint(
                    model=model, op=op.name, n=n, ratio=ratio, remote=scope.remote, without=without
                )
                yield f"{model}, GEMM of {n} rows", x, 1 if n == 8 else 2, product
        for x, slots in enumerate(self.slots()):
            attention = AttentionPoint(
                model=model,
                batch_size=slots,
                length=ATTENTION[1],
                ratio=self.remote_slots(slots, scope) / slots,
                remote=scope.remote,
                without=without,
            )
            yield f"{model}, attention to {ATTENTION[1]:,} positions", x, 1, attention
        for x, name in enumerate(scope.models):
            step = StepPoint(
                model=name,
                batch_size=8,
                new_tokens=scope.new_tokens,
                ratio=ratio,
                transport="direct",
                remote=scope.remote,
                without=without,
            )
            yield self.step, x, 0, step

    def slots(self) -> tuple[int, ...]:
        return (ATTENTION[0], 2 * ATTENTION[0])

    def remote_slots(self, slots: int, scope: Scope) -> int:
        """Slots outside HBM, of which there is at least one."""
        return max(1, round(self.ratio(scope) * slots))

    def categories(self, panel: str, scope: Scope) -> list[str]:
        """The groups of bars of a panel."""
        if panel == self.step:
            return list(scope.models)
        if "attention" in panel:
            return [f"{self.remote_slots(n, scope)} of {n} slots" for n in self.slots()]
        return [op.name for op in scope.products(next(iter(scope.models)), n=8)]

    def panels(self, data: FigureData, scope: Scope) -> list[Panel]:
        panels = []
        for name in data.panels():
            whole, outside = name == self.step, f"{100 * self.ratio(scope):.2g}% outside HBM"
            panels.append(
                panel_of(
                    data,
                    name,
                    (lambda r: milliseconds(r.seconds))
                    if whole
                    else (lambda r: microseconds(r.seconds)),
                    title=name if "attention" in name else f"{name}, {outside}",
                    x="model" if whole else "slots outside HBM" if "attention" in name else "op",
                    y=STEP_AXIS if whole else US_AXIS,
                    categories=self.categories(name, scope),
                )
            )
        return panels

    def worst(self, data: FigureData, panel: str, series: str) -> tuple[float, float] | None:
        """(x, time without over time with both) where it is largest."""
        base = dict(data.times(panel, ALL))
        costs = [(x, s / base[x]) for x, s in data.times(panel, series) if x in base]
        return max(costs, key=lambda of: of[1], default=None)

    def finding(self, data: FigureData, scope: Scope) -> str:
        parts = []
        for panel in data.panels():
            clauses = []
            for series, without in VARIANTS:
                if without and (cost := self.worst(data, panel, series)):
                    place = self.categories(panel, scope)[int(cost[0])]
                    clauses.append(f"{series} up to {factor(cost[1])} the time ({place})")
            if clauses:
                parts.append(f"{panel}: {', '.join(clauses)}.")
        return sentence(parts, data)

    def claim(self, data: FigureData, scope: Scope) -> str:
        costs = {
            series: max(
                (c[1] for panel in data.panels() if (c := self.worst(data, panel, series))),
                default=None,
            )
            for series, without in VARIANTS
            if without
        }
        here = [f"{name} {factor(cost)} the time" for name, cost in costs.items() if cost]
        return (
            "Paper: both speed up GEMM and attention. Here, at most: "
            f"{', '.join(here) or 'not measured yet'}."
        )

    def notes(self, scope: Scope) -> list[str]:
        return [
            "GEMM and models are at the ratio where HBM and the link take the same time. Past it "
            "the link limits the step and the window cannot matter. Attention is at the nearest "
            "whole slot, at least one, which may lie past it.",
            "Alignment differs by kernel. The GEMM of few rows sizes its groups of row blocks for "
            "even waves; the tiled GEMM sizes its tiles so, or shares the last ones by Stream-K. "
            "Attention's CTAs take equal shares of the KV blocks anyway: alignment only moves SMs "
            "from the link to HBM if each CTA there then has fewer heads, and else does nothing.",
            "A link without congestion, such as NVLink to another GPU, has no window to leave out.",
        ]
