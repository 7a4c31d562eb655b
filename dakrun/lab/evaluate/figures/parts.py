"""A decode step by its parts."""

from collections.abc import Iterator
from dataclasses import replace

from dakrun.lab.evaluate.charts import Chart, Entry, FigureData
from dakrun.lab.evaluate.figures.base import LAUNCH, Figure
from dakrun.lab.evaluate.points import LINEAR, PARTS, PartPoint
from dakrun.lab.evaluate.scope import Scope
from dakrun.lab.panel import Series

BATCH, PROMPT = 64, 1024
MODEL = "qwen2.5-7b"
# Microseconds of MODEL by part in the article. What it stores in the KV cache is in the last.
ARTICLE = dict(zip(PARTS, (5079.0, 1413.0, 145.0, 98.0, 57.0, 399.0), strict=True))


class Parts(Figure):
    """The decomposition of an article, for any model."""

    name = "parts"
    title = "Parts of a decode step"
    paper = (
        "Not of the paper, but of an article, The Hidden Bottleneck in MLA Serving (Zhang): linear "
        "layers take most of a step, so that faster attention gains little."
    )
    claimed = (
        "Article, Qwen2.5-7B, batch 64, on an H100: linear layers 70.6%, attention 19.6%, norms "
        "2.0%, activation 1.4%, RoPE 0.8%, other 5.5%. Here:"
    )

    def charts(self, scope: Scope) -> list[Chart]:
        models = list(scope.models)[: 1 if scope.quick else None]
        return [self._chart(model, scope) for model in models]

    def _chart(self, model: str, scope: Scope) -> Chart:
        sizes = {"batch_size": BATCH, "prompt_len": PROMPT, "new_tokens": scope.new_tokens}
        lines = []
        if model == MODEL:
            points = list(enumerate(ARTICLE.values()))
            lines = [Series(name="article, SGLang on an H100", kind="line", points=points)]
        return Chart(
            name=model,
            title=f"{model}, batch {BATCH}, prompts of {PROMPT:,} tokens",
            x="part of the step (op)",
            shown=[replace(LAUNCH, axis="time in a step (us)", lines=lines)],
            entries=[
                Entry("dakrun", x, PartPoint(model=model, part=part, **sizes), 2)
                for x, part in enumerate(PARTS)
            ],
            categories=PARTS,
        )

    def shares(self, data: FigureData, chart: Chart) -> list[tuple[str, float, float]]:
        """(part, seconds, share of the step) of the parts with a time."""
        found = data.times(chart, "dakrun")
        step = sum(found.values())
        return [(chart.where(x), seconds, seconds / step) for x, seconds in found.items()]

    def table(self, data: FigureData) -> list[list[str]]:
        head = [["model", "part", "us", "%", "article (us)", "article (%)"]]
        rows = []
        for chart in data.charts:
            for part, seconds, share in self.shares(data, chart):
                row = [chart.name, part, f"{seconds * 1e6:,.0f}", f"{share:.1%}"]
                us = ARTICLE[part] if chart.name == MODEL else 0.0
                row += [f"{us:,.0f}", f"{us / sum(ARTICLE.values()):.1%}"] if us else ["", ""]
                rows.append(row)
        return head + rows if rows else []

    def sentences(self, data: FigureData) -> Iterator[str]:
        for chart in data.charts:
            if shares := self.shares(data, chart):
                step = sum(seconds for _, seconds, _ in shares)
                text = ", ".join(f"{part} {share:.1%}" for part, _, share in shares)
                yield f"{chart.name}: of {step * 1e3:.3g} ms, {text}."

    def here(self, data: FigureData) -> Iterator[str]:
        for chart in data.charts:
            found = {part: share for part, _, share in self.shares(data, chart)}
            if LINEAR in found:
                yield f"{chart.name}: linear layers {found[LINEAR]:.1%}"

    def notes(self, scope: Scope) -> list[str]:
        return [
            "The article does not state its context. Its attention reads about 1,020 positions in "
            "its time, at the bandwidth that it measured for 1,024.",
            "A fused part is the time of its launches with it, less the time without: norms and "
            "activation of linear layers, RoPE of attention. Without its activation a linear layer "
            "writes twice as many outputs, so that the activation may take less than nothing.",
            "Storing keys and values is included in attention. Other is the rest of the median "
            "step: embedding, sampling, and what launches cost more, or less, behind others.",
        ]
