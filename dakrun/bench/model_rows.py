"""The rows of a model's benchmark: what a point's decode steps took, and what follows from it.

Pure; tables, CSV and JSON are made of these by output.py.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dakrun.bench.model_sweep import AskedTransport, ModelRatio, ModelSweep, Point
from dakrun.bench.output import Column
from dakrun.bench.rows import microseconds
from dakrun.plan.plan import Plan
from dakrun.plan.policy import Strategy
from dakrun.plan.prefill import predict_prefill
from dakrun.probe.measurement import spread
from dakrun.units import format_decimal, format_seconds


@dataclass(frozen=True, kw_only=True)
class Run:
    """What was measured of a point whose `plan` was obeyed; times in seconds.

    `step_s` are decode steps of the whole batch, which read `kv_bytes` of KV each on average;
    `ttft_s` is by request, batch after batch, `prefill_s` that of a batch. All tiers in use
    together give `ceiling_bytes_per_s`. `gap_s` is the time between steps on a GPU and `gpu_bytes`
    what was taken of its memory beside the CUDA context, where there is one.
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


@dataclass(frozen=True, kw_only=True)
class ModelRow:
    """A point and its figures under keys with units; None stands for what was not measured.

    `transports` are those that the plan chose for remote weights. EB is the model's weight bytes
    over the step's time, EB total all weight and KV bytes that it read, which is compared with the
    ceilings of all tiers together. `limit_s` is what the
    ceilings allow (model_limit.py), `bound_s` and `predicted_s` what the profile says, `rival_s`
    the step of another program with all in HBM. `problem` is why nothing was measured.
    """

    batch_size: int
    asked_transport: AskedTransport
    asked_ratio: ModelRatio
    strategy: Strategy
    transports: str | None = None
    ratio: float | None = None
    steps: int | None = None
    tpot_s: float | None = None
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
    rival_s: float | None = None
    speedup: float | None = None
    weight_bytes: int | None = None
    hbm_read_bytes: float | None = None
    remote_read_bytes: float | None = None
    gpu_bytes: int | None = None
    planned_gpu_bytes: int | None = None
    problem: str | None = None

    @property
    def figures(self) -> dict[str, Any]:
        """All of it by key."""
        return dict(vars(self))

    @property
    def summary(self) -> str:
        """The outcome in a few words."""
        if self.tpot_s is None or self.eb_bytes_per_s is None:
            return f"not measured: {self.problem}"
        return (
            f"TPOT {format_seconds(self.tpot_s)}, EB {format_decimal(self.eb_bytes_per_s, 'B/s')}, "
            f"{self.limit_over_time:.1%} of the limit"
        )


def failed_row(point: Point, problem: str) -> ModelRow:
    """The row of a point that cannot run because of `problem`."""
    return ModelRow(
        batch_size=point.batch_size,
        asked_transport=point.transport,
        asked_ratio=point.ratio,
        strategy=point.strategy,
        problem=problem,
    )


def measured_row(point: Point, run: Run, rival_s: float | None = None) -> ModelRow:
    """The row of a point that ran."""
    plan, time = run.plan, statistics.median(run.step_s)
    tiers = range(len(plan.tiers))
    weights = sum(op.read_bytes(tier) for op in plan.weights() for tier in tiers)
    remote = {op.transport for op in plan.ops if op.op.category == "linear" and op.ratio > 0}
    on_gpu = run.gpu_bytes is not None
    return ModelRow(
        batch_size=point.batch_size,
        asked_transport=point.transport,
        asked_ratio=point.ratio,
        strategy=point.strategy,
        transports="+".join(sorted(remote)) or None,
        ratio=plan.ratio,
        steps=len(run.step_s),
        tpot_s=time,
        spread=spread(run.step_s),
        tokens_per_s=point.batch_size / time,
        eb_bytes_per_s=plan.weight_bytes / time,
        eb_total_bytes_per_s=(weights + run.kv_bytes) / time,
        eb_total_over_ceiling=(weights + run.kv_bytes) / time / run.ceiling_bytes_per_s,
        limit_s=run.limit_s,
        limit_over_time=run.limit_s / time,
        bound_s=plan.bound_s,
        predicted_s=plan.predicted_s,
        prediction_error=plan.predicted_s / time - 1,
        ttft_s=statistics.median(_last_of_batches(run.ttft_s, point.batch_size)),
        predicted_ttft_s=predict_prefill(plan).predicted_s,
        prefill_s=run.prefill_s,
        gap_s=run.gap_s,
        rival_s=rival_s,
        speedup=None if rival_s is None else rival_s / time,
        weight_bytes=plan.weight_bytes,
        hbm_read_bytes=plan.read_bytes(0),
        remote_read_bytes=sum(map(plan.read_bytes, tiers[1:])),
        gpu_bytes=run.gpu_bytes,
        planned_gpu_bytes=planned_gpu_bytes(plan) if on_gpu else None,
    )


def _last_of_batches(ttft_s: Sequence[float], batch_size: int) -> list[float]:
    """What the last request of each batch took."""
    return [max(ttft_s[i : i + batch_size]) for i in range(0, len(ttft_s), batch_size)]


def planned_gpu_bytes(plan: Plan) -> int:
    """Bytes that the plan takes of its GPU beside the CUDA context."""
    return sum(nbytes for what, nbytes in plan.memory(0).items() if what != "context")


def _milliseconds(seconds: float) -> str:
    """In about five digits, so that a table of slow steps is no wider."""
    ms = seconds * 1e3
    return f"{ms:,.{3 if ms < 100 else 2 if ms < 1000 else 1}f}"


def _gigabytes(rate: float) -> str:
    return f"{rate / 1e9:,.1f}"


def _gibibytes(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f}"


_COLUMNS = (
    Column("batch_size", "batch"),
    Column("asked_transport", "asked"),
    Column("transports", "read"),
    Column("ratio", "remote", "{:.2%}".format),
    Column("tpot_s", "TPOT ms", _milliseconds),
    Column("eb_bytes_per_s", "EB GB/s", _gigabytes),
    Column("eb_total_bytes_per_s", "EB total GB/s", _gigabytes),
    Column("eb_total_over_ceiling", "of sum", "{:.1%}".format),
    Column("limit_s", "limit ms", _milliseconds),
    Column("limit_over_time", "of limit", "{:.1%}".format),
    Column("predicted_s", "predicted ms", _milliseconds),
    Column("prediction_error", "error", "{:+.1%}".format),
    Column("ttft_s", "TTFT ms", _milliseconds),
    Column("predicted_ttft_s", "plan ms", _milliseconds),
    Column("gap_s", "gap us", microseconds),
    Column("gpu_bytes", "GPU GiB", _gibibytes),
    Column("planned_gpu_bytes", "plan GiB", _gibibytes),
)


def model_columns(sweep: ModelSweep) -> tuple[Column, ...]:
    """The columns of a table: strategies where there are several, a rival where there is one."""
    columns: tuple[Column, ...] = _COLUMNS
    if len(sweep.strategies) > 1:
        columns = (*columns[:1], Column("strategy", "strategy"), *columns[1:])
    if sweep.rival is None:
        return columns
    rival = (
        Column("rival_s", f"{sweep.rival} ms", _milliseconds),
        Column("speedup", "speed-up", "{:.2f}".format),
    )
    return columns + rival
