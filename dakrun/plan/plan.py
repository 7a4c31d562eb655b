"""The Plan: a frozen decision that the loader and the engine obey, and the figures it implies."""

import functools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from dakrun.config import ModelConfig, Workload
from dakrun.hardware.profile import HardwareProfile
from dakrun.plan.ops import PREFILL_CHUNK_TOKENS, Op, weight_bytes
from dakrun.plan.policy import Policy, Transport
from dakrun.plan.roofline import Regime


@dataclass(frozen=True, kw_only=True)
class OpPlan:
    """Where one op's units lie, and the time that follows.

    `placement[layer][t]` units are in the plan's tier t, in the order of the tiers; `bounds_s`
    and `predicted_s` hold seconds per layer. `sms[t]` SMs work on tier t; where that are none, a
    part that is read where it lies is mixed: the local tier's SMs read it among their own. `a` and
    `b` are the shares between which the op is no slower than at its best.
    """

    op: Op
    regime: Regime
    transport: Transport
    sms: tuple[int, ...]
    a: float
    b: float
    placement: tuple[tuple[int, ...], ...]
    bounds_s: tuple[float, ...]
    predicted_s: tuple[float, ...]

    def resident_bytes(self, tier: int) -> int:
        """Bytes that all layers keep in the plan's tier number `tier`."""
        return self._tier_bytes[tier]

    @functools.cached_property
    def _tier_bytes(self) -> tuple[int, ...]:
        layers = Counter(self.placement)
        held = ([n * size for size in self.op.tier_bytes(of)] for of, n in layers.items())
        return tuple(map(sum, zip(*held, strict=True)))

    def read_bytes(self, tier: int) -> float:
        """Bytes that a decode step reads from the plan's tier number `tier`."""
        return self.resident_bytes(tier) * (self.op.read_bytes / self.op.resident_bytes)

    def mixed(self, tier: int) -> bool:
        """Whether the local tier's SMs read the part in the plan's tier number `tier`."""
        held = tier > 0 and self.resident_bytes(tier) > 0
        return held and self.transport == "direct" and self.sms[tier] == 0

    @property
    def ratio(self) -> float:
        """Share of the op's bytes outside the local tier, as placed."""
        return 1 - self.resident_bytes(0) / (self.op.layers * self.op.resident_bytes)


@dataclass(frozen=True, kw_only=True)
class PrefillPlan:
    """How prompts are prefilled: in passes of `chunk_tokens` tokens, the last maybe shorter.

    Each reads the remote parts of matrices where they lie (direct), once for PREFILL_LAUNCH_ROWS
    tokens, or once in all, after the copy engine has brought them (staged).
    """

    chunk_tokens: int = PREFILL_CHUNK_TOKENS
    transport: Transport = "direct"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The decision for one run. `tiers[0]` is the local tier; budgets are bytes per tier.

    `fixed_bytes` names what lies in the local tier besides weights and KV. `required_ratio` is
    the share of weight and KV bytes that capacity forces out of the local tier; `phase` is how far
    the greedy went: 1 up to the ops' a, 2 up to their b, 3 beyond. `sampling_s` is what a step's
    next tokens are predicted to take, `waits_s` how long direct and staged reads of matrices wait
    for each other. `forgone` is a plan with a remote share that would be too little faster. All but
    `prefill` is of decode steps.
    """

    model: ModelConfig
    workload: Workload
    profile: HardwareProfile
    policy: Policy
    tiers: tuple[str, ...]
    budgets: tuple[int, ...]
    fixed_bytes: dict[str, int]
    required_ratio: float
    phase: Literal[1, 2, 3]
    ops: tuple[OpPlan, ...]
    sampling_s: float = 0.0
    waits_s: float = 0.0
    prefill: PrefillPlan = PrefillPlan()
    forgone: "Plan | None" = None

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
        return weight_bytes(tuple(op.op for op in self.ops))

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
        return sum(sum(op.predicted_s) for op in self.ops) + self.sampling_s + self.waits_s
