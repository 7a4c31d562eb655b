"""The batch size with the most predicted tokens per second.

Compares quick plans of the planner; batches that do not fit the budgets are skipped.
"""

import math
from dataclasses import replace

from dakrun.config import ModelConfig, Workload
from dakrun.errors import CannotRun
from dakrun.hardware import HardwareProfile
from dakrun.plan.planner import make_plan
from dakrun.plan.policy import Policy
from dakrun.units import format_seconds

MAX_BATCH_SIZE = 2048
FINENESS = 16  # steps are halved as long as they exceed the best power of two / FINENESS


def choose_batch_size(
    model: ModelConfig,
    workload: Workload,
    profile: HardwareProfile,
    policy: Policy,
    *,
    limit: int = MAX_BATCH_SIZE,
    max_decode_step: float | None = None,
) -> Workload:
    """`workload` with the best batch size up to `limit`.

    Tries the powers of two and `limit`, then sizes around the best of them by halving steps. Skips
    sizes with a predicted decode step above `max_decode_step` seconds. Raises CannotRun where no
    size fits the budgets, or none is fast enough.
    """
    refusals: list[CannotRun] = []
    steps_s: dict[int, float] = {}

    def rate(n: int) -> float:
        """Tokens per second of a batch of `n`; 0 where it is skipped."""
        if n not in steps_s:
            steps_s[n] = math.inf
            try:
                candidate = replace(workload, batch_size=n)
                plan = make_plan(model, candidate, profile, policy, thorough=False)
                steps_s[n] = plan.predicted_s
            except CannotRun as refusal:
                refusals.append(refusal)
        return n / steps_s[n] if max_decode_step is None or steps_s[n] <= max_decode_step else 0.0

    best = max(batch_candidates(limit), key=rate)
    step, least = best // 2, best // FINENESS
    while step > least:
        around = (n for n in (best - step, best + step) if n <= limit)
        best, step = max(best, *around, key=rate), step // 2
    if rate(best) > 0:
        return replace(workload, batch_size=best)
    fastest = min(steps_s.values())
    if max_decode_step is None or math.isinf(fastest):
        raise refusals[0]
    enough = fastest * 1.0005e3  # ms, with a margin for rounding
    raise CannotRun(
        "no batch size is predicted to have a decode step of "
        f"{format_seconds(max_decode_step)} or less: the fastest takes {format_seconds(fastest)}",
        hint=f"raise --max-decode-step to {enough:.4g} or more, or raise --hbm-budget; "
        "dakrun plan shows what limits the speed",
    )


def batch_candidates(limit: int) -> list[int]:
    """The powers of two below `limit`, and `limit` (at least 1) itself."""
    limit = max(limit, 1)
    return [1 << i for i in range((limit - 1).bit_length())] + [limit]
