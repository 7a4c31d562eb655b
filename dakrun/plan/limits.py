"""What a decode step of a plan waits for: how busy each tier, link and the arithmetic units are.

Knows the plan's placement; advice.py says what to do about it.
"""

from collections import Counter, defaultdict

from dakrun.hardware.profile import LOCAL
from dakrun.plan.plan import Plan
from dakrun.plan.roofline import COMPUTE, Links, compute_time, line_time, op_cost

LAUNCHES = "launches"
TOGETHER = 0.9  # as busy as this share of the busiest one: both are at their limit


def busy_shares(plan: Plan) -> dict[str, float]:
    """Share of the predicted step for which each resource is in use, the busiest first.

    Resources are COMPUTE, the plan's tiers, tiers behind one link ("host+peer:1") and LAUNCHES,
    the fixed cost of the ops. Ops run one after the other, each using several at once.
    """
    links = Links.of(plan.profile, plan.tiers[1:])
    seconds = defaultdict[str, float](float)
    for op in plan.ops:
        seconds[LAUNCHES] += op.op.layers * op_cost(op.op, plan.profile)[0]
        compute = compute_time(op.op, plan.profile, plan.model.dtype)
        lines = links.named_lines(op.op.read_bytes, compute, staged=op.transport == "staged")
        for counts, layers in Counter(op.placement).items():
            shares = op.op.shares(counts)
            for name, line in lines.items():
                seconds[name] += layers * line_time(line, shares)
    busiest = sorted(seconds, key=lambda name: -seconds[name])
    return {name: seconds[name] / plan.predicted_s for name in busiest}


def limits(busy: dict[str, float]) -> list[str]:
    """The resources that a step waits for: the busiest, and those that are nearly as busy.

    Of a link that tiers share and a tier behind it only the link is named.
    """
    most = max(busy.values())
    names = [name for name, share in busy.items() if share >= TOGETHER * most]
    shared = {tier for name in names if "+" in name for tier in name.split("+")}
    return [name for name in names if name not in shared]


def resource_text(name: str) -> str:
    """A resource as people call it, such as "the link to host memory"."""
    if name in (COMPUTE, LAUNCHES):
        return {COMPUTE: "arithmetic", LAUNCHES: "the fixed cost of launches"}[name]
    if "+" in name:
        return f"the memory link that {' and '.join(name.split('+'))} share"
    return "HBM bandwidth" if name == LOCAL else f"the link to {name} memory"
