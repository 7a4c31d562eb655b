"""A machine as the planner sees it: tiers, links, compute rates, fixed costs.

HardwareProfile is loaded from and saved to TOML; where its numbers come from is part of it.
Knows nothing of models and measures nothing.
"""

import functools
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from dakrun.config import DTYPE_BYTES, Dtype
from dakrun.errors import UsageError
from dakrun.hardware.parts import LOCAL as LOCAL
from dakrun.hardware.parts import (
    MAX,
    MAX_SECONDS,
    MIN,
    OtherSchema,
    bad,
    check_positive,
    check_whole,
)
from dakrun.hardware.parts import ComputeRate as ComputeRate
from dakrun.hardware.parts import OpCosts as OpCosts
from dakrun.hardware.parts import Provenance as Provenance
from dakrun.hardware.parts import Published as Published
from dakrun.hardware.parts import RemoteTier as RemoteTier
from dakrun.hardware.parts import Sweep as Sweep
from dakrun.hardware.toml_text import key, toml_text

SCHEMA = 2
COSTS = ("linear", "many_rows", "norm", "attention", "sampling")  # kinds of what is launched
OPTIONAL_COSTS = ("many_rows", "norm", "sampling")
# What a staged op costs besides: it starts when its copy has ended, not beside the op before. For
# profiles that do not say; the mean over OPT-6.7B's on an H200, at 0.5 to 10% in host memory.
STAGED_SECONDS = 5.5e-6


@dataclass(frozen=True, kw_only=True)
class HardwareProfile:
    """One machine. Bandwidths are in bytes/s, sizes in bytes, times in seconds.

    `linear` and `attention` are what ops cost besides what bandwidths and compute rates allow, and
    `many_rows` is the same of linear ops with more rows of X than `linear` has. The fixed cost of
    attention has in it what it and the products beside it cost each other. `norm` is what a
    norm ahead of a linear op costs besides X read and written, `sampling` what the next tokens
    cost besides logits read; None where it is not known, and left out of predictions.
    `staged_seconds` is what an op costs more whose bytes the copy engine has brought.
    `link_groups` gives the total rate of each group; on a CPU the local tier is in one, too.
    `facts` (sizes, PCIe generation ...), `sweeps` and what others `published` are for people and
    pictures: no plan reads them.
    """

    name: str
    description: str
    provenance: Provenance
    device: Literal["cuda", "cpu"]
    device_name: str
    sms: int
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
    norm: OpCosts | None = None
    sampling: OpCosts | None = None
    staged_seconds: float = STAGED_SECONDS
    facts: Mapping[str, int | str] = field(default_factory=dict)
    sweeps: Mapping[str, Sweep] = field(default_factory=dict)
    published: tuple[Published, ...] = ()

    def __post_init__(self) -> None:
        for text in (self.name, self.description, self.device_name, self.hbm_group):
            if not isinstance(text, str):
                raise bad(f"{text!r} stands for a name or description", "a string")
        check_whole(self, self.name, "sms")
        check_positive(self, self.name, "hbm_capacity_bytes", "hbm_bytes_per_s")
        if self.device not in ("cuda", "cpu"):
            raise bad(f"device is {self.device!r}", "cuda or cpu")
        if not 0 <= self.context_bytes <= MAX:
            raise bad(f"context_bytes is {self.context_bytes}", "at least 0")
        if not 0 <= self.staged_seconds <= MAX_SECONDS:
            raise bad(f"staged_seconds is {self.staged_seconds}", f"0 to {MAX_SECONDS:g}")
        if self.many_rows and self.many_rows.rows[0] <= self.linear.rows[-1]:
            raise bad(f"many_rows begin at {self.many_rows.rows[0]}", "more rows than linear has")
        if not all(MIN <= rate <= MAX for rate in self.link_groups.values()):
            raise bad("the rate of a link group makes no sense", "bytes per second")
        names = [tier.name for tier in self.remote]
        if len(set(names)) < len(names):
            raise bad(f"remote tiers {names} share a name", "a name of its own for each")
        for tier in self.remote:
            if tier.sms > self.sms:
                expected = f"at most the device's {self.sms}"
                raise bad(f"remote tier {tier.name}: sms is {tier.sms}", expected)
        if self.device == "cuda" and self.sms <= len(self.remote):
            raise bad(f"{self.name}: sms is {self.sms}", "one for each remote tier and one for HBM")
        for group in (self.hbm_group, *(tier.group for tier in self.remote)):
            if group and group not in self.link_groups:
                raise bad(f"link group {group!r} is not listed", "a rate under [link_groups]")

    @functools.cached_property
    def products(self) -> OpCosts:
        """What linear ops cost by rows of X, few and many; between the two linear in rows."""
        parts = [self.linear] if self.many_rows is None else [self.linear, self.many_rows]
        names = ("rows", "seconds", "efficiency")
        return OpCosts(
            **{
                name: tuple(value for part in parts for value in getattr(part, name))
                for name in names
            }
        )

    def tier(self, name: str) -> RemoteTier:
        """The remote tier called `name`, at its group's rates if these are less.

        Raises UsageError where the machine has none.
        """
        for tier in self.remote:
            if tier.name == name:
                most = self.link_groups.get(tier.group or "", math.inf)
                if max(tier.direct_bytes_per_s, tier.staged_bytes_per_s) <= most:
                    return tier
                return replace(
                    tier,
                    direct_bytes_per_s=min(tier.direct_bytes_per_s, most),
                    staged_bytes_per_s=min(tier.staged_bytes_per_s, most),
                )
        names = ", ".join(tier.name for tier in self.remote) or "none"
        raise UsageError(
            f"profile {self.name} has no remote tier {name!r}", hint=f"it has: {names}"
        )

    def flops_per_s(self, dtype: Dtype, n: int) -> float:
        """Matrix multiply rate in `dtype` for a batch of `n` rows, in FLOP/s."""
        if dtype not in self.compute:
            known = ", ".join(self.compute)
            raise UsageError(
                f"profile {self.name} has no compute rate for {dtype}", hint=f"it has: {known}"
            )
        return self.compute[dtype].at(n)

    @classmethod
    def from_toml(cls, text: str, *, source: str) -> "HardwareProfile":
        """Parse a profile; UsageError naming `source` where it does not follow the schema."""
        try:
            raw = tomllib.loads(text)
            if raw.get("schema") != SCHEMA:
                raise OtherSchema(
                    f"schema is {raw.get('schema')!r}, not {SCHEMA}",
                    hint="measure again with dakrun profile, or see profiles/ for examples",
                )
            return _from_tables(raw)
        except tomllib.TOMLDecodeError as problem:
            raise UsageError(
                f"{source}: not TOML ({problem})", hint="see profiles/ for examples"
            ) from None
        except KeyError as missing:
            raise UsageError(
                f"{source}: {missing.args[0]!r} is missing", hint="see profiles/ for examples"
            ) from None
        except UsageError as problem:
            raise type(problem)(f"{source}: {problem}", hint=problem.hint) from None
        except (TypeError, ValueError, AttributeError, OverflowError) as problem:
            raise UsageError(
                f"{source}: a value has the wrong type ({problem})",
                hint="see profiles/ for examples",
            ) from None

    def to_toml(self) -> str:
        """The profile as TOML; from_toml gives back an equal one."""
        p = self.provenance
        head = {"schema": SCHEMA, "name": self.name, "description": self.description}
        tables: list[tuple[str, dict[str, Any]]] = [
            ("[provenance]", {"kind": p.kind, "date": p.date, "source": p.source}),
            ("[device]", {"kind": self.device, "name": self.device_name, "sms": self.sms}),
            ("[hbm]", {"capacity_bytes": self.hbm_capacity_bytes,
                       "bytes_per_s": float(self.hbm_bytes_per_s),
                       **({"group": self.hbm_group} if self.hbm_group else {})}),
            ("[costs]", {"context_bytes": self.context_bytes,
                         "staged_seconds": float(self.staged_seconds)}),
            *((f"[costs.{kind}]", {k: list(v) for k, v in vars(costs).items()})
              for kind in COSTS if (costs := getattr(self, kind))),
        ]  # fmt: skip
        if self.link_groups:
            tables.append(("[link_groups]", {k: float(v) for k, v in self.link_groups.items()}))
        for tier in self.remote:
            tables.append(("[[remote]]", {k: v for k, v in vars(tier).items() if v != ""}))
        for dtype, rate in self.compute.items():
            points = [[n, float(flops)] for n, flops in rate.measured]
            table = {"peak_flops_per_s": float(rate.peak), "measured": points}
            tables.append((f"[compute.{dtype}]", {k: v for k, v in table.items() if v != []}))
        if self.facts:
            tables.append(("[facts]", dict(self.facts)))
        tables += [("[[published]]", dict(vars(figure))) for figure in self.published]
        for name, sweep in self.sweeps.items():
            rows = [list(map(_number, row)) for row in sweep.rows]
            tables.append((f"[sweeps.{key(name)}]", {"columns": [*sweep.columns], "rows": rows}))
        return toml_text(head, tables)


def _from_tables(raw: Mapping[str, Any]) -> HardwareProfile:
    device, hbm, costs = raw["device"], raw["hbm"], raw["costs"]
    compute: dict[Dtype, ComputeRate] = {}
    for dtype, table in raw["compute"].items():
        if dtype not in DTYPE_BYTES:
            raise bad(f"compute.{dtype} is unknown", ", ".join(DTYPE_BYTES))
        points = tuple((n, float(rate)) for n, rate in table.get("measured", []))
        compute[dtype] = ComputeRate(peak=float(table["peak_flops_per_s"]), measured=points)
    return HardwareProfile(
        name=raw["name"],
        description=raw["description"],
        provenance=Provenance(**raw["provenance"]),
        device=device["kind"],
        device_name=device["name"],
        sms=device["sms"],
        hbm_capacity_bytes=hbm["capacity_bytes"],
        hbm_bytes_per_s=hbm["bytes_per_s"],
        context_bytes=costs["context_bytes"],
        linear=_op_costs(costs["linear"]),
        attention=_op_costs(costs["attention"]),
        **{kind: _op_costs(costs[kind]) for kind in OPTIONAL_COSTS if kind in costs},
        staged_seconds=costs.get("staged_seconds", STAGED_SECONDS),
        remote=tuple(RemoteTier(**table) for table in raw.get("remote", [])),
        compute=compute,
        link_groups=raw.get("link_groups", {}),
        hbm_group=hbm.get("group", ""),
        facts=raw.get("facts", {}),
        sweeps={
            name: Sweep(
                columns=tuple(table["columns"]),
                rows=tuple(tuple(map(float, row)) for row in table["rows"]),
            )
            for name, table in raw.get("sweeps", {}).items()
        },
        published=tuple(Published(**table) for table in raw.get("published", [])),
    )


def _op_costs(table: Mapping[str, Any]) -> OpCosts:
    return OpCosts(**{name: tuple(values) for name, values in table.items()})


def _number(value: float) -> float:
    """`value` as an int where it is one, which reads better."""
    return int(value) if value.is_integer() and abs(value) < 2**53 else value
