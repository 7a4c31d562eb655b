"""The batch size with the most predicted tokens per second, in full steps or over a whole run.

Compares quick plans of the planner; batches that do not fit the budgets are skipped.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace

from dakrun.config import ModelConfig, Workload
from dakrun.errors import CannotRun
from dakrun.geometry import KV_BLOCK
from dakrun.hardware import HardwareProfile
from dakrun.plan.expected_run import ExpectedRun
from dakrun.plan.ops import kept_positions
from dakrun.plan.plan import Plan
from dakrun.plan.planner import MIN_RUN_GAIN, make_plan
from dakrun.plan.policy import Policy
from dakrun.units import format_seconds

MAX_BATCH_SIZE = 2048
KEPT_SHARES = 7 / 8, 3 / 4, 5 / 8, 1 / 2  # of the KV blocks that slots need for expected ends
FINENESS = 16  # steps are halved as long as they exceed the best power of two / FINENESS


def choose_batch_size(
    model: ModelConfig,
    workload: Workload,
    profile: HardwareProfile,
    policy: Policy,
    *,
    limit: int = MAX_BATCH_SIZE,
    max_decode_step: float | None = None,
    run: ExpectedRun | None = None,
) -> Workload:
    """`workload` with the best batch size up to `limit`: that with the most tokens per second.

    Tries the powers of two and `limit`, then sizes around the best of them by halving steps. Skips
    sizes with a predicted decode step above `max_decode_step` seconds. Without a `run`, tokens per
    second are those of full steps. With one they are the run's: its last requests do not fill a
    large batch, whose KV cache took room from weights all along. Then a size that offloads nothing
    is preferred to one whose run is shorter by less than MIN_RUN_GAIN. Last, as many KV blocks are
    tried with more slots. Raises CannotRun where no size fits the budgets, or none is fast enough.
    """
    refusals: list[CannotRun] = []
    plans: dict[int, Plan | None] = {}

    def rate(n: int) -> float:
        """Tokens per second of a batch of `n`; 0 where it is skipped."""
        if n not in plans:
            try:
                candidate = replace(workload, batch_size=n)
                plans[n] = make_plan(model, candidate, profile, policy, thorough=False)
            except CannotRun as refusal:
                plans[n] = None
                refusals.append(refusal)
        if (plan := plans[n]) is None:
            return 0.0
        enough = max_decode_step is None or plan.predicted_s <= max_decode_step
        return n / plan.predicted_s if enough else 0.0

    best = _best_around(max(batch_candidates(limit), key=rate), rate, limit)
    if rate(best) > 0:
        if run is None or not run.requests:
            return replace(workload, batch_size=best)
        best = _best_for_run(run, best, rate, plans, limit)
        plan = plans[best]
        assert plan is not None

        def more_slots(workload: Workload) -> Plan | None:
            with suppress(CannotRun):
                found = make_plan(model, workload, profile, policy, thorough=False)
                if max_decode_step is None or found.predicted_s <= max_decode_step:
                    return found
            return None

        return _crowded(run, plan, more_slots, limit)
    steps_s = [plan.predicted_s for plan in plans.values() if plan]
    if max_decode_step is None or not steps_s:
        raise refusals[0]
    fastest = min(steps_s)
    enough = fastest * 1.0005e3  # ms, with a margin for rounding
    raise CannotRun(
        "no batch size is predicted to have a decode step of "
        f"{format_seconds(max_decode_step)} or less: the fastest takes {format_seconds(fastest)}",
        hint=f"raise --max-decode-step to {enough:.4g} or more, or raise --hbm-budget; "
        "dakrun plan shows what limits the speed",
    )


def _best_around(best: int, rate: Callable[[int], float], limit: int) -> int:
    """The size with the highest `rate` of `best` and those around it, by halving steps."""
    step, least = best // 2, best // FINENESS
    while step > least:
        around = (n for n in (best - step, best + step) if n <= limit)
        best, step = max(best, *around, key=rate), step // 2
    return best


def _best_for_run(
    run: ExpectedRun,
    best: int,
    rate: Callable[[int], float],
    plans: Mapping[int, Plan | None],
    limit: int,
) -> int:
    """The size with the shortest run, or the shortest run without offloading if about as short.

    About: longer by up to MIN_RUN_GAIN. `rate(n)` is that of full steps, the highest for `best`,
    and makes the plan of size n. `plans` has those made so far.
    """
    highest = rate(best)
    rates: dict[int, float] = {}

    def run_rate(n: int) -> float:
        """New tokens per second of the run; 0 if even its full steps are slower than the best."""
        if n not in rates:
            full, plan = rate(n), plans[n]
            slow = plan is None or full <= max([highest / 2, *rates.values()])
            rates[n] = 0.0 if slow or plan is None else run.forecast(plan).tokens_per_s
        return rates[n]

    run_rate(best)
    tried = sorted(plans, key=rate, reverse=True)
    soonest = _best_around(max(tried, key=run_rate), run_rate, limit)
    least = (1 - MIN_RUN_GAIN) * run_rate(soonest)
    short = {n: plan for n, plan in plans.items() if plan and rates.get(n, 0.0) >= least}
    return min(short, key=lambda n: (short[n].ratio > 0, -rates[n]))


def _crowded(
    run: ExpectedRun, plan: Plan, plan_of: Callable[[Workload], Plan | None], limit: int
) -> Workload:
    """The workload of `plan`, or one with more slots for as many KV blocks if the run is shorter.

    By MIN_RUN_GAIN or more. Requests reach their ends at different times, and until then have fewer
    blocks: so blocks for the ends of B requests are enough for more than B.
    """
    work, blocks = plan.workload, kept_positions(plan.workload) // KV_BLOCK
    rates = {work: run.forecast(plan).tokens_per_s * (1 + MIN_RUN_GAIN)}
    for kept in dict.fromkeys(max(1, round(share * blocks)) for share in KEPT_SHARES):
        slots = min(limit, work.batch_size * blocks // kept)
        crowded = replace(work, batch_size=slots, kept_len=kept * KV_BLOCK)
        if slots > work.batch_size and (found := plan_of(crowded)):
            rates[crowded] = run.forecast(found).tokens_per_s
    return max(rates, key=rates.__getitem__)


def batch_candidates(limit: int) -> list[int]:
    """The powers of two below `limit`, and `limit` (at least 1) itself."""
    limit = max(limit, 1)
    return [1 << i for i in range((limit - 1).bit_length())] + [limit]
