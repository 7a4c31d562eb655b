"""The Plan: a frozen decision that loader and engine follow, and the figures derived from it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from dakrun.config import ModelConfig, Workload
from dakrun.geometry import KV_BLOCK
from dakrun.hardware import HardwareProfile, why_no_kernels
from dakrun.plan.footprint import PREFILL_CHUNK_TOKENS
from dakrun.plan.ops import Op, kept_positions, kv_positions, weight_bytes
from dakrun.plan.placed_op import PlacedOp
from dakrun.plan.policy import Policy, Strategy, Transport
from dakrun.plan.roofline import Regime


@dataclass(frozen=True, kw_only=True)
class OpPlan(PlacedOp):
    """A placed op of a plan, with the limit of its speed.

    The op is at its fastest between the offload ratios `a` and `b`.
    """

    regime: Regime
    a: float
    b: float


@dataclass(frozen=True, kw_only=True)
class PrefillPlan:
    """Prompts in passes of up to `chunk_tokens` tokens, each of them a step of the engine.

    A pass reads the remote parts of matrices in place, once per PREFILL_LAUNCH_ROWS tokens
    (direct), or from HBM after the copy engine has copied them once (staged).
    """

    chunk_tokens: int = PREFILL_CHUNK_TOKENS
    transport: Transport = "direct"

    def stages(self, one: Op, local: float = 0.0) -> bool:
        """Whether all remote bytes of `one`, with the rows of a pass, are copied ahead of its read.

        A share `local` of its bytes is local. In staged passes linear weights are copied, and
        remote experts if nearly all of them are read.
        """
        return self.transport == "staged" and one.can_be_staged(local)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The decision for one run. `tiers[0]` is the local tier; budgets are bytes per tier.

    `fixed_bytes` are the local tier's bytes besides weights and KV, by purpose. `required_ratio`
    is the ratio of weight and KV bytes that capacity forces out of the local tier. `phase` is the
    extent of offloading: 1 up to the ops' a, 2 up to their b, 3 beyond. `sampling_s` is the time
    of choosing a step's tokens, `waits_s` the time in which direct and staged reads of a tier
    wait for each other. `forgone` is an offloading plan whose gain is below MIN_OFFLOAD_GAIN.
    `spare_kv_blocks` are KV blocks of the local tier beyond those of expected lengths: they use
    memory that is left.
    `strategy` is greedy or uniform, also where the policy's is auto; `tried_s` has a step's
    predicted seconds with every strategy that was tried, infinite where it does not fit. All
    figures but those of `prefill` are of decode steps.
    """

    model: ModelConfig
    workload: Workload
    profile: HardwareProfile
    policy: Policy
    phase: Literal[1, 2, 3]
    required_ratio: float
    tiers: tuple[str, ...]
    budgets: tuple[int, ...]
    fixed_bytes: dict[str, int]
    ops: tuple[OpPlan, ...]
    sampling_s: float = 0.0
    waits_s: float = 0.0
    prefill: PrefillPlan = PrefillPlan()
    spare_kv_blocks: int = 0
    strategy: Strategy
    tried_s: Mapping[Strategy, float]
    forgone: "Plan | None" = None

    def op(self, name: str) -> OpPlan:
        """The plan of the op called `name`, such as "qkv"."""
        return next(op for op in self.ops if op.op.name == name)

    def placement(self, name: str, layer: int = 0) -> tuple[tuple[str, int], ...]:
        """(tier, units) of one layer of an op, in the order of its units."""
        return tuple(zip(self.tiers, self.op(name).placement[layer], strict=True))

    def kv_placement(self) -> tuple[tuple[str, int, int], ...]:
        """(tier, slots, KV blocks) of the cache, the local tier first."""
        whole = kept_positions(self.workload) // KV_BLOCK  # of a slot
        (local, units), *others = self.placement("attention")
        parts = self.op("attention").op.units // self.workload.batch_size
        remote = [(tier, n // parts, n // parts * whole) for tier, n in others]
        if remote:
            remote[0] = (*remote[0][:2], remote[0][2] + self.kv_spill_blocks)
        slots = self.workload.batch_size - sum(n for _, n, _ in remote)
        blocks = units * whole // parts + self.spare_kv_blocks
        return ((local, slots, blocks), *remote)

    @property
    def kv_spill_blocks(self) -> int:
        """KV blocks of the remote tier for local slots, whose leading blocks then lie there.

        They are there where placement has divided a slot.
        """
        units = [n for _, n in self.placement("attention")]
        parts = self.op("attention").op.units // self.workload.batch_size
        whole = kept_positions(self.workload) // KV_BLOCK
        slots = self.workload.batch_size - sum(n // parts for n in units[1:])
        return slots * whole - units[0] * whole // parts

    def memory(self, tier: int) -> dict[str, int]:
        """Bytes in the plan's tier number `tier` by purpose."""
        kv = self.kv_placement()[tier][2] * self.kv_block_bytes
        weights = sum(op.resident_bytes(tier) for op in self.weights())
        return {"weights": weights, "kv": kv, **(self.fixed_bytes if tier == 0 else {})}

    @property
    def kv_block_bytes(self) -> int:
        """Bytes of a KV block in all layers."""
        return KV_BLOCK * self.model.kv_bytes_per_token

    def with_spare_kv_blocks(self) -> "Plan":
        """This plan with memory of the local tier that is left used for further KV blocks.

        There are at most as many as the tier's slots may take. On a CPU, whose memory other
        programs use, there are none.
        """
        slots = self.kv_placement()[0][1]
        most = slots * (kv_positions(self.workload) - kept_positions(self.workload)) // KV_BLOCK
        left = self.budgets[0] - sum(self.memory(0).values())
        if self.profile.device != "cuda" or left <= 0:
            return self
        return replace(self, spare_kv_blocks=min(most, left // self.kv_block_bytes))

    def weights(self) -> Iterator[OpPlan]:
        """The ops with a matrix."""
        return (op for op in self.ops if op.op.category != "attention")

    def read_bytes(self, tier: int) -> float:
        """Bytes of weights and KV that a decode step reads from tier number `tier`."""
        return sum(op.read_bytes(tier) for op in self.ops)

    @property
    def why_no_kernels(self) -> str | None:
        """A sentence if its card has no kernels for the model, which plans assume; else None."""
        return why_no_kernels(self.profile)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all matrices over all tiers."""
        return weight_bytes(tuple(op.op for op in self.ops))

    @property
    def ratio(self) -> float:
        """Offload ratio: weight and KV bytes outside the local tier, over all."""
        total = sum(op.op.layers * op.op.resident_bytes for op in self.ops)
        return 1 - sum(op.resident_bytes(0) for op in self.ops) / total

    @property
    def bound_s(self) -> float:
        """Seconds of a decode step by bytes over bandwidths and FLOPs over rates alone."""
        return sum(sum(op.bounds_s) for op in self.ops)

    @property
    def predicted_s(self) -> float:
        """Seconds of a decode step with the profile's efficiencies and fixed costs."""
        return sum(sum(op.predicted_s) for op in self.ops) + self.sampling_s + self.waits_s
