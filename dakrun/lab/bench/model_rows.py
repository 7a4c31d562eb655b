"""The rows of a model's benchmark: times of a point's decode steps, and the figures derived.

Pure arithmetic, that of a step's lower bound (`limit_s`) included; output.py turns rows into
tables, CSV and JSON.
"""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dakrun.hardware import LOCAL, HardwareProfile
from dakrun.lab.bench.ceilings import Ceilings
from dakrun.lab.bench.model_sweep import (
    ModelCase,
    ModelRatio,
    ModelSweep,
    Order,
    Rival,
    TransportChoice,
)
from dakrun.lab.bench.output import Column, microseconds
from dakrun.lab.probe.measurement import spread
from dakrun.plan import Links, OpPlan, Plan, Strategy, bound_time, predict_prefill
from dakrun.plan.show.json import experts_figures
from dakrun.units import format_decimal, format_seconds

Reads = Mapping[str, Sequence[Sequence[float]]]  # bytes by op, layer and tier


@dataclass(frozen=True, kw_only=True)
class Run:
    """The measurements of a point that ran with `plan`; times in seconds.

    `step_s` are decode steps of the whole batch, which read `kv_bytes` of KV on average; `ttft_s`
    is by request, batch after batch; `prefill_s` is that of a batch. `ceiling_bytes_per_s` is the
    sum over all tiers in use. On a GPU, `gap_s` is the time between two steps and `gpu_bytes` the
    allocated memory without the CUDA context. Of a mixture a layer of a decode step read
    `experts_per_step` experts, `local_read_share` of their bytes in HBM; `expert_reads` are the
    mean bytes that a step read in each tier, by op and layer of experts.
    """

    plan: Plan
    step_s: Sequence[float]
    ttft_s: Sequence[float]
    prefill_s: float
    kv_bytes: float
    limit_s: float
    ceiling_bytes_per_s: float
    gap_s: float | None = None
    gpu_bytes: int | None = None
    experts_per_step: float | None = None
    local_read_share: float | None = None
    expert_reads: Reads = field(default_factory=dict)

    def read_bytes(self, tier: int, *, weights: bool = False) -> float:
        """Bytes that a step read from the plan's tier number `tier`; with `weights` of these alone.

        Those of experts are measured.
        """
        ops = self.plan.weights() if weights else self.plan.ops
        return sum(_read_bytes(op, tier, self.expert_reads) for op in ops)


@dataclass(frozen=True, kw_only=True)
class RivalRun:
    """Seconds of the decode step of the rival `name`; None is a time that was not measured.

    `step_s` is with `ratio` of its weight bytes in host memory, `best_s` with everything in HBM.
    """

    name: Rival
    ratio: float | None
    step_s: float | None
    best_s: float | None

    def figures(self, time: float, weight_bytes: int) -> dict[str, Any]:
        """Those of a row whose step takes `time` seconds for a model of `weight_bytes`."""
        step_s, best_s = self.step_s, self.best_s
        return {
            "rival": self.name,
            "rival_ratio": self.ratio,
            "rival_s": step_s,
            "rival_eb_bytes_per_s": weight_bytes / step_s if step_s else None,
            "speedup": step_s / time if step_s else None,
            "rival_best_s": best_s,
            "best_speedup": best_s / time if best_s else None,
        }


@dataclass(frozen=True, kw_only=True)
class ModelRow:
    """A point and its figures; keys carry units, None is a figure that was not measured.

    `transports` are those that the plan chose for remote weights. EB (effective bandwidth) is the
    model's weight bytes over the step's time, EB total all weight and KV bytes read over that time.
    `limit_s` follows from the ceilings (see `limit_s` below), `bound_s` and `predicted_s` from the
    profile. `rival_s` is the step of another program with `rival_ratio` of its weight bytes in host
    memory, `rival_best_s` that with everything in HBM; the speedups are relative to them. `problem`
    is the reason why nothing was measured.
    """

    batch_size: int
    asked_transport: TransportChoice
    asked_ratio: ModelRatio
    strategy: Strategy
    order: Order
    transports: str | None = None
    ratio: float | None = None
    steps: int | None = None
    step_s: float | None = None
    spread: float | None = None
    tokens_per_s: float | None = None
    eb_bytes_per_s: float | None = None
    eb_total_bytes_per_s: float | None = None
    eb_total_over_ceiling: float | None = None
    limit_s: float | None = None
    limit_over_time: float | None = None
    bound_s: float | None = None
    predicted_s: float | None = None
    prediction_error: float | None = None
    ttft_s: float | None = None
    predicted_ttft_s: float | None = None
    prefill_s: float | None = None
    gap_s: float | None = None
    experts_per_step: float | None = None
    predicted_experts_per_step: float | None = None
    local_read_share: float | None = None
    predicted_local_read_share: float | None = None
    rival: Rival | None = None
    rival_ratio: float | None = None
    rival_s: float | None = None
    rival_eb_bytes_per_s: float | None = None
    speedup: float | None = None
    rival_best_s: float | None = None
    best_speedup: float | None = None
    weight_bytes: int | None = None
    hbm_read_bytes: float | None = None
    remote_read_bytes: float | None = None
    gpu_bytes: int | None = None
    planned_gpu_bytes: int | None = None
    problem: str | None = None

    @property
    def figures(self) -> dict[str, Any]:
        """All figures by key."""
        return dict(vars(self))

    @property
    def summary(self) -> str:
        """Decode step, EB and percentage of the limit, for a progress message."""
        if self.step_s is None or self.eb_bytes_per_s is None:
            return f"not measured: {self.problem}"
        return (
            f"step {format_seconds(self.step_s)}, EB {format_decimal(self.eb_bytes_per_s, 'B/s')}, "
            f"{self.limit_over_time:.1%} of the limit"
        )


def measured_links(ceilings: Ceilings, profile: HardwareProfile) -> Links:
    """The bandwidths of `ceilings`, by transport; links that tiers share are the profile's."""
    shared = Links.of(profile, tuple(ceilings.rates)[1:])
    return replace(shared, direct=ceilings.rates, staged={**ceilings.rates, **ceilings.copied})


def limit_s(plan: Plan, links: Links, expert_reads: Reads | None = None) -> float:
    """Lower bound in seconds of a decode step of `plan`, from the bytes it reads alone.

    Those of experts are what `expert_reads` says, or else those that the plan expects.

    Ops run one after the other; each takes as long as the slowest tier that it reads, and reads
    staged bytes from the local tier. Copies may run ahead of their ops, so a link's time is
    compared with the whole step.
    """
    reads = expert_reads or {}
    ops = sum(_op_s(op, links, reads) for op in plan.ops)
    return max([ops, *(_link_s(plan, tier, links, reads) for tier in range(1, len(plan.tiers)))])


def _read_bytes(op: OpPlan, tier: int, reads: Reads) -> float:
    """Bytes that a step reads of an op in a tier, those of experts as `reads` says."""
    if op.op.name in reads:
        return sum(of[tier] for of in reads[op.op.name])
    return op.read_bytes(tier)


def _op_s(op: OpPlan, links: Links, reads: Reads) -> float:
    """Seconds of an op in all layers, one after the other."""
    if op.op.name in reads:
        return sum(
            bound_time(links.lines(sum(of), 0.0).values(), [n / sum(of) for n in of])
            for of in reads[op.op.name]
        )
    read = op.op.read_bytes
    if op.transport == "staged":
        return op.op.layers * read / links.direct[LOCAL]
    lines = links.lines(read, 0.0).values()
    return sum(
        layers * bound_time(lines, op.op.read_shares(counts))
        for counts, layers in Counter(op.placement).items()
    )


def _link_s(plan: Plan, tier: int, links: Links, reads: Reads) -> float:
    """Seconds for all bytes that the plan reads from its remote tier number `tier`."""
    seconds = 0.0
    for op in plan.ops:
        if nbytes := _read_bytes(op, tier, reads):
            rates = links.staged if op.transport == "staged" else links.direct
            seconds += nbytes / rates[plan.tiers[tier]]
    return seconds


def failed_row(point: ModelCase, problem: str) -> ModelRow:
    """The row of a point that could not run."""
    return ModelRow(
        batch_size=point.batch_size,
        asked_transport=point.transport,
        asked_ratio=point.ratio,
        strategy=point.strategy,
        order=point.order,
        problem=problem,
    )


def measured_row(point: ModelCase, run: Run, rival: RivalRun | None = None) -> ModelRow:
    """The row of a point that ran, and of its rival."""
    plan, time = run.plan, statistics.median(run.step_s)
    tiers = range(len(plan.tiers))
    weights = sum(run.read_bytes(tier, weights=True) for tier in tiers)
    remote = {op.transport for op in plan.ops if op.op.category == "linear" and op.ratio > 0}
    on_gpu, experts = run.gpu_bytes is not None, experts_figures(plan)
    return ModelRow(
        batch_size=point.batch_size,
        asked_transport=point.transport,
        asked_ratio=point.ratio,
        strategy=point.strategy,
        order=point.order,
        transports="+".join(sorted(remote)) or None,
        ratio=plan.ratio,
        steps=len(run.step_s),
        step_s=time,
        spread=spread(run.step_s),
        tokens_per_s=point.batch_size / time,
        eb_bytes_per_s=plan.weight_bytes / time,
        eb_total_bytes_per_s=(weights + run.kv_bytes) / time,
        eb_total_over_ceiling=(weights + run.kv_bytes) / time / run.ceiling_bytes_per_s,
        limit_s=run.limit_s,
        limit_over_time=run.limit_s / time,
        bound_s=plan.bound_s,
        predicted_s=plan.predicted_s,
        prediction_error=plan.predicted_s / time - 1 if plan.profile.comparable else None,
        ttft_s=statistics.median(_last_of_batches(run.ttft_s, point.batch_size)),
        predicted_ttft_s=predict_prefill(plan).predicted_s,
        prefill_s=run.prefill_s,
        gap_s=run.gap_s,
        experts_per_step=run.experts_per_step,
        predicted_experts_per_step=experts["experts_read_per_step"] if experts else None,
        local_read_share=run.local_read_share,
        predicted_local_read_share=experts["local_read_share"] if experts else None,
        **(rival.figures(time, plan.weight_bytes) if rival else {}),
        weight_bytes=plan.weight_bytes,
        hbm_read_bytes=run.read_bytes(0),
        remote_read_bytes=sum(map(run.read_bytes, tiers[1:])),
        gpu_bytes=run.gpu_bytes,
        planned_gpu_bytes=planned_gpu_bytes(plan) if on_gpu else None,
    )


def _last_of_batches(ttft_s: Sequence[float], batch_size: int) -> list[float]:
    """TTFT of the slowest request of each batch."""
    return [max(ttft_s[i : i + batch_size]) for i in range(0, len(ttft_s), batch_size)]


def planned_gpu_bytes(plan: Plan) -> int:
    """Bytes of GPU memory that the plan allocates, without the CUDA context."""
    return sum(nbytes for name, nbytes in plan.memory(0).items() if name != "context")


def _milliseconds(seconds: float) -> str:
    """Milliseconds in about five digits, so that slow steps do not widen a table."""
    ms = seconds * 1e3
    return f"{ms:,.{3 if ms < 100 else 2 if ms < 1000 else 1 if ms < 10_000 else 0}f}"


def _rounded(value: float) -> str:
    """One digit after the point, or none where there are five ahead of it."""
    return f"{value:,.{1 if value < 10_000 else 0}f}"


def _gigabytes(rate: float) -> str:
    return _rounded(rate / 1e9)


def _transports(names: str) -> str:
    """The transport of remote weights, or "both"."""
    return "both" if "+" in names else names


def _gibibytes(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f}"


_COLUMNS = (
    Column("batch_size", "batch"),
    Column("asked_transport", "transport asked", rank=11),
    Column("transports", "remote read", _transports, rank=1),
    Column("ratio", "remote bytes", "{:.2%}".format),
    Column("step_s", "step ms", _milliseconds),
    Column("tokens_per_s", "tokens/s", _rounded),
    Column("eb_bytes_per_s", "EB GB/s", _gigabytes),
    Column("eb_total_bytes_per_s", "EB total GB/s", _gigabytes, rank=6),
    Column("eb_total_over_ceiling", "share of bandwidth", "{:.1%}".format, rank=10),
    Column("limit_s", "limit ms", _milliseconds, rank=5),
    Column("limit_over_time", "share of limit", "{:.1%}".format),
    Column("predicted_s", "predicted ms", _milliseconds, rank=4),
    Column("prediction_error", "prediction error", "{:+.1%}".format),
    Column("ttft_s", "TTFT ms", _milliseconds, rank=3),
    Column("predicted_ttft_s", "predicted TTFT ms", _milliseconds, rank=7),
    Column("gap_s", "gap us", microseconds, rank=12),
    Column("gpu_bytes", "GPU GiB", _gibibytes, rank=8),
    Column("planned_gpu_bytes", "planned GPU GiB", _gibibytes, rank=9),
)


def model_columns(sweep: ModelSweep) -> tuple[Column, ...]:
    """The columns of a table; strategy, experts and rival only if the sweep has them."""
    columns: tuple[Column, ...] = _COLUMNS
    if len(sweep.strategies) > 1:
        columns = (*columns[:1], Column("strategy", "strategy"), *columns[1:])
    if len(sweep.orders) > 1:
        columns = (*columns[:1], Column("order", "experts by"), *columns[1:])
    if sweep.config.mixture:
        columns += (
            Column("experts_per_step", "experts read", "{:.1f}".format, rank=2),
            Column("predicted_experts_per_step", "predicted read", "{:.1f}".format, rank=7),
            Column("local_read_share", "read in HBM", "{:.1%}".format, rank=2),
            Column("predicted_local_read_share", "predicted in HBM", "{:.1%}".format, rank=7),
        )
    if sweep.rival is None:
        return columns
    columns += (
        Column("rival", "rival", rank=8),
        Column("rival_s", "rival ms", _milliseconds),
        Column("speedup", "speedup", "{:.2f}".format, rank=2),
    )
    if sweep.rival == "transformers":
        return columns
    return (
        *columns,
        Column("rival_ratio", "rival remote", "{:.2%}".format, rank=3),
        Column("rival_eb_bytes_per_s", "rival EB GB/s", _gigabytes, rank=5),
        Column("rival_best_s", "rival in HBM ms", _milliseconds, rank=7),
        Column("best_speedup", "speedup in HBM", "{:.2f}".format, rank=6),
    )
