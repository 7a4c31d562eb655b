"""The report of a run: its plan, the measured times and rates, and the machine.

`make_report` makes the JSON of --report, `render` prints a summary. Units are in the keys.
TTFT: time to first token. TPOT: time per output token. EB: effective bandwidth.
"""

import platform
import statistics
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

import torch
from rich.console import Console

import dakrun
from dakrun.engine.progress import EngineStats
from dakrun.plan import Plan, run_bound
from dakrun.plan.show import plan_dict
from dakrun.tables import Column, print_table
from dakrun.units import ceil_div, format_bytes, format_seconds

SCHEMA = 1
_MODEL_KEYS = ("name", "family", "dtype", "weight_bytes")  # keys taken from plan_dict's "model"
FIGURE_COLUMNS = Column("", "left"), Column("", "left", wraps=True)
ERROR_BAR = 0.10  # relative error of a prediction; `render` lists the ops that exceed it
MIN_ERROR = 0.01  # of a step's time


def make_report(
    plan: Plan,
    stats: EngineStats,
    op_seconds: Mapping[str, float],
    details: Mapping[str, Any],
    *,
    device: str,
    load_s: float,
    wall_s: float,
) -> dict[str, Any]:
    """The run's report as JSON-ready data (schema 1).

    `op_seconds` are the measured seconds of a decode step by op; `details` are entries that the
    runner adds; `device` is the name of the GPU or CPU.

    time.bound_s is the least time of the run's work (see plan.run_bound).

    EB is the model's weight bytes over the mean decode step time (arXiv 2604.26074). EB total is
    the rate of the weight and KV bytes that the steps read. Entries that need a decode step are
    None without one.
    """
    steps = len(stats.step_s)
    decode_s = sum(stats.step_s)
    step_s = decode_s / steps if steps else None
    weights_read = sum(op.read_bytes(t) for op in plan.weights() for t in range(len(plan.tiers)))
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
        "ttft_s": _spread(stats.ttft_s),
        "tpot_s": _spread(stats.tpot_s),
        "decode_step_s": _spread(stats.step_s),
        "tokens_per_s": stats.new_tokens / wall_s if wall_s > 0 else None,
        "eb_bytes_per_s": plan.weight_bytes / step_s if step_s else None,
        "eb_total_bytes_per_s": (
            (weights_read * steps + stats.kv_bytes_read) / decode_s if decode_s else None
        ),
        "predicted_step_s": plan.predicted_s,
        "predictions_comparable": plan.profile.comparable,
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


def render(report: Mapping[str, Any], console: Console) -> None:
    """Print a summary of `report`."""
    print_table(console, FIGURE_COLUMNS, _figures(report), gap=2)
    comparable = report["predictions_comparable"]
    times = ("bound", "predicted", "measured") if comparable else ("measured",)
    rows = [
        (op["name"], str(op["layers"]), *(_seconds(op[f"{time}_s"]) for time in times))
        for op in report["ops"]
    ]
    columns = Column("op", "left"), *map(Column, ("layers", *times))
    console.print("Per decode step", highlight=False)
    print_table(console, columns, rows, gap=2)
    if not comparable:
        console.print(
            f"no predictions: profile {report['plan']['profile']['name']} has round numbers; "
            "dakrun profile --device cpu measures this machine",
            highlight=False,
            markup=False,
        )
    elif errors := _large_errors(report["ops"]):
        console.print(
            "measured time relative to the prediction for a full batch: " + ", ".join(errors)
        )


def _large_errors(ops: Sequence[Mapping[str, Any]]) -> list[str]:
    """The ops whose time differs from the prediction by more than ERROR_BAR, and by how much.

    Those with an error of less than MIN_ERROR of the whole step are left out.
    """
    known = [op for op in ops if op["measured_s"] and op["predicted_s"]]
    least = MIN_ERROR * sum(op["measured_s"] for op in known)
    errors = {
        op["name"]: op["measured_s"] / op["predicted_s"] - 1
        for op in known
        if abs(op["measured_s"] - op["predicted_s"]) >= least
    }
    return [f"{name} {error:+.0%}" for name, error in errors.items() if abs(error) > ERROR_BAR]


def _figures(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(name, text) of the run's figures and tiers."""
    model, requests, times = report["model"], report["requests"], report["time"]
    plan = report["plan"]
    rows = {
        "model": f"{model['name']} ({model['dtype']}, {format_bytes(model['weight_bytes'])})",
        "machine": f"{report['machine']['device']}, profile {plan['profile']['name']}, "
        f"{report['machine']['threads']} CPU threads",
        "requests": f"{requests['finished']} finished, {requests['prompt_tokens']} prompt and "
        f"{requests['new_tokens']} new tokens"
        + _shared(requests["shared_prompt_tokens"])
        + _capped(requests["capped"], plan)
        + _preempted(requests["preempted"], requests["swapped"]),
        "time": f"load {_seconds(times['load_s'])}, prefill {_seconds(times['prefill_s'])}, "
        f"decode {_seconds(times['decode_s'])} in {times['decode_steps']} steps",
        "TTFT": _spread_text(report["ttft_s"]),
        "TPOT": _spread_text(report["tpot_s"]),
        "decode step": _spread_text(report["decode_step_s"]) + _predicted(report),
        "throughput": f"{report['tokens_per_s'] or 0:.1f} tokens/s" + _share(report),
        "EB": f"{_rate(report['eb_bytes_per_s'])}; all weight and KV bytes read "
        f"{_rate(report['eb_total_bytes_per_s'])}",
    }
    for tier in report["tiers"]:
        parts = {k.removesuffix("_bytes"): v for k, v in tier.items() if k != "name" and v}
        text = ", ".join(f"{k} {format_bytes(v)}" for k, v in parts.items())
        rows[f"tier {tier['name']}"] = text or "empty"
    return list(rows.items())


def _predicted(report: Mapping[str, Any]) -> str:
    """The predicted time of a decode step; empty if it is not comparable with the measured one."""
    if not report["predictions_comparable"]:
        return ""
    return f"; predicted {_seconds(report['predicted_step_s'])} with a full batch"


def _share(report: Mapping[str, Any]) -> str:
    """The share of the run's bound; empty where the profile's rates are not those of the device."""
    times = report["time"]
    if not report["predictions_comparable"] or not times["wall_s"]:
        return ""
    share = times["bound_s"] / times["wall_s"]
    predicted = times.get("predicted_s")
    before = f" (predicted {predicted:.1f} s)" if predicted else ""
    bound = f"{share:.0%} of what arithmetic, memory and link allow ({times['bound_s']:.1f} s)"
    return f" in {times['wall_s']:.1f} s{before}, {bound}"


def _shared(count: int) -> str:
    return f"; {count} prompt tokens shared with earlier requests" if count else ""


def _preempted(count: int, swapped: int) -> str:
    """The requests that made room for others; empty if there are none."""
    copied = f" ({swapped} copied to host memory meanwhile)" if swapped else ""
    return f"; {count} made room for others, as the KV cache was full{copied}" if count else ""


def _capped(count: int, plan: Mapping[str, Any]) -> str:
    """The requests that ended before their max_tokens; empty if there are none."""
    length = plan["workload"]["max_model_len_tokens"]
    return f"; {count} capped at {length} tokens, the maximum length" if count else ""


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


def _spread_text(spread: Mapping[str, float] | None) -> str:
    if spread is None:
        return "-"
    return ", ".join(f"{name} {format_seconds(value)}" for name, value in spread.items())


def _seconds(value: float | None) -> str:
    return "-" if value is None else format_seconds(value)


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value / 1e9:.2f} GB/s"
