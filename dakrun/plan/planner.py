"""The planner: model, workload, machine and budgets in; a frozen Plan out.

The loader and the engine obey the Plan; nothing else decides where an item or a slot lies.
"""

import itertools
import math
from collections.abc import Sequence

from dakrun.config import ModelConfig, Workload
from dakrun.errors import CannotRun, UsageError
from dakrun.hardware import LOCAL, HardwareProfile
from dakrun.plan import ops as inventory
from dakrun.plan.greedy import Curve, best_total, greedy_shares, uniform_shares
from dakrun.plan.ops import Op
from dakrun.plan.plan import OpPlan, Plan
from dakrun.plan.policy import Policy, Transport
from dakrun.plan.roofline import (
    Line,
    Links,
    compute_time,
    predicted_time,
    regime,
    sms_by_tier,
    time_of,
)
from dakrun.plan.rounding import RemoteBytes, remote_bytes, round_shares, split_units
from dakrun.units import format_bytes

__all__ = ["OpPlan", "Plan", "Policy", "make_plan"]

Counts = tuple[int, ...]
STAGING_BUFFERS = 2


def make_plan(
    model: ModelConfig, workload: Workload, profile: HardwareProfile, policy: Policy
) -> Plan:
    """Choose every op's offload ratio and transport, and round to items and slots.

    Raises CannotRun where the budgets do not hold the model, saying by how much, and UsageError
    where the workload does not suit the model.
    """
    if workload.max_model_len > model.max_positions:
        raise UsageError(
            f"max model length {workload.max_model_len} is beyond the {model.max_positions} "
            f"positions of {model.name}",
            hint=f"use --max-model-len {model.max_positions} or less",
        )
    staging = 0
    while True:
        plan = _Problem(model, workload, profile, policy, staging).best_plan()
        needed = _staging_bytes(plan)
        if needed <= staging:
            return plan
        staging = needed


def _staging_bytes(plan: Plan) -> int:
    """Buffers in the local tier through which staged bytes pass: the largest op's, twice."""
    sizes = [
        op.op.unit_bytes(counts[0], op.op.units)
        for op in plan.ops
        if op.transport == "staged"
        for counts in op.placement
    ]
    return STAGING_BUFFERS * max(sizes, default=0)


class _Problem:
    """One planning problem: capacities in bytes, op times, and the arithmetic between them.

    `caps` are bytes per tier for weights and KV, the local one first.
    """

    def __init__(
        self,
        model: ModelConfig,
        workload: Workload,
        profile: HardwareProfile,
        policy: Policy,
        staging: int,
    ) -> None:
        self.model, self.workload, self.profile = model, workload, profile
        self.policy = policy
        self.remote = policy.remote_tiers(profile)
        self.tiers = (LOCAL, *self.remote)
        self.links = Links.of(profile, self.remote)
        self.ops = list(inventory.decode_ops(model, workload))
        self.compute = {op.name: compute_time(op, profile, model.dtype) for op in self.ops}
        self.attention = next(op for op in self.ops if op.category == "attention")
        self.weights = [op for op in self.ops if op.category != "attention"]
        self.curves = {op.name: self._curve(op) for op in self.ops}
        self.fixed = {
            "vectors": inventory.vector_bytes(model),
            "activations": inventory.activation_bytes(model, workload),
            "context": profile.context_bytes,
        } | ({"staging": staging} if staging else {})
        local = policy.hbm_budget
        remote = [policy.budget(t, profile.tier(t).capacity_bytes) for t in self.remote]
        self.budgets = (profile.hbm_capacity_bytes if local is None else local, *remote)
        self.caps = (self.budgets[0] - sum(self.fixed.values()), *remote)
        self.total = sum(op.layers * op.resident_bytes for op in self.ops)
        self._check_budgets()

    def best_plan(self) -> Plan:
        """The fastest of the plans with different numbers of remote KV slots."""
        plans, refusal = [], None
        for slots in self._slot_choices():
            try:
                plans.append(self._plan(slots))
            except CannotRun as problem:
                refusal = refusal or problem
        if not plans:
            assert refusal is not None
            raise refusal
        return min(plans, key=lambda plan: plan.predicted_s)

    def _floor(self, op: Op) -> float:
        """Seconds that one layer of `op` takes wherever its bytes lie."""
        if self.policy.transport == "staged":
            return self.compute[op.name]
        return max(self.compute[op.name], op.read_bytes / self.links.total_rate())

    def _curve(self, op: Op) -> Curve:
        staged = self.policy.transport == "staged"
        compute, local = self.compute[op.name], op.read_bytes / self.links.direct[LOCAL]
        return Curve(
            resident=op.layers * op.resident_bytes,
            read=op.layers * op.read_bytes,
            floor=op.layers * (max(compute, local) if staged else self._floor(op)),
            local_rate=self.links.direct[LOCAL],
            remote_rate=self.links.rate(self.remote, staged=staged),
            staged=staged,
        )

    def _check_budgets(self) -> None:
        if self.caps[0] < 0:
            raise CannotRun(
                f"the HBM budget of {format_bytes(self.budgets[0])} is "
                f"{format_bytes(-self.caps[0])} too small for what must lie in HBM",
                hint="raise --hbm-budget, or lower --batch-size or --max-model-len",
            )
        short = self.total - sum(self.caps)
        if short > 0:
            raise self._too_small(short)

    def _too_small(self, short: float) -> CannotRun:
        remote = " and ".join(
            f"{format_bytes(budget)} of {tier} memory"
            for tier, budget in zip(self.remote, self.budgets[1:], strict=True)
        )
        return CannotRun(
            f"the budgets are {format_bytes(short)} too small: {format_bytes(self.budgets[0])} of "
            f"HBM and {remote} for {format_bytes(self.total)} of weights and KV cache",
            hint="raise --host-budget or --hbm-budget, or lower --batch-size or --max-model-len",
        )

    def _ideal(
        self, ops: list[Op], wanted: float | None, caps: Sequence[float]
    ) -> list[tuple[float, ...]]:
        """Share of every tier for each op, before rounding; `wanted` fixes the remote bytes."""
        resident = sum(op.layers * op.resident_bytes for op in ops)
        uniform = self.policy.strategy == "uniform"
        required, limit = max(0.0, resident - caps[0]), max(0.0, sum(caps[1:]))
        if len(self.remote) == 1:
            curves = [self.curves[op.name] for op in ops]
            auto = min(max(best_total(curves), required), limit, resident)
            choose = uniform_shares if uniform else greedy_shares
            return [(1 - x, x) for x in choose(curves, auto if wanted is None else wanted)]
        from dakrun.plan.tier_mix import MixedOp, mixed_shares  # numpy takes a while to import

        mixed = [MixedOp(op.layers * op.resident_bytes, self._lines(op)) for op in ops]
        free = (resident, *caps[1:]) if wanted is not None else caps
        shares = mixed_shares(mixed, free, wanted, uniform=uniform)
        if shares is None:
            raise self._too_small(max(resident, wanted or 0.0) - sum(free) or 1.0)
        return shares

    def _lines(self, op: Op) -> tuple[Line, ...]:
        staged = self.policy.transport == "staged"
        read, floor = op.layers * op.read_bytes, op.layers * self._floor(op)
        return self.links.lines(read, floor, staged=staged)

    def _slot_choices(self) -> list[Counts]:
        """Remote KV slots per remote tier worth planning with: the ideal ones rounded both ways."""
        n, policy = self.workload.batch_size, self.policy
        wanted = None if policy.offload_ratio is None else policy.offload_ratio * self.total
        fixed = policy.kv_offload_ratio
        if fixed is not None and len(self.remote) == 1:
            return [(math.floor(fixed * n + 0.5),)]
        shares = self._ideal(self.ops, wanted if fixed is None else None, self.caps)
        kv = shares[self.ops.index(self.attention)][1:]
        if fixed is not None:
            return self._slot_splits(math.floor(fixed * n + 0.5), kv)
        both = [{math.floor(x * n + 1e-9), min(math.ceil(x * n - 1e-9), n)} for x in kv]
        return sorted(c for c in itertools.product(*both) if sum(c) <= n)

    def _slot_splits(self, total: int, mix: Sequence[float]) -> list[Counts]:
        """Ways to give `total` slots to the remote tiers: as in `mix`, and to one tier alone."""
        rates = [self.links.direct[tier] for tier in self.remote]
        weights = mix if sum(mix) > 0 else rates
        ends = [
            math.floor(total * sum(weights[: i + 1]) / sum(weights) + 0.5)
            for i in range(len(weights))
        ]
        spread = tuple(end - start for start, end in zip([0, *ends], ends, strict=False))
        alone = [tuple(total * (i == j) for j in range(len(rates))) for i in range(len(rates))]
        return sorted({spread, *alone})

    def _plan(self, slots: Counts) -> Plan:
        """The plan with the given KV slots in the remote tiers."""
        slot = self.attention.layers * remote_bytes(self.attention, 1)
        local_slots = self.workload.batch_size - sum(slots)
        kv = [count * slot for count in (local_slots, *slots)]
        caps = [cap - held for cap, held in zip(self.caps, kv, strict=True)]
        resident = sum(op.layers * op.resident_bytes for op in self.weights)
        ratio, wanted = self.policy.offload_ratio, None
        if ratio is not None and self.policy.kv_offload_ratio is None:
            wanted = min(max(ratio * self.total - sum(kv[1:]), 0.0), resident)
        elif ratio is not None:
            wanted = ratio * resident
        shares = self._ideal(self.weights, wanted, caps)
        by_name = {op.name: share for op, share in zip(self.weights, shares, strict=True)}
        goal = RemoteBytes(max(0.0, resident - caps[0]), sum(caps[1:]), wanted)
        if wanted is not None:
            goal = RemoteBytes(0.0, resident, wanted)

        def time(op: Op, units: int) -> float:
            return self._bound(op, self._mixed_bytes(op, units, by_name[op.name]), "direct")

        totals = round_shares(self.weights, [1 - share[0] for share in shares], goal, time)
        free = [
            cap
            - sum(
                s[t] * op.layers * op.resident_bytes
                for op, s in zip(self.weights, shares, strict=True)
            )
            for t, cap in enumerate(caps)
        ][1:]
        sink = free.index(max(free))
        placements = {
            op.name: split_units(op, units, by_name[op.name][1:], sink)
            for op, units in zip(self.weights, totals, strict=True)
        }
        placements[self.attention.name] = ((local_slots, *slots),) * self.attention.layers
        plan = self._assemble(placements)
        self._check_plan(plan)
        return plan

    def _mixed_bytes(self, op: Op, units: int, share: Sequence[float]) -> list[float]:
        """Bytes that one layer of `op` reads of each tier, `units` of it being remote."""
        remote = remote_bytes(op, units) * op.read_bytes / op.resident_bytes
        weights = share[1:] if sum(share[1:]) > 0 else [1.0] * len(self.remote)
        parts = [remote * w / sum(weights) for w in weights]
        return [op.read_bytes - remote, *parts]

    def _bound(self, op: Op, tier_bytes: Sequence[float], transport: Transport) -> float:
        """Seconds that bytes and FLOPs alone take for one layer of `op`."""
        lines = self.links.lines(op.read_bytes, self.compute[op.name], staged=transport == "staged")
        shares = [n / op.read_bytes for n in tier_bytes]
        return time_of(lines, shares)

    def _assemble(self, placements: dict[str, tuple[Counts, ...]]) -> Plan:
        op_plans = tuple(self._op_plan(op, placements[op.name]) for op in self.ops)
        curves = list(self.curves.values())
        moved = sum(sum(op.resident_bytes(t) for t in range(1, len(self.tiers))) for op in op_plans)
        up_to_b = sum(curve.b * curve.resident for curve in curves)
        phase = 1 if moved <= best_total(curves) * 1.001 else 2 if moved <= up_to_b else 3
        return Plan(
            model=self.model,
            workload=self.workload,
            profile=self.profile,
            policy=self.policy,
            tiers=self.tiers,
            budgets=self.budgets,
            fixed_bytes=self.fixed,
            required_ratio=max(0.0, self.total - self.caps[0]) / self.total,
            phase=phase,  # type: ignore[arg-type]
            ops=op_plans,
        )

    def _op_plan(self, op: Op, placement: tuple[Counts, ...]) -> OpPlan:
        times: dict[Transport, dict[Counts, float]] = {"direct": {}, "staged": {}}
        for counts in set(placement):
            ends = list(itertools.accumulate(counts))
            spans = zip([0, *ends], ends, strict=False)
            scale = op.read_bytes / op.resident_bytes
            tier_bytes = [op.unit_bytes(start, end) * scale for start, end in spans]
            for transport, by_counts in times.items():
                by_counts[counts] = self._bound(op, tier_bytes, transport)
        totals = {t: sum(by[counts] for counts in placement) for t, by in times.items()}
        better: Transport = "staged" if totals["staged"] < totals["direct"] else "direct"
        transport = self.policy.transport or better
        bounds = tuple(times[transport][counts] for counts in placement)
        curve, compute = self.curves[op.name], self.compute[op.name]
        return OpPlan(
            op=op,
            regime=regime(op, compute, self.links),
            transport=transport,
            sms=sms_by_tier(
                op, placement, compute, sum(bounds) / len(bounds), self.profile, self.remote
            ),
            a=curve.a,
            b=curve.b,
            placement=placement,
            bounds_s=bounds,
            predicted_s=tuple(predicted_time(op, bound, self.profile) for bound in bounds),
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
