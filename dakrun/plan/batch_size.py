"""How many requests to decode together: the batch with the most predicted tokens per second.

Knows only what the planner predicts; a batch that does not fit the budgets is passed over.
"""

import math
from dataclasses import replace

from dakrun.config import ModelConfig, Workload
from dakrun.errors import CannotRun
from dakrun.hardware import HardwareProfile
from dakrun.plan.planner import Policy, make_plan
from dakrun.units import format_seconds

MAX_BATCH_SIZE = 1024


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

    Those whose predicted time per output token is above `max_tpot` seconds are passed over, too. Of
    equally fast ones the smallest is taken. Raises CannotRun where not even one request fits, or
    where it takes longer than that.
    """
    best: tuple[float, Workload] | None = None
    refusal: CannotRun | None = None
    fastest = math.inf
    for batch_size in candidates(limit):
        candidate = replace(workload, batch_size=batch_size)
        try:
            tpot = make_plan(model, candidate, profile, policy).predicted_s
        except CannotRun as problem:
            refusal = refusal or problem
            continue
        fastest = min(fastest, tpot)
        within = max_tpot is None or tpot <= max_tpot
        if within and (best is None or batch_size / tpot > best[0]):
            best = batch_size / tpot, candidate
    if best is not None:
        return best[1]
    if max_tpot is None or math.isinf(fastest):
        assert refusal is not None
        raise refusal
    raise CannotRun(
        f"no batch is predicted to take {format_seconds(max_tpot)} per output token or less: the "
        f"fastest takes {format_seconds(fastest)}",
        hint=f"raise --max-tpot to {fastest * 1e3:.4g} or more, or give HBM more of the model; "
        "see: dakrun plan",
    )


def candidates(limit: int) -> list[int]:
    """The powers of two below `limit`, and `limit` (at least 1) itself."""
    limit = max(limit, 1)
    return [1 << i for i in range((limit - 1).bit_length())] + [limit]
