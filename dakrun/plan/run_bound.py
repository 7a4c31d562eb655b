"""The least seconds of a whole run, by arithmetic, memory and links alone.

Takes counts of what was done, or will be; knows neither files nor the engine.
"""

from dataclasses import replace

from dakrun.geometry import TILED_MAX_ROWS
from dakrun.hardware import LOCAL
from dakrun.plan.plan import Plan
from dakrun.plan.roofline import Links


def run_bound(
    plan: Plan, *, requests: int, prompt_tokens: int, new_tokens: int, steps: int, kv_bytes: float
) -> float:
    """Seconds that a run of `steps` steps takes at least: the longest of run_limits()."""
    limits = run_limits(
        plan, requests=requests, prompt_tokens=prompt_tokens, new_tokens=new_tokens, steps=steps,
        kv_bytes=kv_bytes,
    )  # fmt: skip
    return max(limits.values())


def run_limits(
    plan: Plan, *, requests: int, prompt_tokens: int, new_tokens: int, steps: int, kv_bytes: float
) -> dict[str, float]:
    """Seconds that a run of `steps` steps takes at least, by what it waits for.

    That is "arithmetic", or the name of a tier:

        max(FLOPs of products / P + KV bytes / B_g,   P: the rate with many rows, B_g: HBM's
            steps * local weight bytes / B_g + KV bytes / B_g,
            steps * weight bytes behind a link / its rate, for each link)

    Products multiply every token but the last of each request; the head only rows that choose a
    token. `kv_bytes` are those that decode rows read; prompts' own attention is left out. Experts
    are those that the mean number of decode rows is expected to choose.
    """
    links = Links.of(plan.profile, plan.tiers[1:])
    rate = plan.profile.compute[plan.model.dtype].at(TILED_MAX_ROWS)
    flops = 0.0
    for op in plan.weights():
        inside = op.op.in_layer or op.op.name == "project_in"
        rows = prompt_tokens + new_tokens - requests if inside else new_tokens
        flops += op.op.layers * op.op.flops / op.op.batch_size * rows
    rows = max(1, min(plan.workload.batch_size, new_tokens // max(1, steps)))
    least = [replace(op, transport="direct") for op in plan.weights()]  # copies may bring more
    read = [sum(op.read_at(tier, rows) for op in least) for tier in range(len(plan.tiers))]
    local = links.direct[LOCAL]
    return {
        "arithmetic": flops / rate + kv_bytes / local,
        plan.tiers[0]: (steps * read[0] + kv_bytes) / local,
        **{
            tier: steps * size / max(links.direct[tier], links.staged[tier])
            for tier, size in zip(plan.tiers[1:], read[1:], strict=True)
        },
    }
