"""Figure 12: ablations of the congestion window and of wave alignment."""

from collections.abc import Mapping
from dataclasses import replace

from dakrun.lab.evaluate.charts import Chart, Entry, Quantity
from dakrun.lab.evaluate.figures.base import LAUNCH, STEP_LINEAR, Figure
from dakrun.lab.evaluate.points import AttentionPoint, OpPoint, ProductPoint, StepPoint

ALL = "with both"
VARIANTS: dict[str, tuple[str, ...]] = {
    ALL: (), "without the window": ("window",), "without alignment": ("alignment",)
}  # fmt: skip
SLOTS, LENGTH = (32, 64), 1024  # of attention
Places = Mapping[str, OpPoint | StepPoint]
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
    claimed = "Paper: both speed up GEMM and attention. Here, with both, at most:"

    def make_charts(self) -> list[Chart]:
        scope = self.scope
        # The ratio with most to lose: HBM and the link take the same time.
        ratio, model = round(min(scope.turning_point, 0.5), 4), next(iter(scope.models))
        outside = f", {100 * ratio:.2g}% outside {scope.near}"
        far = {slots: max(1, round(ratio * slots)) for slots in SLOTS}
        attention = {
            f"{count} of {slots} slots": scope.op(
                AttentionPoint, model, count / slots, batch_size=slots, length=LENGTH
            )
            for slots, count in far.items()
        }
        steps = {name: scope.step(name, 8, ratio, transport="direct") for name in scope.models}

        def products(n: int) -> Places:
            names = [op.name for op in scope.products(model, n=n)]
            return {of: scope.op(ProductPoint, model, ratio, op=of, n=n) for of in names}

        return [
            *(chart_of(f"{model}, GEMM of {n} rows", outside, "op", LAUNCH, products(n),
                       rank=1 if n == 8 else 2) for n in BATCHES),
            chart_of(f"{model}, attention to {LENGTH:,} positions", "",
                     f"slots outside {scope.near}", LAUNCH, attention, rank=1),
            chart_of("whole models, batch 8", outside, "model", STEP_LINEAR, steps, rank=0),
        ]  # fmt: skip

    def notes(self) -> list[str]:
        predicted = (
            "Predictions count uneven groups of the GEMM of few rows, and without the window the "
            "rates of the profile's sweep with the bytes in flight that the rings hold."
        )
        near = self.scope.near
        return [
            *([predicted] if self.scope.predict else []),
            f"GEMM and models are at the ratio where {near} and the link take the same time. Past "
            "it the link limits the step and the window cannot matter. Attention is at the nearest "
            "whole slot, at least one, which may lie past it.",
            "Alignment differs by kernel. The GEMM of few rows sizes its groups of row blocks for "
            "even waves; the tiled GEMM sizes its tiles so, or shares the last ones by Stream-K. "
            "Attention's CTAs take equal shares of the KV blocks anyway: alignment only moves SMs "
            f"from the link to {near} if each CTA there then has fewer heads, and else does "
            "nothing.",
            "A link without congestion, such as NVLink to another GPU, has no window to leave out.",
        ]


def chart_of(name: str, more: str, x: str, shown: Quantity, places: Places, *, rank: int) -> Chart:
    """A group of bars for each of `places`: with all techniques, and without each."""
    entries = [
        Entry(series, number, replace(point, without=without), rank)
        for series, without in VARIANTS.items()
        for number, point in enumerate(places.values())
    ]
    return Chart(
        name=name, title=name + more, x=x, shown=[shown], categories=list(places), entries=entries
    )
