"""A run's report for people: a summary of a few lines, or with all ops and tiers.

Knows the JSON of report.py, not how it came about. TTFT: time to first token. TPOT: time per
output token. EB: effective bandwidth.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from dakrun.tables import Column, print_table
from dakrun.units import counted, format_bytes, format_seconds

FIGURE_COLUMNS = Column("", "left"), Column("", "left", wraps=True)
ERROR_BAR = 0.10  # relative error of a prediction; the ops that exceed it are listed
MIN_ERROR = 0.05  # of a step's time: nobody waits for what is less


def render(report: Mapping[str, Any], console: Console, *, verbose: bool = False) -> None:
    """Print a summary of `report`: six lines at most in 80 columns, or all that it has."""
    if not verbose:
        print_table(console, FIGURE_COLUMNS, _figures(report), gap=2)
        return
    print_table(console, FIGURE_COLUMNS, _all_figures(report), gap=2)
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
        why = f"plain torch ran, not the kernels that are predicted: {report['fallback']}"
        if report["fallback"] is None:
            why = (
                f"profile {report['plan']['profile']['name']} has round numbers; "
                "dakrun profile --device cpu measures this machine"
            )
        console.print(f"no predictions: {why}", highlight=False, markup=False)
    elif errors := _large_errors(report["ops"]):
        console.print(
            "measured time relative to the prediction for a full batch: " + ", ".join(errors),
            highlight=False,
            markup=False,
        )


def _figures(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(name, text) of the figures that say what ran, how much, how long and how fast."""
    model, requests, times = report["model"], report["requests"], report["time"]
    profile = report["plan"]["profile"]["name"]
    return [
        ("model", f"{model['name']} ({model['dtype']}, {format_bytes(model['weight_bytes'])})"),
        ("machine", f"{report['machine']['device']}, profile {profile}, {_threads(report)}"),
        (
            "requests",
            _tokens(requests) + _valid(requests) + _capped(requests["capped"], report["plan"]),
        ),
        ("time", _times(times)),
        ("throughput", _throughput(report) + _share(report) + _drafts(report)),
    ]


def _all_figures(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(name, text) of all figures, and of the tiers."""
    requests, times, plan = report["requests"], report["time"], report["plan"]
    rows = {
        **dict(_figures(report)),
        "requests": _tokens(requests)
        + _valid(requests)
        + _shared(requests["shared_prompt_tokens"])
        + _capped(requests["capped"], plan)
        + _preempted(requests["preempted"], requests["swapped"]),
        "time": _times(times) + f" in {counted(times['decode_steps'], 'step')}",
        "TTFT": _spread_text(report["ttft_s"]),
        "TPOT": _spread_text(report["tpot_s"]),
        "decode step": _spread_text(report["decode_step_s"]) + _predicted(report),
        "EB": f"{_rate(report['eb_bytes_per_s'])}; all weight and KV bytes read "
        f"{_rate(report['eb_total_bytes_per_s'])}",
    }
    if experts := report["experts"]:
        rows["experts"] = _experts(experts, plan["tiers"][0]["name"])
        rows["experts"] += _moved(report.get("expert_moves"))
    for tier in report["tiers"]:
        parts = {k.removesuffix("_bytes"): v for k, v in tier.items() if k != "name" and v}
        text = ", ".join(f"{k} {format_bytes(v)}" for k, v in parts.items())
        rows[f"tier {tier['name']}"] = text or "empty"
    return list(rows.items())


def _experts(experts: Mapping[str, Any], local: str) -> str:
    """Experts of a layer that a step reads and where they lie, as predicted and as measured."""
    shares = [experts[f"{kind}_local_read_share"] for kind in ("predicted", "measured")]
    text = f"placed by use ({experts['popularity']}); a step is predicted to read "
    if experts["measured_per_step"] is None:
        return text + f"{experts['predicted_per_step']:.1f} in a layer, {shares[0]:.0%} in {local}"
    return (
        text + f"{experts['predicted_at_mean_batch']:.1f} in a layer, {shares[0]:.0%} in {local}; "
        f"it read {experts['measured_per_step']:.1f}, {shares[1]:.0%}"
    )


def _moved(moves: Mapping[str, Any] | None) -> str:
    """Experts that were exchanged; empty if none was."""
    if not moves or not moves["exchanged_pairs"]:
        return ""
    pairs, size = counted(moves["exchanged_pairs"], "pair"), format_bytes(moves["bytes"])
    return f"; {pairs} exchanged ({size})"


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
    return [
        f"{name} {error:+.0%}" if error < 1 else f"{name} {error + 1:.1f} times"
        for name, error in errors.items()
        if abs(error) > ERROR_BAR
    ]


def _tokens(requests: Mapping[str, Any]) -> str:
    return (
        f"{requests['finished']} finished, {requests['prompt_tokens']} prompt and "
        f"{counted(requests['new_tokens'], 'new token')}"
    )


def _throughput(report: Mapping[str, Any]) -> str:
    """New tokens per second; where prompts are only scored, their tokens."""
    scored, wall_s = report["requests"]["prompt_tokens"], report["time"]["wall_s"]
    if report["requests"]["new_tokens"] or not scored or not wall_s:
        return f"{report['tokens_per_s'] or 0:,.1f} tokens/s"
    return f"{scored / wall_s:,.1f} prompt tokens/s"


def _times(times: Mapping[str, Any]) -> str:
    return (
        f"load {_seconds(times['load_s'])}, prefill {_seconds(times['prefill_s'])}, "
        f"decode {_seconds(times['decode_s'])}"
    )


def _threads(report: Mapping[str, Any]) -> str:
    return counted(report["machine"]["threads"], "CPU thread")


def _predicted(report: Mapping[str, Any]) -> str:
    """The predicted time of a decode step; empty if it is not comparable with the measured one."""
    if not report["predictions_comparable"]:
        return ""
    return f"; predicted {_seconds(report['predicted_step_s'])} with a full batch"


def _share(report: Mapping[str, Any]) -> str:
    """The run's time, and the share of its bound that was reached.

    The share is left out where the profile's rates are not those of the device.
    """
    times = report["time"]
    text = f" in {times['wall_s']:.1f} s"
    if not report["predictions_comparable"] or not times["wall_s"]:
        return text
    share = times["bound_s"] / times["wall_s"]
    predicted = times.get("predicted_s")
    before = f" (predicted {predicted:.1f} s)" if predicted else ""
    return f"{text}{before}, {share:.0%} of the limit ({times['bound_s']:.1f} s)"


def _drafts(report: Mapping[str, Any]) -> str:
    """Tokens of a row and step; empty without drafts."""
    drafts = report.get("drafts")
    return f"; {drafts['tokens_per_step_and_row']:.2f} tokens a step and row" if drafts else ""


def _shared(count: int) -> str:
    return f"; {counted(count, 'prompt token')} shared with earlier requests" if count else ""


def _preempted(count: int, swapped: int) -> str:
    """The requests that made room for others; empty if there are none."""
    copied = f" ({swapped} copied to host memory meanwhile)" if swapped else ""
    return f"; {count} made room for others, as the KV cache was full{copied}" if count else ""


def _valid(requests: Mapping[str, Any]) -> str:
    """How many of the answers that must have a form are finished and have it."""
    if not (asked := requests["structured"]):
        return ""
    return f"; {requests['valid']} of {counted(asked, 'answer')} valid"


def _capped(count: int, plan: Mapping[str, Any]) -> str:
    """The requests that ended before their max_tokens; empty if there are none."""
    length = plan["workload"]["max_model_len_tokens"]
    return f"; {count} capped at {length} tokens, the maximum length" if count else ""


def _spread_text(spread: Mapping[str, float] | None) -> str:
    if spread is None:
        return "-"
    return ", ".join(f"{name} {format_seconds(value)}" for name, value in spread.items())


def _seconds(value: float | None) -> str:
    return "-" if value is None else format_seconds(value)


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value / 1e9:.2f} GB/s"
