"""Figure 6: the bandwidth of each op against its offload ratio."""

from collections.abc import Iterator

from dakrun.lab.evaluate.figures.base import (
    RATE_AXIS,
    Figure,
    at,
    factor,
    fastest,
    gigabytes,
    panel_of,
    root_x,
    sentence,
    thresholds,
)
from dakrun.lab.evaluate.panel import Panel
from dakrun.lab.evaluate.points import AttentionPoint, Entry, FigureData, Point, ProductPoint
from dakrun.lab.evaluate.scope import Scope
from dakrun.plan import Op

LENGTHS = {8: 1024, 512: 128}  # positions of a slot by batch


class OpRatios(Figure):
    """Figure 6."""

    name = "fig6"
    title = "Figure 6: bandwidth of each op against its offload ratio"
    paper = (
        "The bandwidth of an op bound by memory rises with its offload ratio up to the ratio of "
        "the bandwidths and then falls. An op bound by arithmetic is at its best over a whole "
        "range, from a (HBM is no longer the limit) to b (the link becomes the limit)."
    )

    def entries(self, scope: Scope) -> list[Entry]:
        models = list(scope.models)[: 1 if scope.quick else None]
        return [
            Entry(
                panel=f"{model}, batch {batch}",
                series=op.name,
                x=100 * ratio,
                rank=1 if batch == 8 else 2,
                point=point,
            )
            for model in models
            for batch in LENGTHS
            for op in self.ops(model, batch, scope)
            for ratio, point in self.points(model, op, batch, scope)
        ]

    def ops(self, model: str, batch: int, scope: Scope) -> list[Op]:
        """The ops of a layer that have a ratio."""
        ops = scope.ops(model, batch_size=batch, prompt_len=LENGTHS[batch])
        return [op for op in ops if op.in_layer]

    def points(self, model: str, op: Op, batch: int, scope: Scope) -> Iterator[tuple[float, Point]]:
        """The op's points: attention in whole slots, which alone can lie outside HBM."""
        ratios = scope.some_ratios() if batch == 8 else self.wide_ratios(scope)
        if op.category == "attention":
            slots = sorted({round(batch * ratio) for ratio in (*ratios, 1 / batch)})
            for n in slots:
                yield (
                    n / batch,
                    AttentionPoint(
                        model=model,
                        batch_size=batch,
                        length=LENGTHS[batch],
                        ratio=n / batch,
                        remote=scope.remote,
                    ),
                )
            return
        for ratio in ratios:
            point = ProductPoint(model=model, op=op.name, n=batch, ratio=ratio, remote=scope.remote)
            yield ratio, point

    def wide_ratios(self, scope: Scope) -> list[float]:
        """`some_ratios` with 5% and 20%: thresholds of many rows lie further right."""
        return sorted({*scope.some_ratios(), 0.05, 0.2})

    def panels(self, data: FigureData, scope: Scope) -> list[Panel]:
        return [
            panel_of(
                data,
                name,
                lambda r: gigabytes(r.rate),
                title=name,
                x="bytes of the op outside HBM (%)",
                y=RATE_AXIS,
                root_x=root_x(scope),
                marks=self.marks(*self.of_panel(name), scope),
            )
            for name in data.panels()
        ]

    def of_panel(self, name: str) -> tuple[str, int]:
        """The model and the batch of a panel."""
        model, _, batch = name.rpartition(", batch ")
        return model, int(batch)

    def marks(self, model: str, batch: int, scope: Scope) -> list[tuple[float, str]]:
        """The thresholds by rates alone; those that several ops share are one mark."""
        shared: dict[tuple[float, str], list[str]] = {}
        for op in self.ops(model, batch, scope):
            a, b = (100 * x for x in thresholds(op, scope.models[model].dtype, scope))
            same = abs(a - b) < 0.2
            for x, letter in [(a, "a = b")] if same else [(a, "a"), (b, "b")]:
                shared.setdefault((round(x, 1), letter), []).append(op.name)
        everything = len(self.ops(model, batch, scope))
        return [
            (x, f"{letter}: {'all' if len(ops) == everything else ', '.join(ops)}")
            for (x, letter), ops in sorted(shared.items())
            if x > 0
        ]

    def finding(self, data: FigureData, scope: Scope) -> str:
        parts = []
        for panel in data.panels():
            gains = []
            for op in data.lines(panel):
                curve = data.times(panel, op)
                base, best = at(curve, 0.0), fastest(curve)
                if base and best:
                    gains.append((base / best[1], op, best[0]))
            if gains:
                gain, op, x = max(gains)
                parts.append(
                    f"{panel}: {op} gains most, {factor(gain)} with {x:.2g}% outside HBM."
                    if gain > 1.005
                    else f"{panel}: no op gains from bytes outside HBM."
                )
        return sentence(parts, data)

    def claim(self, data: FigureData, scope: Scope) -> str:
        return (
            "Paper: each op has two thresholds and is at its fastest between them; for ops bound "
            f"by memory both are the ratio of the bandwidths. Here: {self.measured(data)}."
        )

    def measured(self, data: FigureData) -> str:
        """The best ratios of ops."""
        best = [
            f"{op} {x[0]:.2g}%"
            for panel in data.panels()[:1]
            for op in data.lines(panel)
            if (x := fastest(data.times(panel, op)))
        ]
        return f"fastest at {', '.join(best)}, with few rows" if best else "not measured yet"

    def notes(self, scope: Scope) -> list[str]:
        return [
            f"a and b are {100 * scope.turning_point:.2g}% for ops bound by memory on this "
            "profile. They follow from rates alone, without launches and uneven SMs.",
            "Where there are too few remote bytes to fill an SM, SMs read both tiers in dakrun; in "
            "the paper each SM reads one.",
        ]
