"""The planner: model, workload, machine and budgets in; a frozen Plan out.

The loader and the engine obey the Plan; nothing else decides where an item or a slot lies.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from dakrun.config import ModelConfig, Workload
from dakrun.errors import CannotRun, UsageError
from dakrun.hardware import LOCAL, HardwareProfile
from dakrun.plan import ops as inventory
from dakrun.plan.greedy import Curve, best_total, greedy_shares, uniform_shares
from dakrun.plan.ops import Op
from dakrun.plan.roofline import Links, Regime, compute_time, predicted_time, regime
from dakrun.plan.rounding import RemoteBytes, remote_bytes, round_shares
from dakrun.units import format_bytes

Strategy = Literal["greedy", "uniform"]


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What the user fixes; None leaves the choice to the planner.

    Budgets are bytes per tier (default: the profile's capacities). `offload_ratio` is the share
    of all weight and KV bytes outside HBM, or of the weights alone where `kv_offload_ratio`
    (share of KV slots) is given, too. Ratios are met to the nearest unit, or refused.
    """

    hbm_budget: int | None = None
    host_budget: int | None = None
    offload_ratio: float | None = None
    kv_offload_ratio: float | None = None
    strategy: Strategy = "greedy"
    remote: tuple[str, ...] = ("host",)

    def __post_init__(self) -> None:
        for name in ("offload_ratio", "kv_offload_ratio"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise UsageError(
                    f"{name.replace('_', ' ')} is {value}", hint="it must be from 0 to 1, or auto"
                )
        if len(self.remote) != 1:
            raise CannotRun(
                f"a plan over the remote tiers {', '.join(self.remote) or 'none'} is not supported",
                hint="name one remote tier, such as --remote host",
            )


@dataclass(frozen=True, kw_only=True)
class OpPlan:
    """Where one op's units lie, and the time that follows.

    `placement[layer][t]` units are in the plan's tier t, in the order of the tiers; `bounds_s`
    and `predicted_s` hold seconds per layer. `a` and `b` are the shares between which the op is
    no slower than at its best.
    """

    op: Op
    regime: Regime
    a: float
    b: float
    placement: tuple[tuple[int, ...], ...]
    bounds_s: tuple[float, ...]
    predicted_s: tuple[float, ...]

    def resident_bytes(self, tier: int) -> int:
        """Bytes that all layers keep in the plan's tier number `tier`."""
        total = 0
        for counts in self.placement:
            first = sum(counts[:tier])
            total += self.op.unit_bytes(first, first + counts[tier])
        return total

    def read_bytes(self, tier: int) -> float:
        """Bytes that a decode step reads from the plan's tier number `tier`."""
        return self.resident_bytes(tier) * (self.op.read_bytes / self.op.resident_bytes)

    @property
    def ratio(self) -> float:
        """Share of the op's bytes outside the local tier, as placed."""
        return 1 - self.resident_bytes(0) / (self.op.layers * self.op.resident_bytes)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The decision for one run. `tiers[0]` is the local tier; budgets are bytes per tier.

    `fixed_bytes` names what lies in the local tier besides weights and KV. `required_ratio` is
    the share of weight and KV bytes that capacity forces out of the local tier.
    """

    model: ModelConfig
    workload: Workload
    profile: HardwareProfile
    strategy: Strategy
    tiers: tuple[str, ...]
    budgets: tuple[int, ...]
    fixed_bytes: dict[str, int]
    required_ratio: float
    ops: tuple[OpPlan, ...]

    def op(self, name: str) -> OpPlan:
        """The plan of the op called `name`, such as "qkv"."""
        return next(op for op in self.ops if op.op.name == name)

    def placement(self, name: str, layer: int = 0) -> tuple[tuple[str, int], ...]:
        """(tier, units) of one layer of an op, in the order of its units."""
        return tuple(zip(self.tiers, self.op(name).placement[layer], strict=True))

    def memory(self, tier: int) -> dict[str, int]:
        """Bytes in the plan's tier number `tier` by purpose."""
        kv = self.op("attention").resident_bytes(tier)
        weights = sum(op.resident_bytes(tier) for op in self.weights())
        return {"weights": weights, "kv": kv, **(self.fixed_bytes if tier == 0 else {})}

    def weights(self) -> Iterator[OpPlan]:
        """The ops that have a matrix."""
        return (op for op in self.ops if op.op.category != "attention")

    def read_bytes(self, tier: int) -> float:
        """Bytes of weights and KV that a decode step reads from tier number `tier`."""
        return sum(op.read_bytes(tier) for op in self.ops)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all matrices over all tiers."""
        return inventory.weight_bytes(tuple(op.op for op in self.ops))

    @property
    def ratio(self) -> float:
        """Share of weight and KV bytes outside the local tier, as placed."""
        total = sum(op.op.layers * op.op.resident_bytes for op in self.ops)
        return 1 - sum(op.resident_bytes(0) for op in self.ops) / total

    @property
    def bound_s(self) -> float:
        """Time of a decode step by bytes over bandwidths and FLOPs over rates alone."""
        return sum(sum(op.bounds_s) for op in self.ops)

    @property
    def predicted_s(self) -> float:
        """Time of a decode step with the profile's efficiencies and fixed costs."""
        return sum(sum(op.predicted_s) for op in self.ops)


def make_plan(
    model: ModelConfig, workload: Workload, profile: HardwareProfile, policy: Policy
) -> Plan:
    """Choose every op's offload ratio and round it to items.

    Raises CannotRun where the budgets do not hold the model, saying by how much, and UsageError
    where the workload does not suit the model.
    """
    if workload.max_model_len > model.max_positions:
        raise UsageError(
            f"max model length {workload.max_model_len} is beyond the {model.max_positions} "
            f"positions of {model.name}",
            hint=f"use --max-model-len {model.max_positions} or less",
        )
    problem = _Problem(model, workload, profile, policy)
    plans, refusal = [], None
    for slots in problem.remote_slot_choices():
        try:
            plans.append(problem.plan(slots))
        except CannotRun as problem_with_it:
            refusal = refusal or problem_with_it
    if not plans:
        assert refusal is not None
        raise refusal
    return min(plans, key=lambda plan: plan.predicted_s)


class _Problem:
    """One planning problem: budgets in bytes, op curves, and the arithmetic between them."""

    def __init__(
        self, model: ModelConfig, workload: Workload, profile: HardwareProfile, policy: Policy
    ) -> None:
        self.model, self.workload, self.profile = model, workload, profile
        self.policy = policy
        self.remote = profile.tier(policy.remote[0])
        self.links = Links.of(profile, policy.remote)
        self.ops = inventory.decode_ops(model, workload)
        self.compute = [compute_time(op, profile, model.dtype) for op in self.ops]
        self.attention = next(op for op in self.ops if op.category == "attention")
        self.weights = [op for op in self.ops if op.category != "attention"]
        self.curves = {op.name: self._curve(op) for op in self.ops}
        self.fixed = {
            "vectors": inventory.vector_bytes(model),
            "activations": inventory.activation_bytes(model, workload),
            "context": profile.context_bytes,
        }
        local, remote = policy.hbm_budget, policy.host_budget
        self.hbm_budget = profile.hbm_capacity_bytes if local is None else local
        self.remote_budget = self.remote.capacity_bytes if remote is None else remote
        self.total = sum(op.layers * op.resident_bytes for op in self.ops)
        self.required = max(0, self.total + sum(self.fixed.values()) - self.hbm_budget)
        self._check_budgets()

    def _curve(self, op: Op) -> Curve:
        compute = compute_time(op, self.profile, self.model.dtype)
        return Curve(
            resident=op.layers * op.resident_bytes,
            read=op.layers * op.read_bytes,
            floor=op.layers * max(compute, op.read_bytes / self.links.total_rate()),
            local_rate=self.links.rates[LOCAL],
            remote_rate=self.links.rates[self.remote.name],
        )

    def _check_budgets(self) -> None:
        fixed = sum(self.fixed.values())
        if fixed > self.hbm_budget:
            raise CannotRun(
                f"the HBM budget of {format_bytes(self.hbm_budget)} is "
                f"{format_bytes(fixed - self.hbm_budget)} too small for what must lie in HBM",
                hint="raise --hbm-budget, or lower --batch-size or --max-model-len",
            )
        short = self.required - min(self.remote_budget, self.total)
        if short > 0:
            raise self._too_small(short)

    def _too_small(self, short: float) -> CannotRun:
        return CannotRun(
            f"the budgets are {format_bytes(short)} too small: {format_bytes(self.hbm_budget)} of "
            f"HBM and {format_bytes(self.remote_budget)} of {self.remote.name} memory for "
            f"{format_bytes(self.total)} of weights and KV cache",
            hint="raise --host-budget or --hbm-budget, or lower --batch-size or --max-model-len",
        )

    def _shares(self, ops: list[Op], wanted: float) -> list[float]:
        curves = [self.curves[op.name] for op in ops]
        choose = uniform_shares if self.policy.strategy == "uniform" else greedy_shares
        return choose(curves, wanted)

    def _within_budgets(self, wanted: float) -> float:
        return min(max(wanted, self.required), self.remote_budget)

    def remote_slot_choices(self) -> list[int]:
        """Numbers of remote KV slots worth planning with: the ideal one rounded both ways."""
        n, policy = self.workload.batch_size, self.policy
        if policy.kv_offload_ratio is not None:
            return [math.floor(policy.kv_offload_ratio * n + 0.5)]
        if policy.offload_ratio is None:
            wanted = self._within_budgets(best_total([self.curves[op.name] for op in self.ops]))
        else:
            wanted = policy.offload_ratio * self.total
        shares = self._shares(list(self.ops), wanted)
        ideal = shares[self.ops.index(self.attention)] * n
        return sorted({math.floor(ideal + 1e-9), min(math.ceil(ideal - 1e-9), n)})

    def plan(self, slots: int) -> Plan:
        """The plan with `slots` KV slots in the remote tier."""
        kv = slots * self.attention.layers * remote_bytes(self.attention, 1)
        weights = sum(op.layers * op.resident_bytes for op in self.weights)
        ratio, wanted = self.policy.offload_ratio, None
        if ratio is not None:
            of_all = self.policy.kv_offload_ratio is None
            wanted = min(max(ratio * self.total - kv, 0.0), weights) if of_all else ratio * weights
        best = best_total([self.curves[op.name] for op in self.weights])
        goal = RemoteBytes(self.required - kv, self.remote_budget - kv, wanted)
        auto = max(0.0, min(max(best, goal.required), goal.limit, weights))
        aim = auto if wanted is None else wanted
        shares = self._shares(self.weights, aim)
        rounded = round_shares(self.weights, shares, goal, self._time)
        placements = dict(zip((op.name for op in self.weights), rounded, strict=True))
        placements[self.attention.name] = (slots,) * self.attention.layers
        plan = self._assemble(placements)
        self._check_plan(plan)
        return plan

    def _time(self, op: Op, units: int) -> float:
        """Seconds that one layer of `op` is bound by with `units` units in the remote tier."""
        share = op.read_bytes / op.resident_bytes
        remote = remote_bytes(op, units) * share
        local = op.read_bytes - remote
        read = self.links.read_time({LOCAL: local, self.remote.name: remote})
        return max(compute_time(op, self.profile, self.model.dtype), read)

    def _assemble(self, remote_units: dict[str, tuple[int, ...]]) -> Plan:
        op_plans = []
        for op, compute in zip(self.ops, self.compute, strict=True):
            units, curve = remote_units[op.name], self.curves[op.name]
            times = {n: self._time(op, n) for n in set(units)}
            op_plans.append(
                OpPlan(
                    op=op,
                    regime=regime(op, compute, self.links),
                    a=curve.a,
                    b=curve.b,
                    placement=tuple((op.units - n, n) for n in units),
                    bounds_s=tuple(times[n] for n in units),
                    predicted_s=tuple(predicted_time(op, times[n], self.profile) for n in units),
                )
            )
        return Plan(
            model=self.model,
            workload=self.workload,
            profile=self.profile,
            strategy=self.policy.strategy,
            tiers=(LOCAL, self.remote.name),
            budgets=(self.hbm_budget, self.remote_budget),
            fixed_bytes=self.fixed,
            required_ratio=self.required / self.total,
            ops=tuple(op_plans),
        )

    def _check_plan(self, plan: Plan) -> None:
        """No budget is exceeded, whatever ratios were asked for."""
        for tier, (name, budget) in enumerate(zip(plan.tiers, plan.budgets, strict=True)):
            over = sum(plan.memory(tier).values()) - budget
            ratios = (self.policy.offload_ratio, self.policy.kv_offload_ratio)
            if over > 0 and ratios == (None, None) and not tier:
                raise self._too_small(over)
            if over > 0:
                raise CannotRun(
                    f"with these offload ratios {name} memory is over its budget of "
                    f"{format_bytes(budget)} by {format_bytes(over)}",
                    hint="leave --offload-ratio and --kv-offload-ratio at auto, or raise the "
                    "budget of that tier",
                )
