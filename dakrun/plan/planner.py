"""The planner: model, workload, machine and budgets in; a frozen Plan out.

Builds the problem, makes candidate placements (placement.py), costs each candidate (assemble.py),
chooses the fastest and assembles its Plan. The loader and the engine obey the Plan.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TypeVar

from dakrun.config import ModelConfig, Workload
from dakrun.errors import CannotRun, UsageError
from dakrun.hardware import HardwareProfile
from dakrun.plan.assemble import Candidate, assemble, cost_placement
from dakrun.plan.expected_run import ExpectedRun
from dakrun.plan.op_costs import Counts, StepCosts
from dakrun.plan.placement import all_local, place, slot_candidates
from dakrun.plan.plan import Plan, PrefillPlan
from dakrun.plan.policy import Policy, Strategy, Transport
from dakrun.plan.prefill import with_prefill
from dakrun.plan.problem import Problem
from dakrun.plan.prompt_pass import PREFILL_LAUNCH_ROWS
from dakrun.plan.staging import staging_bytes

Key = TypeVar("Key")

STEPS = (256, 64, 16, 4, 1)  # changes tried to a number of remote KV slots, one after the other
MAX_MOVES = 4  # moves by each step
MIN_OFFLOAD_GAIN = 0.02  # fraction of a step's time; a smaller gain is within prediction error
MIN_RUN_GAIN = 0.02  # fraction of a run's time; a smaller gain is within prediction error
RESERVED_PASSES = (1, 2)  # prompt passes for which HBM may be reserved, in PREFILL_LAUNCH_ROWS


def make_plan(
    model: ModelConfig,
    workload: Workload,
    profile: HardwareProfile,
    policy: Policy,
    *,
    thorough: bool = True,
    prompts: bool = True,
    run: ExpectedRun | None = None,
    max_decode_step: float | None = None,
) -> Plan:
    """Choose every op's offload ratio and transport, round to row blocks and slots, plan prefill.

    The plan has the least time of a decode step plus the prompt passes that the step carries in
    `workload`; without `prompts`, of the step alone.
    If everything fits in HBM, the plan offloads only for a gain of MIN_OFFLOAD_GAIN or more, unless
    `policy` fixes a ratio. Without `thorough` the search is much shorter, and the plan a few
    percent slower where HBM is full.

    With `run`, plans that reserve HBM to stage the matrices of prompt passes are tried too, but not
    on a CPU, for float32, or with a transport fixed by `policy`. Their decode steps are longer, up
    to `max_decode_step` seconds if given. Such a plan is taken if it shortens the run by
    MIN_RUN_GAIN or more.

    Raises CannotRun if the budgets are too small for the model, saying by how much, and UsageError
    if the workload's `max_model_len` exceeds the model's positions.
    """
    if workload.max_model_len > model.max_positions:
        raise UsageError(
            f"max model length {workload.max_model_len} is beyond the {model.max_positions} "
            f"positions of {model.name}" + (f" ({model.limited_by})" if model.limited_by else ""),
            hint=f"use --max-model-len {model.max_positions} or less",
        )
    costs = StepCosts(model, workload, profile, policy.remote_tiers(profile))
    problem = Problem.of(costs, policy, prompts=prompts)
    plan = _planned(problem, thorough)
    if run is None or plan.ratio == 0 or plan.prefill.transport == "staged":
        return plan
    if policy.transport is not None or profile.device != "cuda" or model.dtype == "float32":
        return plan
    soonest = (1 - MIN_RUN_GAIN) * run.forecast(plan).seconds
    for passes in RESERVED_PASSES:
        prefill = PrefillPlan(chunk_tokens=passes * PREFILL_LAUNCH_ROWS, transport="staged")
        with suppress(CannotRun):
            other = _planned(replace(problem, prefill=prefill), thorough)
            if max_decode_step is not None and other.predicted_s > max_decode_step:
                continue
            if (seconds := run.forecast(other).seconds) < soonest:
                plan, soonest = other, seconds
    return plan


def _planned(problem: Problem, thorough: bool) -> Plan:
    """The plan with the least time of a decode step and of the prompts that the step carries.

    Its prompt passes are the best in the HBM that placement leaves.
    """
    chosen, tried_s = _fastest(problem, thorough)
    return with_prefill(_local_if_as_fast(problem, chosen, tried_s)).with_spare_kv_blocks()


def _fastest(problem: Problem, thorough: bool) -> tuple[Candidate, dict[Strategy, float]]:
    """The fastest candidate of all narrowed problems, and the step of each strategy's fastest.

    Of the problems over the same remote tiers, the first feasible one ends the search if not
    `thorough`, or if its candidate offloads nothing: then the others cannot be faster.
    """
    candidates: list[Candidate] = []
    refusals: list[CannotRun] = []
    tried: dict[Strategy, list[Candidate]] = {}
    for part in _by_remote_tier(problem):
        first = len(candidates)
        for narrowed in _narrowed(part):
            of_strategy = tried.setdefault(narrowed.strategy, [])
            try:
                candidate = _with_buffers(narrowed, thorough)
                candidates.append(candidate.in_tiers(part.tiers, problem.tiers))
                of_strategy.append(candidates[-1])
            except CannotRun as reason:
                refusals.append(reason)
            if candidates[first:] and (not thorough or candidates[first].remote_bytes() == 0):
                break
    if not candidates:
        raise refusals[0]
    soonest = partial(min, key=lambda candidate: candidate.total_s)
    tried_s = {
        strategy: soonest(found).predicted_s if found else math.inf
        for strategy, found in tried.items()
    }
    return soonest(candidates), tried_s


def _by_remote_tier(problem: Problem) -> list[Problem]:
    """`problem`, and the same over only one of several remote tiers, if that is large enough.

    A few bytes of every op in every tier may cost more in fixed costs than they gain.
    """
    names, (local, *caps) = problem.costs.remote, problem.caps
    if len(names) == 1:
        return [problem]
    enough = (t for t, cap in zip(names, caps, strict=True) if problem.total <= local + cap)
    return [problem, *map(problem.over, enough)]


def _narrowed(problem: Problem) -> Iterator[Problem]:
    """Variants of `problem` with a strategy, and with a fixed transport or none.

    The strategy auto tries greedy and uniform: the greedy minimises bounds, so that one ratio for
    all ops may have the better prediction. A fixed transport may need smaller staging buffers, or
    none; so may staging of experts alone, of which a layer's are smaller than a head.
    """
    experts = any(op.category == "experts" and op.can_be_staged() for op in problem.costs.ops)
    strategies: tuple[Strategy, ...] = ("greedy", "uniform")
    transports: tuple[Transport | None, ...] = (None, "direct", "staged")
    for strategy in strategies if problem.strategy == "auto" else (problem.strategy,):
        for transport in transports if problem.transport is None else (problem.transport,):
            yield replace(problem, strategy=strategy, transport=transport)
        if experts and problem.transport is None:
            yield replace(problem, strategy=strategy, experts_alone=True)


def _with_buffers(problem: Problem, thorough: bool) -> Candidate:
    """The fastest candidate for which HBM has room for its staging buffers.

    Buffers take room from weights, which may lead to more staged bytes. So the search is repeated
    with the buffers reserved until they suffice.
    """
    candidate, machine = _search(problem, thorough), problem.machine
    while (needed := staging_bytes(candidate.ops, problem.prefill, *machine)) > problem.staging:
        problem = problem.with_staging(needed)
        candidate = _search(problem, thorough)
    return candidate


def _search(problem: Problem, thorough: bool) -> Candidate:
    """The fastest candidate over numbers of remote KV slots.

    Starts from the ideal numbers, rounded. If `thorough` and free to choose ratios and slots,
    climbs from the best of them: slots may take room that weights need, and the bounds that make
    numbers ideal ignore fixed costs.
    """
    most = problem.attention.units
    tried: dict[Counts, Candidate] = {}
    refusals: dict[Counts, CannotRun] = {}

    def seconds(slots: Counts) -> float:
        if slots not in tried and slots not in refusals:
            try:
                tried[slots] = cost_placement(problem, place(problem, slots))
            except CannotRun as reason:
                refusals[slots] = reason
        return tried[slots].total_s if slots in tried else math.inf

    def near(slots: Counts, step: int) -> Iterator[Counts]:
        return neighbours(slots, step, most)

    free = problem.policy.offload_ratio is None and problem.policy.kv_offload_ratio is None
    climbs = thorough and free and problem.free_slots
    steps = [step for step in STEPS if step <= most] if climbs else []
    best = climb(slot_candidates(problem), seconds, near, steps)
    if best not in tried:
        raise refusals[best]
    return tried[best]


def climb(
    starts: Sequence[Key],
    seconds: Callable[[Key], float],
    near: Callable[[Key, int], Iterable[Key]],
    steps: Iterable[int],
) -> Key:
    """The best of `starts`, improved by up to MAX_MOVES moves of each step (hill climbing).

    `near(key, step)` are the keys one step away; `seconds` is to be minimised.
    """
    best = min(starts, key=seconds)
    for step in steps:
        for _ in range(MAX_MOVES):
            other = min((best, *near(best, step)), key=seconds)
            if other == best:
                break
            best = other
    return best


def neighbours(slots: Counts, step: int, most: int) -> Iterator[Counts]:
    """`slots` with `step` more or fewer in one tier, at most `most` in all."""
    for tier, by in itertools.product(range(len(slots)), (-step, step)):
        other = (*slots[:tier], slots[tier] + by, *slots[tier + 1 :])
        if other[tier] >= 0 and sum(other) <= most:
            yield other


def _local_if_as_fast(
    problem: Problem, chosen: Candidate, tried_s: Mapping[Strategy, float]
) -> Plan:
    """The plan of `chosen`, or of everything in HBM where offloading gains too little.

    The gain is that of decode steps, less what their prompts lose. The choice exists only where
    everything fits and `problem`'s policy fixes no ratio.
    """
    policy, plan = problem.policy, assemble(problem, chosen, tried_s)
    free = policy.offload_ratio is None and policy.kv_offload_ratio is None
    if not free or plan.required_ratio > 0 or plan.ratio == 0:
        return plan
    alone = cost_placement(replace(problem, strategy=chosen.strategy), all_local(problem))
    local = assemble(problem, alone, tried_s, forgone=plan)
    gain = (alone.total_s - chosen.total_s) / local.predicted_s
    return plan if gain >= MIN_OFFLOAD_GAIN else local
