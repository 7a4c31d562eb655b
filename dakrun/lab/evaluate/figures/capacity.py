"""Figures 10 and 14: decode steps of batches and prompts that may not fit in HBM."""

from collections.abc import Iterator, Sequence

from dakrun.lab.evaluate.charts import Chart, Entry, FigureData, Quantity
from dakrun.lab.evaluate.figures.base import (
    STEP,
    Figure,
    best_of,
    faster,
    gains,
    largest,
    scaled,
)
from dakrun.lab.evaluate.figures.paper_ratios import (
    MODEL,
    PERCENT,
    ROOM,
    counting,
    named,
    paper_ratios,
)
from dakrun.lab.evaluate.scope import Scope
from dakrun.lab.panel import Series
from dakrun.units import format_seconds

Case = tuple[int, int]  # batch, prompt length
CHOICE, COPIED = "planner's choice", "copied ahead"
SMALL_ROOM = 50_000_000_000
required = scaled("required_ratio", 100)
OF_PAPER = ", ".join(f"{percent:.0f}% for {named(case)}" for case, percent in PERCENT.items())


def required_ratio(lines: Sequence[Series]) -> Quantity:
    """The required ratio, where anything needs more than HBM."""
    return Quantity(
        "bytes that HBM cannot hold (%)", required, lines=lines, title=": required ratio",
        only=CHOICE, needed=lambda of: bool(of.required_ratio or of.short_of_memory),
    )  # fmt: skip


def chart_of(model: str, budget: int, cases: Sequence[Case], scope: Scope) -> Chart:
    """Steps of `model` with `budget` bytes of HBM: the planner's choice, and all copied ahead."""

    def rank(case: Case, series: str) -> int:
        return 1 + (case[0] * case[1] > 1 << 16) + (series == COPIED)

    known = [(x, PERCENT.get(case, 0.0)) for x, case in enumerate(cases)]
    paper = [Series(name="paper, GH200", kind="line", points=known)]
    name = f"{model} in {budget / 1e9:.0f} GB"
    entries = [
        Entry(series, x, scope.step(
            model, batch, None, prompt_len=prompt, hbm_budget=budget,
            transport="staged" if series == COPIED else None,
        ), rank((batch, prompt), series))
        for x, (batch, prompt) in enumerate(cases)
        for series in ([CHOICE] if scope.quick else [CHOICE, COPIED])
    ]  # fmt: skip
    return Chart(
        name=name,
        title=name,
        x="batch x prompt length (requests x tokens)",
        shown=[STEP, required_ratio(paper if (model, budget) == (MODEL, ROOM) else [])],
        entries=entries,
        categories=[named(case) for case in cases],
    )


class Capacity(Figure):
    """What figures 10 and 14 say of their results."""

    def sentences(self, data: FigureData) -> Iterator[str]:
        for chart in data.charts:
            known = [of for of in data.lines(chart).get(CHOICE, []) if of[1].seconds]
            if not known:
                continue
            entry, result = known[-1]
            case = chart.categories[int(entry.x)]
            step = format_seconds(result.seconds or 0)
            outside = f" with {result.ratio:.1%} outside {data.scope.near}" if result.ratio else ""
            yield f"{chart.name}: {case} takes {step} a step{outside}."
            if gain := largest(data.times(chart, CHOICE), data.times(chart, COPIED)):
                clause = faster(gain[1], CHOICE, "copying everything ahead")
                yield f"At most, at {chart.categories[int(gain[0])]}, the {clause}."

    def needed(self, data: FigureData, name: str) -> dict[str, float]:
        """The required percent of each case of the chart `name`, where it is above 0."""
        return {
            chart.categories[int(entry.x)]: value
            for chart in data.charts
            if chart.name == name
            for entry, result in data.lines(chart)[CHOICE]
            if (value := required(result))
        }

    def over_copying(self, data: FigureData) -> Iterator[str]:
        """The largest gain of the planner's choice."""
        for gain in best_of([gain for *_, gain in gains(data, CHOICE, COPIED)]):
            yield f"against copying ahead the gain is up to {gain}"


class InHbm(Capacity):
    """Figure 10."""

    name = "fig10"
    title = "Figure 10: decode step by batch and prompt, in 96 GB and in 50 GB"
    paper = (
        "Where weights and KV cache exceed HBM, a part must lie outside. Long prompts make the KV "
        "cache the larger part; with 50 GB the weights of a 30B model alone do not fit."
    )
    claimed = f"Paper: the required ratios of OPT-30B in 96 GB are {OF_PAPER}. Here:"
    cases: Sequence[Case] = ((8, 32), *PERCENT)

    def charts(self, scope: Scope) -> list[Chart]:
        return [
            chart_of(model, budget, self._cases(model, scope), scope)
            for model in scope.models
            for budget in (ROOM, SMALL_ROOM)
        ]

    def _cases(self, model: str, scope: Scope) -> Sequence[Case]:
        """All of the paper's for its model; fewer of others in a quick run."""
        return self.cases[:: 2 if scope.quick and model != MODEL else 1]

    def table(self, data: FigureData) -> list[list[str]]:
        """Required ratios of the paper's cases: the paper's, the planner's, those of this run."""
        here = self.needed(data, f"{MODEL} in 96 GB")
        rows = [
            [of.case, *(f"{value:.1f}" for value in (of.paper, of.mixed, of.decimal, of.planned)),
             f"{here[of.case]:.1f}" if of.case in here else "-"]
            for of in paper_ratios()
        ]  # fmt: skip
        head = ["required ratio (%), opt-30b in 96 GB", "paper, GH200", "GiB of weights + GB of KV"]
        return [[*head, "GB of both", "dakrun's planner, gh200", "here"], *rows]

    def here(self, data: FigureData) -> Iterator[str]:
        if MODEL not in data.scope.models:
            yield f"{MODEL} is not among the models"
        needed = self.needed(data, f"{MODEL} in 96 GB")
        yield from (f"{value:.1f}% for {case}" for case, value in needed.items())
        yield from self.over_copying(data)

    def notes(self, scope: Scope) -> list[str]:
        return [
            counting(),
            "The 50 GB card is this one with a budget of HBM: its bandwidth is not smaller.",
            f"The remote tier has {scope.profile.tier(scope.remote).capacity_bytes / 1e9:,.0f} GB "
            "here; the paper's RTX PRO 6000 has 512 GB of host memory.",
        ]


class ManyRequests(Capacity):
    """Figure 14."""

    name = "fig14"
    title = "Figure 14: decode step of a small model with many requests, in 96 GB"
    paper = (
        "With OPT-6.7B the weights fit and the KV cache of hundreds of requests does not: nearly "
        "all bytes outside HBM are then KV cache."
    )
    claimed = "Paper: OPT-6.7B for 8 x 32 to 512 x 1,024 in 96 GB on GH200. Required ratios here:"
    model = "opt-6.7b"
    cases: Sequence[Case] = ((8, 32), (256, 1024), (512, 512), (512, 1024))

    def charts(self, scope: Scope) -> list[Chart]:
        """Of OPT-6.7B, or else of the first model; a CPU takes long for more than one case."""
        model = self.model if self.model in scope.models else next(iter(scope.models))
        count = 1 if scope.profile.device == "cpu" else 2 if scope.quick else None
        return [chart_of(model, ROOM, self.cases[:count], scope)]

    def here(self, data: FigureData) -> Iterator[str]:
        needed = self.needed(data, data.charts[0].name)
        yield from (f"{value:.1f}% for {case}" for case, value in needed.items())
        yield from self.over_copying(data)

    def notes(self, scope: Scope) -> list[str]:
        return [f"The remote tier has {scope.profile.tier(scope.remote).capacity_bytes / 1e9:,.0f} "
                "GB here; cases that need more are markers without a time."]  # fmt: skip
