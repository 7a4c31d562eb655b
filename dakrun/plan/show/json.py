"""A Plan as data for scripts: pure functions that print nothing.

Key names end in units. The figures are defined in dakrun/plan/README.md.
"""

import math
from typing import Any

from dakrun.errors import CannotRun
from dakrun.formats import Rows
from dakrun.geometry import KV_BLOCK
from dakrun.hardware import HardwareProfile
from dakrun.plan.advice import Advice, Alternative, tokens_per_s
from dakrun.plan.ops import kept_positions
from dakrun.plan.plan import OpPlan, Plan
from dakrun.plan.show.overview import Comparison, Forecast, Overview
from dakrun.plan.step_time import ACCEPTANCES, draft_forecasts
from dakrun.units import format_seconds

SCHEMA = 1


def overview_dict(shown: Overview) -> dict[str, Any]:
    """The output of `dakrun plan --json`: the plan, its comparisons, and advice."""
    return {
        **_forecast_dict(shown.chosen),
        "prompts": {
            "passes_per_decode_step": shown.prompts.passes,
            "ratios_for_decode_alone": shown.prompts.changed,
        },
        "uniform": _uniform_dict(shown.uniform),
        "published": [_published_dict(other) for other in shown.published],
        "advice": _advice_dict(shown.advice),
        "drafts": drafts_figures(shown.chosen.plan),
    }


def plan_dict(plan: Plan) -> dict[str, Any]:
    """`plan` as JSON-ready data, with units in the key names.

    Ops are listed once for all layers; `units_by_layer` has each tier's units of every layer.
    """
    return _forecast_dict(Forecast.of(plan))


def _forecast_dict(forecast: Forecast) -> dict[str, Any]:
    plan = forecast.plan
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
            "quantization": _quantization_dict(plan),
            "experts": experts_figures(plan),
        },
        "workload": {
            "batch_size": plan.workload.batch_size,
            "prompt_tokens": plan.workload.prompt_len,
            "new_tokens": plan.workload.new_tokens,
            "max_model_len_tokens": plan.workload.max_model_len,
            "mean_kv_len_tokens": plan.workload.mean_kv_len,
            "kv_tokens_kept_per_slot": kept_positions(plan.workload),
            "kv_block_tokens": KV_BLOCK,
            "prefill_chunk_tokens": plan.prefill.chunk_tokens,
        },
        "profile": _profile_dict(plan),
        "strategy": plan.strategy,
        "asked_strategy": plan.policy.strategy,
        "strategy_reason": strategy_reason(plan),
        "required_ratio": plan.required_ratio,
        "ratio": plan.ratio,
        "phase": plan.phase,
        "tiers": [_tier_dict(plan, tier) for tier in range(len(plan.tiers))],
        "kv": kv_figures(plan),
        "prefill": {
            "tokens": forecast.prefill.tokens,
            "chunks": forecast.prefill.chunks,
            "transport": plan.prefill.transport,
            "flops": forecast.prefill.flops,
        },
        "bound": bound_figures(forecast),
        "predicted": predicted_figures(forecast),
        "sampling_s": plan.sampling_s,
        "waits_s": plan.waits_s,
        "ops": [_op_dict(plan, op) for op in plan.ops],
    }


def op_format(plan: Plan, op: OpPlan) -> str:
    """The format of a weight: the model's dtype, or that of its codes and scales."""
    stored = op.op.stored()
    return plan.model.dtype if isinstance(stored, Rows) else stored.name


def _quantization_dict(plan: Plan) -> dict[str, Any] | None:
    """The format of a quantized model's weights, and what of it is not applied."""
    found = plan.model.quantization
    if found is None:
        return None
    return {
        "method": found.method,
        "format": found.name,
        "costs_are_estimates": any(
            op.op.quantized and not plan.profile.measures(op.op.quantized) for op in plan.weights()
        ),
        "not_applied": list(found.unapplied),
    }


def strategy_reason(plan: Plan) -> str:
    """Meaning of the strategy of `plan`, and why it was taken."""
    fixed, free = plan.policy.kv_offload_ratio, plan.policy.offload_ratio is None
    if plan.strategy == "uniform":
        text = "one ratio for all ops, in whole units"
    elif plan.policy.strategy == "auto" and free and fixed is None:
        text = "a ratio for each op, KV slots by predicted time"
    else:
        text = "a ratio for each op"
    if fixed is not None:
        text += ", but for the KV cache, whose ratio you fixed"
    if plan.policy.strategy != "auto":
        return f"{text}; as you asked"
    if plan.ratio == 0:
        return f"{text}; chosen by auto, and of no effect as nothing is offloaded"
    others = [(name, s) for name, s in plan.tried_s.items() if name != plan.strategy]
    if not others:
        return f"{text}; the first that auto tried"
    ((other, seconds),) = others
    if math.isinf(seconds):
        return f"{text}; chosen by auto, as {other} does not fit the budgets"
    own = format_seconds(plan.predicted_s)
    return f"{text}; chosen by auto: a step takes {own}, with {other} {format_seconds(seconds)}"


def bound_figures(forecast: Forecast) -> dict[str, float]:
    """`predicted_figures` by bytes over bandwidths and FLOPs over rates alone."""
    return _figures(forecast.plan, forecast.plan.bound_s, forecast.prefill.bound_s)


def predicted_figures(forecast: Forecast) -> dict[str, float]:
    """Speed with the profile's efficiencies and fixed costs.

    TTFT is that of a whole batch (predict_prefill), tokens/s that of decode steps, and with the
    prompts of their requests (advice.tokens_per_s). EB is the model's weight bytes over the step's
    time (arXiv 2604.26074), EB total the weight and KV bytes that the step really reads over that
    time.
    """
    plan = forecast.plan
    figures = _figures(plan, plan.predicted_s, forecast.prefill.predicted_s)
    return figures | {"tokens_per_s_with_prompts": tokens_per_s(plan)}


def _figures(plan: Plan, step_s: float, ttft_s: float) -> dict[str, float]:
    read = sum(plan.read_bytes(tier) for tier in range(len(plan.tiers)))
    return {
        "ttft_s": ttft_s,
        "decode_step_s": step_s,
        "tokens_per_s": plan.workload.batch_size / step_s,
        "eb_bytes_per_s": plan.weight_bytes / step_s,
        "eb_total_bytes_per_s": read / step_s,
    }


def kv_figures(plan: Plan) -> dict[str, float]:
    """Bytes of the KV cache over all tiers, and those that a step reads from HBM and over links."""
    kv = plan.op("attention")
    tiers = range(len(plan.tiers))
    return {
        "resident_bytes": sum(kv.resident_bytes(tier) for tier in tiers),
        "hbm_read_bytes_per_step": kv.read_bytes(0),
        "link_read_bytes_per_step": sum(kv.read_bytes(tier) for tier in tiers[1:]),
    }


def experts_figures(plan: Plan) -> dict[str, Any] | None:
    """Experts of a layer, those of a token, and those that a step is expected to read.

    `read_share` is their share of the bytes of all experts, `local_read_share` what is read in HBM
    of these. None without experts.
    """
    if plan.model.mixture is None:
        return None
    routing = plan.model.mixture.routing
    placed = [op for op in plan.ops if op.op.category == "experts"]
    ops, popularity = [op.op for op in placed], plan.model.mixture.popularity
    resident = sum(op.layers * op.resident_bytes for op in ops)
    read = sum(op.layers * op.read_bytes for op in ops)
    return {
        "experts": routing.experts,
        "experts_per_token": routing.top_k,
        "popularity": popularity.source if popularity else "uniform",
        "experts_read_per_step": routing.experts * read / resident,
        "resident_bytes": resident,
        "read_bytes_per_step": read,
        "read_share": read / resident,
        "local_read_share": sum(op.read_bytes(0) for op in placed) / read,
    }


def drafts_figures(plan: Plan) -> dict[str, Any] | None:
    """Steps with drafts, by rows, and the time of a token by acceptance; None without drafts."""
    if not plan.workload.speculation.most:
        return None
    return {
        "tokens": plan.workload.speculation.most,
        "steps": [
            {
                "rows": one.rows,
                "drafts": one.drafts,
                "step_s": one.step_s,
                "plain_step_s": one.plain_s,
                "break_even_tokens_per_row": one.break_even,
                "token_s": {str(rate): one.token_s(rate) for rate in ACCEPTANCES},
            }
            for one in draft_forecasts(plan, plan.workload.speculation)
        ],
    }


def ridge(profile: HardwareProfile, plan: Plan) -> float:
    """Arithmetic intensity in FLOPs per byte at which HBM feeds the peak compute rate."""
    return profile.compute[plan.model.dtype].peak / profile.hbm_bytes_per_s


def op_eb(op: OpPlan) -> float:
    """Effective bandwidth of one op in bytes/s: bytes read by all its layers over their time."""
    return op.op.layers * op.op.read_bytes / sum(op.predicted_s)


def window(plan: Plan, op: OpPlan, tier: int) -> int | None:
    """Maximum bytes in flight of the op's direct reads from remote tier number `tier`.

    None where the op has no SMs of its own for that tier: staged, mixed, or nothing there.
    """
    if tier == 0 or op.transport == "staged" or not op.resident_bytes(tier) or op.mixed(tier):
        return None
    return plan.profile.tier(plan.tiers[tier]).window_bytes


def _profile_dict(plan: Plan) -> dict[str, Any]:
    profile, source = plan.profile, plan.profile.provenance
    return {
        "name": profile.name,
        "description": profile.description,
        "device": profile.device,
        "device_name": profile.device_name,
        "why_no_kernels": plan.why_no_kernels,
        "provenance": {"kind": source.kind, "date": source.date, "source": source.source},
        "sms": profile.sms,
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
    attention = op.op.category == "attention"
    return {
        "name": op.op.name,
        "category": op.op.category,
        "layers": layers,
        "shape": list(op.op.shape),
        "shape_means": ["query_heads", "kv_heads"] if attention else ["rows", "cols"],
        "unit": "slot" if attention else "row_block",
        "format": None if attention else op_format(plan, op),
        "units_per_layer": op.op.units,
        "units_by_layer": {
            plan.tiers[tier]: [counts[tier] for counts in op.placement] for tier in tiers
        },
        "resident_bytes": layers * op.op.resident_bytes,
        "read_bytes_per_step": layers * op.op.read_bytes,
        "flops_per_step": layers * op.op.flops,
        "arithmetic_intensity_flops_per_byte": op.op.arithmetic_intensity,
        "ridge_flops_per_byte": ridge(plan.profile, plan),
        "regime": op.regime,
        "a": op.a,
        "b": op.b,
        "ratio": op.ratio,
        "transport": op.transport,
        "tiers": [_op_tier_dict(plan, op, tier) for tier in tiers],
        "bound_s": sum(op.bounds_s),
        "predicted_s": sum(op.predicted_s),
        "eb_bytes_per_s": op_eb(op),
    }


def _op_tier_dict(plan: Plan, op: OpPlan, tier: int) -> dict[str, Any]:
    return {
        "name": plan.tiers[tier],
        "units": sum(counts[tier] for counts in op.placement),
        "resident_bytes": op.resident_bytes(tier),
        "read_bytes_per_step": op.read_bytes(tier),
        "sms": op.sms[tier],
        "mixed": op.mixed(tier),
        "window_bytes": window(plan, op, tier),
    }


def _uniform_dict(uniform: Forecast | CannotRun) -> dict[str, Any]:
    if isinstance(uniform, CannotRun):
        return {"runs": False, "reason": str(uniform)}
    return {
        "runs": True,
        "ratio": uniform.plan.ratio,
        "bound": bound_figures(uniform),
        "predicted": predicted_figures(uniform),
    }


def _published_dict(other: Comparison) -> dict[str, Any]:
    return {
        **vars(other.published),
        "efficiency": other.efficiency,
        "predicted_eb_bytes_per_s": other.expected_eb,
        "predicted_efficiency": other.expected,
        "bound_eb_bytes_per_s": other.bound_eb,
    }


def _advice_dict(advice: Advice) -> dict[str, Any]:
    return {
        "sentence": advice.sentence,
        "limited_by": advice.limits,
        "busy_shares": advice.busy,
        "alternatives": [_alternative_dict(other) for other in advice.alternatives],
    }


def _alternative_dict(other: Alternative) -> dict[str, Any]:
    return {
        "kind": other.kind,
        "change": other.change,
        "available": other.available,
        "origin": other.origin,
        "predicted_decode_step_s": other.plan.predicted_s,
        "predicted_tokens_per_s": other.plan.workload.batch_size / other.plan.predicted_s,
        "predicted_batch_tokens_per_s": tokens_per_s(other.plan),
        "gain": other.gain,
    }
