"""How the GPU reads each tier of each op, as a plan has it."""

from collections.abc import Sequence

from dakrun.hardware.profile import HardwareProfile
from dakrun.kernels.gemm.splitk_config import TierAccess
from dakrun.plan.plan import OpPlan, Plan


def tier_accesses(plan: Plan) -> dict[str, tuple[TierAccess, ...]]:
    """By op, how its part of each of the plan's tiers is read, the local one first.

    What is staged is read in HBM like the rest, by its share of the SMs.
    """
    return {op.op.name: (TierAccess(), *_remote(plan, op)) for op in plan.ops}


def direct_accesses(
    profile: HardwareProfile, remote: Sequence[str], sms: Sequence[int]
) -> list[TierAccess]:
    """How the tiers `remote` are read where they lie: by `sms` of each, in its window.

    Where a plan has no SMs for a tier, those of the local one read it among their own units.
    """
    tiers = (profile.tier(name) for name in remote)
    return [
        TierAccess(own or tier.sms, tier.window_bytes, mixed=not own)
        for tier, own in zip(tiers, sms, strict=True)
    ]


def _remote(plan: Plan, op: OpPlan) -> list[TierAccess]:
    names, total = plan.tiers[1:], op.op.layers * op.op.resident_bytes
    if op.transport == "direct":
        return direct_accesses(plan.profile, names, op.sms[1:])
    shares = [op.resident_bytes(tier) / total for tier in range(1, len(plan.tiers))]
    spare = 1 if op.resident_bytes(0) else 0
    most = plan.profile.sms - spare - len(shares) + 1
    return [TierAccess(min(most, max(1, round(share * plan.profile.sms)))) for share in shares]
