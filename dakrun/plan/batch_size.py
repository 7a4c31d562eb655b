"""How many requests to decode together: the batch with the most predicted tokens per second.

Knows only what the planner predicts, if not thoroughly; a batch that does not fit the budgets is
passed over.
"""

import math
from dataclasses import replace

from dakrun.config import ModelConfig, Workload
from dakrun.errors import CannotRun
from dakrun.hardware import HardwareProfile
from dakrun.plan.planner import make_plan
from dakrun.plan.policy import Policy
from dakrun.units import format_seconds

MAX_BATCH_SIZE = 1024
FINENESS = 16  # of a batch: what beside the best ones is tried


def choose_batch_size(
    model: ModelConfig,
    workload: Workload,
    profile: HardwareProfile,
    policy: Policy,
    *,
    limit: int = MAX_BATCH_SIZE,
    max_tpot: float | None = None,
) -> Workload:
    """`workload` with the best batch size out of the powers of two below `limit`, and `limit`.

    And out of some beside the best of these. Those whose predicted time per output token is above
    `max_tpot` seconds are passed over, too. Raises CannotRun where not even one request fits, or
    where it takes longer than that.
    """
    refusals: list[CannotRun] = []
    tpots: dict[int, float] = {}

    def rate(n: int) -> float:
        """Tokens per second of a batch of `n`; 0 where it is to be passed over."""
        if n not in tpots:
            tpots[n] = math.inf
            try:
                candidate = replace(workload, batch_size=n)
                plan = make_plan(model, candidate, profile, policy, thorough=False)
                tpots[n] = plan.predicted_s
            except CannotRun as refusal:
                refusals.append(refusal)
        return n / tpots[n] if max_tpot is None or tpots[n] <= max_tpot else 0.0

    best = max(candidates(limit), key=rate)
    step, least = best // 2, best // FINENESS
    while step > least:
        beside = (n for n in (best - step, best + step) if n <= limit)
        best, step = max(best, *beside, key=rate), step // 2
    if rate(best) > 0:
        return replace(workload, batch_size=best)
    fastest = min(tpots.values())
    if max_tpot is None or math.isinf(fastest):
        raise refusals[0]
    enough = fastest * 1.0005e3  # however it is rounded
    raise CannotRun(
        f"no batch is predicted to take {format_seconds(max_tpot)} per output token or less: the "
        f"fastest takes {format_seconds(fastest)}",
        hint=f"raise --max-tpot to {enough:.4g} or more, or give HBM more of the model; see: "
        "dakrun plan",
    )


def candidates(limit: int) -> list[int]:
    """The powers of two below `limit`, and `limit` (at least 1) itself."""
    limit = max(limit, 1)
    return [1 << i for i in range((limit - 1).bit_length())] + [limit]
