"""Figures 10 and 14: decode steps of batches and prompts that may not fit in HBM."""

from collections.abc import Iterator

from dakrun.evaluate.figures.base import (
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
from dakrun.evaluate.panel import Panel, Series
from dakrun.evaluate.points import Entry, Found, Result, StepPoint
from dakrun.evaluate.scope import Scope

CASES = ((8, 32), (32, 1024), (128, 256), (128, 512), (128, 1024))  # batch, prompt length
BUDGETS = (96_000_000_000, 50_000_000_000)
CHOICE, COPIED = "planner's choice", "copied ahead"
REQUIRED = "bytes that HBM cannot hold (%)"
PAPER_MODEL, PAPER_REQUIRED = "opt-30b", (0.0, 6.0, 10.0, 37.0, 60.0)  # percent, GH200


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

    def panels(self, found: Found, scope: Scope) -> list[Panel]:
        panels = []
        for name in found.panels():
            for title, y, value, lines, log_y in (
                (name, STEP_AXIS, lambda r: milliseconds(r.seconds), [], True),
                (f"{name}: required ratio", REQUIRED, required, self.of_paper(name, scope), False),
            ):
                if title != name and not self.exceeds(found, name):
                    continue
                panels.append(
                    panel_of(
                        found if title == name else choice_alone(found),
                        name,
                        value,
                        title=title,
                        x="batch x prompt length (requests x tokens)",
                        y=y,
                        lines=lines,
                        categories=[f"{batch} x {prompt:,}" for batch, prompt in self.cases(scope)],
                        log_y=log_y,
                    )
                )
        return panels

    def exceeds(self, found: Found, panel: str) -> bool:
        """Whether anything in a panel needs more than HBM."""
        results = [result for line in found.lines(panel).values() for _, result in line]
        return any(result.required_ratio or result.short_of_memory for result in results)

    def of_paper(self, panel: str, scope: Scope) -> list[Series]:
        """The paper's required ratios, for its model and its 96 GB."""
        if panel != self.panel(PAPER_MODEL, BUDGETS[0]):
            return []
        points = [
            (x, PAPER_REQUIRED[CASES.index(case)]) for x, case in enumerate(self.cases(scope))
        ]
        return [Series(name="paper, GH200", kind="line", points=points)]

    def finding(self, found: Found, scope: Scope) -> str:
        parts = []
        for panel in found.panels():
            lines = found.lines(panel).get(CHOICE, [])
            known = [(entry, result) for entry, result in lines if result.seconds]
            if not known:
                continue
            entry, result = known[-1]
            batch, prompt = self.cases(scope)[int(entry.x)]
            outside = "" if result.ratio is None else f" with {result.ratio:.1%} outside HBM"
            parts.append(
                f"{panel}: {batch} x {prompt:,} takes {seconds(result.seconds or 0)} "
                f"a step{outside}."
            )
            if gain := largest(found.times(panel, CHOICE), found.times(panel, COPIED)):
                batch, prompt = self.cases(scope)[int(gain[0])]
                clause = faster(gain[1], CHOICE, "copying everything ahead")
                parts.append(f"At most, at {batch} x {prompt:,}, the {clause}.")
        return sentence(parts, found)

    def claim(self, found: Found, scope: Scope) -> str:
        gains = [
            gain[1]
            for panel in found.panels()
            if (gain := largest(found.times(panel, CHOICE), found.times(panel, COPIED)))
        ]
        needed = [
            f"{value:.1f}%"
            for _, result in found.lines(self.panel(PAPER_MODEL, BUDGETS[0])).get(CHOICE, [])
            if (value := required(result)) is not None and value > 0
        ]
        here = f"{', '.join(needed)} for that model and budget" if needed else "not measured yet"
        if PAPER_MODEL not in scope.models:
            here = f"{PAPER_MODEL} is not among the models"
        if gains:
            here += f"; against copying ahead the gain is up to {factor(max(gains))}"
        return (
            f"Paper: the required ratios of OPT-30B in 96 GB are 6, 10, 37 and 60%. Here: {here}."
        )

    def notes(self, scope: Scope) -> list[str]:
        return [
            "dakrun's planner needs 12.6, 18.7, 41.5 and 62.7% for GH200, where the paper has 6, "
            "10, 37 and 60%. The paper seems to add GiB of weights to decimal GB of KV; dakrun "
            "also counts KV blocks, activations and the CUDA context.",
            "The 50 GB card is this one with a budget of HBM: its bandwidth is not smaller.",
            f"The remote tier has {scope.profile.tier(scope.remote).capacity_bytes / 1e9:,.0f} GB "
            "here; the paper's RTX PRO 6000 has 512 GB of host memory.",
        ]


def required(result: Result) -> float | None:
    """The required ratio in percent."""
    return None if result.required_ratio is None else 100 * result.required_ratio


def choice_alone(found: Found) -> Found:
    """The entries of the planner's choice: required ratios do not depend on the transport."""
    return Found([entry for entry in found.entries if entry.series == CHOICE], found.results)
