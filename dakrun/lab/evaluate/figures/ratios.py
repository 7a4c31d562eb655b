"""Figures 1, 8 and 9: effective bandwidth and decode step against the offload ratio."""

import math
from collections.abc import Iterator, Sequence
from typing import ClassVar

from dakrun.lab.evaluate.figures.base import (
    EB_AXIS,
    PERCENT,
    STEP_AXIS,
    Figure,
    at,
    crossing,
    factor,
    faster,
    fastest,
    gigabytes,
    largest,
    milliseconds,
    panel_of,
    root_x,
    seconds,
    sentence,
)
from dakrun.lab.evaluate.panel import Panel, Series
from dakrun.lab.evaluate.points import Entry, FigureData, StepPoint
from dakrun.lab.evaluate.scope import Scope
from dakrun.plan import Op, Transport, compute_time, weight_bytes
from dakrun.units import format_rate

STEPS = 200  # line segments of a bound
TRANSPORTS: tuple[Transport, ...] = ("direct", "staged")


class RatioFigure(Figure):
    """Decode steps of every model by offload ratio: read in place, and copied to HBM."""

    batch_size: ClassVar[int]

    def entries(self, scope: Scope) -> list[Entry]:
        return [
            Entry(
                panel=model,
                series=series,
                x=100 * ratio,
                rank=rank,
                point=StepPoint(
                    model=model,
                    batch_size=self.batch_size,
                    new_tokens=scope.new_tokens,
                    ratio=ratio,
                    transport=transport,
                    remote=scope.remote,
                ),
            )
            for model in scope.models
            for series, transport, ratio, rank in self.lines(scope)
        ]

    def lines(self, scope: Scope) -> Iterator[tuple[str, Transport | None, float, int]]:
        """(series, transport, ratio, rank) of dakrun's points."""
        ratios = scope.ratios() if self.batch_size < 64 else scope.some_ratios()
        telling = {0.0, round(scope.turning_point, 4), 0.1}
        for transport in TRANSPORTS:
            for ratio in ratios:
                rank = 0 if ratio in telling and transport == "direct" else 1
                yield transport, (transport if ratio else None), ratio, rank

    def panels(self, data: FigureData, scope: Scope) -> list[Panel]:
        panels = []
        for model in data.panels():
            ideal, prefetch = self.bounds(model, scope)
            for y, factor_, value, limit in (
                (EB_AXIS, 1e-9, lambda r: gigabytes(r.eb), 0),
                (STEP_AXIS, 1e3, lambda r: milliseconds(r.seconds), 1),
            ):
                panels.append(
                    panel_of(
                        data,
                        model,
                        value,
                        title=f"{model}, batch {self.batch_size}",
                        x=PERCENT,
                        y=y,
                        root_x=root_x(scope),
                        log_y=True,
                        lines=[
                            Series(
                                name=name,
                                kind="line",
                                points=[(x, factor_ * pair[limit]) for x, *pair in line],
                            )
                            for name, line in (
                                ("ideal: HBM and link together", ideal),
                                ("bound of prefetching: all bytes through HBM", prefetch),
                            )
                        ],
                    )
                )
        return panels

    def bounds(
        self, model: str, scope: Scope
    ) -> tuple[Sequence[tuple[float, float, float]], Sequence[tuple[float, float, float]]]:
        """(percent, EB in bytes/s, seconds) of the ideal and of prefetching, by ratio.

        Lower bounds from rates alone, with C bytes read, R of them from the remote tier, and T
        seconds of arithmetic: max((C-R)/B_hbm, R/B_link, T), and max(C/B_hbm, R/B_copy, T). R is
        free within what the ratio allows: a step reads little of an embedding table, and of a KV
        cache that is not full.
        """
        local, direct, copied = scope.rates
        ops, dtype = scope.ops(model, batch_size=self.batch_size), scope.models[model].dtype
        read, weights = sum(op.layers * op.read_bytes for op in ops), weight_bytes(ops)
        compute = sum(op.layers * compute_time(op, scope.profile, dtype) for op in ops)
        together, link = read / scope.links.total_rate(), max(direct, copied)
        even = read * link / (local + link)  # HBM and the link take the same time
        ideal, prefetch = [], []
        for step in range(STEPS + 1):
            x = step / STEPS
            least, most = remote_reads(ops, x), read - remote_reads(ops, 1 - x)
            far = min(max(even, least), most)
            time = max((read - far) / local, far / link, together, compute)
            ideal.append((100 * x, weights / time, time))
            time = max(read / local, least / copied, compute)
            prefetch.append((100 * x, weights / time, time))
        return ideal, prefetch

    def finding(self, data: FigureData, scope: Scope) -> str:
        parts = []
        for model in data.panels():
            direct, staged = (data.times(model, name) for name in TRANSPORTS)
            base, best = at(direct, 0.0), fastest(direct)
            if best is None:
                continue
            if base is None:
                parts.append(
                    f"{model}: not all in HBM; fastest read in place with {best[0]:.2g}% outside, "
                    f"{seconds(best[1])}."
                )
            elif best[0] > 0 and base / best[1] > 1.005:
                parts.append(
                    f"{model}: fastest with {best[0]:.2g}% outside HBM and read in place, "
                    f"{seconds(best[1])}, {factor(base / best[1])} as fast as all in HBM "
                    f"({seconds(base)})."
                )
            else:
                parts.append(f"{model}: fastest with everything in HBM, {seconds(base)}.")
            there, copied = at(direct, 10.0), at(staged, 10.0)
            if there and copied:
                clause = faster(copied / there, "reading in place", "copying ahead")
                parts.append(f"With 10% outside, {clause} ({seconds(there)}, {seconds(copied)}).")
            if (x := crossing(direct, staged)) is not None:
                where = f"From about {x:.2g}% on" if x >= 0.05 else "At every ratio"
                parts.append(f"{where}, copies are faster.")
            parts += self.of_rivals(data, model)
        return sentence(parts, data)

    def of_rivals(self, data: FigureData, model: str) -> list[str]:
        """Sentences about rivals at the same ratios."""
        return [
            f"At {gain[0]:.2g}%, {faster(gain[1], 'dakrun', name)}."
            for name in data.lines(model)
            if name not in TRANSPORTS and (gain := self.gain(data, model, name))
        ]

    def gain(self, data: FigureData, model: str, rival: str) -> tuple[float, float] | None:
        """(percent, factor) where the better transport gains most on a rival."""
        direct, staged = (data.times(model, name) for name in TRANSPORTS)
        best = [(x, min(s, at(staged, x) or s)) for x, s in direct]
        return largest(best, data.times(model, rival))

    def claim(self, data: FigureData, scope: Scope) -> str:
        gains: dict[str, list[float]] = {}
        rates = []
        for model in data.panels():
            curve = data.times(model, "direct")
            if (base := at(curve, 0.0)) and (best := fastest(curve)):
                gains.setdefault("all in HBM", []).append(base / best[1])
            for name in data.lines(model):
                if name not in TRANSPORTS and (gain := self.gain(data, model, name)):
                    gains.setdefault(name, []).append(gain[1])
            rates += [
                f"EB of {model} at 10% {format_rate(result.eb)}"
                for entry, result in data.lines(model).get("direct", [])
                if math.isclose(entry.x, 10) and result.eb
            ]
        best_of = [f"{factor(max(of))} as fast as {name}" for name, of in gains.items()]
        here = ", ".join([*best_of, *rates]) or "not measured yet"
        return (
            "Paper: up to 3 x the state of the art of offloading on NVLink-C2C and 1.8 x on "
            "PCIe; EB of OPT-30B at a ratio of 10% 3.3 TB/s on GH200. Here, the largest gains: "
            f"{here}."
        )


def remote_reads(ops: Sequence[Op], ratio: float) -> float:
    """The fewest bytes that a step reads from the remote tier with `ratio` of all bytes there."""
    left, reads = ratio * sum(op.layers * op.resident_bytes for op in ops), 0.0
    for op in sorted(ops, key=lambda op: op.read_bytes / op.resident_bytes):
        moved = min(left, op.layers * op.resident_bytes)
        reads += moved * op.read_bytes / op.resident_bytes
        left -= moved
    return reads


class SmallBatch(RatioFigure):
    """Figures 1 and 8."""

    name = "fig8"
    title = "Figures 1 and 8: EB and decode step against the offload ratio, batch 8"
    paper = (
        "With few rows a step reads all weights and hardly computes. Read in place, a part of the "
        "weights in the remote tier adds that tier's bandwidth to HBM's, up to the ratio of the "
        "bandwidths; prefetching passes all bytes through HBM, so its EB never exceeds HBM's."
    )
    batch_size = 8

    def entries(self, scope: Scope) -> list[Entry]:
        rivals = [
            Entry(
                panel=model,
                series=rival,
                x=100 * ratio,
                rank=1 if rival == "prefetch" else 2,
                point=StepPoint(
                    model=model,
                    batch_size=self.batch_size,
                    new_tokens=scope.new_tokens,
                    ratio=ratio,
                    remote=scope.remote,
                    by=rival,
                ),
            )
            for model in scope.models
            for rival in scope.rivals
            for ratio in self.rival_ratios(rival, scope)
        ]
        return [*super().entries(scope), *rivals]

    def rival_ratios(self, rival: str, scope: Scope) -> list[float]:
        """All in HBM for transformers; a few ratios for those that offload."""
        if rival == "transformers":
            return [0.0]
        if rival == "prefetch":
            return [x for x in scope.some_ratios() if x]
        return [0.1] if scope.quick else [0.1, 0.3, 0.6]


class LargeBatch(RatioFigure):
    """Figure 9."""

    name = "fig9"
    title = "Figure 9: EB and decode step against the offload ratio, batch 512"
    paper = (
        "With many rows linear ops are bound by arithmetic. Reading a part of their weights over "
        "the link is then free until it takes as long as the arithmetic, so more of the model can "
        "lie outside HBM at the same speed."
    )
    batch_size = 512

    def claim(self, data: FigureData, scope: Scope) -> str:
        free = {
            model: max(x for x, s in curve if s <= 1.02 * base)
            for model in data.panels()
            if (base := at(curve := data.times(model, "direct"), 0.0))
        }
        here = ", ".join(f"up to {x:.2g}% of {model}" for model, x in free.items())
        return (
            "Paper: with many rows a part of the model costs nothing outside HBM. Here, within 2% "
            f"of the time of all in HBM: {here or 'not measured yet'}."
        )
