"""Figure 6: the bandwidth of each op against its offload ratio."""

from collections.abc import Iterator

from dakrun.lab.evaluate.charts import Chart, Entry, Quantity
from dakrun.lab.evaluate.figures.base import Figure, factor, scaled, thresholds
from dakrun.lab.evaluate.points import AttentionPoint, Point, ProductPoint
from dakrun.plan import Op

LENGTHS = {8: 1024, 512: 128}  # positions of a slot by batch
RATE = Quantity("bytes read per time (GB/s)", scaled("rate", 1e-9))


class OpRatios(Figure):
    """Figure 6."""

    name = "fig6"
    title = "Figure 6: bandwidth of each op against its offload ratio"
    paper = (
        "The bandwidth of an op bound by memory rises with its offload ratio up to the ratio of "
        "the bandwidths and then falls. An op bound by arithmetic is at its best over a whole "
        "range, from a (HBM is no longer the limit) to b (the link becomes the limit)."
    )
    claimed = (
        "Paper: each op has two thresholds and is at its fastest between them; for ops bound by "
        "memory both are the ratio of the bandwidths. Here, fastest with few rows at:"
    )

    def make_charts(self) -> list[Chart]:
        models = list(self.scope.models)[: 1 if self.scope.quick else None]
        return [self._chart(model, batch) for model in models for batch in LENGTHS]

    def _chart(self, model: str, batch: int) -> Chart:
        scope, length = self.scope, LENGTHS[batch]
        ops = [of for of in scope.ops(model, batch_size=batch, prompt_len=length) if of.in_layer]
        ratios = scope.some_ratios()
        if batch > 8:  # thresholds of many rows lie further right
            ratios = sorted({*ratios, 0.05, 0.2})
        # Attention in whole slots, which alone can lie outside HBM.
        slots = sorted({round(batch * ratio) / batch for ratio in (*ratios, 1 / batch)})

        def entry(op: Op, ratio: float) -> Entry:
            point: Point = scope.op(ProductPoint, model, ratio, op=op.name, n=batch)
            if op.category == "attention":
                sizes = {"batch_size": batch, "length": length}
                point = scope.op(AttentionPoint, model, ratio, **sizes)
            return Entry(op.name, 100 * ratio, point, 1 if batch == 8 else 2)

        return Chart(
            name=f"{model}, batch {batch}",
            title=f"{model}, batch {batch}",
            x=f"bytes of the op outside {scope.near} (%)",
            shown=[RATE],
            entries=[
                entry(op, ratio)
                for op in ops
                for ratio in (slots if op.category == "attention" else ratios)
            ],
            root_x=True,
            marks=list(self._marks(model, ops)),
        )

    def _marks(self, model: str, ops: list[Op]) -> Iterator[tuple[float, str]]:
        """The thresholds by rates alone; those that several ops share are one mark."""
        shared: dict[tuple[float, str], list[str]] = {}
        for op in ops:
            a, b = (100 * x for x in thresholds(op, self.scope.models[model].dtype, self.scope))
            same = abs(a - b) < 0.2
            for x, letter in [(a, "a = b")] if same else [(a, "a"), (b, "b")]:
                shared.setdefault((round(x, 1), letter), []).append(op.name)
        for (x, letter), names in sorted(shared.items()):
            if x > 0:
                yield x, f"{letter}: {'all' if len(names) == len(ops) else ', '.join(names)}"

    def sentences(self) -> Iterator[str]:
        for chart in self.charts:
            curves = {op: self.times(chart, op) for op in self.lines(chart)}
            known = [
                (base / best[1], op, best[0])
                for op, curve in curves.items()
                if (base := curve.get(0.0)) and (best := curve.fastest())
            ]
            gain, op, x = max(known, default=(0.0, "", 0.0))
            if gain > 1.005:
                yield (
                    f"{chart.name}: {op} gains most, {factor(gain)} with {x:.2g}% outside "
                    f"{self.scope.near}."
                )
            elif known:
                yield f"{chart.name}: no op gains from bytes outside {self.scope.near}."

    def here(self) -> Iterator[str]:
        for op in self.lines(self.charts[0]):
            if best := self.times(self.charts[0], op).fastest():
                yield f"{op} {best[0]:.2g}%"

    def notes(self) -> list[str]:
        return [
            f"a and b are {100 * self.scope.turning_point:.2g}% for ops bound by memory on this "
            "profile. They follow from rates alone, without launches and uneven SMs.",
            "Where there are too few remote bytes to fill an SM, SMs read both tiers in dakrun; in "
            "the paper each SM reads one.",
        ]
