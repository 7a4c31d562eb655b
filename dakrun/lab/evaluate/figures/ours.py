"""What the paper does not show: a transport for each op, other GPUs as tiers, whole files."""

from collections.abc import Iterator

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
)
from dakrun.lab.evaluate.panel import Panel
from dakrun.lab.evaluate.points import Entry, FigureData, FilePoint, Result, StepPoint
from dakrun.lab.evaluate.scope import Scope
from dakrun.plan import Transport

CHOICE = "planner's choice for each op"
SERIES: tuple[tuple[str, Transport | None], ...] = (
    ("direct", "direct"),
    ("staged", "staged"),
    (CHOICE, None),
)
FILES, FILE_SERIES = "whole file", "tokens of all requests"
RATIOS: tuple[tuple[str, float | None], ...] = (
    ("all in HBM", 0.0),
    ("10% outside", 0.1),
    ("planner's choice", None),
)


class Ours(Figure):
    """Figures of this project alone."""

    name = "ours"
    title = "Not in the paper: a transport for each op, peers, whole files"
    paper = (
        "The paper reads all remote bytes in place, from host memory alone, with requests "
        "of one length."
    )

    def entries(self, scope: Scope) -> list[Entry]:
        steps = [
            Entry(
                panel=model,
                series=series,
                x=100 * ratio,
                rank=1 if transport is None else 2,
                point=StepPoint(
                    model=model,
                    batch_size=8,
                    new_tokens=scope.new_tokens,
                    ratio=ratio,
                    transport=transport,
                    remote=remote,
                ),
            )
            for model in scope.models
            for series, transport, remote in self.series(scope)
            for ratio in scope.some_ratios()
            if ratio
        ]
        requests, longest = (32, 64) if scope.quick else (256, 256)
        files = [
            Entry(
                panel=f"{model}, {FILES}",
                series=FILE_SERIES,
                x=x,
                rank=2,
                point=FilePoint(
                    model=model,
                    requests=requests,
                    longest=longest,
                    ratio=ratio,
                    remote=scope.remote,
                ),
            )
            for model in list(scope.models)[:1]
            for x, (_, ratio) in enumerate(RATIOS)
        ]
        return [*steps, *files]

    def series(self, scope: Scope) -> Iterator[tuple[str, Transport | None, str]]:
        """(series, transport, remote tier)."""
        for series, transport in SERIES:
            yield series, transport, scope.remote
        for tier in scope.profile.remote:
            if tier.name != scope.remote:
                yield f"direct, from {tier.name}", "direct", tier.name

    def panels(self, data: FigureData, scope: Scope) -> list[Panel]:
        panels = []
        for name in data.panels():
            if name.endswith(FILES):
                panels.append(self.of_file(data, name))
                continue
            panels.append(
                panel_of(
                    data,
                    name,
                    lambda r: milliseconds(r.seconds),
                    title=f"{name}, batch 8",
                    x=PERCENT,
                    y=STEP_AXIS,
                    root_x=root_x(scope),
                    log_y=True,
                )
            )
        return panels

    def of_file(self, data: FigureData, name: str) -> Panel:
        """The panel of whole files."""
        point = next(entry.point for entry in data.entries if entry.panel == name)
        assert isinstance(point, FilePoint)
        return panel_of(
            data,
            name,
            rate,
            title=f"{name}: {point.requests} requests, prompts and completions of 1 to "
            f"{point.longest} tokens",
            x="ratio of bytes outside HBM",
            y="new tokens per second (tokens/s)",
            categories=[label for label, _ in RATIOS],
        )

    def finding(self, data: FigureData, scope: Scope) -> str:
        parts = []
        for panel in data.panels():
            if panel.endswith(FILES):
                rates = dict(self.rates(data, panel))
                if 0 in rates and 1 in rates:
                    parts.append(
                        f"{panel}: {rates[1]:,.0f} tokens/s with 10% outside HBM, "
                        f"{factor(rates[1] / rates[0])} of all in HBM."
                    )
                continue
            choice = data.times(panel, CHOICE)
            both = [dict(data.times(panel, name)) for name, _ in SERIES[:2]]
            alone = [(x, min(of[x] for of in both)) for x in both[0] if x in both[1]]
            if (gain := largest(choice, alone)) is not None:
                clause = faster(gain[1], "a transport for each op", "the better of one for all")
                parts.append(f"{panel}: at most, at {gain[0]:.2g}% outside HBM, {clause}.")
        return sentence(parts, data)

    def rates(self, data: FigureData, panel: str) -> list[tuple[float, float]]:
        """(x, tokens/s) of a file."""
        line = data.lines(panel).get(FILE_SERIES, [])
        return [(e.x, r.tokens_per_s) for e, r in line if r.tokens_per_s]

    def claim(self, data: FigureData, scope: Scope) -> str:
        return "Paper: no such figure."

    def notes(self, scope: Scope) -> list[str]:
        _, direct, staged = scope.rates
        notes = [
            f"The copy engine moves {factor(staged / direct)} the bytes of direct reads on this "
            "link, but its bytes pass HBM twice. On an H200 over PCIe 5.0 copying is faster from "
            "about 1.2% on (measured 2026-11-21); where the link is as fast as NVLink, reading in "
            "place is.",
            "The requests of a file have random lengths, so slots fill and empty; its rate "
            "includes the prompts.",
        ]
        return notes


def rate(result: Result) -> float | None:
    return result.tokens_per_s
