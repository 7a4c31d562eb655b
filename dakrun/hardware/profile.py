"""A machine as the planner sees it: tiers, links, compute rates and costs.

Knows nothing of models and files, and measures nothing.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from dakrun.config import Dtype
from dakrun.errors import UsageError
from dakrun.hardware import estimates
from dakrun.hardware.card import Card
from dakrun.hardware.estimates import QUANTIZED
from dakrun.hardware.parts import (
    MAX,
    MAX_SECONDS,
    MIN,
    ComputeRate,
    KernelModel,
    OpCosts,
    Provenance,
    Published,
    RemoteTier,
    Sweep,
    bad,
    check_positive,
    check_whole,
    is_number,
)

STAGED_SECONDS = 5.5e-6  # mean over OPT-6.7B's ops on an H200, 0.5 to 10% in host memory


@dataclass(frozen=True, kw_only=True)
class HardwareProfile:
    """One machine. Bandwidths are in bytes/s, sizes in bytes, times in seconds.

    `linear` has the costs of linear ops of few rows of X, `many_rows` of more rows, `attention` of
    attention including its interference with the products beside it. `norm` has the costs of a norm
    ahead of a linear op, beyond reading and writing X; `sampling` those of choosing the next
    tokens, beyond reading logits. `int4` to `eight_bits` have the costs of products with quantized
    weights, by the kind of their elements, of few rows and of many. `experts` has the costs of a
    product with experts, by the rows of X that an expert has; `router` those of a norm and a router
    ahead of it, beyond reading and writing X. Costs that are None are not predicted, but those of
    quantized weights, experts and routers are estimated (estimates.py). `staged_seconds` is the
    extra time of an op with staged bytes, which waits for its copy instead of overlapping the op
    ahead of it. `kernel_model` has the constants of the CTA model. `link_groups` gives the total
    rate of each group of tiers, of a link or a memory; on a CPU the local tier is in one
    (`hbm_group`). `clusters` are those of the card, estimated if empty. `facts` (sizes, PCIe
    generation ...) and `sweeps` are for tables and pictures, `published` for comparisons; but the
    card's compute capability and shared memory are among the facts, and L2 is known from both.
    """

    name: str
    description: str
    provenance: Provenance
    device: Literal["cuda", "cpu"]
    device_name: str
    sms: int
    clusters: tuple[int, ...] = ()
    hbm_capacity_bytes: int
    hbm_bytes_per_s: float
    context_bytes: int
    linear: OpCosts
    attention: OpCosts
    remote: tuple[RemoteTier, ...]
    compute: Mapping[Dtype, ComputeRate]
    link_groups: Mapping[str, float] = field(default_factory=dict)
    hbm_group: str = ""
    many_rows: OpCosts | None = None
    int4: OpCosts | None = None
    int4_zeros: OpCosts | None = None
    e2m1: OpCosts | None = None
    eight_bits: OpCosts | None = None
    experts: OpCosts | None = None
    router: OpCosts | None = None
    norm: OpCosts | None = None
    sampling: OpCosts | None = None
    staged_seconds: float = STAGED_SECONDS
    kernel_model: KernelModel = field(default_factory=KernelModel)
    facts: Mapping[str, int | str] = field(default_factory=dict)
    sweeps: Mapping[str, Sweep] = field(default_factory=dict)
    published: tuple[Published, ...] = ()

    def __post_init__(self) -> None:
        for text in (self.name, self.description, self.device_name, self.hbm_group):
            if not isinstance(text, str):
                raise bad(f"{text!r} is not a name or description", "a string")
        check_whole(self, self.name, "sms")
        if not all(type(n) is int and 0 < n <= self.sms for n in self.clusters):
            raise bad(
                f"clusters are {list(self.clusters)}", "numbers of clusters of 2, 3, ... CTAs"
            )
        check_positive(self, self.name, "hbm_capacity_bytes", "hbm_bytes_per_s")
        if self.device not in ("cuda", "cpu"):
            raise bad(f"device is {self.device!r}", "cuda or cpu")
        if type(self.context_bytes) is not int or not 0 <= self.context_bytes <= MAX:
            raise bad(f"context_bytes is {self.context_bytes!r}", "an integer of at least 0")
        if not (is_number(self.staged_seconds) and 0 <= self.staged_seconds <= MAX_SECONDS):
            raise bad(f"staged_seconds is {self.staged_seconds!r}", f"0 to {MAX_SECONDS:g}")
        if self.many_rows and self.many_rows.rows[0] <= self.linear.rows[-1]:
            raise bad(f"many_rows begin at {self.many_rows.rows[0]}", "above those of few rows")
        if not all(is_number(r) and MIN <= r <= MAX for r in self.link_groups.values()):
            raise bad("the rate of a link group is out of range", f"{MIN:g} to {MAX:g} bytes/s")
        names = [tier.name for tier in self.remote]
        if len(set(names)) < len(names):
            raise bad(f"two of the remote tiers {names} have the same name", "unique names")
        for tier in self.remote:
            if tier.sms > self.sms:
                expected = f"at most the device's {self.sms}"
                raise bad(f"remote tier {tier.name}: sms is {tier.sms}", expected)
        if self.device == "cuda" and self.sms <= len(self.remote):
            raise bad(f"{self.name}: sms is {self.sms}", "one for each tier, HBM included")
        for group in (self.hbm_group, *(tier.group for tier in self.remote)):
            if group and group not in self.link_groups:
                raise bad(f"link group {group!r} is not listed", "a rate under [link_groups]")

    @functools.cached_property
    def card(self) -> Card:
        """The GPU as launches see it; a Hopper where the facts do not say which."""
        shared = self.facts.get("shared_bytes_per_sm")
        return Card.of(
            str(self.facts.get("compute_capability", "9.0")),
            sms=self.sms,
            shared_bytes_per_sm=shared if isinstance(shared, int) else None,
            clusters=self.clusters,
        )

    def on(self, card: Card) -> "HardwareProfile":
        """This machine with the limits of `card`; rates and costs stay.

        Remote tiers keep their SMs, as far as the card has them.
        """
        own = self.card
        if (own.capability, own.sms, own.shared_bytes_per_sm) == (
            card.capability,
            card.sms,
            card.shared_bytes_per_sm,
        ):
            return self
        most = max(1, card.sms - len(self.remote))
        return replace(
            self,
            sms=card.sms,
            clusters=card.clusters,
            remote=tuple(replace(tier, sms=min(tier.sms, most)) for tier in self.remote),
            facts={
                **self.facts,
                "compute_capability": card.capability,
                "shared_bytes_per_sm": card.shared_bytes_per_sm,
            },
        )

    def launching(self, card: Card) -> "HardwareProfile":
        """This machine with launches as on `card`, which has the same limits."""
        machine = replace(self)
        machine.__dict__["card"] = card  # where the cached property looks
        return machine

    @functools.cached_property
    def l2(self) -> tuple[float, float] | None:
        """Bytes that SMs read again from L2, and their rate in bytes/s; None if not measured.

        It is the largest working set of the sweep that fits L2. Larger sets are left out, although
        the sweeps so far have high rates there: CTAs that drift together are believed to share what
        one of them reads.
        """
        sweep, size = self.sweeps.get("l2"), self.facts.get("l2_bytes")
        if sweep is None or not isinstance(size, int):
            return None
        sets = zip(sweep.column("set_bytes"), sweep.column("bytes_per_s"), strict=True)
        return max((of for of in sets if of[0] <= size), default=None)

    def for_steps(self, nbytes: float) -> "HardwareProfile":
        """This machine for decode steps that read `nbytes` of operands, HBM's rate being L2's.

        That is if they stay in L2 from step to step: an op's operands are used once in a step, and
        all others are read in between. To be confirmed on a GPU: that steps of a small model reach
        L2's rate, and up to which size.
        """
        if self.l2 is None or nbytes > self.l2[0]:
            return self
        rate = max(self.hbm_bytes_per_s, self.l2[1])
        return replace(self, hbm_bytes_per_s=rate).launching(self.card)

    @functools.cached_property
    def products(self) -> OpCosts:
        """Costs of linear ops by rows of X: the tables of few and of many rows in one."""
        parts = [self.linear] if self.many_rows is None else [self.linear, self.many_rows]
        names = ("rows", "seconds", "efficiency")
        return OpCosts(
            **{
                name: tuple(value for part in parts for value in getattr(part, name))
                for name in names
            }
        )

    def products_of(self, kind: str) -> OpCosts:
        """The same for quantized weights of a `kind` of QUANTIZED; "" for the model's dtype.

        Estimated where the profile has none.
        """
        return self._quantized[kind] if kind else self.products

    def measures(self, kind: str) -> bool:
        """Whether the costs of a `kind` of ESTIMATED are measured."""
        return getattr(self, kind) is not None

    @functools.cached_property
    def _quantized(self) -> dict[str, OpCosts]:
        return {kind: getattr(self, kind) or estimates.quantized(self, kind) for kind in QUANTIZED}

    @functools.cached_property
    def experts_or_estimate(self) -> OpCosts:
        """Costs of a product with experts, by the rows of X that an expert has."""
        return self.experts or estimates.experts(self)

    @functools.cached_property
    def router_or_estimate(self) -> OpCosts | None:
        """Costs of a norm and the router behind it, by rows of X."""
        return self.router or estimates.router(self)

    @property
    def comparable(self) -> bool:
        """Whether to compare predictions with measurements; False for a nominal CPU profile."""
        return self.device != "cpu" or self.provenance.kind == "measured"

    def tier(self, name: str) -> RemoteTier:
        """The remote tier called `name`, its rates capped by its group's total.

        Raises UsageError where the machine has no such tier.
        """
        if name in self._tiers:
            return self._tiers[name]
        names = ", ".join(tier.name for tier in self.remote)
        raise UsageError(
            f"profile {self.name} has no remote tier {name!r}",
            hint=f"it has: {names}"
            if names
            else "it has none: leave out --remote to use HBM alone",
        )

    @functools.cached_property
    def _tiers(self) -> dict[str, RemoteTier]:
        """The remote tiers by name, their rates capped."""
        found = {}
        for tier in self.remote:
            total = self.link_groups.get(tier.group or "", math.inf)
            found[tier.name] = replace(
                tier,
                direct_bytes_per_s=min(tier.direct_bytes_per_s, total),
                staged_bytes_per_s=min(tier.staged_bytes_per_s, total),
            )
        return found

    def flops_per_s(self, dtype: Dtype, n: int) -> float:
        """Matrix multiply rate in FLOP/s, in `dtype` and for `n` rows; UsageError if unknown."""
        if dtype not in self.compute:
            known = ", ".join(self.compute)
            raise UsageError(
                f"profile {self.name} has no compute rate for {dtype}", hint=f"it has: {known}"
            )
        return self.compute[dtype].at(n)
