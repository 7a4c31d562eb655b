"""The time of decode steps of fewer rows than a plan's batch, and of several tokens a row.

A step that verifies k drafts of a row computes 1 + k tokens, and keeps those up to the first that
its draft did not foresee. The placement is a plan's. Knows neither texts nor the engine.
"""

import functools
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dakrun.config import Speculation
from dakrun.geometry import PROMPT_PART_ROWS, TILED_MAX_ROWS
from dakrun.plan.footprint import DRAFTING_ROWS, VERIFIED_TOKENS
from dakrun.plan.op_costs import StepCosts
from dakrun.plan.plan import Plan
from dakrun.plan.roofline import op_cost, sampling_time
from dakrun.units import ceil_div

PROMPT_EFFICIENCY = 0.4  # of the arithmetic of attention with several queries of a request
ACCEPTANCES = (0.5, 0.8, 0.95)  # for which figures are shown
FEWER_DRAFTS = (1, 3, 7, 15)  # of a row, besides the most
EXPECTED_ACCEPTANCE = 0.8  # for which the number of drafts is chosen


class StepTimes:
    """Predicted seconds of a plan's steps; rows have the cached positions that it expects."""

    def __init__(self, plan: Plan) -> None:
        self._plan, self._attention = plan, plan.op("attention")
        seconds, _ = op_cost(self._attention.op, plan.profile)
        self._launches_s = self._attention.op.layers * seconds
        read_s = sum(self._attention.predicted_s) - self._launches_s
        self._row_s = read_s / plan.workload.batch_size

    @functools.cache  # noqa: B019  of one plan
    def step(self, rows: int, tokens: int = 1) -> float:
        """Seconds of a step of `rows` rows with `tokens` tokens each."""
        plan, count = self._plan, rows * tokens
        sampling = sampling_time(plan.model, count, plan.profile)
        return plan.waits_s + sampling + self.products(count) + self._attend(rows, tokens)

    @functools.cache  # noqa: B019
    def products(self, tokens: int) -> float:
        """Seconds of all ops but attention, in a step of `tokens` tokens of all its rows."""
        plan = self._plan
        workload = replace(plan.workload, batch_size=tokens)
        costs = StepCosts(plan.model, workload, plan.profile, plan.tiers[1:])
        ops = {op.name: op for op in costs.ops}
        return sum(
            sum(costs.placed(ops[op.op.name], op.placement, op.transport).predicted_s)
            for op in plan.weights()
        )

    def _attend(self, rows: int, tokens: int) -> float:
        """Seconds of attention of `rows` rows; a row's keys and values are read once.

        With several tokens the kernel multiplies whole parts of queries of a KV head.
        """
        read = self._launches_s + rows * self._row_s
        if tokens == 1:
            return read
        plan, op = self._plan, self._attention.op
        queries = float(tokens)
        if plan.profile.device == "cuda":
            group = plan.model.num_heads // plan.model.num_kv_heads
            part = max(1, PROMPT_PART_ROWS // group)
            queries = ceil_div(tokens, part) * PROMPT_PART_ROWS / group
        flops = op.layers * op.flops / plan.workload.batch_size * rows * queries
        rate = PROMPT_EFFICIENCY * plan.profile.compute[plan.model.dtype].at(TILED_MAX_ROWS)
        return max(read, self._launches_s + flops / rate)


def tokens_kept(acceptance: float, drafts: int) -> float:
    """Tokens that a step with `drafts` drafts of a row is expected to give the row.

    `acceptance` is the chance that a draft is right if all drafts before it are. So the number is
    the sum of the powers of `acceptance` (Leviathan et al. 2023, arXiv 2211.17192, equation 1).
    """
    return sum(acceptance**i for i in range(drafts + 1))


@dataclass(frozen=True, kw_only=True)
class DraftForecast:
    """Steps of `rows` rows: `plain_s` seconds without drafts, `step_s` with `drafts` a row."""

    rows: int
    drafts: int
    plain_s: float
    step_s: float

    @property
    def break_even(self) -> float:
        """Drafts save time if a step gives a row more tokens than this."""
        return self.step_s / self.plain_s

    @property
    def cost(self) -> float:
        """Share of a step without drafts by which one more token of each row makes it longer."""
        return max(0.0, self.break_even - 1) / self.drafts

    def token_s(self, acceptance: float) -> float:
        """Seconds of a step over the tokens that it is expected to give a row."""
        return self.step_s / tokens_kept(acceptance, self.drafts)


def draft_forecasts(plan: Plan, speculation: Speculation) -> list[DraftForecast]:
    """Steps of 1, 2, 4, ... rows with drafts, up to the most rows that have any.

    The rows have `speculation.most` drafts each, or as many as VERIFIED_TOKENS allow. With `fewer`
    they have the number with which a token takes least time at EXPECTED_ACCEPTANCE.
    """
    if not speculation.most:
        return []
    most, times = min(plan.workload.batch_size, DRAFTING_ROWS), StepTimes(plan)
    found = list[DraftForecast]()
    for rows in [*(1 << i for i in range((most - 1).bit_length())), most]:
        room = min(speculation.most, VERIFIED_TOKENS // rows - 1)
        numbers = [k for k in FEWER_DRAFTS if k < room] if speculation.fewer else []
        plain, steps = times.step(rows), [(k, times.step(rows, 1 + k)) for k in [*numbers, room]]
        some = [DraftForecast(rows=rows, drafts=k, plain_s=plain, step_s=step) for k, step in steps]
        found.append(min(some, key=lambda one: one.token_s(EXPECTED_ACCEPTANCE)))
    return found


def drafts_of(forecasts: Sequence[DraftForecast], rows: int) -> int:
    """Drafts of a row in steps of `rows` rows, of `forecasts` by rising rows; 0 beyond them."""
    size = bisect_left(forecasts, rows, key=lambda one: one.rows)
    return forecasts[size].drafts if size < len(forecasts) else 0
