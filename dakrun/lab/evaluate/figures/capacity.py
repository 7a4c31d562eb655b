"""Figures 10 and 14: decode steps of batches and prompts that may not fit in HBM."""

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

from dakrun.hardware import load_profile
from dakrun.lab.evaluate.charts import Chart, Entry, Quantity
from dakrun.lab.evaluate.figures.base import STEP, Figure, scaled
from dakrun.lab.evaluate.scope import Scope
from dakrun.lab.panel import Series
from dakrun.models import known_model
from dakrun.units import format_seconds

Case = tuple[int, int]  # batch, prompt length
CHOICE, COPIED = "planner's choice", "copied ahead"
SMALL_ROOM = 50_000_000_000
MODEL, ROOM = "opt-30b", 96_000_000_000
PERCENT = {(32, 1024): 6.0, (128, 256): 10.0, (128, 512): 37.0, (128, 1024): 60.0}  # the paper's
NEW_TOKENS = 32  # with which the paper's ratios can be derived
required = scaled("required_ratio", 100)


def named(case: Case) -> str:
    """A batch and prompt length in words."""
    return f"{case[0]} x {case[1]:,}"


OF_PAPER = ", ".join(f"{percent:.0f}% for {named(case)}" for case, percent in PERCENT.items())


class RequiredRatio(NamedTuple):
    """The ratio of bytes that must lie outside HBM for a batch of prompts, in percent.

    `paper` is the paper's, `mixed` that of GiB of weights and decimal GB of KV in 96, `decimal`
    that of GB of both, `planned` the one of dakrun's planner.
    """

    case: str
    paper: float
    mixed: float
    decimal: float
    planned: float


@functools.cache
def paper_ratios() -> tuple[RequiredRatio, ...]:
    """The paper's cases that do not fit in 96 GB, from the profile `gh200`."""
    model = known_model(MODEL)
    assert model is not None
    machine = load_profile("gh200")
    scope = Scope(models={MODEL: model}, profile=machine, remote="host", quick=False, predict=True)

    def outside(needed: float) -> float:
        return 100 * max(0.0, 1 - ROOM / needed)

    found = []
    for (batch, prompt), paper in PERCENT.items():
        more = {"prompt_len": prompt, "new_tokens": NEW_TOKENS, "hbm_budget": ROOM}
        plan = scope.plan(scope.step(MODEL, batch, None, **more))
        kv = model.kv_bytes_per_token * batch * (prompt + NEW_TOKENS)
        mixed, decimal = (
            outside(plan.weight_bytes * 1e9 / 2**30 + kv),
            outside(plan.weight_bytes + kv),
        )
        planned = 100 * plan.required_ratio
        found.append(RequiredRatio(named((batch, prompt)), paper, mixed, decimal, planned))
    return tuple(found)


def counting() -> str:
    """How the paper's ratios seem to be counted, with the outcome of that calculation."""
    ratios = paper_ratios()
    same = all(round(ratio.mixed) == ratio.paper for ratio in ratios)
    shown = ", ".join(f"{ratio.mixed:.1f}%" for ratio in ratios)
    return (
        "The paper's required ratios seem to add GiB of weights to decimal GB of KV cache for "
        f"{NEW_TOKENS} new tokens: this gives {shown}, which {'are' if same else 'are not'} its "
        "figures when rounded. dakrun counts both in bytes, and whole KV blocks, activations, the "
        "CUDA context and a reserve as well."
    )


class Capacity(Figure):
    """Steps by batch and prompt: the planner's choice, and everything copied ahead."""

    cases: ClassVar[Sequence[Case]]

    def chart(self, model: str, budget: int, cases: Sequence[Case]) -> Chart:
        """`model` with `budget` bytes of HBM."""
        name = f"{model} in {budget / 1e9:.0f} GB"

        def entry(x: int, series: str) -> Entry:
            batch, prompt = cases[x]
            more: dict[str, Any] = {"prompt_len": prompt, "hbm_budget": budget}
            more |= {"transport": "staged"} if series == COPIED else {}
            rank = 1 + (batch * prompt > 1 << 16) + (series == COPIED)
            return Entry(series, x, self.scope.step(model, batch, None, **more), rank)

        def rivals(x: int) -> Iterator[Entry]:
            """Other programs, with as many of the weights outside as the budget needs."""
            batch, prompt = cases[x]
            whole = self.scope.roomy().plan(self.scope.step(model, batch, 0.0, prompt_len=prompt))
            excess = max(0.0, sum(whole.memory(0).values()) - budget)
            ratio = min(1.0, math.ceil(1e4 * excess / whole.weight_bytes) / 1e4)
            for name in self.scope.rivals:
                step = self.scope.step(model, batch, ratio, prompt_len=prompt, by=name)
                yield Entry(name, x, replace(step, hbm_budget=budget), 3)

        paper = [(x, PERCENT.get(case, 0.0)) for x, case in enumerate(cases)]
        line = Series(name="paper, GH200", kind="line", points=paper)
        ratios = Quantity(
            f"bytes that {self.scope.near} cannot hold (%)", required, title=": required ratio",
            only=CHOICE, lines=[line] if (model, budget) == (MODEL, ROOM) else [],
            needed=lambda of: bool(of.required_ratio or of.short_of_memory),
        )  # fmt: skip
        shown = [CHOICE] if self.scope.quick else [CHOICE, COPIED]
        return Chart(
            name=name, title=name, x="batch x prompt length (requests x tokens)",
            shown=[STEP, ratios], categories=[named(case) for case in cases],
            entries=[entry(x, series) for x in range(len(cases)) for series in shown]
            + [of for x in range(0 if self.scope.quick else len(cases)) for of in rivals(x)],
        )  # fmt: skip

    def sentences(self) -> Iterator[str]:
        for chart in self.charts:
            known = [of for of in self.lines(chart)[CHOICE] if of[1].seconds]
            for entry, result in known[-1:]:
                case, step = chart.where(entry.x), format_seconds(result.seconds or 0)
                part = f" with {result.ratio:.1%} outside {self.scope.near}" if result.ratio else ""
                yield f"{chart.name}: {case} takes {step} a step{part}."
        yield from super().sentences()

    def needed(self, name: str) -> dict[str, float]:
        """The required percent of each case of the chart `name`, where it is above 0."""
        return {
            chart.where(entry.x): value
            for chart in self.charts
            if chart.name == name
            for entry, result in self.lines(chart)[CHOICE]
            if (value := required(result))
        }

    def here(self) -> Iterator[str]:
        needed = self.needed(f"{self.model_of()} in 96 GB")
        yield from (f"{value:.1f}% for {case}" for case, value in needed.items())
        yield from super().here()

    def model_of(self) -> str:
        """The paper's model."""
        return MODEL


class InHbm(Capacity):
    """Figure 10."""

    name = "fig10"
    title = "Figure 10: decode step by batch and prompt, in 96 GB and in 50 GB"
    paper = (
        "Where weights and KV cache exceed HBM, a part must lie outside. Long prompts make the KV "
        "cache the larger part; with 50 GB the weights of a 30B model alone do not fit."
    )
    claimed = f"Paper: the required ratios of OPT-30B in 96 GB are {OF_PAPER}. Here:"
    cases = ((8, 32), *PERCENT)

    def make_charts(self) -> list[Chart]:
        """All cases of the paper for its model; fewer of others in a quick run."""
        few = self.cases[::2] if self.scope.quick else self.cases
        return [
            self.chart(model, budget, self.cases if model == MODEL else few)
            for model in self.scope.models
            for budget in (ROOM, SMALL_ROOM)
        ]

    def table(self) -> list[list[str]]:
        """Required ratios of the paper's cases: the paper's, the planner's, those of this run."""
        here = self.needed(f"{MODEL} in 96 GB")
        head = ["required ratio (%), opt-30b in 96 GB", "paper, GH200", "GiB of weights + GB of KV"]
        body = [
            [case, *(f"{of:.1f}" for of in values), f"{here[case]:.1f}" if case in here else "-"]
            for case, *values in paper_ratios()
        ]
        return [[*head, "GB of both", "dakrun's planner, gh200", "here"], *body]

    def missing(self) -> str:
        absent = f"{MODEL} is not among the models"
        return super().missing() if MODEL in self.scope.models else absent

    def notes(self) -> list[str]:
        size = self.scope.profile.tier(self.scope.remote).capacity_bytes / 1e9
        return [
            counting(),
            f"The 50 GB card is this one with a budget of {self.scope.near}: its bandwidth is not "
            "smaller.",
            f"The remote tier has {size:,.0f} GB here; the paper's RTX PRO 6000 has 512 GB of host "
            "memory.",
        ]


class ManyRequests(Capacity):
    """Figure 14."""

    name = "fig14"
    title = "Figure 14: decode step of a small model with many requests, in 96 GB"
    paper = (
        "The weights of OPT-6.7B are a small part of 96 GB; the KV cache of hundreds of requests "
        "exceeds it."
    )
    claimed = "Paper: OPT-6.7B for 8 x 32 to 512 x 1,024 in 96 GB on GH200. Required ratios here:"
    cases = ((8, 32), (256, 1024), (512, 512), (512, 1024))

    def make_charts(self) -> list[Chart]:
        """A CPU takes long for more than one case."""
        count = 1 if self.scope.profile.device == "cpu" else 2 if self.scope.quick else None
        return [self.chart(self.model_of(), ROOM, self.cases[:count])]

    def model_of(self) -> str:
        """OPT-6.7B, or else the first model."""
        return "opt-6.7b" if "opt-6.7b" in self.scope.models else next(iter(self.scope.models))

    def notes(self) -> list[str]:
        size = self.scope.profile.tier(self.scope.remote).capacity_bytes / 1e9
        return [f"The remote tier has {size:,.0f} GB here: cases that need more have no time."]
