"""What limits a plan's speed, and which change would help most: found by planning again.

Tries one change at a time and compares predicted tokens/s; sees neither weights nor a GPU.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from dakrun.config import Workload
from dakrun.errors import DakrunError
from dakrun.plan.batch_size import MAX_BATCH_SIZE
from dakrun.plan.limits import busy_shares, limits, resource_text
from dakrun.plan.planner import Plan, make_plan
from dakrun.plan.policy import Policy, Transport
from dakrun.units import format_bytes, format_seconds, parse_bytes

MIN_GAIN = 0.02  # a gain that is worth a word
UNLIMITED = 1 << 60

Kind = Literal["hbm_budget", "batch_size", "transport", "remote", "ratio", "strategy"]


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """The plan after one change: options of `dakrun plan`, or hardware that is not `available`.

    `gain` is its predicted tokens/s over the first plan's, less 1.
    """

    kind: Kind
    change: str
    available: bool
    plan: Plan
    gain: float


@dataclass(frozen=True, kw_only=True)
class Advice:
    """What the step waits for (see limits.busy_shares), and what was tried, the best first."""

    plan: Plan
    busy: dict[str, float]
    alternatives: tuple[Alternative, ...]

    @property
    def limits(self) -> list[str]:
        """The resources that the step waits for."""
        return limits(self.busy)

    @property
    def sentence(self) -> str:
        """What limits the run, and the two kinds of change that help most, in one sentence."""
        plan = self.plan
        said = "limited by " + " and ".join(
            f"{resource_text(name)} ({self.busy[name]:.0%} of the step)" for name in self.limits
        )
        if plan.phase == 3 and plan.required_ratio > 0:
            said += f", as {plan.required_ratio:.1%} of the bytes do not fit in HBM"
        helping: dict[Kind, Alternative] = {}
        for other in self.alternatives:
            if other.gain > MIN_GAIN:
                helping.setdefault(other.kind, other)
        best = [_text(other) for other in list(helping.values())[:2]]
        if not best:
            return (
                f"{said}; no other budget, batch size, transport or remote tier that was tried "
                f"helps by more than {MIN_GAIN:.0%}"
            )
        return f"{said}; {best[0]} would help most" + "".join(f", then {b}" for b in best[1:])


def advise(plan: Plan, max_tpot: float | None = None) -> Advice:
    """Plan again with more HBM, other batch sizes, transports and remote tiers, and compare.

    Plans that take more than `max_tpot` seconds per output token are left out.
    """
    rate = plan.workload.batch_size / plan.predicted_s
    found = []
    for kind, change, workload, policy in _changes(plan):
        try:
            other = make_plan(plan.model, workload, plan.profile, policy)
        except DakrunError:
            continue  # what does not run does not help
        if max_tpot is not None and other.predicted_s > max_tpot:
            continue
        budget = policy.hbm_budget or 0
        available = kind != "hbm_budget" or budget <= plan.profile.hbm_capacity_bytes
        gain = workload.batch_size / other.predicted_s / rate - 1
        found.append(
            Alternative(kind=kind, change=change, available=available, plan=other, gain=gain)
        )
    found.sort(key=lambda other: -other.gain)
    return Advice(plan=plan, busy=busy_shares(plan), alternatives=tuple(found))


def _changes(plan: Plan) -> Iterator[tuple[Kind, str, Workload, Policy]]:
    """What to try: (kind, its text, the workload and the policy with that one change)."""
    work, policy = plan.workload, plan.policy
    for text in _budgets(plan):
        roomier = replace(policy, hbm_budget=parse_bytes(text))
        yield "hbm_budget", f"--hbm-budget {text}", work, roomier
    for size in (work.batch_size // 2, min(2 * work.batch_size, MAX_BATCH_SIZE)):
        if size > 0 and size != work.batch_size:
            text = f"--batch-size {size}"
            yield "batch_size", text, replace(work, batch_size=size), policy
    transports: tuple[Transport | None, ...] = (None, "direct", "staged")
    for transport in transports:
        if transport != policy.transport:
            text = f"--transport {transport or 'auto'}"
            yield "transport", text, work, replace(policy, transport=transport)
    for tiers in _more_tiers(plan):
        yield "remote", f"--remote {','.join(tiers)}", work, replace(policy, remote=tiers)
    fixed = {
        "--offload-ratio auto": policy.offload_ratio,
        "--kv-offload-ratio auto": policy.kv_offload_ratio,
    }
    if options := [option for option, ratio in fixed.items() if ratio is not None]:
        free = replace(policy, offload_ratio=None, kv_offload_ratio=None)
        yield "ratio", " ".join(options), work, free
    if policy.strategy != "greedy":
        yield "strategy", "--strategy greedy", work, replace(policy, strategy="greedy")


def _budgets(plan: Plan) -> list[str]:
    """HBM budgets to try, as one writes them: a tenth more, all of it, and as much as is of use.

    None where more HBM would lie idle.
    """
    unlimited = replace(plan.policy, hbm_budget=UNLIMITED)
    try:
        roomy = make_plan(plan.model, plan.workload, plan.profile, unlimited, thorough=False)
    except DakrunError:
        return []
    now, useful = plan.budgets[0], sum(roomy.memory(0).values())
    if useful <= now:
        return []
    tried = {_size(min(now * 1.1, useful), math.ceil), _size(useful, math.ceil)}
    if useful > plan.profile.hbm_capacity_bytes:
        tried.add(_size(plan.profile.hbm_capacity_bytes, math.floor))
    return sorted((text for text in tried if parse_bytes(text) > now), key=parse_bytes)


def _size(n: float, rounded: Callable[[float], int]) -> str:
    """`n` bytes, rounded to be short."""
    if n >= 2**30:
        return f"{rounded(n / 2**30 * 100) / 100:.2f}GiB"
    return f"{rounded(n / 2**20)}MiB"


def _more_tiers(plan: Plan) -> list[tuple[str, ...]]:
    """The plan's remote tiers with one more of the profile's, and with all of them."""
    used = plan.tiers[1:]
    others = [tier.name for tier in plan.profile.remote if tier.name not in used]
    one_more = [(*used, name) for name in others]
    return one_more + ([(*used, *others)] if len(others) > 1 else [])


def _text(other: Alternative) -> str:
    change = other.change
    if not other.available:
        size = format_bytes(other.plan.budgets[0])
        has = format_bytes(other.plan.profile.hbm_capacity_bytes)
        change = f"{size} of HBM ({other.plan.profile.name} has {has})"
    gain = f"{1 + other.gain:.1f} times the" if other.gain >= 1 else f"{other.gain:+.0%}"
    return f"{change} ({gain} tokens/s, TPOT {format_seconds(other.plan.predicted_s)})"
