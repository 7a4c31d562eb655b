"""Figure 11: a ratio for each op against one ratio for all."""

from collections.abc import Iterator

from dakrun.lab.evaluate.charts import Chart, Entry, FigureData
from dakrun.lab.evaluate.figures.base import (
    STEP,
    Figure,
    best_of,
    factor,
    faster,
    gains,
    thresholds,
)
from dakrun.lab.evaluate.scope import Scope
from dakrun.plan import compute_time

BATCH = 512
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
    claimed = "Paper: greedy up to 1.5 x as fast as uniform on GH200. Here:"

    def charts(self, scope: Scope) -> list[Chart]:
        return [
            Chart(
                name=model,
                title=f"{model}, batch {BATCH}, read in place",
                x=scope.outside,
                shown=[STEP],
                root_x=True,
                entries=[
                    Entry(
                        name,
                        100 * ratio,
                        scope.step(model, BATCH, ratio, transport="direct", strategy=name),
                        1 if ratio in (0.1, 0.3) else 2,
                    )
                    for name in ("greedy", "uniform")
                    for ratio in scope.some_ratios()
                    if ratio
                ],
            )
            for model in scope.models
        ]

    def sentences(self, data: FigureData) -> Iterator[str]:
        for chart, x, gain in gains(data, "greedy", "uniform"):
            clause = faster(gain, "greedy", "uniform")
            yield f"{chart.name}: at most, {clause}, at {x:.2g}% outside {data.scope.near}."

    def here(self, data: FigureData) -> list[str]:
        return best_of([gain for *_, gain in gains(data, "greedy", "uniform")])

    def notes(self, scope: Scope) -> list[str]:
        return [
            "Both strategies are pure here: one ratio for every op, the KV cache included, against "
            "a ratio for each op. Neither falls back to the other, and both read in place.",
            "Greedy gains where ops bound by arithmetic hide link time that a uniform ratio adds "
            "to ops bound by memory, and where it moves bytes that a step reads least, such as KV "
            "slots that are not full. It is small where either kind takes most of a step. "
            f"By this profile's rates alone the gain is at most {bounds(scope)}.",
        ]


def bounds(scope: Scope) -> str:
    """The largest factor of each model, by rates alone."""
    found = []
    for model in scope.models:
        gains = [bound(model, step / STEPS, scope) for step in range(1, STEPS)]
        best = max(gains)
        ratio = (gains.index(best) + 1) / STEPS
        found.append((best, f"{factor(best)} at {ratio:.0%} for {model}"))
    text = ", ".join(text for _, text in found)
    if max(found)[0] < PAPER_GAIN:
        text += "; the rest of the paper's 1.5 x seems to come from the kernels there"
    return text


def bound(model: str, ratio: float, scope: Scope) -> float:
    """The time of a uniform `ratio` over that of greedy ones, by rates alone.

    An op of C bytes takes the longest of its arithmetic, (1-x) C/B_hbm and x C/B_link. Greedy
    first moves the bytes that shorten ops (up to a), then those that cost nothing (up to b),
    then those that a step reads least.
    """
    local, remote, _ = scope.rates
    dtype = scope.models[model].dtype
    uniform = greedy = left = 0.0
    parts: list[tuple[float, float]] = []  # (seconds for each byte moved, bytes)
    for op in scope.ops(model, batch_size=BATCH):
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
