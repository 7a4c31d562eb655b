"""Figures 1, 8, 9 and 11: effective bandwidth and decode step against the offload ratio."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import ClassVar

from dakrun.lab.evaluate.charts import Chart, Entry
from dakrun.lab.evaluate.figures.base import EB, STEP, Curve, Figure, factor, faster, thresholds
from dakrun.lab.evaluate.scope import Scope
from dakrun.lab.panel import Series
from dakrun.plan import Op, compute_time, weight_bytes
from dakrun.units import format_decimal, format_rate, format_seconds

STEPS = 200  # ratios of a bound
FEW, MANY = 8, 512  # requests
PAPER_GAIN = 1.5  # at most, of greedy on uniform
LEAST_GAIN = 0.005  # relative: steps closer to each other count as equal
NEAR = 12  # percent that a picture of its own shows
TRANSPORTS = ("direct", "staged")
Bound = list[tuple[float, float, float]]  # (percent, EB in bytes/s, seconds)


class Ratios(Figure):
    """Decode steps of every model by offload ratio: read in place, and copied to HBM."""

    batch_size: ClassVar[int]

    def make_charts(self) -> list[Chart]:
        return [self._chart(model) for model in self.scope.models]

    def _chart(self, model: str) -> Chart:
        batch, telling = self.batch_size, {0.0, round(self.scope.turning_point, 4), 0.1}

        def entry(transport: str, ratio: float) -> Entry:
            step = self.scope.step(model, batch, ratio, transport=transport if ratio else None)
            return Entry(transport, 100 * ratio, step,
                         0 if ratio in telling and transport == "direct" else 1)  # fmt: skip

        others = [
            Entry(rival, 100 * ratio, self.scope.step(model, batch, of_weights, by=rival),
                  1 if rival == "prefetch" else 2)
            for rival, ratio, of_weights in self.rivals(model)
        ]  # fmt: skip
        ratios = self.scope.ratios() if batch < 64 else self.scope.some_ratios()
        ratios = sorted({*ratios, *(ratio for _, ratio, _ in self.rivals(model))})
        entries = [entry(transport, ratio) for transport in TRANSPORTS for ratio in ratios]
        names = "ideal: {} and link together", "bound of prefetching: all bytes through {}"
        lines = [
            (name.format(self.scope.near), bound)
            for name, bound in zip(names, bounds(model, batch, self.scope), strict=True)
        ]
        eb, step = (
            replace(quantity, lines=[
                Series(name=name, kind="line", points=[(x, scale * of[which]) for x, *of in bound])
                for name, bound in lines
            ])
            for quantity, which, scale in ((EB, 0, 1e-9), (STEP, 1, 1e3))
        )  # fmt: skip
        near = replace(eb, title=f": the first {NEAR}%", until=NEAR)
        return Chart(name=model, title=f"{model}, batch {batch}", x=self.scope.outside, root_x=True,
                     shown=[eb, near, step], entries=entries + others)  # fmt: skip

    def rivals(self, model: str) -> Iterator[tuple[str, float, float]]:
        """(rival, ratio of weight and KV bytes, ratio of weight bytes), which are the same bytes.

        transformers has all in HBM. Those that offload have whole layers outside, as near as these
        come to a few ratios, and all KV in HBM. Fewer with many rows in a quick run.
        """
        ops = self.scope.ops(model, batch_size=self.batch_size)
        weights, both = weight_bytes(ops), sum(op.layers * op.resident_bytes for op in ops)
        layers = self.scope.models[model].num_layers
        layer = weight_bytes(tuple(op for op in ops if op.in_layer)) / layers
        few = [0.1] if self.scope.quick else [0.1, 0.3, 0.6]
        many = self.scope.quick and self.batch_size >= 64
        outside = few if many else [self.scope.turning_point, *few, 0.3]
        ratios = {"transformers": [0.0], "prefetch": outside, "uva": outside}
        for rival in self.scope.rivals:
            wanted = [x * both / layer for x in ratios.get(rival, few)]
            for count in sorted({math.ceil(x) if x < 1 else round(x) for x in wanted}):
                if count <= layers:
                    yield rival, round(count * layer / both, 4), round(count * layer / weights, 4)

    def sentences(self) -> Iterator[str]:
        near = self.scope.near
        for chart in self.charts:
            direct, staged = (self.times(chart, name) for name in TRANSPORTS)
            if (best := self.better(chart).fastest()) is None:
                continue
            base, least, x = direct.get(0.0), format_seconds(best[1]), best[0]
            how = "read in place" if direct[x] == best[1] else "copied ahead"
            if base is None:
                said = f"not all in {near}; fastest with {x:.2g}% outside, {how}, {least}"
            elif base / best[1] > 1 + LEAST_GAIN:
                said = (
                    f"fastest with {x:.2g}% outside {near} and {how}, {least}, "
                    f"{factor(base / best[1])} as fast as all in {near} ({format_seconds(base)})"
                )
            elif x > 0:
                said = (
                    f"{format_seconds(base)} with everything in {near}, and no more than "
                    f"{LEAST_GAIN:.1%} less with bytes outside"
                )
            else:
                said = f"fastest with everything in {near}, {format_seconds(base)}"
            yield f"{chart.name}: {said}."
            if 10.0 in direct and 10.0 in staged:
                clause = faster(staged[10.0] / direct[10.0], "reading in place", "copying ahead")
                times = f"{format_seconds(direct[10.0])}, {format_seconds(staged[10.0])}"
                yield f"With 10% outside, {clause} ({times})."
            if (least_x := direct.crossing(staged)) is not None:
                where = f"From about {least_x:.2g}% on" if least_x >= 0.05 else "At every ratio"
                yield f"{where}, copies are faster."
            for rival, (x, gain) in self.of_rivals(chart).items():
                lines = (self.lines(chart)[name] for name in ("direct", rival))
                both = [of.remote_bytes for line in lines for e, of in line if round(e.x, 6) == x]
                said = " and ".join(format_decimal(nbytes, "B") for nbytes in both if nbytes)
                read = f" ({said} outside {near} are read)" if said else ""
                yield f"At {x:.4g}%, {faster(gain, 'dakrun', rival)}{read}."

    def notes(self) -> list[str]:
        same = (
            "Programs that offload are compared at as many bytes outside: whole layers of theirs, "
            "all read in a step; here also KV blocks, of which a step reads what is filled."
        )
        once = "Predicted uva reads each byte once; cuBLAS may read it again for each tile of X."
        return [same, *([once] if self.scope.predict and "uva" in self.scope.rivals else [])]

    def better(self, chart: Chart) -> Curve:
        """The time of the better transport, where bytes were read in place, by percent outside."""
        direct, staged = (self.times(chart, name) for name in TRANSPORTS)
        return Curve((x, min(s, staged.get(x, s))) for x, s in direct.items())

    def of_rivals(self, chart: Chart) -> dict[str, tuple[float, float]]:
        """(percent, factor) where the better transport gains most on each rival."""
        best = self.better(chart)
        rivals = [name for name in self.lines(chart) if name not in TRANSPORTS]
        found = {name: best.largest(self.times(chart, name)) for name in rivals}
        return {name: gain for name, gain in found.items() if gain}


def bounds(model: str, batch_size: int, scope: Scope) -> tuple[Bound, Bound]:
    """The least times of all ways, and of prefetching, from rates alone.

    They are max((C-R)/B_hbm, R/B_link, T) and max(C/B_hbm, R/B_copy, T), with C bytes read, R of
    them from the remote tier, and T seconds of arithmetic. R is free within what the ratio allows:
    a step reads little of an embedding table, and of a KV cache that is not full.
    """
    local, direct, copied = scope.rates
    ops, dtype = scope.ops(model, batch_size=batch_size), scope.models[model].dtype
    read, weights = sum(op.layers * op.read_bytes for op in ops), weight_bytes(ops)
    compute = sum(op.layers * compute_time(op, scope.profile, dtype) for op in ops)
    together, link = read / scope.links.total_rate(), max(direct, copied)
    even = read * link / (local + link)  # HBM and the link take the same time
    ideal, prefetch = [], []
    for x in (step / STEPS for step in range(STEPS + 1)):
        least, most = remote_reads(ops, x), read - remote_reads(ops, 1 - x)
        far = min(max(even, least), most)
        time = max((read - far) / local, far / link, together, compute)
        ideal.append((100 * x, weights / time, time))
        time = max(read / local, least / copied, compute)
        prefetch.append((100 * x, weights / time, time))
    return ideal, prefetch


def remote_reads(ops: Sequence[Op], ratio: float) -> float:
    """The fewest bytes that a step reads from the remote tier with `ratio` of all bytes there."""
    left, reads = ratio * sum(op.layers * op.resident_bytes for op in ops), 0.0
    for op in sorted(ops, key=lambda op: op.read_bytes / op.resident_bytes):
        moved = min(left, op.layers * op.resident_bytes)
        reads += moved * op.read_bytes / op.resident_bytes
        left -= moved
    return reads


class SmallBatch(Ratios):
    """Figures 1 and 8."""

    name = "fig8"
    title = "Figures 1 and 8: EB and decode step against the offload ratio, batch 8"
    paper = (
        "With few rows a step reads all weights and hardly computes. Read in place, a part of the "
        "weights in the remote tier adds that tier's bandwidth to HBM's, up to the ratio of the "
        "bandwidths; prefetching passes all bytes through HBM, so its EB never exceeds HBM's."
    )
    claimed = (
        "Paper: up to 3 x the state of the art of offloading on NVLink-C2C and 1.8 x on PCIe; EB "
        "of OPT-30B at a ratio of 10% 3.3 TB/s on GH200. Here, the largest gains:"
    )
    batch_size = FEW

    def here(self) -> Iterator[str]:
        most: dict[str, list[float]] = {}
        for chart in self.charts:
            curve = self.better(chart)
            if (base := curve.get(0.0)) and (best := curve.fastest()):
                most.setdefault(f"all in {self.scope.near}", []).append(base / best[1])
            for name, (_, gain) in self.of_rivals(chart).items():
                most.setdefault(name, []).append(gain)
        yield from (f"{factor(max(of))} as fast as {name}" for name, of in most.items())
        for chart in self.charts:
            for entry, result in self.lines(chart)["direct"]:
                if math.isclose(entry.x, 10) and result.eb:
                    yield f"EB of {chart.name} at 10% {format_rate(result.eb)}"


class LargeBatch(Ratios):
    """Figure 9."""

    name = "fig9"
    title = "Figure 9: EB and decode step against the offload ratio, batch 512"
    paper = (
        "With many rows linear ops are bound by arithmetic. Reading a part of their weights over "
        "the link is then free until it takes as long as the arithmetic, so more of the model can "
        "lie outside HBM at the same speed."
    )
    claimed = (
        "Paper: with many rows a part of the model costs nothing outside HBM. Here, within 2% of "
        "the time with nothing outside:"
    )
    batch_size = MANY

    def here(self) -> Iterator[str]:
        for chart in self.charts:
            curve = self.times(chart, "direct")
            if base := curve.get(0.0):
                free = max(x for x, seconds in curve.items() if seconds <= 1.02 * base)
                yield f"up to {free:.2g}% of {chart.name}"


class Strategies(Figure):
    """Figure 11."""

    name = "fig11"
    title = "Figure 11: a ratio for each op (greedy) against one ratio for all, batch 512"
    paper = (
        "Ops bound by arithmetic can take a larger ratio for free than those bound by memory. The "
        "greedy allocation gives each its own; a uniform one slows the ops that have no slack."
    )
    claimed = "Paper: greedy up to 1.5 x as fast as uniform on GH200. Here, greedy is:"

    def make_charts(self) -> list[Chart]:
        def entry(model: str, name: str, ratio: float) -> Entry:
            step = self.scope.step(model, MANY, ratio, transport="direct", strategy=name)
            return Entry(name, 100 * ratio, step, 1 if ratio in (0.1, 0.3) else 2)

        ratios = [ratio for ratio in self.scope.some_ratios() if ratio]
        return [
            Chart(name=model, title=f"{model}, batch {MANY}, read in place", x=self.scope.outside,
                  shown=[STEP], root_x=True, place="{:.2g}% outside " + self.scope.near,
                  entries=[entry(model, name, x) for name in ("greedy", "uniform") for x in ratios])
            for model in self.scope.models
        ]  # fmt: skip

    def notes(self) -> list[str]:
        best = {
            model: max(
                (uniform_over_greedy(model, step / STEPS, self.scope), step / STEPS)
                for step in range(1, STEPS)
            )
            for model in self.scope.models
        }
        text = ", ".join(f"{factor(x)} at {at:.0%} for {model}" for model, (x, at) in best.items())
        if max(best.values())[0] < PAPER_GAIN:
            text += "; the rest of the paper's 1.5 x seems to come from the kernels there"
        return [
            "Both strategies are pure here: one ratio for every op, the KV cache included, against "
            "a ratio for each op. Neither falls back to the other, and both read in place.",
            "Greedy gains where ops bound by arithmetic hide link time that a uniform ratio adds "
            "to ops bound by memory, and where it moves bytes that a step reads least, such as KV "
            "slots that are not full. It is small where either kind takes most of a step. "
            f"By this profile's rates alone the gain is at most {text}.",
        ]


def uniform_over_greedy(model: str, ratio: float, scope: Scope) -> float:
    """The time of a uniform `ratio` over that of greedy ones, by rates alone.

    An op of C bytes takes the longest of its arithmetic, (1-x) C/B_hbm and x C/B_link. Greedy first
    moves the bytes that shorten ops (up to a), then those that cost nothing (up to b), then those
    that a step reads least.
    """
    local, remote, _ = scope.rates
    uniform = greedy = left = 0.0
    parts: list[tuple[float, float]] = []  # (seconds for each byte moved, bytes)
    for op in scope.ops(model, batch_size=MANY):
        compute = compute_time(op, scope.profile, scope.models[model].dtype)
        kept, share = op.layers * op.resident_bytes, op.read_bytes / op.resident_bytes
        a, b = thresholds(op, scope.models[model].dtype, scope)
        link = op.read_bytes * max((1 - ratio) / local, ratio / remote)
        uniform += op.layers * max(compute, link)
        greedy += op.layers * max(compute, op.read_bytes / local)
        parts += [(-share / local, a * kept), (0, (b - a) * kept), (share / remote, (1 - b) * kept)]
        left += ratio * kept
    for cost, size in sorted(parts):
        greedy += cost * min(size, left)
        left -= min(size, left)
    return uniform / greedy
