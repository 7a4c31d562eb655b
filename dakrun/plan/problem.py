"""A planning problem: the ops to place, the tiers they can lie in, and the budgets.

Chooses nothing: placement.py makes placements, op_costs.py their times, planner.py the choice.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from dakrun.config import Dtype
from dakrun.errors import CannotRun
from dakrun.hardware import LOCAL, HardwareProfile
from dakrun.plan.footprint import reserve_bytes
from dakrun.plan.greedy import Curve
from dakrun.plan.lossy import lossy_hint
from dakrun.plan.op_costs import StepCosts
from dakrun.plan.ops import Op
from dakrun.plan.plan import PrefillPlan
from dakrun.plan.policy import Policy, Strategy, Transport
from dakrun.plan.prompt_pass import PREFILL_LAUNCH_ROWS, PromptPasses
from dakrun.plan.roofline import Line, line_time
from dakrun.plan.rounding import remote_bytes
from dakrun.units import format_bytes


@dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """The ops to place and the room for them; sizes are in bytes, times in seconds.

    `strategy` and `transport` are the policy's, or one of the choices that it leaves open.
    `staging` bytes of the local tier are reserved for staging buffers, and further ones for the
    activations of the passes of `prefill`. `carries_prompts` says whether the prompt passes that a
    step carries count. With `experts_alone` and no transport nothing but experts is staged.
    Raises CannotRun if the budgets are too small.
    """

    costs: StepCosts
    policy: Policy
    strategy: Strategy
    transport: Transport | None
    staging: int = 0
    prefill: PrefillPlan = field(default_factory=PrefillPlan)
    carries_prompts: bool = True
    experts_alone: bool = False

    def __post_init__(self) -> None:
        if self.caps[0] < 0:
            raise CannotRun(
                f"the HBM budget of {format_bytes(self.budgets[0])} is "
                f"{format_bytes(-self.caps[0])} too small for activations and other data that "
                "must be in HBM",
                hint="raise --hbm-budget, or lower --batch-size or --max-model-len",
            )
        short = self.total - sum(self.caps)
        if short > 0:
            raise self.too_small(short)

    @classmethod
    def of(cls, costs: StepCosts, policy: Policy, *, prompts: bool = True) -> "Problem":
        """The problem with the strategy and transport of `policy`."""
        return cls(
            costs=costs,
            policy=policy,
            strategy=policy.strategy,
            transport=policy.transport,
            carries_prompts=prompts,
        )

    def over(self, tier: str) -> "Problem":
        """The same problem over the local tier and one of its remote tiers."""
        return replace(self, costs=self.costs.over(tier))

    def with_staging(self, nbytes: int) -> "Problem":
        """The same problem with `nbytes` of the local tier reserved for staging buffers."""
        return self if nbytes == self.staging else replace(self, staging=nbytes)

    @functools.cached_property
    def tiers(self) -> tuple[str, ...]:
        """Names of the tiers in use, the local one first."""
        return (LOCAL, *self.costs.remote)

    @property
    def machine(self) -> tuple[HardwareProfile, tuple[str, ...], Dtype]:
        """The profile, the remote tiers in use, and the model's dtype."""
        return self.costs.profile, self.costs.remote, self.costs.model.dtype

    @functools.cached_property
    def attention(self) -> Op:
        """The op that reads the KV cache."""
        return next(op for op in self.costs.ops if op.category == "attention")

    @functools.cached_property
    def weights(self) -> list[Op]:
        """The ops with a matrix."""
        return [op for op in self.costs.ops if op.category != "attention"]

    @property
    def free_slots(self) -> bool:
        """Whether to try numbers of remote KV slots beside the number that the greedy gives."""
        return self.policy.strategy == "auto" and self.strategy != "uniform"

    @property
    def one_ratio(self) -> bool:
        """Whether weights and KV have the same ratio.

        They do under the strategy uniform, unless the policy fixes a ratio for KV.
        """
        return self.strategy == "uniform" and self.policy.kv_offload_ratio is None

    @functools.cached_property
    def total(self) -> int:
        """Bytes of weights and KV cache."""
        return sum(op.layers * op.resident_bytes for op in self.costs.ops)

    @functools.cached_property
    def fixed(self) -> dict[str, int]:
        """Bytes of the local tier besides weights and KV, by purpose."""
        purposes = {
            "vectors": self.costs.vector_bytes,
            "activations": self.activations,
            "context": self.costs.profile.context_bytes,
        } | ({"staging": self.staging} if self.staging else {})
        if self.costs.profile.device == "cuda":
            # The most bytes on the host that capacity can force there. If a plan puts more there,
            # it leaves more room in HBM than their page tables take.
            forced = max(0, self.total + sum(purposes.values()) - self.budgets[0])
            purposes["reserve"] = reserve_bytes(forced)
        return purposes

    @property
    def activations(self) -> int:
        """Bytes of activations for which the local tier has room in any case."""
        return self.costs.activations(self.prefill.chunk_tokens)

    @functools.cached_property
    def budgets(self) -> tuple[int, ...]:
        """Bytes per tier that may be used, the local one first."""
        profile, policy = self.costs.profile, self.policy
        local = profile.hbm_capacity_bytes if policy.hbm_budget is None else policy.hbm_budget
        remote = (policy.budget(t, profile.tier(t).capacity_bytes) for t in self.costs.remote)
        return (local, *remote)

    @functools.cached_property
    def caps(self) -> tuple[int, ...]:
        """Bytes per tier for weights and KV cache, the local one first."""
        local = self.budgets[0] - sum(self.fixed.values())
        return (local, *self.budgets[1:])

    @functools.cached_property
    def curves(self) -> dict[str, Curve]:
        """Time by offload ratio of each op, by name; all remote tiers count as one."""
        return {op.name: self._curve(op) for op in self.costs.ops}

    def passes(self, free: float, *, staged: bool) -> PrefillPlan:
        """The prompt passes for which HBM has room, `free` bytes being left; as in with_prefill.

        `staged`: there is room for the buffers of staged matrices.
        """
        costs, tokens = self.costs, self.prefill.chunk_tokens
        if costs.profile.device != "cuda" or costs.model.dtype == "float32":
            return self.prefill
        larger, free = PREFILL_LAUNCH_ROWS, free + self.activations
        whole = max(larger, costs.workload.batch_size * costs.workload.prompt_len)
        while larger < 2 * whole and costs.activations(larger) <= free:
            tokens, larger = max(tokens, larger), 2 * larger
            if not staged:
                break
        if not staged or tokens < PREFILL_LAUNCH_ROWS:
            return PrefillPlan(chunk_tokens=tokens)
        return PrefillPlan(chunk_tokens=tokens, transport=self.policy.transport or "staged")

    @functools.cached_property
    def prompts(self) -> PromptPasses:
        """The passes that a decode step carries, as expected before anything is placed.

        Matrices are staged if HBM is not full, or if staging is the faster way for decode steps.
        """
        links, remote, fixed = self.costs.links, self.costs.remote, self.policy.offload_ratio
        least = max(0, self.total - self.caps[0])
        free = self.caps[0] - self.total + max(least, (fixed or 0.0) * self.total)
        faster = links.rate(remote, staged=True) > links.rate(remote)
        staged = self.transport == "staged" or (self.transport is None and faster)
        return self.prompts_in(self.passes(free, staged=staged or free > 0))

    def prompts_in(self, passes: PrefillPlan) -> PromptPasses:
        """The prompt passes that a decode step carries, cut and staged as `passes` says."""
        return _prompt_passes(self.costs, passes, self.carries_prompts)

    @functools.cached_property
    def curves_by_limit(self) -> dict[str, dict[str, Curve]]:
        """`curves` with prompt passes that wait for one limit alone, by the limit's name."""
        return {limit: self._with_prompts(limit) for limit in self.prompts.limits}

    def _with_prompts(self, limit: str) -> dict[str, Curve]:
        found = {}
        for name, curve in self.curves.items():
            lines = self.prompts.times[name].by(limit)
            ends = tuple((line_time(line, (1, 0)), line_time(line, (0, 1))) for line in lines)
            varies = any(start != end for start, end in ends)
            found[name] = replace(curve, prompts=ends) if varies else curve
        return found

    def lines(self, op: Op) -> tuple[Line, ...]:
        """Lower bounds of the time of all layers of `op`, by its ratio in every tier."""
        if len(self.tiers) == 2 and len(op.classes) == 1:
            return self.curves[op.name].lines
        read, floor = op.layers * op.read_bytes, op.layers * self._floor(op)
        return tuple(
            self.costs.links.lines(read, floor, staged=self.transport == "staged").values()
        )

    def tier_bytes(self, op: Op, units: int, ratios: Sequence[float]) -> list[float]:
        """Bytes that one layer of `op` reads of each tier, with `units` remote ones.

        They are divided over the remote tiers in proportion to `ratios`, the op's in every tier.
        """
        if op.chances:
            remote = op.tier_reads((op.units - units, units))[1]
        else:
            remote = remote_bytes(op, units) * op.read_bytes / op.resident_bytes
        weights = ratios[1:] if sum(ratios[1:]) > 0 else [1.0] * (len(self.tiers) - 1)
        parts = [remote * w / sum(weights) for w in weights]
        return [op.read_bytes - remote, *parts]

    def too_small(self, short: float) -> CannotRun:
        """The error for budgets that are `short` bytes too small for weights and KV."""
        room = " and ".join(
            f"{format_bytes(budget)} of {'HBM' if tier == LOCAL else f'{tier} memory'}"
            for tier, budget in zip(self.tiers, self.budgets, strict=True)
        )
        lossy = lossy_hint(self.costs.model)
        return CannotRun(
            f"the model does not fit: the budgets are {format_bytes(short)} too small: {room} "
            f"for {format_bytes(self.total)} of weights and KV cache",
            hint=f"raise {' or '.join(self._budget_options())}, or lower --batch-size or "
            f"--max-model-len" + (f"; {lossy}" if lossy else ""),
        )

    def over_budget(self, where: str, budget: float, over: float) -> CannotRun:
        """The error for ratios with which tiers `where` hold `over` bytes beyond their `budget`."""
        fixed = self.policy.offload_ratio, self.policy.kv_offload_ratio
        options = (
            "--strategy" if fixed == (None, None) else "--offload-ratio and --kv-offload-ratio"
        )
        ratios = "one ratio for all ops" if self.one_ratio else "these offload ratios"
        return CannotRun(
            f"with {ratios} {where} memory is over its budget of {format_bytes(budget)} by "
            f"{format_bytes(over)}",
            hint=f"leave {options} at auto, or raise the budget of that tier",
        )

    def _budget_options(self) -> list[str]:
        """The budget options of the tiers in use, remote ones first."""
        peers = [name.startswith("peer") for name in self.tiers[1:]]
        options = ["--host-budget"] * (not all(peers)) + ["--peer-budget"] * any(peers)
        return [*options, "--hbm-budget"]

    def _floor(self, op: Op) -> float:
        """Least seconds of one layer of `op`, wherever its bytes lie."""
        work = self.costs.work[op.name]
        if self.transport == "staged":
            return work
        return max(work, op.read_bytes / self.costs.links.total_rate())

    def _curve(self, op: Op) -> Curve:
        links, staged = self.costs.links, self.transport == "staged"
        local = op.read_bytes / links.direct[LOCAL]
        remote, beyond = self.costs.remote, None
        if op.can_be_staged() and len(op.classes) == 1 and self.transport is None:
            beyond = max(links.rate(remote, staged=by) for by in (False, True))
        return Curve(
            resident=op.layers * op.resident_bytes,
            read=op.layers * op.read_bytes,
            floor=op.layers * (max(self._floor(op), local) if staged else self._floor(op)),
            local_rate=links.direct[LOCAL],
            remote_rate=links.rate(remote, staged=staged),
            staged=staged,
            beyond=beyond,
            classes=(1.0,) if staged else op.classes,
        )


@functools.lru_cache(maxsize=16)
def _prompt_passes(costs: StepCosts, prefill: PrefillPlan, counted: bool) -> PromptPasses:
    """The passes that problems of one workload share; they take no time unless `counted`."""
    return PromptPasses(costs, prefill, batches=float(counted) / costs.workload.new_tokens)
