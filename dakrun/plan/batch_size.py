"""How many requests to decode together: the batch with the most predicted tokens per second.

Knows only what the planner predicts; a batch that does not fit the budgets is passed over.
"""

from dataclasses import replace

from dakrun.config import ModelConfig, Workload
from dakrun.errors import CannotRun
from dakrun.hardware import HardwareProfile
from dakrun.plan.planner import Policy, make_plan

MAX_BATCH_SIZE = 512


def choose_batch_size(
    model: ModelConfig,
    workload: Workload,
    profile: HardwareProfile,
    policy: Policy,
    *,
    limit: int = MAX_BATCH_SIZE,
) -> Workload:
    """`workload` with the best batch size out of the powers of two below `limit`, and `limit`.

    Of equally fast ones the smallest is taken. Raises CannotRun where not even one request fits.
    """
    best: tuple[float, Workload] | None = None
    refusal: CannotRun | None = None
    for batch_size in candidates(limit):
        candidate = replace(workload, batch_size=batch_size)
        try:
            rate = batch_size / make_plan(model, candidate, profile, policy).predicted_s
        except CannotRun as problem:
            refusal = refusal or problem
            continue
        if best is None or rate > best[0]:
            best = rate, candidate
    if best is None:
        assert refusal is not None
        raise refusal
    return best[1]


def candidates(limit: int) -> list[int]:
    """The powers of two below `limit`, and `limit` (at least 1) itself."""
    limit = max(limit, 1)
    return [1 << i for i in range((limit - 1).bit_length())] + [limit]
