"""The limit of a plan's speed, and the changes that would help most, found by planning again.

Tries one change at a time and compares predicted tokens/s of whole batches, prompts included. Needs
neither weights nor a GPU.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from dakrun.config import Workload
from dakrun.errors import DakrunError
from dakrun.hardware import LOCAL
from dakrun.plan.batch_size import MAX_BATCH_SIZE
from dakrun.plan.plan import Plan
from dakrun.plan.planner import make_plan
from dakrun.plan.policy import Policy, Transport
from dakrun.plan.prefill import predict_prefill
from dakrun.plan.roofline import COMPUTE, Links, compute_time, line_time, norm_time, op_cost
from dakrun.units import format_bytes, format_seconds, parse_bytes

LAUNCHES = "launches"
SAME_LIMIT = 0.9  # fraction of the busiest resource's time from which others limit the step, too
MIN_GAIN = 0.02  # relative gain in tokens/s from which a change is advised
UNLIMITED = 1 << 60  # bytes

Kind = Literal["budget", "batch_size", "transport", "remote", "ratio", "strategy"]
Origin = Literal["user", "machine", "missing"]
ORIGINS: tuple[Origin, ...] = get_args(Origin)  # changes of the first are advised first


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """The plan after one change of the options.

    `change` is its text on the command line; `gain` is relative, in tokens/s as `tokens_per_s`
    counts them. `origin` is user for a limit that the user set, machine for what the machine
    has besides, and missing for more HBM than it has.
    """

    kind: Kind
    change: str
    origin: Origin
    plan: Plan
    gain: float

    @property
    def available(self) -> bool:
        """Whether the machine has what the change needs."""
        return self.origin != "missing"


@dataclass(frozen=True, kw_only=True)
class Advice:
    """How busy each resource is (see `busy_shares`), and the alternatives.

    They are in the order of ORIGINS, and the best of each first.
    """

    plan: Plan
    busy: dict[str, float]
    alternatives: tuple[Alternative, ...]

    @property
    def limits(self) -> list[str]:
        """The resources that limit the step."""
        return limits(self.busy)

    @property
    def sentence(self) -> str:
        """The limit of the run and the first two kinds of change that help, in one sentence."""
        plan = self.plan
        limit = "limited by " + " and ".join(
            f"{resource_text(name)} ({self.busy[name]:.0%} of the step)" for name in self.limits
        )
        if plan.phase == 3 and plan.required_ratio > 0:
            limit += f", as {plan.required_ratio:.1%} of the bytes do not fit in HBM"
        helping: dict[Kind, Alternative] = {}
        for other in self.alternatives:
            if other.gain > MIN_GAIN:
                helping.setdefault(other.kind, other)
        best = list(helping.values())[:2]
        if not best:
            return (
                f"{limit}; no other budget, batch size, transport or remote tier that was tried "
                f"helps by more than {MIN_GAIN:.0%}"
            )
        most = " most" * (best[0].gain >= max(other.gain for other in self.alternatives))
        first, *others = map(_text, best)
        return f"{limit}; {first} would help{most}" + "".join(
            f"; so would {text}" for text in others
        )


def advise(
    plan: Plan, max_decode_step: float | None = None, *, requests: int = MAX_BATCH_SIZE
) -> Advice:
    """Plan again with other budgets, batch sizes, transports and remote tiers, and compare.

    Plans that take more than `max_decode_step` seconds per decode step are left out. No larger
    batch than of `requests` is tried.
    """
    rate = tokens_per_s(plan)
    alternatives = []
    for kind, change, workload, policy in _changes(plan, requests):
        try:
            other = make_plan(plan.model, workload, plan.profile, policy)
        except DakrunError:
            continue
        if max_decode_step is not None and other.predicted_s > max_decode_step:
            continue
        gain = tokens_per_s(other) / rate - 1
        origin = _origin(kind, plan, policy)
        alternatives.append(
            Alternative(kind=kind, change=change, origin=origin, plan=other, gain=gain)
        )
    alternatives.sort(key=lambda other: (ORIGINS.index(other.origin), -other.gain))
    return Advice(plan=plan, busy=busy_shares(plan), alternatives=tuple(alternatives))


def tokens_per_s(plan: Plan) -> float:
    """Predicted new tokens/s of whole batches: their prompts, then as many steps as new tokens.

    Prompts count whole, also where they share prefixes.
    """
    work = plan.workload
    seconds = predict_prefill(plan).predicted_s + work.new_tokens * plan.predicted_s
    return work.batch_size * work.new_tokens / seconds


def _origin(kind: Kind, plan: Plan, changed: Policy) -> Origin:
    """Origin of a change of this kind that gives `plan` the policy `changed`."""
    if kind == "budget" and (changed.hbm_budget or 0) > plan.profile.hbm_capacity_bytes:
        return "missing"
    fixed = kind == "transport" and plan.policy.transport is not None
    return "user" if fixed or kind in ("budget", "ratio", "strategy") else "machine"


def _changes(plan: Plan, requests: int) -> Iterator[tuple[Kind, str, Workload, Policy]]:
    """Changes to try: (kind, its text, the workload and the policy with that one change)."""
    work, policy = plan.workload, plan.policy
    for text in _budgets(plan):
        roomier = replace(policy, hbm_budget=parse_bytes(text))
        yield "budget", f"--hbm-budget {text}", work, roomier
    if all_set := _own_limits(plan):
        text = " ".join(f"--{name.replace('_', '-')} {size}" for name, size in all_set.items())
        sizes: dict[str, Any] = {name: parse_bytes(size) for name, size in all_set.items()}
        yield "budget", text, work, replace(policy, **sizes)
    larger = min(2 * work.batch_size, MAX_BATCH_SIZE, max(requests, work.batch_size))
    for size in (work.batch_size // 2, larger):
        if size > 0 and size != work.batch_size:
            text = f"--batch-size {size}"
            yield "batch_size", text, replace(work, batch_size=size, kept_len=None), policy
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
    if policy.strategy != "auto":
        yield "strategy", "--strategy auto", work, replace(policy, strategy="auto")


def _own_limits(plan: Plan) -> dict[str, str]:
    """The machine's capacity as an option value for every budget that the user set below it.

    Empty for the HBM budget alone, which `_budgets` tries.
    """
    profile = plan.profile
    capacities = {"hbm_budget": profile.hbm_capacity_bytes}
    for tier in map(profile.tier, plan.tiers[1:]):
        name = "peer_budget" if tier.name.startswith("peer") else "host_budget"
        capacities[name] = min(tier.capacity_bytes, capacities.get(name, tier.capacity_bytes))
    given = {name: getattr(plan.policy, name) for name in capacities}
    limits = {
        name: _size(capacity, math.floor)
        for name, capacity in capacities.items()
        if given[name] is not None and given[name] < capacity
    }
    return {} if set(limits) == {"hbm_budget"} else limits


def _budgets(plan: Plan) -> list[str]:
    """HBM budgets to try, as option values: 10% more, all of the GPU's, all that a plan can use.

    Empty if more HBM would stay unused.
    """
    unlimited = replace(plan.policy, hbm_budget=UNLIMITED)
    try:
        roomy = make_plan(plan.model, plan.workload, plan.profile, unlimited, thorough=False)
    except DakrunError:
        return []
    needed = replace(roomy, spare_kv_blocks=0).memory(0)  # no more KV than expected
    now, useful = plan.budgets[0], sum(needed.values())
    if useful <= now:
        return []
    tried = {_size(min(now * 1.1, useful), math.ceil), _size(useful, math.ceil)}
    if useful > plan.profile.hbm_capacity_bytes:
        tried.add(_size(plan.profile.hbm_capacity_bytes, math.floor))
    return sorted((text for text in tried if parse_bytes(text) > now), key=parse_bytes)


def _size(n: float, rounded: Callable[[float], int]) -> str:
    """`n` bytes as a short option value, rounded by `rounded`."""
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
    """The change, its gain and its decode step for the batch; auto may choose another one then."""
    change = other.change
    if not other.available:
        size = format_bytes(other.plan.budgets[0])
        has = format_bytes(other.plan.profile.hbm_capacity_bytes)
        change = f"{size} of HBM ({other.plan.profile.name} has {has})"
    gain = f"{1 + other.gain:.1f} times the" if other.gain >= 1 else f"{other.gain:+.0%}"
    batch = other.plan.workload.batch_size
    rows = f"{batch:,} request{'s' * (batch > 1)}"
    step = f"{format_seconds(other.plan.predicted_s)} for {rows}"
    return f"{change} ({gain} tokens/s with prompts, decode step {step})"


def busy_shares(plan: Plan) -> dict[str, float]:
    """Fraction of the predicted step's time for which each resource is busy, the busiest first.

    Resources are COMPUTE, the plan's tiers, tiers behind one link ("host+peer:1") and LAUNCHES,
    the fixed cost of the ops, routers included. Ops run one after the other; each uses several
    resources at once.
    """
    links = Links.of(plan.profile, plan.tiers[1:])
    seconds = defaultdict[str, float](float)
    for op in plan.ops:
        fixed = op_cost(op.op, plan.profile)[0]
        if op.op.category == "experts":
            fixed += norm_time(op.op, plan.profile)
        seconds[LAUNCHES] += op.op.layers * fixed
        compute = compute_time(op.op, plan.profile, plan.model.dtype)
        lines = links.lines(op.op.read_bytes, compute, staged=op.transport == "staged")
        for counts, layers in Counter(op.placement).items():
            ratios = op.op.read_shares(counts)
            if op.is_copied:
                copied = op.op.tier_bytes(counts)[1:]
                ratios = [ratios[0], *(n / op.op.read_bytes for n in copied)]
            for name, line in lines.items():
                seconds[name] += layers * line_time(line, ratios)
    busiest = sorted(seconds, key=lambda name: -seconds[name])
    return {name: seconds[name] / plan.predicted_s for name in busiest}


def limits(busy: dict[str, float]) -> list[str]:
    """The resources that limit a step: the busiest, and those within SAME_LIMIT of it.

    A link that tiers share stands for the tiers behind it.
    """
    highest = max(busy.values())
    names = [name for name, ratio in busy.items() if ratio >= SAME_LIMIT * highest]
    shared = {tier for name in names if "+" in name for tier in name.split("+")}
    return [name for name in names if name not in shared]


def resource_text(name: str) -> str:
    """A resource in words, such as "the link to host memory"."""
    if name in (COMPUTE, LAUNCHES):
        return {COMPUTE: "arithmetic", LAUNCHES: "the fixed cost of launches"}[name]
    if "+" in name:
        return f"the memory link that {' and '.join(name.split('+'))} share"
    return "HBM bandwidth" if name == LOCAL else f"the link to {name} memory"
