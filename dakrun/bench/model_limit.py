"""What the memories allow a decode step: the bytes that its plan reads, at measured rates.

Pure arithmetic; the rates are model.py's.
"""

from collections import Counter
from dataclasses import replace

from dakrun.bench.ceilings import Ceilings
from dakrun.hardware.profile import LOCAL, HardwareProfile
from dakrun.plan.plan import OpPlan, Plan
from dakrun.plan.roofline import Links, time_of


def measured_links(ceilings: Ceilings, profile: HardwareProfile) -> Links:
    """The tiers of `ceilings`, remote ones read directly or by the copy engine.

    What tiers share of a link is the profile's.
    """
    shared = Links.of(profile, tuple(ceilings.rates)[1:])
    return replace(shared, direct=ceilings.rates, staged={**ceilings.rates, **ceilings.copied})


def limit_s(plan: Plan, links: Links) -> float:
    """Seconds that a decode step of `plan` takes at least, its arithmetic left aside.

    Ops follow each other, and each takes as long as the slowest of the tiers that it reads; bytes
    that were staged it reads from the local one. Copies may run ahead of their ops, so the time
    that the links need counts for the step as a whole.
    """
    ops = sum(_op_s(op, links) for op in plan.ops)
    return max([ops, *(_link_s(plan, tier, links) for tier in range(1, len(plan.tiers)))])


def _op_s(op: OpPlan, links: Links) -> float:
    """Seconds of all layers of an op, one after the other."""
    read = op.op.read_bytes
    if op.transport == "staged":
        return op.op.layers * read / links.direct[LOCAL]
    lines = links.lines(read, 0.0)
    return sum(
        layers * time_of(lines, op.op.shares(counts))
        for counts, layers in Counter(op.placement).items()
    )


def _link_s(plan: Plan, tier: int, links: Links) -> float:
    """Seconds in which the plan's remote tier number `tier` gives all that is read of it."""
    seconds = 0.0
    for op in plan.ops:
        if nbytes := op.read_bytes(tier):
            rates = links.staged if op.transport == "staged" else links.direct
            seconds += nbytes / rates[plan.tiers[tier]]
    return seconds
