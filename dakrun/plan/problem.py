"""One planning problem: what there is to place, and where it can lie.

Knows budgets and bounds; chooses nothing. planner.py chooses, assemble.py makes the Plan.
"""

from collections.abc import Sequence
from copy import copy

from dakrun.errors import CannotRun
from dakrun.hardware.profile import LOCAL
from dakrun.plan import ops as inventory
from dakrun.plan.greedy import Curve
from dakrun.plan.op_times import OpTimes
from dakrun.plan.ops import Op
from dakrun.plan.policy import Policy
from dakrun.plan.roofline import Line
from dakrun.plan.rounding import remote_bytes
from dakrun.units import format_bytes


class Problem:
    """Capacities in bytes, bounds in seconds, and the arithmetic between them.

    `staging` bytes of the local tier are kept for buffers. `budgets` are bytes per tier, the local
    one first, `caps` what of them is left for weights and KV; `curves` are by op name. Raises
    CannotRun where the budgets are too small.
    """

    def __init__(self, op_times: OpTimes, policy: Policy, staging: int) -> None:
        model, workload, profile = op_times.model, op_times.workload, op_times.profile
        self.op_times, self.policy = op_times, policy
        self.ops, self.links, self.remote = op_times.ops, op_times.links, op_times.remote
        self.tiers = (LOCAL, *self.remote)
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

    def with_remote(self, tier: int) -> "Problem":
        """The same, all other remote tiers being full."""
        alone = copy(self)
        alone.caps = tuple(cap if t in (0, tier) else 0 for t, cap in enumerate(self.caps))
        return alone

    def lines(self, op: Op) -> tuple[Line, ...]:
        """Lower bounds of the time of all layers of `op`, by its share of every tier."""
        staged = self.policy.transport == "staged"
        read, floor = op.layers * op.read_bytes, op.layers * self._floor(op)
        return self.links.lines(read, floor, staged=staged)

    def mixed_bytes(self, op: Op, units: int, share: Sequence[float]) -> list[float]:
        """Bytes that one layer of `op` reads of each tier.

        `units` of it are remote, divided over the remote tiers like the op's `share` of each tier.
        """
        remote = remote_bytes(op, units) * op.read_bytes / op.resident_bytes
        weights = share[1:] if sum(share[1:]) > 0 else [1.0] * len(self.remote)
        parts = [remote * w / sum(weights) for w in weights]
        return [op.read_bytes - remote, *parts]

    def too_small(self, short: float) -> CannotRun:
        """The error for budgets that are `short` bytes too small for weights and KV."""
        remote = " and ".join(
            f"{format_bytes(budget)} of {tier} memory"
            for tier, budget in zip(self.remote, self.budgets[1:], strict=True)
        )
        return CannotRun(
            f"the budgets are {format_bytes(short)} too small: {format_bytes(self.budgets[0])} of "
            f"HBM and {remote} for {format_bytes(self.total)} of weights and KV cache",
            hint=f"raise {' or '.join(self._budget_options())}, or lower --batch-size or "
            "--max-model-len",
        )

    def over_budget(self, where: str, budget: float, over: float) -> CannotRun:
        """The error for ratios with which tiers `where` hold `over` bytes beyond their `budget`."""
        return CannotRun(
            f"with these offload ratios {where} memory is over its budget of "
            f"{format_bytes(budget)} by {format_bytes(over)}",
            hint="leave --offload-ratio and --kv-offload-ratio at auto, or raise the budget of "
            "that tier",
        )

    def _budget_options(self) -> list[str]:
        """The options that say how much of each tier in use there is, remote ones first."""
        peers = any(name.startswith("peer") for name in self.remote)
        others = any(not name.startswith("peer") for name in self.remote)
        return ["--host-budget"] * others + ["--peer-budget"] * peers + ["--hbm-budget"]

    def _floor(self, op: Op) -> float:
        """Seconds that one layer of `op` takes wherever its bytes lie."""
        if self.policy.transport == "staged":
            return self.op_times.work[op.name]
        return max(self.op_times.work[op.name], op.read_bytes / self.links.total_rate())

    def _curve(self, op: Op) -> Curve:
        staged = self.policy.transport == "staged"
        work, local = self.op_times.work[op.name], op.read_bytes / self.links.direct[LOCAL]
        beyond = None
        if op.category == "linear" and self.policy.transport is None:
            beyond = max(self.links.rate(self.remote, staged=by) for by in (False, True))
        return Curve(
            resident=op.layers * op.resident_bytes,
            read=op.layers * op.read_bytes,
            floor=op.layers * (max(work, local) if staged else self._floor(op)),
            local_rate=self.links.direct[LOCAL],
            remote_rate=self.links.rate(self.remote, staged=staged),
            staged=staged,
            beyond=beyond,
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
            raise self.too_small(short)
