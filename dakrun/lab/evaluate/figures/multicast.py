"""Table 1 and figure 13: a host-resident product with and without multicast, by rows of X."""

from dakrun.lab.evaluate.figures.base import (
    STEP_AXIS,
    US_AXIS,
    Figure,
    factor,
    faster,
    largest,
    microseconds,
    milliseconds,
    panel_of,
    sentence,
)
from dakrun.lab.evaluate.panel import Panel
from dakrun.lab.evaluate.points import Entry, FigureData, ProductPoint, Result, StepPoint
from dakrun.lab.evaluate.scope import Scope

WITH, WITHOUT = "with multicast", "without multicast"
SERIES: tuple[tuple[str, tuple[str, ...]], ...] = ((WITH, ()), (WITHOUT, ("multicast",)))
ROWS = "rows of X (N)"
TILES = (
    "The tiles of the product have up to 512 rows of X here, so up to N = 512 every byte crosses "
    "the link once without multicast too. The tiles of the paper's kernels seem to have 256 rows: "
    "there multicast gains 1.3 x at 512. From 1,024 on two or more tiles need each byte: "
    "multicast should gain 2 x there."
)


def series_of(scope: Scope) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """The series of a figure; a card without clusters has no multicast."""
    return SERIES if scope.profile.card.clusters else SERIES[1:]


def missing(scope: Scope) -> str:
    """Why there is no figure with multicast."""
    if scope.profile.card.clusters:
        return "not measured yet"
    return f"{scope.profile.device_name} has no clusters, and so no multicast"


def entries_of(scope: Scope, *, rank: int) -> list[Entry]:
    """The largest product of a layer, all of its weight outside HBM, by rows of X."""
    counts = (8, 512, 1024) if scope.quick else (8, 64, 128, 256, 512, 1024, 2048, 4096)
    models = list(scope.models)[: 1 if scope.quick else None]
    return [
        Entry(
            panel=f"{model}, {op}",
            series=series,
            x=n,
            rank=rank if n in (512, 1024) else rank + 1,
            point=ProductPoint(
                model=model, op=op, n=n, ratio=1.0, remote=scope.remote, without=without
            ),
        )
        for model in models
        for op in [scope.largest_product(model).name]
        for series, without in series_of(scope)
        for n in counts
    ]


def crossings(result: Result) -> float | None:
    """How often a byte of the weight crosses the link."""
    if result.link_bytes is None or not result.weight_bytes:
        return None
    return result.link_bytes / result.weight_bytes


def gain(data: FigureData, panel: str) -> tuple[float, float] | None:
    """(x, factor) of the largest gain by multicast."""
    return largest(data.times(panel, WITH), data.times(panel, WITHOUT))


class LinkBytes(Figure):
    """Table 1."""

    name = "table1"
    title = "Table 1: bytes over the link against N, the weight outside HBM"
    paper = (
        "Remote memory is not kept in the L2 cache, so each tile of rows of X reads the weight "
        "over the link again. Multicast gives the bytes of one read to all tiles of a cluster."
    )

    def entries(self, scope: Scope) -> list[Entry]:
        return entries_of(scope, rank=1)

    def panels(self, data: FigureData, scope: Scope) -> list[Panel]:
        return [
            panel_of(
                data,
                name,
                crossings,
                title=f"{name}, all of its weight in {scope.remote}",
                x=ROWS,
                y="link bytes per byte of the weight (x)",
                log_x=True,
            )
            for name in data.panels()
        ]

    def table(self, data: FigureData, scope: Scope) -> list[list[str]]:
        rows = []
        for panel in data.panels():
            by_n: dict[float, dict[str, Result]] = {}
            for series, line in data.lines(panel).items():
                for entry, result in line:
                    by_n.setdefault(entry.x, {})[series] = result
            for n, results in sorted(by_n.items()):
                both = [results.get(series) for series, _ in SERIES]
                sizes = [of.link_bytes if of else None for of in both]
                times = [of.seconds if of else None for of in both]
                rows.append([panel, f"{n:,.0f}", *(_cell(x, 1e-9) for x in sizes)])
                rows[-1] += [_cell(x, 1e6, 1) for x in times]
        head = ["product", "N", f"{WITH} (GB)", f"{WITHOUT} (GB)", f"{WITH} (us)"]
        return [[*head, f"{WITHOUT} (us)"], *rows] if rows else []

    def repeated(self, data: FigureData) -> list[tuple[str, float, float, float]]:
        """(panel, N, crossings with and without multicast) at the largest N that has both."""
        last = []
        for panel in data.panels():
            lines = {
                series: {e.x: times for e, r in line if (times := crossings(r))}
                for series, line in data.lines(panel).items()
            }
            both = lines.get(WITH, {}).keys() & lines.get(WITHOUT, {}).keys()
            if both:
                n = max(both)
                last.append((panel, n, lines[WITH][n], lines[WITHOUT][n]))
        return last

    def finding(self, data: FigureData, scope: Scope) -> str:
        parts = [
            f"{panel}: with N = {n:,.0f} a byte of the weight crosses the link {once:.3g} x with "
            f"multicast and {again:.3g} x without."
            for panel, n, once, again in self.repeated(data)
        ]
        return sentence(parts, data)

    def claim(self, data: FigureData, scope: Scope) -> str:
        saved = [1 - once / again for *_, once, again in self.repeated(data)]
        here = f"it saves {max(saved):.0%}" if saved else missing(scope)
        return (
            "Paper: without multicast the bytes over the link grow with N, with it each byte "
            f"crosses once per cluster. Here, at the largest N: {here}."
        )

    def notes(self, scope: Scope) -> list[str]:
        return [
            TILES,
            "Bytes follow from the tiles and clusters of the launch. Over its time they give the "
            "rate of the link.",
        ]


class Multicast(Figure):
    """Figure 13."""

    name = "fig13"
    title = "Figure 13: multicast on and off, by N"
    paper = (
        "With many rows of X several tiles need the same remote bytes. One read that is given to "
        "all of them takes the time of one; separate reads share the link."
    )

    def entries(self, scope: Scope) -> list[Entry]:
        batches = (512,) if scope.quick else (256, 512, 1024)
        models = list(scope.models)[:1]
        steps = [
            Entry(
                panel=f"{model}, decode step",
                series=series,
                x=batch,
                rank=2,
                point=StepPoint(
                    model=model,
                    batch_size=batch,
                    new_tokens=scope.new_tokens,
                    ratio=0.1,
                    transport="direct",
                    remote=scope.remote,
                    without=without,
                ),
            )
            for model in models
            for batch in batches
            for series, without in series_of(scope)
        ]
        return [*entries_of(scope, rank=0), *steps]

    def panels(self, data: FigureData, scope: Scope) -> list[Panel]:
        panels = []
        for name in data.panels():
            step = name.endswith("decode step")
            panels.append(
                panel_of(
                    data,
                    name,
                    (lambda r: milliseconds(r.seconds))
                    if step
                    else (lambda r: microseconds(r.seconds)),
                    title=f"{name}, 10% outside HBM" if step else f"{name}, all in {scope.remote}",
                    x="batch: rows of X (N)" if step else ROWS,
                    y=STEP_AXIS if step else US_AXIS,
                    log_x=True,
                    log_y=not step,
                )
            )
        return panels

    def finding(self, data: FigureData, scope: Scope) -> str:
        parts = []
        for panel in data.panels():
            if (best := gain(data, panel)) is not None:
                clause = faster(best[1], WITH, WITHOUT)
                parts.append(f"{panel}: at most, at N = {best[0]:,.0f}, {clause}.")
        return sentence(parts, data)

    def claim(self, data: FigureData, scope: Scope) -> str:
        here = []
        for panel in data.panels()[:1]:
            times = dict(data.times(panel, WITHOUT))
            with_it = dict(data.times(panel, WITH))
            here = [
                f"{factor(times[n] / with_it[n])} at {n:,}"
                for n in (512, 1024)
                if n in times and n in with_it
            ]
        return (
            "Paper: multicast makes the product 1.3 x as fast at N = 512. "
            f"Here: {', '.join(here) or missing(scope)}."
        )

    def notes(self, scope: Scope) -> list[str]:
        return [TILES]


def _cell(value: float | None, scale: float, digits: int = 3) -> str:
    """A number in a table, or that it is missing."""
    return "-" if value is None else f"{value * scale:,.{digits}f}"
