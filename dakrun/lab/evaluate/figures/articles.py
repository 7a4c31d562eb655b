"""Figures of an article on L2: batched products by the size of the weights, and parts of a step.

The article is The Hidden Bottleneck in MLA Serving (Zhang).
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

from dakrun.lab.evaluate.charts import Chart, Entry
from dakrun.lab.evaluate.figures.base import LAUNCH, Figure, factor
from dakrun.lab.evaluate.points import LINEAR, PARTS, BatchPoint, PartPoint
from dakrun.lab.panel import Series

MIB = 2**20
FOUR, SIXTEEN, CUBLAS = "4 bits", "16 bits", "cuBLAS, 16 bits"
FOUR_TILED = "4 bits, tiled"
SERIES: dict[str, tuple[Literal[4, 16], Literal["splitk", "tiled", "cublas"]]] = {
    FOUR: (4, "splitk"),
    SIXTEEN: (16, "splitk"),
    FOUR_TILED: (4, "tiled"),
    "16 bits, tiled": (16, "tiled"),
    CUBLAS: (16, "cublas"),
}
HEADS = (64, 128, 256, 384, 512, 1024)
BATCHES = (1, 4, 16, 64)
# Rows and columns of a head's matrix in DeepSeek-V3: keys absorbed into queries, values of latents.
SHAPES = {"queries": (512, 128), "values": (128, 512)}
MLA_MIB = 16.0  # of the 128 heads of DeepSeek-V3
# Microseconds of cuBLAS by MiB in the article, of queries with a batch of 1.
CUBLAS_US = [(16.0, 4.9), (32.0, 7.6), (48.0, 21.7), (128.0, 49.1)]

BATCH, PROMPT = 64, 1024
MODEL = "qwen2.5-7b"
# Microseconds of MODEL by part in the article. What it stores in the KV cache is in the last.
PARTS_US = dict(zip(PARTS, (5079.0, 1413.0, 145.0, 98.0, 57.0, 399.0), strict=True))


class L2Barrier(Figure):
    """The sweep of an article on the products of multi-head latent attention."""

    name = "l2"
    title = "L2: batched products in 4 and 16 bits, by the bytes of all matrices"
    paper = (
        "Not of the paper, but of an article, The Hidden Bottleneck in MLA Serving (Zhang): small "
        "matrices that stay in L2 from launch to launch gain less from fewer bits than those that "
        "HBM delivers."
    )
    claimed = (
        "Article, on an H100 in CUDA graphs: its kernel of 4 bits is 0.49 to 0.53 x as fast as "
        "cuBLAS in 16 bits at 16 MiB, and about as fast from 40 MiB on. Here, at 16 MiB:"
    )

    def make_charts(self) -> list[Chart]:
        shapes = list(SHAPES)[: 1 if self.scope.quick else None]
        batches, heads = (BATCHES[::3], HEADS[1::2]) if self.scope.quick else (BATCHES, HEADS)
        return [self._chart(shape, n, heads) for shape in shapes for n in batches]

    def _chart(self, name: str, n: int, counts: Sequence[int]) -> Chart:
        rows, cols = SHAPES[name]
        lines = []
        if (name, n) == ("queries", 1):
            lines = [Series(name="article, cuBLAS on an H100", kind="line", points=CUBLAS_US)]

        def entry(series: str, heads: int) -> Entry:
            bits, by = SERIES[series]
            point = BatchPoint(heads=heads, rows=rows, cols=cols, n=n, bits=bits, by=by)
            return Entry(series, 2 * heads * rows * cols / MIB, point, 2 + (by == "tiled"))

        left_out = {"tiled", "cublas"} if self.scope.predict else set()  # unknown to the planner
        some = [series for series, (_, by) in SERIES.items() if by not in left_out]
        return Chart(
            name=f"{name}, batch {n}",
            title=f"heads of {rows} x {cols} ({name}), batch {n}",
            x="all matrices in 16 bits (MiB)",
            log_x=True,
            place="{:,.0f} MiB",
            shown=[replace(LAUNCH, log=True, lines=lines)],
            entries=[entry(series, heads) for series in some for heads in counts],
        )

    def ratios(self, chart: Chart, other: str = CUBLAS) -> dict[float, float]:
        """The time of the series `other` over the least of 4 bits by MiB, where both are known."""
        base, tiled = self.times(chart, other), self.times(chart, FOUR_TILED)
        few = self.times(chart, FOUR)
        return {x: base[x] / min(s, tiled.get(x, s)) for x, s in few.items() if x in base}

    def sentences(self) -> Iterator[str]:
        other, name = (SIXTEEN, SIXTEEN) if self.scope.predict else (CUBLAS, "cuBLAS in 16 bits")
        for chart in self.charts:
            if ratios := self.ratios(chart, other):
                low, high = (by(ratios.items(), key=lambda of: of[1]) for by in (min, max))
                yield (
                    f"{chart.name}: 4 bits are {factor(low[1])} (at {chart.where(low[0])}) to "
                    f"{factor(high[1])} (at {chart.where(high[0])}) as fast as {name}."
                )

    def here(self) -> Iterator[str]:
        for chart in self.charts:
            if ratio := self.ratios(chart).get(MLA_MIB):
                yield f"{factor(ratio)} ({chart.name})"

    def missing(self) -> str:
        return "not predicted for cuBLAS" if self.scope.predict else super().missing()

    def notes(self) -> list[str]:
        return [
            "The weights of a launch are those of the launch before. The article widens its "
            "matrices; here there are more heads, of DeepSeek-V3's size each.",
            "Each head is an expert of the grouped kernels. SplitK_GEMM takes two launches for "
            "more than 512 of them. In 4 bits the faster kernel counts, SplitK_GEMM or tiled.",
            "4 bits have a scale for 128 columns of a row; the article's have one for a row.",
        ]


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

    def make_charts(self) -> list[Chart]:
        models = list(self.scope.models)[: 1 if self.scope.quick else None]
        return [self._chart(model) for model in models]

    def _chart(self, model: str) -> Chart:
        sizes = {"batch_size": BATCH, "prompt_len": PROMPT, "new_tokens": self.scope.new_tokens}
        lines = []
        if model == MODEL:
            points = list(enumerate(PARTS_US.values()))
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

    def shares(self, chart: Chart) -> list[tuple[str, float, float]]:
        """(part, seconds, share of the step) of the parts with a time."""
        found = self.times(chart, "dakrun")
        step = sum(found.values())
        return [(chart.where(x), seconds, seconds / step) for x, seconds in found.items()]

    def table(self) -> list[list[str]]:
        head = [["model", "part", "us", "%", "article (us)", "article (%)"]]
        rows = []
        for chart in self.charts:
            for part, seconds, share in self.shares(chart):
                row = [chart.name, part, f"{seconds * 1e6:,.0f}", f"{share:.1%}"]
                us = PARTS_US[part] if chart.name == MODEL else 0.0
                row += [f"{us:,.0f}", f"{us / sum(PARTS_US.values()):.1%}"] if us else ["", ""]
                rows.append(row)
        return head + rows if rows else []

    def sentences(self) -> Iterator[str]:
        for chart in self.charts:
            if shares := self.shares(chart):
                step = sum(seconds for _, seconds, _ in shares)
                text = ", ".join(f"{part} {share:.1%}" for part, _, share in shares)
                yield f"{chart.name}: of {step * 1e3:.3g} ms, {text}."

    def here(self) -> Iterator[str]:
        for chart in self.charts:
            found = {part: share for part, _, share in self.shares(chart)}
            if LINEAR in found:
                yield f"{chart.name}: linear layers {found[LINEAR]:.1%}"

    def notes(self) -> list[str]:
        return [
            "The article does not state its context. Its attention reads about 1,020 positions in "
            "its time, at the bandwidth that it measured for 1,024.",
            "A fused part is the time of its launches with it, less the time without: norms and "
            "activation of linear layers, RoPE of attention. Without its activation a linear layer "
            "writes twice as many outputs, so that the activation may take less than nothing.",
            "Storing keys and values is included in attention. Other is the rest of the median "
            "step: embedding, sampling, and what launches cost more, or less, behind others.",
        ]
