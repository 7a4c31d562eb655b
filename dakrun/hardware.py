"""A machine as the planner sees it: tiers, links, compute rates, fixed costs.

HardwareProfile is loaded from and saved to TOML; where its numbers come from is part of it.
Knows nothing of models and measures nothing.
"""

import bisect
import json
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from dakrun.config import DTYPE_BYTES, Dtype
from dakrun.errors import UsageError
from dakrun.resources import resource_dir

SCHEMA = 1
LOCAL = "hbm"


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """Where a profile's numbers come from: measured (when, how) or a spec sheet (which)."""

    kind: Literal["measured", "spec-sheet", "nominal"]
    date: str
    source: str

    def __post_init__(self) -> None:
        if self.kind not in ("measured", "spec-sheet", "nominal"):
            raise _bad(f"provenance.kind is {self.kind!r}", "measured, spec-sheet or nominal")
        if not all(isinstance(text, str) and text for text in (self.source, self.date)):
            raise _bad("provenance lacks its date or source", "say when and how it was found")


@dataclass(frozen=True, kw_only=True)
class RemoteTier:
    """Memory behind a link. Bandwidths are in bytes/s.

    `window_bytes` caps the bytes in flight of direct reads over all SMs; `sms` is how many SMs
    saturate the link with it. Tiers that name the same `group` share that link's total rate.
    """

    name: str
    capacity_bytes: int
    direct_bytes_per_s: float
    staged_bytes_per_s: float
    window_bytes: int
    sms: int
    group: str = ""

    def __post_init__(self) -> None:
        if self.name == LOCAL or not self.name:
            raise _bad(f"a remote tier is named {self.name!r}", "host, peer:1 and the like")
        positive = ("capacity_bytes", "direct_bytes_per_s", "staged_bytes_per_s", "window_bytes")
        _check_positive(self, f"remote tier {self.name}", *positive, "sms")


@dataclass(frozen=True, kw_only=True)
class ComputeRate:
    """Dense matrix multiply rate of one dtype, in FLOP/s.

    `peak` is what the unit can do; `measured` holds (N, FLOP/s) pairs with N ascending.
    """

    peak: float
    measured: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        ns = [n for n, _ in self.measured]
        rates = [self.peak, *(rate for _, rate in self.measured)]
        if not all(0 < rate < math.inf for rate in rates) or ns != sorted({n for n in ns if n > 0}):
            raise _bad("compute rates are not positive with N ascending", "a list [[N, FLOP/s]]")

    def at(self, n: int) -> float:
        """FLOP/s at batch `n`: between measured points linear in log N and log rate."""
        if not self.measured:
            return self.peak
        index = bisect.bisect_left(self.measured, (n, 0.0))
        if index == 0:
            return self.measured[0][1]
        if index == len(self.measured):
            return self.measured[-1][1]
        (n0, r0), (n1, r1) = self.measured[index - 1 : index + 1]
        share = math.log(n / n0) / math.log(n1 / n0)
        return math.exp(math.log(r0) + share * math.log(r1 / r0))


@dataclass(frozen=True, kw_only=True)
class HardwareProfile:
    """One machine. Bandwidths are in bytes/s, sizes in bytes, times in seconds.

    An op that the roofline bounds by t is predicted to take t / efficiency + op_seconds; the
    efficiencies are of the op's kind ("linear", "attention"), op_seconds is a launch in a graph.
    `link_groups` gives the total rate of each group; on a CPU the local tier is in one, too.
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
    op_seconds: float
    linear_efficiency: float
    attention_efficiency: float
    remote: tuple[RemoteTier, ...]
    compute: Mapping[Dtype, ComputeRate]
    link_groups: Mapping[str, float] = field(default_factory=dict)
    hbm_group: str = ""

    def __post_init__(self) -> None:
        for text in (self.name, self.description, self.device_name):
            if not isinstance(text, str):
                raise _bad(f"{text!r} stands for a name or description", "a string")
        _check_positive(self, self.name, "sms", "hbm_capacity_bytes", "hbm_bytes_per_s")
        if self.device not in ("cuda", "cpu"):
            raise _bad(f"device is {self.device!r}", "cuda or cpu")
        for value in (self.linear_efficiency, self.attention_efficiency):
            if not 0 < value <= 1:
                raise _bad(f"an efficiency is {value}", "above 0 and at most 1")
        if not all(0 <= cost < math.inf for cost in (self.op_seconds, self.context_bytes)):
            raise _bad("a fixed cost is negative or not finite", "at least 0")
        if not all(0 < rate < math.inf for rate in self.link_groups.values()):
            raise _bad("the rate of a link group is not positive", "bytes per second")
        names = [tier.name for tier in self.remote]
        if len(set(names)) < len(names):
            raise _bad(f"remote tiers {names} share a name", "a name of its own for each")
        for group in (self.hbm_group, *(tier.group for tier in self.remote)):
            if group and group not in self.link_groups:
                raise _bad(f"link group {group!r} is not listed", "a rate under [link_groups]")

    def tier(self, name: str) -> RemoteTier:
        """The remote tier called `name`; UsageError where the machine has none."""
        for tier in self.remote:
            if tier.name == name:
                return tier
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
                raise _bad(f"schema is {raw.get('schema')!r}", str(SCHEMA))
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
            raise UsageError(f"{source}: {problem}", hint=problem.hint) from None
        except (TypeError, ValueError, AttributeError) as problem:
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
            ("[costs]", {"context_bytes": self.context_bytes, "op_seconds": self.op_seconds,
                         "linear_efficiency": self.linear_efficiency,
                         "attention_efficiency": self.attention_efficiency}),
        ]  # fmt: skip
        if self.link_groups:
            tables.append(("[link_groups]", {k: float(v) for k, v in self.link_groups.items()}))
        for tier in self.remote:
            tables.append(("[[remote]]", {k: v for k, v in vars(tier).items() if v != ""}))
        for dtype, rate in self.compute.items():
            points = [[n, float(flops)] for n, flops in rate.measured]
            table = {"peak_flops_per_s": float(rate.peak), "measured": points}
            tables.append((f"[compute.{dtype}]", {k: v for k, v in table.items() if v != []}))
        return "\n".join(
            title + "".join(f"{_key(k)} = {_toml(v)}\n" for k, v in table.items())
            for title, table in (("", head), *((f"{title}\n", t) for title, t in tables))
        )


def load_profile(name: str) -> HardwareProfile:
    """The profile in file `name`, or the one shipped under that name."""
    path = Path(name)
    if path.suffix != ".toml":
        path = resource_dir("profiles") / f"{name}.toml"
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        known = ", ".join(shipped_profiles())
        raise UsageError(
            f"no profile {name!r}", hint=f"give a .toml file or one of: {known}"
        ) from None
    return HardwareProfile.from_toml(text, source=str(path))


def shipped_profiles() -> list[str]:
    """Names of the profiles that come with dakrun."""
    return sorted(path.stem for path in resource_dir("profiles").glob("*.toml"))


def find_profile(*, device: Literal["cuda", "cpu"]) -> HardwareProfile:
    """The shipped profile of this machine's first NVIDIA GPU, or the CPU's.

    Reads the driver's /proc entries, so that planning needs no CUDA library.
    Raises UsageError where the GPU has no profile.
    """
    if device == "cpu":
        return load_profile("cpu")
    gpus = gpu_names()
    profiles = [load_profile(name) for name in shipped_profiles()]
    for profile in profiles:
        if gpus and profile.device_name in gpus[0]:
            return profile
    raise UsageError(
        f"no profile for {gpus[0] if gpus else 'a GPU (there is none here)'}",
        hint="name one with --profile: " + ", ".join(shipped_profiles()),
    )


def gpu_names() -> list[str]:
    """Model names of the NVIDIA GPUs that the driver lists, in its order."""
    names = []
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.startswith("Model:"):
                names.append(line.removeprefix("Model:").strip())
    return names


def _from_tables(raw: Mapping[str, Any]) -> HardwareProfile:
    device, hbm, costs = raw["device"], raw["hbm"], raw["costs"]
    compute: dict[Dtype, ComputeRate] = {}
    for dtype, table in raw["compute"].items():
        if dtype not in DTYPE_BYTES:
            raise _bad(f"compute.{dtype} is unknown", ", ".join(DTYPE_BYTES))
        points = tuple((int(n), float(rate)) for n, rate in table.get("measured", []))
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
        op_seconds=costs["op_seconds"],
        linear_efficiency=costs["linear_efficiency"],
        attention_efficiency=costs["attention_efficiency"],
        remote=tuple(RemoteTier(**table) for table in raw.get("remote", [])),
        compute=compute,
        link_groups=raw.get("link_groups", {}),
        hbm_group=hbm.get("group", ""),
    )


def _check_positive(owner: object, name: str, *fields: str) -> None:
    for attribute in fields:
        value = getattr(owner, attribute)
        if not isinstance(value, int | float) or not 0 < value < math.inf:
            raise _bad(f"{name}: {attribute} is {value!r}", "a positive number")


def _bad(problem: str, expected: str) -> UsageError:
    return UsageError(problem, hint=f"expected: {expected}; see profiles/ for examples")


def _key(name: str) -> str:
    """`name` as a TOML key: bare where TOML allows it."""
    return name if re.fullmatch("[A-Za-z0-9_-]+", name) else _toml(name)


def _toml(value: object) -> str:
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    return repr(value)
