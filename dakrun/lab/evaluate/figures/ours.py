"""What the paper does not show: a transport for each op, other GPUs as tiers, whole files."""

from collections.abc import Iterator

from dakrun.lab.evaluate.charts import Chart, Entry, Quantity
from dakrun.lab.evaluate.figures.base import STEP, Curve, Figure, factor, faster, scaled
from dakrun.lab.evaluate.points import FilePoint

CHOICE, FILE = "planner's choice for each op", "tokens of all requests"
RATIOS: dict[str, float | None] = {
    "all in {}": 0.0, "10% outside": 0.1, "planner's choice": None
}  # fmt: skip
RATE = Quantity("new tokens per second (tokens/s)", scaled("tokens_per_s", 1.0))


class Ours(Figure):
    """Figures of this project alone."""

    name = "ours"
    title = "Not in the paper: a transport for each op, peers, whole files"
    paper = (
        "The paper reads all remote bytes in place, from host memory alone, with requests "
        "of one length."
    )
    claimed = "Paper: no such figure."

    def make_charts(self) -> list[Chart]:
        scope = self.scope
        others = [tier.name for tier in scope.profile.remote if tier.name != scope.remote]
        series = [(of, of, scope.remote) for of in ("direct", "staged")]
        series += [(CHOICE, "", scope.remote)]
        series += [(f"direct, from {tier}", "direct", tier) for tier in others]

        def entry(model: str, name: str, transport: str, remote: str, ratio: float) -> Entry:
            step = scope.step(model, 8, ratio, transport=transport or None, remote=remote)
            return Entry(name, 100 * ratio, step, 2 if transport else 1)

        ratios = [ratio for ratio in scope.some_ratios() if ratio]
        steps = [
            Chart(name=model, title=f"{model}, batch 8", x=scope.outside, shown=[STEP], root_x=True,
                  entries=[entry(model, *of, ratio) for of in series for ratio in ratios])
            for model in scope.models
        ]  # fmt: skip
        requests, longest = (32, 64) if scope.quick else (256, 256)
        model = next(iter(scope.models))

        def file(ratio: float | None) -> FilePoint:
            return FilePoint(
                model=model,
                requests=requests,
                longest=longest,
                ratio=ratio,
                remote=scope.remote,
            )

        name = f"{model}, whole file"
        whole = Chart(
            name=name,
            title=f"{name}: {requests} requests, prompts and completions of 1 to {longest} tokens",
            x=f"ratio of bytes outside {scope.near}",
            shown=[RATE],
            entries=[Entry(FILE, x, file(ratio), 2) for x, ratio in enumerate(RATIOS.values())],
            categories=[label.format(scope.near) for label in RATIOS],
        )
        return [*steps, whole]

    def sentences(self) -> Iterator[str]:
        (*steps, whole), near = self.charts, self.scope.near
        for chart in steps:
            direct, staged = (self.times(chart, name) for name in ("direct", "staged"))
            alone = Curve((x, min(s, staged[x])) for x, s in direct.items() if x in staged)
            if (gain := self.times(chart, CHOICE).largest(alone)) is not None:
                clause = faster(gain[1], "a transport for each op", "the better of one for all")
                yield f"{chart.name}: at most, at {gain[0]:.2g}% outside {near}, {clause}."
        rates = {entry.x: result.tokens_per_s for entry, result in self.lines(whole)[FILE]}
        if (base := rates.get(0)) and (rate := rates.get(1)):
            yield (
                f"{whole.name}: {rate:,.0f} tokens/s with 10% outside {near}, "
                f"{factor(rate / base)} of all in {near}."
            )

    def notes(self) -> list[str]:
        _, direct, staged = self.scope.rates
        return [
            f"The copy engine moves {factor(staged / direct)} the bytes of direct reads on this "
            f"link, but its bytes pass {self.scope.near} twice. Over a slow link copying is "
            "faster from some ratio on, which figures 8 and 9 tell; where the link is as fast as "
            "NVLink, reading in place is.",
            "The requests of a file have random lengths, so slots fill and empty; its rate "
            "includes the prompts.",
        ]
