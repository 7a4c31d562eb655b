"""How the GPU reads each tier of each op, as a plan has it."""

from dakrun.kernels.heuristics import TierAccess
from dakrun.plan.plan import OpPlan, Plan


def tier_accesses(plan: Plan) -> dict[str, tuple[TierAccess, ...]]:
    """By op, how its part of each of the plan's tiers is read, the local one first.

    What is staged is read in HBM like the rest, by its share of the SMs.
    """
    return {op.op.name: (TierAccess(), *_remote(plan, op)) for op in plan.ops}


def _remote(plan: Plan, op: OpPlan) -> list[TierAccess]:
    names, total = plan.tiers[1:], op.op.layers * op.op.resident_bytes
    if op.transport == "direct":
        return [
            TierAccess(max(1, sms), plan.profile.tier(name).window_bytes)
            for name, sms in zip(names, op.sms[1:], strict=True)
        ]
    shares = [op.resident_bytes(tier) / total for tier in range(1, len(plan.tiers))]
    spare = 1 if op.resident_bytes(0) else 0
    most = plan.profile.sms - spare - len(shares) + 1
    return [TierAccess(min(most, max(1, round(share * plan.profile.sms)))) for share in shares]
