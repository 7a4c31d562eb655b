"""The planner: model, workload, machine and budgets in; a frozen Plan out.

The loader and the engine obey the Plan; nothing else decides where an octet or a slot lies.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from dakrun.config import ModelConfig, Workload
from dakrun.errors import CannotRun, UsageError
from dakrun.hardware import HardwareProfile
from dakrun.plan.assemble import Counts, assemble
from dakrun.plan.greedy import best_total, greedy_shares, uniform_shares
from dakrun.plan.ops import Op
from dakrun.plan.plan import OpPlan, Plan
from dakrun.plan.policy import Policy, Strategy
from dakrun.plan.prefill_choice import staging_bytes, with_prefill
from dakrun.plan.problem import Problem
from dakrun.plan.rounding import RemoteBytes, remote_bytes, round_shares, split_units
from dakrun.plan.settle import settled

__all__ = ["OpPlan", "Plan", "Policy", "make_plan"]

MOVES = 4  # from ideal numbers of slots to better ones
FEW_SLOTS = 8  # of more, one more or less counts for little
WORTH = 0.02  # of a step: what predictions are off by. A remote share for less could make it slower


def make_plan(
    model: ModelConfig, workload: Workload, profile: HardwareProfile, policy: Policy
) -> Plan:
    """Choose every op's offload ratio and transport, round to octets and slots, and plan prefill.

    Raises CannotRun where the budgets do not hold the model, saying by how much, and UsageError
    where the workload does not suit the model. What needs no remote tier gets one only for a gain
    that is WORTH it.
    """
    if workload.max_model_len > model.max_positions:
        raise UsageError(
            f"max model length {workload.max_model_len} is beyond the {model.max_positions} "
            f"positions of {model.name}",
            hint=f"use --max-model-len {model.max_positions} or less",
        )
    return with_prefill(_decode_plan(model, workload, profile, policy))


def _decode_plan(
    model: ModelConfig, workload: Workload, profile: HardwareProfile, policy: Policy
) -> Plan:
    plan, staging = _best_plan(Problem(model, workload, profile, policy, 0)), 0
    while (needed := staging_bytes(plan)) > staging:
        staging = needed
        plan = _best_plan(Problem(model, workload, profile, policy, staging))
    if staging and policy.transport is None:  # without the buffers less has to be remote
        direct = _best_plan(
            Problem(model, workload, profile, replace(policy, transport="direct"), 0)
        )
        if direct.predicted_s < plan.predicted_s:
            plan = replace(direct, policy=policy)
    free = policy.offload_ratio is None and policy.kv_offload_ratio is None
    if not free or plan.required_ratio > 0 or plan.ratio == 0:
        return plan
    local = replace(policy, offload_ratio=0.0)
    alone = _best_plan(Problem(model, workload, profile, local, 0))
    gain = 1 - plan.predicted_s / alone.predicted_s
    return plan if gain >= WORTH else replace(alone, policy=policy, forgone=plan)


def _best_plan(problem: Problem) -> Plan:
    """The fastest of the plans with different numbers of remote KV slots.

    The greedy knows bounds, and is not to be predicted to be slower than with a ratio that is asked
    for in every op; nor, where the transport is free and something has to be remote, than what it
    chooses for either.
    """
    plans: list[Plan] = []
    refusals: list[CannotRun] = []
    for choosing, strategy in _choices(problem):
        try:
            found = _plans_by_slots(problem, choosing, strategy)
        except CannotRun as reason:
            refusals.append(reason)
            continue
        plans += (plan for plan in found if isinstance(plan, Plan))
        refusals += (reason for reason in found if isinstance(reason, CannotRun))
    if not plans:
        raise refusals[0]
    return min(plans, key=lambda plan: plan.predicted_s)


def _plans_by_slots(
    problem: Problem, choosing: Problem, strategy: Strategy
) -> list[Plan | CannotRun]:
    """Those with the ideal numbers of remote slots, or why there are none.

    And, of few slots and where no ratio is asked for, with others beside the best of these, as long
    as that makes it faster: whole slots may take room that weights need, which the ideal shares do
    not tell.
    """
    found: dict[Counts, Plan | CannotRun] = {}

    def add(slots: Counts) -> None:
        try:
            found[slots] = assemble(problem, _placements(choosing, slots, strategy))
        except CannotRun as reason:
            found[slots] = reason

    def best() -> Counts:
        return min(found, key=lambda slots: getattr(found[slots], "predicted_s", math.inf))

    for slots in _slot_choices(choosing, strategy):
        add(slots)
    policy, most = problem.policy, problem.workload.batch_size
    asked = policy.offload_ratio is not None or policy.kv_offload_ratio is not None
    for _ in range(0 if asked or most > FEW_SLOTS else MOVES):
        start = best()
        for slots in _beside(start, most):
            if slots not in found:
                add(slots)
        if best() == start:
            break
    return list(found.values())


def _beside(slots: Counts, most: int) -> Iterator[Counts]:
    """`slots` with one more or less in one tier, `most` in all."""
    for tier, by in itertools.product(range(len(slots)), (-1, 1)):
        near = (*slots[:tier], slots[tier] + by, *slots[tier + 1 :])
        if near[tier] >= 0 and sum(near) <= most:
            yield near


def _choices(problem: Problem) -> Iterator[tuple[Problem, Strategy]]:
    """By whose bounds placements of `problem` are chosen, and how."""
    policy = problem.policy
    yield problem, policy.strategy
    if policy.offload_ratio is not None and policy.strategy == "greedy":
        yield problem, "uniform"
    required = policy.offload_ratio is not None or problem.total > problem.caps[0]
    if required and policy.transport is None:
        yield problem.by("direct"), policy.strategy
        yield problem.by("staged"), policy.strategy


def _ideal(
    problem: Problem,
    ops: list[Op],
    wanted: float | None,
    caps: Sequence[float],
    strategy: Strategy,
) -> list[tuple[float, ...]]:
    """Share of every tier for each op, before rounding; `wanted` fixes the remote bytes."""
    resident = sum(op.layers * op.resident_bytes for op in ops)
    uniform = strategy == "uniform"
    required, limit = max(0.0, resident - caps[0]), max(0.0, sum(caps[1:]))
    if len(problem.remote) == 1:
        curves = [problem.curves[op.name] for op in ops]
        auto = min(max(best_total(curves), required), limit, resident)
        choose = uniform_shares if uniform else greedy_shares
        return [(1 - x, x) for x in choose(curves, auto if wanted is None else wanted)]
    from dakrun.plan.tier_mix import MixedOp, mixed_shares  # numpy takes a while to import

    mixed = [MixedOp(op.layers * op.resident_bytes, problem.lines(op)) for op in ops]
    free = (resident, *caps[1:]) if wanted is not None else caps
    shares = mixed_shares(mixed, free, wanted, uniform=uniform)
    if shares is None:
        if wanted is not None and wanted > limit:
            raise problem.over_budget(" and ".join(problem.remote), limit, wanted - limit)
        raise problem.too_small(max(resident - sum(caps), -min(free), 1.0))
    return shares


def _slot_choices(problem: Problem, strategy: Strategy) -> list[Counts]:
    """Remote KV slots per remote tier worth planning with: the ideal ones rounded both ways."""
    n, policy = problem.workload.batch_size, problem.policy
    wanted = None if policy.offload_ratio is None else policy.offload_ratio * problem.total
    fixed = policy.kv_offload_ratio
    if fixed is not None and len(problem.remote) == 1:
        return [(math.floor(fixed * n + 0.5),)]
    shares = _ideal(problem, problem.ops, wanted if fixed is None else None, problem.caps, strategy)
    kv = shares[problem.ops.index(problem.attention)][1:]
    if fixed is not None:
        return _slot_splits(problem, math.floor(fixed * n + 0.5), kv)
    none = {0} if wanted is None else set()
    both = [none | {math.floor(x * n + 1e-9), min(math.ceil(x * n - 1e-9), n)} for x in kv]
    return sorted(c for c in itertools.product(*both) if sum(c) <= n)


def _slot_splits(problem: Problem, total: int, mix: Sequence[float]) -> list[Counts]:
    """Ways to give `total` slots to the remote tiers: as in `mix`, and to one tier alone."""
    rates = [problem.links.direct[tier] for tier in problem.remote]
    weights = mix if sum(mix) > 0 else rates
    ends = [
        math.floor(total * sum(weights[: i + 1]) / sum(weights) + 0.5) for i in range(len(weights))
    ]
    spread = tuple(end - start for start, end in zip([0, *ends], ends, strict=False))
    alone = [tuple(total * (i == j) for j in range(len(rates))) for i in range(len(rates))]
    return sorted({spread, *alone})


def _placements(
    problem: Problem, slots: Counts, strategy: Strategy
) -> dict[str, tuple[Counts, ...]]:
    """Units per layer and tier of every op, with the given KV slots in the remote tiers."""
    attention, weights, policy = problem.attention, problem.weights, problem.policy
    slot = attention.layers * remote_bytes(attention, 1)
    local_slots = problem.workload.batch_size - sum(slots)
    kv = [count * slot for count in (local_slots, *slots)]
    caps = [cap - held for cap, held in zip(problem.caps, kv, strict=True)]
    resident = sum(op.layers * op.resident_bytes for op in weights)
    ratio, wanted = policy.offload_ratio, None
    if ratio is not None and policy.kv_offload_ratio is None:
        wanted = min(max(ratio * problem.total - sum(kv[1:]), 0.0), resident)
    elif ratio is not None:
        wanted = ratio * resident
    shares = _ideal(problem, weights, wanted, caps, strategy)
    by_name = {op.name: share for op, share in zip(weights, shares, strict=True)}
    goal = RemoteBytes(max(0.0, resident - caps[0]), sum(caps[1:]), wanted)
    if wanted is not None:
        goal = RemoteBytes(0.0, resident, wanted)

    def time(op: Op, units: int) -> float:
        return problem.bound(op, problem.mixed_bytes(op, units, by_name[op.name]), "direct")

    totals = round_shares(weights, [1 - share[0] for share in shares], goal, time)
    if wanted is None and len(problem.remote) == 1 and policy.transport != "staged":
        totals = settled(problem, totals, goal)
    free = [
        cap
        - sum(s[t] * op.layers * op.resident_bytes for op, s in zip(weights, shares, strict=True))
        for t, cap in enumerate(caps)
    ][1:]
    sink = free.index(max(free))
    placements = {
        op.name: split_units(op, units, by_name[op.name][1:], sink)
        for op, units in zip(weights, totals, strict=True)
    }
    placements[attention.name] = ((local_slots, *slots),) * attention.layers
    return placements
