"""A Plan as data for scripts and as text for tables: pure functions, nothing printed here.

Units stand in the key names; figures are defined in README.md and DESIGN.md's last section.
"""

from collections.abc import Sequence
from typing import Any

from dakrun.hardware import HardwareProfile
from dakrun.plan.ops import KV_BLOCK, kv_positions
from dakrun.plan.planner import OpPlan, Plan
from dakrun.units import format_bytes, format_seconds

SCHEMA = 1

# Heading of each column of `op_rows`, and whether it is numeric.
COLUMNS = (
    ("op", False),
    ("shape", False),
    ("bytes", True),
    ("FLOP/B", True),
    ("ridge", True),
    ("regime", False),
    ("a", True),
    ("b", True),
    ("ratio", True),
    ("units local/remote", True),
    ("bound", True),
    ("predicted", True),
)


def plan_dict(plan: Plan) -> dict[str, Any]:
    """`plan` as JSON-ready data: bytes, seconds, FLOPs and tokens as the keys say.

    Ops are listed once for all layers; `units_by_layer` has, per tier, the units of every layer.
    """
    return {
        "schema": SCHEMA,
        "model": {
            "name": plan.model.name,
            "family": plan.model.family,
            "dtype": plan.model.dtype,
            "layers": plan.model.num_layers,
            "hidden_size": plan.model.hidden_size,
            "weight_bytes": plan.weight_bytes,
            "kv_bytes_per_token": plan.model.kv_bytes_per_token,
        },
        "workload": {
            "batch_size": plan.workload.batch_size,
            "prompt_tokens": plan.workload.prompt_len,
            "new_tokens": plan.workload.new_tokens,
            "max_model_len_tokens": plan.workload.max_model_len,
            "mean_kv_len_tokens": plan.workload.mean_kv_len,
            "kv_tokens_kept_per_slot": kv_positions(plan.workload),
            "kv_block_tokens": KV_BLOCK,
        },
        "profile": _profile_dict(plan),
        "strategy": plan.policy.strategy,
        "required_ratio": plan.required_ratio,
        "ratio": plan.ratio,
        "tiers": [_tier_dict(plan, tier) for tier in range(len(plan.tiers))],
        "kv": kv_figures(plan),
        "bound": figures(plan, plan.bound_s),
        "predicted": figures(plan, plan.predicted_s),
        "ops": [_op_dict(plan, op) for op in plan.ops],
    }


def figures(plan: Plan, step_s: float) -> dict[str, float]:
    """Speed of a decode step that takes `step_s` seconds.

    EB is the model's weight bytes over the step's time (arXiv 2604.26074), EB total the weight
    and KV bytes that the step really reads over that time.
    """
    read = sum(plan.read_bytes(tier) for tier in range(len(plan.tiers)))
    return {
        "tpot_s": step_s,
        "tokens_per_s": plan.workload.batch_size / step_s,
        "eb_bytes_per_s": plan.weight_bytes / step_s,
        "eb_total_bytes_per_s": read / step_s,
    }


def kv_figures(plan: Plan) -> dict[str, float]:
    """The KV cache's footprint over all tiers, and what a step reads of it from HBM and links."""
    kv = plan.op("attention")
    tiers = range(len(plan.tiers))
    return {
        "resident_bytes": sum(kv.resident_bytes(tier) for tier in tiers),
        "hbm_read_bytes_per_step": kv.read_bytes(0),
        "link_read_bytes_per_step": sum(kv.read_bytes(tier) for tier in tiers[1:]),
    }


def ridge(profile: HardwareProfile, plan: Plan) -> float:
    """Arithmetic intensity in FLOPs per byte from which HBM would keep up with the peak rate."""
    return profile.compute[plan.model.dtype].peak / profile.hbm_bytes_per_s


def op_rows(plan: Plan) -> list[tuple[str, ...]]:
    """One row of text per op, under COLUMNS; bytes, units and times are over all its layers."""
    return [_op_row(plan, op) for op in plan.ops]


def summary_rows(plan: Plan) -> list[tuple[str, str]]:
    """(title, text) pairs: what was planned for what, then where the bytes lie and how fast."""
    model, work, profile = plan.model, plan.workload, plan.profile
    source = profile.provenance
    kv = kv_figures(plan)
    rows = [
        ("model", f"{model.name}, {model.dtype}, {format_bytes(plan.weight_bytes)} of weights"),
        (
            "workload",
            f"batch {work.batch_size}, {work.prompt_len} prompt + {work.new_tokens} new tokens, "
            f"{kv_positions(work)} positions kept per slot",
        ),
        ("profile", f"{profile.name}: {profile.description} ({source.kind}, {source.date})"),
        *((f"{name} memory", _memory_text(plan, tier)) for tier, name in enumerate(plan.tiers)),
        (
            "offload ratio",
            f"{plan.ratio:.1%} of weights and KV chosen ({plan.policy.strategy}), "
            f"{plan.required_ratio:.1%} required by capacity",
        ),
        (
            "KV per step",
            f"{format_bytes(kv['resident_bytes'])} resident, "
            f"{format_bytes(kv['hbm_read_bytes_per_step'])} read from {plan.tiers[0]}, "
            f"{format_bytes(kv['link_read_bytes_per_step'])} over the link",
        ),
    ]
    for title, step_s in (("bound", plan.bound_s), ("predicted", plan.predicted_s)):
        speed = figures(plan, step_s)
        rows.append(
            (
                title,
                f"TPOT {format_seconds(step_s)}, {speed['tokens_per_s']:,.1f} tokens/s, "
                f"EB {_rate(speed['eb_bytes_per_s'])}, "
                f"EB total {_rate(speed['eb_total_bytes_per_s'])}",
            )
        )
    return rows


def _profile_dict(plan: Plan) -> dict[str, Any]:
    profile, source = plan.profile, plan.profile.provenance
    return {
        "name": profile.name,
        "description": profile.description,
        "device": profile.device,
        "device_name": profile.device_name,
        "provenance": {"kind": source.kind, "date": source.date, "source": source.source},
        "hbm_bytes_per_s": profile.hbm_bytes_per_s,
        "remote_bytes_per_s": {n: profile.tier(n).direct_bytes_per_s for n in plan.tiers[1:]},
        "peak_flops_per_s": profile.compute[plan.model.dtype].peak,
        "ridge_flops_per_byte": ridge(profile, plan),
    }


def _tier_dict(plan: Plan, tier: int) -> dict[str, Any]:
    memory = plan.memory(tier)
    return {
        "name": plan.tiers[tier],
        "budget_bytes": plan.budgets[tier],
        "used_bytes": sum(memory.values()),
        **{f"{purpose}_bytes": size for purpose, size in memory.items()},
        "read_bytes_per_step": plan.read_bytes(tier),
    }


def _op_dict(plan: Plan, op: OpPlan) -> dict[str, Any]:
    layers, tiers = op.op.layers, range(len(plan.tiers))
    return {
        "name": op.op.name,
        "category": op.op.category,
        "layers": layers,
        "shape": list(op.op.shape),
        "shape_means": _shape_means(op),
        "unit": _unit(op),
        "units_per_layer": op.op.units,
        "units_by_layer": {
            plan.tiers[tier]: [counts[tier] for counts in op.placement] for tier in tiers
        },
        "resident_bytes": layers * op.op.resident_bytes,
        "read_bytes_per_step": layers * op.op.read_bytes,
        "flops_per_step": layers * op.op.flops,
        "arithmetic_intensity_flops_per_byte": op.op.arithmetic_intensity,
        "regime": op.regime,
        "a": op.a,
        "b": op.b,
        "ratio": op.ratio,
        "bound_s": sum(op.bounds_s),
        "predicted_s": sum(op.predicted_s),
    }


def _op_row(plan: Plan, op: OpPlan) -> tuple[str, ...]:
    first, second = op.op.shape
    shape = f"{first}q/{second}kv" if op.op.category == "attention" else f"{first}x{second}"
    return (
        f"{op.op.name} x{op.op.layers}",
        shape,
        format_bytes(op.op.layers * op.op.resident_bytes),
        f"{op.op.arithmetic_intensity:.1f}",
        f"{ridge(plan.profile, plan):.0f}",
        op.regime.removesuffix("-bound"),
        f"{op.a:.1%}",
        f"{op.b:.1%}",
        f"{op.ratio:.1%}",
        _units_text(op.placement),
        format_seconds(sum(op.bounds_s)),
        format_seconds(sum(op.predicted_s)),
    )


def _units_text(placement: Sequence[Sequence[int]]) -> str:
    """Units of all layers in the local tier and outside it, as in "1200/48"."""
    local = sum(counts[0] for counts in placement)
    return f"{local}/{sum(map(sum, placement)) - local}"


def _memory_text(plan: Plan, tier: int) -> str:
    memory = plan.memory(tier)
    parts = ", ".join(f"{purpose} {format_bytes(size)}" for purpose, size in memory.items() if size)
    used = f"{format_bytes(sum(memory.values()))} of {format_bytes(plan.budgets[tier])}"
    return f"{used} ({parts})" if parts else used


def _shape_means(op: OpPlan) -> list[str]:
    if op.op.category == "attention":
        return ["query_heads", "kv_heads"]
    return ["rows", "cols"]


def _unit(op: OpPlan) -> str:
    return "slot" if op.op.category == "attention" else "item"


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:,.1f} GB/s"
