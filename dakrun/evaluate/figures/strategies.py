"""Figure 11: a ratio for each op against one ratio for all."""

from dakrun.evaluate.figures.base import (
    PERCENT,
    STEP_AXIS,
    Figure,
    factor,
    faster,
    largest,
    milliseconds,
    panel_of,
    sentence,
)
from dakrun.evaluate.panel import Panel
from dakrun.evaluate.points import Entry, Found, StepPoint
from dakrun.evaluate.scope import Scope
from dakrun.plan import Strategy, compute_time


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

    def panels(self, found: Found, scope: Scope) -> list[Panel]:
        return [
            panel_of(
                found,
                model,
                lambda r: milliseconds(r.seconds),
                title=f"{model}, batch {self.batch_size}, read in place",
                x=PERCENT,
                y=STEP_AXIS,
                log_y=True,
            )
            for model in found.panels()
        ]

    def finding(self, found: Found, scope: Scope) -> str:
        parts = []
        for model in found.panels():
            greedy, uniform = (found.times(model, name) for name in ("greedy", "uniform"))
            if (gain := largest(greedy, uniform)) is not None:
                clause = faster(gain[1], "greedy", "uniform")
                parts.append(f"{model}: at most, {clause}, at {gain[0]:.2g}% outside HBM.")
        return sentence(parts)

    def claim(self, found: Found, scope: Scope) -> str:
        gains = [
            gain[1]
            for model in found.panels()
            if (gain := largest(found.times(model, "greedy"), found.times(model, "uniform")))
        ]
        here = factor(max(gains)) if gains else "not measured yet"
        return f"Paper: greedy up to 1.5 x as fast as uniform on GH200. Here: {here}."

    def notes(self, scope: Scope) -> list[str]:
        return [
            "Both strategies are pure here: one ratio for every op, the KV cache included, against "
            "a ratio for each op. Neither falls back to the other, and both read in place.",
            "Greedy gains where ops bound by arithmetic hide link time that a uniform ratio would "
            "add to the ops bound by memory. The gain is small where either kind takes nearly all "
            f"of a step. Arithmetic-bound ops take, by this profile, {self.shares(scope)}. The "
            "paper's kernels are slower with many rows, which leaves more time to hide bytes in.",
        ]

    def shares(self, scope: Scope) -> str:
        """The share of a step that is bound by arithmetic, by the profile."""
        shares = []
        local = scope.rates[0]
        for model, config in scope.models.items():
            total = bound = 0.0
            for op in scope.ops(model, batch_size=self.batch_size):
                compute = compute_time(op, scope.profile, config.dtype)
                time = op.layers * max(compute, op.read_bytes / local)
                total += time
                bound += time if compute >= op.read_bytes / local else 0
            shares.append(f"{bound / total:.0%} of a step of {model}")
        return ", ".join(shares)
