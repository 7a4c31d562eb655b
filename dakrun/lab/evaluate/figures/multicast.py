"""Table 1 and figure 13: a product with a matrix outside HBM, with and without multicast."""

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

from dakrun.lab.evaluate.charts import Chart, Entry, Quantity
from dakrun.lab.evaluate.figures.base import LAUNCH, STEP_LINEAR, Figure, factor, scaled
from dakrun.lab.evaluate.points import ProductPoint, Result
from dakrun.lab.evaluate.predict import predict
from dakrun.lab.evaluate.scope import Scope
from dakrun.lab.evaluate.tables import rows

WITH, WITHOUT = "with multicast", "without multicast"
SERIES: dict[str, tuple[str, ...]] = {WITH: (), WITHOUT: ("multicast",)}
ROWS = "rows of X (N)"
MATRIX, COUNTS = "7168x7168", (256, 512, 1024, 2048, 4096)  # the paper's
TILES = (
    "The tiles of the product have up to 512 rows of X here, so up to N = 512 every byte crosses "
    "the link once without multicast too. The tiles of the paper's kernels seem to have 256 rows: "
    "there multicast gains 1.3 x at 512. From 1,024 on two or more tiles need each byte: "
    "multicast should gain 2 x there, and 8 x at 4,096 where the link stays the limit."
)


def crossings(result: Result | None) -> float | None:
    """How often a byte of the weight crosses the link."""
    if result is None or result.link_bytes is None or not result.weight_bytes:
        return None
    return result.link_bytes / result.weight_bytes


class ByRows(Figure):
    """A matrix outside HBM times X, by rows of X."""

    shown: ClassVar[tuple[Quantity, ...]]
    first: ClassVar[int]  # rank of the most telling points

    def make_charts(self) -> list[Chart]:
        model, op = next(iter(self.scope.models)), MATRIX
        if self.scope.profile.device == "cpu":  # where that matrix takes minutes
            op = max(self.scope.products(model, n=1), key=lambda op: op.resident_bytes).name

        def entry(series: str, n: int) -> Entry:
            point = self.scope.op(ProductPoint, model, 1.0, op=op, n=n, without=SERIES[series])
            return Entry(series, n, point, self.first + (n not in (512, 1024)))

        return [
            Chart(
                name=op, x=ROWS, shown=self.shown, log_x=True, place="N = {:,.0f}",
                title=f"{op}, all of it in {self.scope.remote}",
                entries=[entry(series, n) for series in series_of(self.scope) for n in COUNTS],
            )
        ]  # fmt: skip

    def missing(self) -> str:
        if self.scope.profile.card.clusters:
            return super().missing()
        return f"{self.scope.profile.device_name} has no clusters, and so no multicast"


def series_of(scope: Scope) -> list[str]:
    """The series of a figure; a card without clusters has no multicast."""
    return list(SERIES) if scope.profile.card.clusters else [WITHOUT]


class LinkBytes(ByRows):
    """Table 1."""

    name = "table1"
    title = "Table 1: bytes over the link against N, with the whole weight remote"
    paper = (
        "Remote memory is not kept in the L2 cache, so each tile of rows of X reads the weight "
        "over the link again. Multicast gives the bytes of one read to all tiles of a cluster."
    )
    claimed = (
        "Paper: without multicast the bytes over the link grow with N, with it each byte crosses "
        "once per cluster. Here, at the largest N:"
    )
    shown = (
        Quantity("link bytes per byte of the weight (x)", crossings),
        Quantity("bytes over the link (GB)", scaled("link_bytes", 1e-9)),
    )
    first = 1

    def table(self) -> list[list[str]]:
        """Bytes over the link by N."""
        return rows(self.panel(self.charts[0], self.shown[1]))

    def repeated(self) -> tuple[Entry, Entry] | None:
        """The entries with and without multicast at the largest N for which both have bytes."""
        lines = self.lines(self.charts[0])
        once, again = (
            {entry.x: entry for entry, of in lines.get(name, []) if crossings(of)}
            for name in SERIES
        )
        most = max(once.keys() & again.keys(), default=None)
        return None if most is None else (once[most], again[most])

    def sentences(self) -> Iterator[str]:
        if both := self.repeated():
            found = (self.of(entry) for entry in both)
            tiles = (predict(entry.point, self.scope) for entry in both)
            once, again, *asked = (crossings(of) or 0.0 for of in (*found, *tiles))
            yield (
                f"{self.charts[0].name}: with N = {both[0].x:,.0f} a byte of the weight crosses "
                f"the link {once:.3g} x with multicast and {again:.3g} x without."
            )
            if not self.scope.predict:
                yield "The tiles of the launches ask for {:.3g} x and {:.3g} x.".format(*asked)

    def here(self) -> Iterator[str]:
        if both := self.repeated():
            once, again = (crossings(self.of(entry)) or 0.0 for entry in both)
            yield f"it saves {1 - once / again:.0%}"

    def notes(self) -> list[str]:
        return [
            TILES,
            "Bytes are the time of a launch that the link limits, times the link's rate. That is "
            "the rate of the same product of 64 rows, each byte of which crosses once, replayed in "
            "turns with the launch. A launch that arithmetic limits has no bytes. Predicted bytes "
            "follow from the tiles and clusters of the launch.",
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
    shown = (replace(LAUNCH, log=True),)
    first = 0

    def make_charts(self) -> list[Chart]:
        """The products, and whole decode steps of the first model."""
        name = f"{(model := next(iter(self.scope.models)))}, decode step"

        def entry(series: str, batch: int) -> Entry:
            more = {"transport": "direct", "without": SERIES[series]}
            return Entry(series, batch, self.scope.step(model, batch, 0.1, **more), 2)

        batches = (512,) if self.scope.quick else (256, 512, 1024)
        steps = Chart(
            name=name, title=f"{name}, 10% outside {self.scope.near}", x=f"batch: {ROWS}",
            shown=[STEP_LINEAR], log_x=True, place="N = {:,.0f}",
            entries=[entry(series, n) for n in batches for series in series_of(self.scope)],
        )  # fmt: skip
        return [*super().make_charts(), steps]

    def here(self) -> Iterator[str]:
        one, other = (self.times(self.charts[0], series) for series in SERIES)
        for n in (512, 1024):
            if n in one and n in other:
                yield f"{factor(other[n] / one[n])} at {n:,}"

    def notes(self) -> list[str]:
        return [TILES]
