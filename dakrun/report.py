"""The report of a run: its plan, the measured times and rates, and the machine.

`make_report` makes the JSON of --report, which terminal/summary.py shows. Units are in the keys.
TTFT: time to first token. TPOT: time per output token. EB: effective bandwidth.
"""

import platform
import statistics
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

import torch

import dakrun
from dakrun.engine.expert_use import ExpertUse
from dakrun.engine.progress import EngineStats
from dakrun.plan import Plan, run_bound
from dakrun.plan.show.json import experts_figures, plan_dict
from dakrun.units import ceil_div

SCHEMA = 1
_MODEL_KEYS = ("name", "family", "dtype", "weight_bytes")  # keys taken from plan_dict's "model"


def make_report(
    plan: Plan,
    stats: EngineStats,
    op_seconds: Mapping[str, float],
    details: Mapping[str, Any],
    *,
    device: str,
    load_s: float,
    wall_s: float,
    fallback: str | None = None,
    use: ExpertUse | None = None,
) -> dict[str, Any]:
    """The run's report as JSON-ready data (schema 1).

    `op_seconds` are the measured seconds of a decode step by op; `details` are entries that the
    runner adds; `device` is the name of the GPU or CPU.
    `fallback` says why a GPU ran plain torch: predictions, which are those of kernels, then do not
    count. `use` has the counts of experts, if the model has any and they are counted.

    time.bound_s is the least time of the run's work (see plan.run_bound).

    EB is the model's weight bytes over the mean decode step time (arXiv 2604.26074). EB total is
    the rate of the weight and KV bytes that the steps read. Entries that need a decode step are
    None without one.
    """
    steps = len(stats.step_s)
    decode_s = sum(stats.step_s)
    step_s = decode_s / steps if steps else None
    rows = max(1, round(stats.step_rows / steps)) if steps else 1
    tiers = range(len(plan.tiers))
    weights_read = sum(op.read_at(tier, rows) for op in plan.weights() for tier in tiers)
    planned = plan_dict(plan)
    bound_s = run_bound(
        plan,
        requests=stats.requests,
        prompt_tokens=stats.prompt_tokens - stats.shared_tokens,
        new_tokens=stats.new_tokens,
        steps=steps + stats.prefill_steps,
        kv_bytes=stats.kv_bytes_read + stats.mixed_kv_bytes,
    )
    return {
        "schema": SCHEMA,
        "model": {
            **{key: planned["model"][key] for key in _MODEL_KEYS},
            "eos_token_ids": list(plan.model.eos_token_ids),
        },
        "requests": {
            "finished": stats.requests,
            "capped": stats.capped,
            "structured": stats.structured,
            "valid": stats.valid,
            "preempted": stats.preempted,
            "swapped": stats.swapped,
            "prompt_tokens": stats.prompt_tokens,
            "shared_prompt_tokens": stats.shared_tokens,
            "new_tokens": stats.new_tokens,
        },
        "time": {
            "load_s": load_s,
            "wall_s": wall_s,
            "prefill_s": stats.prefill_s,
            "prefill_steps": stats.prefill_steps,
            "mixed_steps": stats.mixed_steps,
            "bound_s": bound_s,
            "decode_s": decode_s,
            "decode_steps": steps,
            "mean_batch": stats.step_rows / steps if steps else None,
        },
        "drafts": _drafts(stats),
        "ttft_s": _spread(stats.ttft_s),
        "tpot_s": _spread(stats.tpot_s),
        "decode_step_s": _spread(stats.step_s),
        "tokens_per_s": stats.new_tokens / wall_s if wall_s > 0 else None,
        "eb_bytes_per_s": plan.weight_bytes / step_s if step_s else None,
        "eb_total_bytes_per_s": (
            (weights_read * steps + stats.kv_bytes_read) / decode_s if decode_s else None
        ),
        "predicted_step_s": plan.predicted_s,
        "predictions_comparable": plan.profile.comparable and fallback is None,
        "fallback": fallback,
        "experts": _experts(plan, use),
        **details,
        "ops": [
            {
                "name": op.op.name,
                "layers": op.op.layers,
                "bound_s": sum(op.bounds_s),
                "predicted_s": sum(op.predicted_s),
                "measured_s": None if op.transport == "staged" else op_seconds.get(op.op.name),
            }
            for op in plan.ops
        ]
        + _sampling(plan, op_seconds),
        "tiers": [
            {"name": name, **{f"{k}_bytes": v for k, v in plan.memory(number).items()}}
            for number, name in enumerate(plan.tiers)
        ],
        "plan": planned,
        "versions": {
            "dakrun": dakrun.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": version("transformers"),
            "safetensors": version("safetensors"),
        },
        "machine": {
            "device": device,
            "threads": torch.get_num_threads(),
            "system": platform.platform(),
        },
    }


def _experts(plan: Plan, use: ExpertUse | None) -> dict[str, Any] | None:
    """Experts of a layer that a decode step reads: predicted and measured; None without experts.

    `predicted_per_step` is for full batches, `predicted_at_mean_batch` for the steps that were run.
    """
    found = experts_figures(plan)
    if found is None:
        return None
    at_mean = None
    if use is not None and use.steps:
        rows = max(1, round(use.tokens / use.steps))
        chances = next(op.op.with_rows(rows).chances for op in plan.ops if op.op.chances)
        at_mean = sum(chances)
    return {
        "popularity": found["popularity"],
        "predicted_per_step": found["experts_read_per_step"],
        "predicted_at_mean_batch": at_mean,
        "measured_per_step": use and use.read_per_step(),
        "predicted_local_read_share": found["local_read_share"],
        "measured_local_read_share": use and use.local_share(plan),
    }


def _drafts(stats: EngineStats) -> dict[str, Any] | None:
    """Drafts of rows in decode steps, and those accepted; None if steps had none.

    `by_length` has, for each number of tokens drafted for a row, the rows and the tokens accepted
    in one of them.
    """
    if not (rows := sum(stats.drafts.values())):
        return None
    accepted = sum(stats.accepted_drafts.values())
    return {
        "tokens_per_step_and_row": (rows + accepted) / rows,
        "rows_with_drafts": (rows - stats.drafts[0]) / rows,
        "drafted_tokens": sum(length * count for length, count in stats.drafts.items()),
        "accepted_tokens": accepted,
        "lost_s": stats.draft_lost_s,
        "by_length": [
            {"tokens": n, "rows": count, "accepted_per_row": stats.accepted_drafts[n] / count}
            for n, count in sorted(stats.drafts.items())
            if n
        ],
    }


def _sampling(plan: Plan, op_seconds: Mapping[str, float]) -> list[dict[str, Any]]:
    """Sampling as an entry of "ops", without a bound; empty if the plan predicts no time for it."""
    if not plan.sampling_s:
        return []
    return [
        {
            "name": "sampling",
            "layers": 1,
            "bound_s": None,
            "predicted_s": plan.sampling_s,
            "measured_s": op_seconds.get("sampling"),
        }
    ]


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    """Mean, median and 99th percentile (nearest rank) in the unit of `values`."""
    if not values:
        return None
    ordered = sorted(values)
    return {
        "mean": statistics.fmean(ordered),
        "median": statistics.median(ordered),
        "p99": ordered[ceil_div(99 * len(ordered), 100) - 1],
    }
