"""Figures 10 and 14: decode steps of batches and prompts that may not fit in HBM."""

from collections.abc import Iterator

from dakrun.lab.evaluate.figures.base import (
    STEP_AXIS,
    Figure,
    factor,
    faster,
    largest,
    milliseconds,
    panel_of,
    seconds,
    sentence,
)
from dakrun.lab.evaluate.figures.paper_ratios import (
    MODEL,
    PERCENT,
    ROOM,
    counting,
    named,
    paper_ratios,
)
from dakrun.lab.evaluate.panel import Panel, Series
from dakrun.lab.evaluate.points import Entry, FigureData, Result, StepPoint
from dakrun.lab.evaluate.scope import Scope

CASES = ((8, 32), *PERCENT)  # batch, prompt length
BUDGETS = (ROOM, 50_000_000_000)
CHOICE, COPIED = "planner's choice", "copied ahead"
REQUIRED = "bytes that HBM cannot hold (%)"


class Capacity(Figure):
    """Figures 10 and 14."""

    name = "fig10"
    title = "Figures 10 and 14: decode step by batch and prompt, in 96 GB and in 50 GB"
    paper = (
        "Where weights and KV cache exceed HBM, a part must lie outside. Long prompts make the KV "
        "cache the larger part; with 50 GB the weights of a 30B model alone do not fit."
    )

    def entries(self, scope: Scope) -> list[Entry]:
        return [
            Entry(
                panel=self.panel(model, budget),
                series=series,
                x=self.cases(scope).index(case),
                rank=rank,
                point=StepPoint(
                    model=model,
                    batch_size=case[0],
                    prompt_len=case[1],
                    new_tokens=scope.new_tokens,
                    ratio=None,
                    transport="staged" if series == COPIED else None,
                    hbm_budget=budget,
                    remote=scope.remote,
                ),
            )
            for model in scope.models
            for budget in BUDGETS
            for case, series, rank in self.bars(scope)
        ]

    def panel(self, model: str, budget: int) -> str:
        return f"{model} in {budget / 1e9:.0f} GB"

    def cases(self, scope: Scope) -> tuple[tuple[int, int], ...]:
        """Batches and prompt lengths, fewer of them in a quick run."""
        return CASES[:: 2 if scope.quick else 1]

    def bars(self, scope: Scope) -> Iterator[tuple[tuple[int, int], str, int]]:
        """(batch and prompt length, series, rank)."""
        for case in self.cases(scope):
            heavy = case[0] * case[1] > 1 << 16
            for series in [CHOICE] if scope.quick else [CHOICE, COPIED]:
                yield case, series, (3 if heavy else 2) if series == COPIED else (2 if heavy else 1)

    def panels(self, data: FigureData, scope: Scope) -> list[Panel]:
        panels = []
        for name in data.panels():
            for title, y, value, lines, log_y in (
                (name, STEP_AXIS, lambda r: milliseconds(r.seconds), [], True),
                (f"{name}: required ratio", REQUIRED, required, self.of_paper(name, scope), False),
            ):
                if title != name and not self.exceeds(data, name):
                    continue
                panels.append(
                    panel_of(
                        data if title == name else choice_alone(data),
                        name,
                        value,
                        title=title,
                        x="batch x prompt length (requests x tokens)",
                        y=y,
                        lines=lines,
                        categories=[named(case) for case in self.cases(scope)],
                        log_y=log_y,
                    )
                )
        return panels

    def exceeds(self, data: FigureData, panel: str) -> bool:
        """Whether anything in a panel needs more than HBM."""
        results = [result for line in data.lines(panel).values() for _, result in line]
        return any(result.required_ratio or result.short_of_memory for result in results)

    def of_paper(self, panel: str, scope: Scope) -> list[Series]:
        """The paper's required ratios, for its model and its 96 GB."""
        if panel != self.panel(MODEL, ROOM):
            return []
        points = [(x, PERCENT.get(case, 0.0)) for x, case in enumerate(self.cases(scope))]
        return [Series(name="paper, GH200", kind="line", points=points)]

    def table(self, data: FigureData, scope: Scope) -> list[list[str]]:
        """Required ratios of the paper's cases: the paper's, the planner's, those of this run."""
        here = dict(self.needed(data, scope))
        rows = []
        for ratio in paper_ratios():
            values = (ratio.paper, ratio.mixed, ratio.decimal, ratio.planned, here.get(ratio.case))
            rows.append([ratio.case, *("-" if of is None else f"{of:.1f}" for of in values)])
        head = ["required ratio (%), opt-30b in 96 GB", "paper, GH200", "GiB of weights + GB of KV"]
        return [[*head, "GB of both", "dakrun's planner, gh200", "here"], *rows]

    def needed(self, data: FigureData, scope: Scope) -> list[tuple[str, float]]:
        """(case, required percent) of the paper's model and budget, where it is above 0."""
        line = data.lines(self.panel(MODEL, ROOM)).get(CHOICE, [])
        return [
            (named(self.cases(scope)[int(entry.x)]), value)
            for entry, result in line
            if (value := required(result))
        ]

    def finding(self, data: FigureData, scope: Scope) -> str:
        parts = []
        for panel in data.panels():
            lines = data.lines(panel).get(CHOICE, [])
            known = [(entry, result) for entry, result in lines if result.seconds]
            if not known:
                continue
            entry, result = known[-1]
            case = named(self.cases(scope)[int(entry.x)])
            outside = "" if result.ratio is None else f" with {result.ratio:.1%} outside HBM"
            parts.append(f"{panel}: {case} takes {seconds(result.seconds or 0)} a step{outside}.")
            if gain := largest(data.times(panel, CHOICE), data.times(panel, COPIED)):
                case = named(self.cases(scope)[int(gain[0])])
                clause = faster(gain[1], CHOICE, "copying everything ahead")
                parts.append(f"At most, at {case}, the {clause}.")
        return sentence(parts, data)

    def claim(self, data: FigureData, scope: Scope) -> str:
        gains = [
            gain[1]
            for panel in data.panels()
            if (gain := largest(data.times(panel, CHOICE), data.times(panel, COPIED)))
        ]
        needed = [f"{value:.1f}% for {case}" for case, value in self.needed(data, scope)]
        here = ", ".join(needed) or "not measured yet"
        if MODEL not in scope.models:
            here = f"{MODEL} is not among the models"
        if gains:
            here += f"; against copying ahead the gain is up to {factor(max(gains))}"
        paper = ", ".join(f"{percent:.0f}% for {named(case)}" for case, percent in PERCENT.items())
        return f"Paper: the required ratios of OPT-30B in 96 GB are {paper}. Here: {here}."

    def notes(self, scope: Scope) -> list[str]:
        return [
            counting(),
            "The 50 GB card is this one with a budget of HBM: its bandwidth is not smaller.",
            f"The remote tier has {scope.profile.tier(scope.remote).capacity_bytes / 1e9:,.0f} GB "
            "here; the paper's RTX PRO 6000 has 512 GB of host memory.",
        ]


def required(result: Result) -> float | None:
    """The required ratio in percent."""
    return None if result.required_ratio is None else 100 * result.required_ratio


def choice_alone(data: FigureData) -> FigureData:
    """The entries of the planner's choice: required ratios do not depend on the transport."""
    return FigureData([entry for entry in data.entries if entry.series == CHOICE], data.results)
