"""The planner: model, workload, machine and budgets in; a frozen Plan out.

The loader and the engine obey the Plan; nothing else decides where a row block or a slot lies.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from dakrun.config import ModelConfig, Workload
from dakrun.errors import CannotRun, UsageError
from dakrun.hardware.profile import HardwareProfile
from dakrun.plan.assemble import Counts, adopted, assemble
from dakrun.plan.greedy import best_total, greedy_shares, uniform_shares
from dakrun.plan.op_times import OpTimes
from dakrun.plan.ops import Op
from dakrun.plan.plan import OpPlan, Plan
from dakrun.plan.policy import Policy, Strategy, Transport
from dakrun.plan.prefill_choice import staging_bytes, with_prefill
from dakrun.plan.problem import Problem
from dakrun.plan.rounding import RemoteBytes, remote_bytes, round_shares, split_units
from dakrun.plan.settle import settled

__all__ = ["OpPlan", "Plan", "Policy", "make_plan"]

STEPS = (256, 64, 16, 4, 1)  # from numbers of slots to better ones
MOVES = 4  # of each size, at most
MIN_OFFLOAD_GAIN = (
    0.02  # of a step: what predictions are off by. A remote share for less could make it slower
)


def make_plan(
    model: ModelConfig,
    workload: Workload,
    profile: HardwareProfile,
    policy: Policy,
    *,
    thorough: bool = True,
) -> Plan:
    """Choose every op's offload ratio and transport, round to row blocks and slots, plan prefill.

    Raises CannotRun where the budgets do not hold the model, saying by how much, and UsageError
    where the workload does not suit the model. A plan that fits HBM is offloaded only for a gain of
    MIN_OFFLOAD_GAIN or more. Without `thorough` the search is much shorter, and the plan a few
    percent slower where HBM is full.
    """
    if workload.max_model_len > model.max_positions:
        raise UsageError(
            f"max model length {workload.max_model_len} is beyond the {model.max_positions} "
            f"positions of {model.name}",
            hint=f"use --max-model-len {model.max_positions} or less",
        )
    return with_prefill(_decode_plan(model, workload, profile, policy, thorough))


def _decode_plan(
    model: ModelConfig,
    workload: Workload,
    profile: HardwareProfile,
    policy: Policy,
    thorough: bool,
) -> Plan:
    of = OpTimes(model, workload, profile, policy.remote_tiers(profile))
    plans: list[Plan] = []
    refusals: list[CannotRun] = []
    for fixed in _fixings(policy):
        try:
            plans.append(_buffered_plan(of, fixed, thorough))
        except CannotRun as reason:
            refusals.append(reason)
        if plans and (not thorough or plans[0].ratio == 0):
            break
    if not plans:
        raise refusals[0]
    plan = min(plans, key=lambda plan: plan.predicted_s)
    plan = adopted(Problem(of, policy, plan.fixed_bytes.get("staging", 0)), plan)
    free = policy.offload_ratio is None and policy.kv_offload_ratio is None
    if not free or plan.required_ratio > 0 or plan.ratio == 0:
        return plan
    alone = _best_plan(Problem(of, replace(policy, offload_ratio=0.0), 0), thorough)
    gain = 1 - plan.predicted_s / alone.predicted_s
    return plan if gain >= MIN_OFFLOAD_GAIN else replace(alone, policy=policy, forgone=plan)


def _fixings(policy: Policy) -> Iterator[Policy]:
    """`policy`, and with what it leaves open or may be too clever in fixed.

    The greedy knows bounds, and is not to be predicted to be slower than the same ratio in every
    op; nor a free transport than either, which may need no buffers, or smaller ones.
    """
    strategies: tuple[Strategy, ...] = ("greedy", "uniform")
    for strategy in strategies if policy.strategy == "greedy" else ("uniform",):
        transports: tuple[Transport | None, ...] = (None, "direct", "staged")
        for transport in transports if policy.transport is None else (policy.transport,):
            yield replace(policy, strategy=strategy, transport=transport)


def _buffered_plan(of: OpTimes, policy: Policy, thorough: bool) -> Plan:
    """The fastest one in which HBM keeps the buffers that what is staged passes through."""
    plan, staging = _best_plan(Problem(of, policy, 0), thorough), 0
    while (needed := staging_bytes(plan)) > staging:
        staging = needed
        plan = _best_plan(Problem(of, policy, staging), thorough)
    return plan


def _best_plan(problem: Problem, thorough: bool) -> Plan:
    """The fastest of the plans with different numbers of remote KV slots: the ideal ones, rounded.

    To be `thorough`, where no ratio is asked for others are tried beside the best of these, as long
    as that makes it faster: slots may take room that weights need, and ops have costs, which the
    ideal shares do not tell.
    """
    choices, policy = _choices(problem), problem.policy
    found: dict[tuple[int, Counts], Plan | CannotRun] = {}

    def add(choice: int, slots: Counts) -> None:
        try:
            found[choice, slots] = assemble(problem, _placements(choices[choice], slots))
        except CannotRun as reason:
            found[choice, slots] = reason

    def best() -> tuple[int, Counts]:
        return min(found, key=lambda key: getattr(found[key], "predicted_s", math.inf))

    for choice, chosen in enumerate(choices):
        try:
            ideal = _slot_choices(chosen)
        except CannotRun as reason:
            found[choice, ()] = reason
            continue
        for slots in ideal:
            add(choice, slots)
    most = problem.op_times.workload.batch_size
    further = thorough and policy.offload_ratio is None and policy.kv_offload_ratio is None
    for step in (step for step in STEPS if further and step <= most):
        for _ in range(MOVES):
            choice, start = best()
            for slots in _beside(start, step, most):
                if (choice, slots) not in found:
                    add(choice, slots)
            if best() == (choice, start):
                break
    plan = found[best()]
    if isinstance(plan, CannotRun):
        raise plan
    return plan


def _beside(slots: Counts, step: int, most: int) -> Iterator[Counts]:
    """`slots` with `step` more or fewer in one tier, `most` in all."""
    for tier, by in itertools.product(range(len(slots)), (-step, step)):
        near = (*slots[:tier], slots[tier] + by, *slots[tier + 1 :])
        if near[tier] >= 0 and sum(near) <= most:
            yield near


def _choices(problem: Problem) -> list[Problem]:
    """By whose bounds placements of `problem` are chosen.

    Where several remote tiers are not needed, also that one is all there is: a bit of every op in
    every tier may cost more than it gives.
    """
    if len(problem.remote) == 1 or problem.policy.offload_ratio is not None:
        return [problem]
    caps = problem.caps
    enough = [t for t in range(1, len(caps)) if problem.total <= caps[0] + caps[t]]
    return [problem, *map(problem.with_remote, enough)]


def _ideal(
    problem: Problem,
    ops: Sequence[Op],
    wanted: float | None,
    caps: Sequence[float],
) -> list[tuple[float, ...]]:
    """Share of every tier for each op, before rounding; `wanted` fixes the remote bytes."""
    resident = sum(op.layers * op.resident_bytes for op in ops)
    uniform = problem.policy.strategy == "uniform"
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


def _slot_choices(problem: Problem) -> list[Counts]:
    """Remote KV slots per remote tier worth planning with: the ideal ones, rounded, and none.

    Rounded both ways where a ratio is asked for, and others beside them are not tried.
    """
    n, policy = problem.op_times.workload.batch_size, problem.policy
    wanted = None if policy.offload_ratio is None else policy.offload_ratio * problem.total
    fixed = policy.kv_offload_ratio
    if fixed is not None and len(problem.remote) == 1:
        return [(math.floor(fixed * n + 0.5),)]
    shares = _ideal(problem, problem.ops, wanted if fixed is None else None, problem.caps)
    kv = shares[problem.ops.index(problem.attention)][1:]
    if fixed is not None:
        return _slot_splits(problem, math.floor(fixed * n + 0.5), kv)
    if wanted is None:
        options = [{0, math.floor(x * n + 0.5)} for x in kv]
    else:
        options = [{math.floor(x * n + 1e-9), min(math.ceil(x * n - 1e-9), n)} for x in kv]
    return sorted(c for c in itertools.product(*options) if sum(c) <= n)


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


def _placements(problem: Problem, slots: Counts) -> dict[str, tuple[Counts, ...]]:
    """Units per layer and tier of every op, with the given KV slots in the remote tiers."""
    attention, weights, policy = problem.attention, problem.weights, problem.policy
    slot = attention.layers * remote_bytes(attention, 1)
    local_slots = problem.op_times.workload.batch_size - sum(slots)
    kv = [count * slot for count in (local_slots, *slots)]
    caps = [cap - held for cap, held in zip(problem.caps, kv, strict=True)]
    resident = sum(op.layers * op.resident_bytes for op in weights)
    ratio, wanted = policy.offload_ratio, None
    if ratio is not None and policy.kv_offload_ratio is None:
        wanted = min(max(ratio * problem.total - sum(kv[1:]), 0.0), resident)
    elif ratio is not None:
        wanted = ratio * resident
    shares = _ideal(problem, weights, wanted, caps)
    by_name = {op.name: share for op, share in zip(weights, shares, strict=True)}
    required, limit = max(0.0, resident - caps[0]), sum(caps[1:])
    goal = RemoteBytes(*((required, limit) if wanted is None else (0.0, resident)), wanted)

    def time(op: Op, units: int) -> float:
        return problem.op_times.bound(
            op, problem.mixed_bytes(op, units, by_name[op.name]), "direct"
        )

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
