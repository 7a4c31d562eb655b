"""Table 1 and figure 13: a host-resident product with and without multicast, by rows of X."""

from collections.abc import Iterator

from dakrun.lab.evaluate.charts import Chart, Entry, FigureData, Quantity
from dakrun.lab.evaluate.figures.base import (
    LAUNCH,
    NOT_YET,
    Figure,
    at,
    factor,
    faster,
    gains,
    scaled,
)
from dakrun.lab.evaluate.points import Point, Result
from dakrun.lab.evaluate.scope import Scope

WITH, WITHOUT = "with multicast", "without multicast"
SERIES: dict[str, tuple[str, ...]] = {WITH: (), WITHOUT: ("multicast",)}
ROWS = "rows of X (N)"
STEP = Quantity("decode step (ms)", scaled("seconds", 1e3))
TILES = (
    "The tiles of the product have up to 512 rows of X here, so up to N = 512 every byte crosses "
    "the link once without multicast too. The tiles of the paper's kernels seem to have 256 rows: "
    "there multicast gains 1.3 x at 512. From 1,024 on two or more tiles need each byte: "
    "multicast should gain 2 x there."
)


def crossings(result: Result) -> float | None:
    """How often a byte of the weight crosses the link."""
    if result.link_bytes is None or not result.weight_bytes:
        return None
    return result.link_bytes / result.weight_bytes


class ByRows(Figure):
    """The largest product of a layer, all of its weight outside HBM, by rows of X."""

    shown: Quantity
    first: int  # rank of the most telling points

    def charts(self, scope: Scope) -> list[Chart]:
        counts = (8, 512, 1024) if scope.quick else (8, 64, 128, 256, 512, 1024, 2048, 4096)
        found = []
        for model in list(scope.models)[: 1 if scope.quick else None]:
            op = max(scope.products(model, n=1), key=lambda op: op.resident_bytes).name
            name = f"{model}, {op}"
            found.append(Chart(
                name=name, title=f"{name}, all of its weight in {scope.remote}", x=ROWS,
                shown=[self.shown], log_x=True,
                entries=[
                    Entry(series, n, scope.product(model, op, n, 1.0, without),
                          self.first + (n not in (512, 1024)))
                    for series, without in series_of(scope).items()
                    for n in counts
                ],
            ))  # fmt: skip
        return found

    def missing(self, scope: Scope) -> str:
        if scope.profile.card.clusters:
            return NOT_YET
        return f"{scope.profile.device_name} has no clusters, and so no multicast"


def series_of(scope: Scope) -> dict[str, tuple[str, ...]]:
    """The techniques that each series leaves out; a card without clusters has no multicast."""
    return SERIES if scope.profile.card.clusters else {WITHOUT: SERIES[WITHOUT]}


class LinkBytes(ByRows):
    """Table 1."""

    name = "table1"
    title = "Table 1: bytes over the link against N, the weight outside HBM"
    paper = (
        "Remote memory is not kept in the L2 cache, so each tile of rows of X reads the weight "
        "over the link again. Multicast gives the bytes of one read to all tiles of a cluster."
    )
    claimed = (
        "Paper: without multicast the bytes over the link grow with N, with it each byte crosses "
        "once per cluster. Here, at the largest N:"
    )
    shown = Quantity("link bytes per byte of the weight (x)", crossings)
    first = 1

    def table(self, data: FigureData) -> list[list[str]]:
        columns = [("link_bytes", "GB", 1e-9, 3), ("seconds", "us", 1e6, 1)]
        rows = [["product", "N", *(f"{of} ({unit})" for _, unit, *_ in columns for of in SERIES)]]
        for chart in data.charts:
            by_n: dict[float, dict[str, Result]] = {}
            for series, line in data.lines(chart).items():
                for entry, result in line:
                    by_n.setdefault(entry.x, {})[series] = result
            for n, of in sorted(by_n.items()):
                cells = [
                    "-" if (value := getattr(of.get(series), key, None)) is None
                    else f"{value * scale:,.{digits}f}"
                    for key, _, scale, digits in columns
                    for series in SERIES
                ]  # fmt: skip
                rows.append([chart.name, f"{n:,.0f}", *cells])
        return rows if rows[1:] else []

    def repeated(self, data: FigureData) -> Iterator[tuple[str, float, float, float]]:
        """(product, N, crossings with and without multicast) at the largest N that has both."""
        for chart in data.charts:
            lines = data.lines(chart)
            known = [
                {entry.x: times for entry, of in lines.get(series, []) if (times := crossings(of))}
                for series in SERIES
            ]
            if both := known[0].keys() & known[1].keys():
                yield chart.name, max(both), known[0][max(both)], known[1][max(both)]

    def sentences(self, data: FigureData) -> Iterator[str]:
        for name, n, once, again in self.repeated(data):
            yield (
                f"{name}: with N = {n:,.0f} a byte of the weight crosses the link {once:.3g} x "
                f"with multicast and {again:.3g} x without."
            )

    def here(self, data: FigureData) -> list[str]:
        saved = [1 - once / again for *_, once, again in self.repeated(data)]
        return [f"it saves {max(saved):.0%}"] if saved else []

    def notes(self, scope: Scope) -> list[str]:
        return [
            TILES,
            "Bytes follow from the tiles and clusters of the launch. Over its time they give the "
            "rate of the link.",
        ]


class Multicast(ByRows):
    """Figure 13."""

    name = "fig13"
    title = "Figure 13: multicast on and off, by N"
    paper = (
        "With many rows of X several tiles need the same remote bytes. One read that is given to "
        "all of them takes the time of one; separate reads share the link."
    )
    claimed = "Paper: multicast makes the product 1.3 x as fast at N = 512. Here:"
    shown = Quantity(LAUNCH.axis, LAUNCH.value, log=True)
    first = 0

    def charts(self, scope: Scope) -> list[Chart]:
        """The products, and whole decode steps of the first model."""
        model = next(iter(scope.models))

        def step(batch: int, without: tuple[str, ...]) -> Point:
            return scope.step(model, batch, 0.1, transport="direct", without=without)

        name = f"{model}, decode step"
        steps = Chart(
            name=name, title=f"{name}, 10% outside {scope.near}", x=f"batch: {ROWS}",
            shown=[STEP], log_x=True,
            entries=[
                Entry(series, batch, step(batch, without), 2)
                for batch in ((512,) if scope.quick else (256, 512, 1024))
                for series, without in series_of(scope).items()
            ],
        )  # fmt: skip
        return [*super().charts(scope), steps]

    def sentences(self, data: FigureData) -> Iterator[str]:
        for chart, n, gain in gains(data, WITH, WITHOUT):
            yield f"{chart.name}: at most, at N = {n:,.0f}, {faster(gain, WITH, WITHOUT)}."

    def here(self, data: FigureData) -> Iterator[str]:
        one, other = (data.times(data.charts[0], series) for series in SERIES)
        for n in (512, 1024):
            if (with_it := at(one, n)) and (without := at(other, n)):
                yield f"{factor(without / with_it)} at {n:,}"

    def notes(self, scope: Scope) -> list[str]:
        return [TILES]
