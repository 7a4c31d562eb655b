"""Figure 11: a ratio for each op against one ratio for all."""

from dakrun.lab.evaluate.figures.base import (
    PERCENT,
    STEP_AXIS,
    Figure,
    factor,
    faster,
    largest,
    milliseconds,
    panel_of,
    root_x,
    sentence,
    thresholds,
)
from dakrun.lab.evaluate.panel import Panel
from dakrun.lab.evaluate.points import Entry, FigureData, StepPoint
from dakrun.lab.evaluate.scope import Scope
from dakrun.plan import Strategy, compute_time

PAPER_GAIN = 1.5  # at most, of greedy on uniform
STEPS = 200  # ratios at which the largest gain is looked for


class Strategies(Figure):
    """Figure 11."""

    name = "fig11"
    title = "Figure 11: a ratio for each op (greedy) against one ratio for all, batch 512"
    paper = (
        "Ops bound by arithmetic can take a larger ratio for free than those bound by memory. The "
        "greedy allocation gives each its own; a uniform one slows the ops that have no slack."
    )
    batch_size = 512

    def entries(self, scope: Scope) -> list[Entry]:
        named: tuple[Strategy, ...] = ("greedy", "uniform")
        return [
            Entry(
                panel=model,
                series=strategy,
                x=100 * ratio,
                rank=1 if ratio in (0.1, 0.3) else 2,
                point=StepPoint(
                    model=model,
                    batch_size=self.batch_size,
                    new_tokens=scope.new_tokens,
                    ratio=ratio,
                    transport="direct",
                    strategy=strategy,
                    remote=scope.remote,
                ),
            )
            for model in scope.models
            for strategy in named
            for ratio in scope.some_ratios()
            if ratio
        ]

    def panels(self, data: FigureData, scope: Scope) -> list[Panel]:
        return [
            panel_of(
                data,
                model,
                lambda r: milliseconds(r.seconds),
                title=f"{model}, batch {self.batch_size}, read in place",
                x=PERCENT,
                y=STEP_AXIS,
                root_x=root_x(scope),
                log_y=True,
            )
            for model in data.panels()
        ]

    def finding(self, data: FigureData, scope: Scope) -> str:
        parts = []
        for model in data.panels():
            greedy, uniform = (data.times(model, name) for name in ("greedy", "uniform"))
            if (gain := largest(greedy, uniform)) is not None:
                clause = faster(gain[1], "greedy", "uniform")
                parts.append(f"{model}: at most, {clause}, at {gain[0]:.2g}% outside HBM.")
        return sentence(parts, data)

    def claim(self, data: FigureData, scope: Scope) -> str:
        gains = [
            gain[1]
            for model in data.panels()
            if (gain := largest(data.times(model, "greedy"), data.times(model, "uniform")))
        ]
        here = factor(max(gains)) if gains else "not measured yet"
        return f"Paper: greedy up to 1.5 x as fast as uniform on GH200. Here: {here}."

    def notes(self, scope: Scope) -> list[str]:
        return [
            "Both strategies are pure here: one ratio for every op, the KV cache included, against "
            "a ratio for each op. Neither falls back to the other, and both read in place.",
            "Greedy gains where ops bound by arithmetic hide link time that a uniform ratio adds "
            "to ops bound by memory, and where it moves bytes that a step reads least, such as KV "
            "slots that are not full. It is small where either kind takes most of a step. "
            f"By this profile's rates alone the gain is at most {self.bounds(scope)}.",
        ]

    def bounds(self, scope: Scope) -> str:
        """The largest factor of each model, by rates alone."""
        found = []
        for model in scope.models:
            gains = [self.bound(model, step / STEPS, scope) for step in range(1, STEPS)]
            best = max(gains)
            ratio = (gains.index(best) + 1) / STEPS
            found.append((best, f"{factor(best)} at {ratio:.0%} for {model}"))
        text = ", ".join(text for _, text in found)
        if max(found)[0] < PAPER_GAIN:
            text += "; the rest of the paper's 1.5 x seems to come from the kernels there"
        return text

    def bound(self, model: str, ratio: float, scope: Scope) -> float:
        """The time of a uniform `ratio` over that of greedy ones, by rates alone.

        An op of C bytes takes the longest of its arithmetic, (1-x) C/B_hbm and x C/B_link. Greedy
        first moves the bytes that shorten ops (up to a), then those that cost nothing (up to b),
        then those that a step reads least.
        """
        local, remote, _ = scope.rates
        dtype = scope.models[model].dtype
        uniform = greedy = left = 0.0
        parts: list[tuple[float, float]] = []  # (seconds for each byte moved, bytes)
        for op in scope.ops(model, batch_size=self.batch_size):
            compute, read = compute_time(op, scope.profile, dtype), op.read_bytes
            kept, share = op.layers * op.resident_bytes, read / op.resident_bytes
            a, b = thresholds(op, dtype, scope)
            uniform += op.layers * max(compute, read * max((1 - ratio) / local, ratio / remote))
            greedy += op.layers * max(compute, read / local)
            parts += [(-share / local, a * kept), (0.0, (b - a) * kept)]
            parts += [(share / remote, (1 - b) * kept)]
            left += ratio * kept
        for cost, size in sorted(parts):
            greedy += cost * min(size, left)
            left -= min(size, left)
        return uniform / greedy
