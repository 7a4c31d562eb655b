"""A plan's tables: what each op needs, and what the plan does with it."""

from collections.abc import Sequence

from dakrun.plan.plan import OpPlan, Plan
from dakrun.plan.show.json import op_eb, ridge, window
from dakrun.tables import Column
from dakrun.units import format_bytes, format_decimal, format_seconds

# Columns of `need_rows`; a narrow console lacks those of high rank.
NEEDS = (
    Column("op", "left"),
    Column("shape", "left", rank=4),
    Column("bytes"),
    Column("FLOP", rank=5),
    Column("FLOP/B", rank=3),
    Column("ridge", rank=6),
    Column("regime", "left", rank=2),
    Column("a", rank=1),
    Column("b", rank=1),
)
# Columns of `choice_rows`.
CHOICES = (
    Column("op", "left"),
    Column("ratio"),
    Column("units", rank=5),
    Column("SMs", rank=4),
    Column("window", rank=6),
    Column("via", "left", rank=2),
    Column("bound", rank=3),
    Column("predicted"),
    Column("EB GB/s", rank=1),
)


def need_rows(plan: Plan) -> list[tuple[str, ...]]:
    """Rows of the columns NEEDS: the needs of each op, for all its layers and one decode step."""
    return [_need_row(plan, op) for op in plan.ops]


def choice_rows(plan: Plan) -> list[tuple[str, ...]]:
    """Rows of the columns CHOICES: the plan for each op; units and times are for all its layers."""
    return [_choice_row(plan, op) for op in plan.ops]


def need_legend() -> str:
    """Meaning of the columns of `need_rows`."""
    return (
        "bytes: weights, or allocated KV cache; FLOP/B: arithmetic intensity; ridge: peak FLOP/s "
        "over HBM bytes/s; regime: what limits the op, by time; between the offload ratios a and "
        "b it is at its fastest. Figures are for all layers and one decode step."
    )


def choice_legend(plan: Plan) -> str:
    """Meaning of the columns of `choice_rows`."""
    tiers = "/".join(plan.tiers)
    sampling = f" Sampling is predicted to take {format_seconds(plan.sampling_s)} more."
    mixed = f" Where a tier has no SMs, those of {plan.tiers[0]} read it among their own units."
    links = "/".join(plan.tiers[1:]) or "a link"
    waits = f" Direct and staged reads wait {format_seconds(plan.waits_s)} for each other."
    return (
        f"ratio: share of the bytes outside {plan.tiers[0]}; "
        "units (row blocks of 8 rows, or KV slots) "
        f"and SMs: {tiers}; window: bytes in flight from {links}; via: how "
        "remote bytes are read; EB: bytes read over predicted time."
        + (mixed if any(op.mixed(t) for op in plan.ops for t in range(len(plan.tiers))) else "")
        + (sampling if plan.sampling_s else "")
        + (waits if plan.waits_s else "")
    )


def _need_row(plan: Plan, op: OpPlan) -> tuple[str, ...]:
    first, second = op.op.shape
    shape = f"{first}q/{second}kv" if op.op.category == "attention" else f"{first}x{second}"
    return (
        f"{op.op.name} x{op.op.layers}",
        shape,
        format_bytes(op.op.layers * op.op.resident_bytes),
        format_decimal(op.op.layers * op.op.flops, "").rstrip(),
        f"{op.op.arithmetic_intensity:.1f}",
        f"{ridge(plan.profile, plan):.3g}",
        op.regime.removesuffix("-bound"),
        f"{op.a:.1%}",
        f"{op.b:.1%}",
    )


def _choice_row(plan: Plan, op: OpPlan) -> tuple[str, ...]:
    tiers = range(len(plan.tiers))
    windows = [window(plan, op, tier) for tier in tiers[1:]]
    return (
        op.op.name,
        f"{op.ratio:.1%}",
        _slashed([sum(counts[tier] for counts in op.placement) for tier in tiers]),
        _slashed(op.sms),
        _slashed(["-" if size is None else _short_bytes(size) for size in windows]),
        op.transport if op.ratio > 0 else "-",
        format_seconds(sum(op.bounds_s)),
        format_seconds(sum(op.predicted_s)),
        f"{op_eb(op) / 1e9:,.1f}",
    )


def _slashed(values: Sequence[object]) -> str:
    """Values of the tiers in their order, as in "1200/48"."""
    return "/".join(map(str, values))


def _short_bytes(size: int) -> str:
    """A window's size without zeros after the point, as in "256 KiB"."""
    return format_bytes(size).replace(".00 ", " ")
