"""The rows of a model's benchmark: times of a point's decode steps, and the figures derived.

Pure arithmetic, that of a step's lower bound (`limit_s`) included; output.py turns rows into
tables, CSV and JSON.
"""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from dakrun.hardware import LOCAL, HardwareProfile
from dakrun.lab.bench import drafts
from dakrun.lab.bench.model_sweep import ModelCase, ModelSweep
from dakrun.lab.ceilings import Ceilings
from dakrun.lab.output import Column, microseconds
from dakrun.lab.samples import spread
from dakrun.plan import ACCEPTANCES, Links, OpPlan, Plan, bound_time, predict_prefill
from dakrun.plan.show.json import experts_figures
from dakrun.units import format_decimal, format_seconds

Reads = Mapping[str, Sequence[Sequence[float]]]  # bytes by op, layer and tier
Row = Mapping[str, Any]


def measured_links(ceilings: Ceilings, profile: HardwareProfile) -> Links:
    """The bandwidths of `ceilings`, by transport; links that tiers share are the profile's."""
    shared = Links.of(profile, tuple(ceilings.rates)[1:])
    return replace(shared, direct=ceilings.rates, staged={**ceilings.rates, **ceilings.copied})


def limit_s(plan: Plan, links: Links, expert_reads: Reads | None = None) -> float:
    """Lower bound in seconds of a decode step of `plan`, from the bytes that it reads alone.

    The bytes of experts are those of `expert_reads`, or else those that the plan expects.

    Ops run one after the other; each takes as long as the slowest tier that it reads, and reads
    staged bytes from the local tier. Copies may run ahead of their ops, so a link's time is
    compared with the whole step.
    """
    reads, ops_s = expert_reads or {}, 0.0
    link_s = dict.fromkeys(range(1, len(plan.tiers)), 0.0)
    for op in plan.ops:
        ops_s += _op_s(op, links, reads)
        rates = links.staged if op.is_copied else links.direct
        for tier in link_s:
            if nbytes := _read_bytes(op, tier, reads):
                link_s[tier] += nbytes / rates[plan.tiers[tier]]
    return max(ops_s, *link_s.values(), 0.0)


def _read_bytes(op: OpPlan, tier: int, reads: Reads) -> float:
    """Bytes that a step reads of an op in a tier, or copies from it; of experts as `reads` says."""
    if op.op.name in reads and not (tier and op.is_copied):
        return sum(of[tier] for of in reads[op.op.name])
    return op.read_bytes(tier)


def _op_s(op: OpPlan, links: Links, reads: Reads) -> float:
    """Seconds of an op in all layers, one after the other."""
    read, measured = op.op.read_bytes, reads.get(op.op.name)
    if op.is_copied:
        nbytes = sum(map(sum, measured)) if measured else op.op.layers * read
        return nbytes / links.direct[LOCAL]
    if measured:
        parts = [(sum(of), 1, [n / sum(of) for n in of]) for of in measured]
    else:
        parts = [(read, layers, op.op.read_shares(counts))
                 for counts, layers in Counter(op.placement).items()]  # fmt: skip
    return sum(
        layers * bound_time(links.lines(nbytes, 0.0).values(), shares)
        for nbytes, layers, shares in parts
    )


def row_of(point: ModelCase, **figures: Any) -> dict[str, Any]:
    """The row of a point: what was asked for, and the figures that are known; others are None."""
    names = *(column.key for column in COLUMNS), *UNSHOWN
    assert figures.keys() <= set(names)
    asked = {
        "batch_size": point.batch_size,
        "asked_transport": point.transport,
        "asked_ratio": point.ratio,
        "strategy": point.strategy,
        "order": point.order,
    }
    return dict.fromkeys(names) | asked | figures


def measured_row(
    point: ModelCase, plan: Plan, *, step_s: Sequence[float], ttft_s: float,
    kv_bytes: float, limit_s: float, ceiling_bytes_per_s: float, expert_reads: Reads | None = None,
    gpu_bytes: int | None = None, **measured: float | None,
) -> dict[str, Any]:  # fmt: skip
    """The row of a point that ran with `plan`; the rival's figures are missing. Times in seconds.

    `step_s` are decode steps of the whole batch, which read `kv_bytes` of KV on average; `ttft_s`
    is what all prompts of a batch take, ahead of its first decode step. `ceiling_bytes_per_s` is
    the sum over all tiers in use. On a GPU `gpu_bytes` is the allocated memory without the CUDA
    context. `expert_reads` are the mean bytes that a step read in each tier, by op and layer of
    experts. `measured` are other figures: `gap_s` between two steps on a GPU, and of a mixture the
    `experts_per_step` of a layer and the `local_read_share` of their bytes in HBM.
    """
    reads, time, size = expert_reads or {}, statistics.median(step_s), point.batch_size
    weights = sum(_read_bytes(op, tier, reads)
                  for op in plan.weights() for tier in range(len(plan.tiers)))  # fmt: skip
    local, *far = (sum(_read_bytes(op, tier, reads) for op in plan.ops)
                   for tier in range(len(plan.tiers)))  # fmt: skip
    placed = (op for op in plan.ops if op.op.category in ("linear", "experts"))
    remote = {op.transport for op in placed if op.ratio > 0}
    experts = experts_figures(plan) or {}
    planned = sum(nbytes for name, nbytes in plan.memory(0).items() if name != "context")
    return row_of(
        point,
        transports="+".join(sorted(remote)) or None,
        ratio=plan.ratio,
        steps=len(step_s),
        step_s=time,
        spread=spread(step_s),
        tokens_per_s=size / time,
        eb_bytes_per_s=plan.weight_bytes / time,
        eb_total_bytes_per_s=(weights + kv_bytes) / time,
        eb_total_over_ceiling=(weights + kv_bytes) / time / ceiling_bytes_per_s,
        limit_s=limit_s,
        limit_over_time=limit_s / time,
        bound_s=plan.bound_s,
        predicted_s=plan.predicted_s,
        prediction_error=plan.predicted_s / time - 1 if plan.profile.comparable else None,
        ttft_s=ttft_s,
        predicted_ttft_s=predict_prefill(plan).predicted_s,
        predicted_experts_per_step=experts.get("experts_read_per_step"),
        predicted_local_read_share=experts.get("local_read_share"),
        weight_bytes=plan.weight_bytes,
        hbm_read_bytes=local,
        remote_read_bytes=sum(far),
        gpu_bytes=gpu_bytes,
        planned_gpu_bytes=None if gpu_bytes is None else planned,
        **measured,
    )


def summary(row: Row) -> str:
    """Decode step, EB and percentage of the limit, for a progress message."""
    if row["step_s"] is None:
        return f"not measured: {row['problem']}"
    eb = format_decimal(row["eb_bytes_per_s"], "B/s")
    limit = f"{row['limit_over_time']:.1%} of the limit"
    return f"step {format_seconds(row['step_s'])}, EB {eb}, {limit}"


def _milliseconds(seconds: float) -> str:
    """Milliseconds in about five digits, so that slow steps do not widen a table."""
    ms = seconds * 1e3
    return f"{ms:,.{3 if ms < 100 else 2 if ms < 1000 else 1 if ms < 10_000 else 0}f}"


def _rounded(value: float, scale: float = 1.0) -> str:
    """`value` over `scale`: one digit after the point, or none with five ahead of it."""
    value /= scale
    return f"{value:,.{1 if value < 10_000 else 0}f}"


_gigabytes = partial(_rounded, scale=1e9)
_share, _signed, _factor = "{:.1%}".format, "{:+.1%}".format, "{:.2f}".format


def model_columns(sweep: ModelSweep) -> tuple[Column, ...]:
    """The columns of a table; strategy, experts and rival only if the sweep has them."""
    several = {"strategy": len(sweep.strategies) > 1, "order": len(sweep.orders) > 1}
    several |= dict.fromkeys(EXPERTS, sweep.config.mixture is not None)
    several |= dict.fromkeys(drafts.FIGURES, sweep.speculate > 0)
    several |= dict.fromkeys(RIVAL, sweep.rival is not None)
    several |= dict.fromkeys(RIVAL[3:], sweep.rival not in (None, "transformers"))
    return tuple(column for column in COLUMNS if several.get(column.key, True))


EXPERTS = ("experts_per_step", "predicted_experts_per_step", "local_read_share",
           "predicted_local_read_share")  # fmt: skip
RIVAL = ("rival", "rival_s", "speedup", "rival_ratio", "rival_eb_bytes_per_s", "rival_best_s",
         "best_speedup")  # fmt: skip
# `transports` are those that the plan chose for remote weights. EB (effective bandwidth) is the
# model's weight bytes over the step's time, EB total all weight and KV bytes read over that time.
# `limit_s` follows from the ceilings, `bound_s` and `predicted_s` from the profile. `rival_s` is
# the step of another program with `rival_ratio` of its weight bytes in host memory, `rival_best_s`
# its step with everything in HBM; `speedup` is over the first, `best_speedup` over the second.
COLUMNS = (
    Column("batch_size", "batch"),
    Column("order", "experts by"),
    Column("strategy", "strategy"),
    Column("asked_transport", "transport asked", rank=11),
    Column("transports", "remote read", lambda of: "both" if "+" in of else of, rank=1),
    Column("ratio", "remote bytes", "{:.2%}".format),
    Column("step_s", "step ms", _milliseconds),
    Column("tokens_per_s", "tokens/s", _rounded),
    Column("eb_bytes_per_s", "EB GB/s", _gigabytes),
    Column("eb_total_bytes_per_s", "EB total GB/s", _gigabytes, rank=6),
    Column("eb_total_over_ceiling", "share of bandwidth", _share, rank=10),
    Column("limit_s", "limit ms", _milliseconds, rank=5),
    Column("limit_over_time", "share of limit", _share),
    Column("predicted_s", "predicted ms", _milliseconds, rank=4),
    Column("prediction_error", "prediction error", _signed),
    Column("ttft_s", "TTFT ms", _milliseconds, rank=3),
    Column("predicted_ttft_s", "predicted TTFT ms", _milliseconds, rank=7),
    Column("gap_s", "gap us", microseconds, rank=12),
    Column("gpu_bytes", "GPU GiB", lambda n: f"{n / 2**30:.2f}", rank=8),
    Column("planned_gpu_bytes", "planned GPU GiB", lambda n: f"{n / 2**30:.2f}", rank=9),
    Column("experts_per_step", "experts read", "{:.1f}".format, rank=2),
    Column("predicted_experts_per_step", "predicted read", "{:.1f}".format, rank=7),
    Column("local_read_share", "read in HBM", _share, rank=2),
    Column("predicted_local_read_share", "predicted in HBM", _share, rank=7),
    Column(drafts.FIGURES[0], "with drafts ms", _milliseconds),
    *(
        Column(key, f"token ms at {rate}", _milliseconds, rank=2)
        for key, rate in zip(drafts.FIGURES[1:], ACCEPTANCES, strict=True)
    ),
    Column("rival", "rival", rank=8),
    Column("rival_s", "rival ms", _milliseconds),
    Column("speedup", "speedup", _factor, rank=2),
    Column("rival_ratio", "rival remote", "{:.2%}".format, rank=3),
    Column("rival_eb_bytes_per_s", "rival EB GB/s", _gigabytes, rank=5),
    Column("rival_best_s", "rival in HBM ms", _milliseconds, rank=7),
    Column("best_speedup", "speedup in HBM", _factor, rank=6),
)
# Of rows, but of no table. Read bytes are those of a step; `problem` says why nothing was measured.
UNSHOWN = ("steps", "spread", "bound_s", "weight_bytes", "hbm_read_bytes",
           "remote_read_bytes", "problem")  # fmt: skip
