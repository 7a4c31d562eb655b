"""A hardware profile as TOML text: written, and read with checks of its keys and types.

profile.py checks the values.
"""

import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from dakrun.config import DTYPE_BYTES, Dtype
from dakrun.errors import UsageError
from dakrun.hardware.estimates import QUANTIZED
from dakrun.hardware.parts import (
    ComputeRate,
    KernelModel,
    OpCosts,
    OtherSchema,
    Provenance,
    Published,
    RemoteTier,
    Sweep,
    bad,
    check_keys,
    is_number,
)
from dakrun.hardware.profile import STAGED_SECONDS, HardwareProfile

SCHEMA = 3
OPTIONAL_COSTS = ("many_rows", *QUANTIZED, "experts", "router", "norm", "sampling")
COSTS = ("linear", "attention", *OPTIONAL_COSTS)  # tables under [costs]


def _fields(part: Any) -> list[str]:
    """The keys of a table that is as `part`."""
    return [field.name for field in fields(part)]


_HEAD = ("schema", "name", "description")
_TABLES: dict[str, Iterable[str]] = {  # keys
    "device": ("kind", "name", "sms", "clusters"),
    "hbm": ("capacity_bytes", "bytes_per_s", "group"),
    "costs": ("context_bytes", "staged_seconds", *COSTS),
    "kernel_model": _fields(KernelModel),
    "provenance": _fields(Provenance),
}
_OTHERS = ("remote", "compute", "link_groups", "facts", "sweeps", "published")


def parse_profile(text: str, *, source: str) -> HardwareProfile:
    """The profile in TOML. Raises UsageError, naming `source`, if `text` breaks the schema."""
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


def profile_text(profile: HardwareProfile) -> str:
    """A profile as TOML, of which parse_profile makes an equal one."""
    p = profile.provenance
    head = {"schema": SCHEMA, "name": profile.name, "description": profile.description}
    tables: list[tuple[str, dict[str, Any]]] = [
        ("[provenance]", {"kind": p.kind, "date": p.date, "source": p.source}),
        ("[device]", {"kind": profile.device, "name": profile.device_name, "sms": profile.sms,
                      **({"clusters": list(profile.clusters)} if profile.clusters else {})}),
        ("[hbm]", {"capacity_bytes": profile.hbm_capacity_bytes,
                   "bytes_per_s": float(profile.hbm_bytes_per_s),
                   **({"group": profile.hbm_group} if profile.hbm_group else {})}),
        ("[costs]", {"context_bytes": profile.context_bytes,
                     "staged_seconds": float(profile.staged_seconds)}),
        *((f"[costs.{kind}]", {k: list(v) for k, v in vars(costs).items()})
          for kind in COSTS if (costs := getattr(profile, kind))),
        ("[kernel_model]", {k: float(v) for k, v in vars(profile.kernel_model).items()}),
    ]  # fmt: skip
    if profile.link_groups:
        tables.append(("[link_groups]", {k: float(v) for k, v in profile.link_groups.items()}))
    for tier in profile.remote:
        tables.append(("[[remote]]", {k: v for k, v in vars(tier).items() if v != ""}))
    for dtype, rate in profile.compute.items():
        points = [[n, float(flops)] for n, flops in rate.measured]
        table = {"peak_flops_per_s": float(rate.peak), "measured": points}
        tables.append((f"[compute.{dtype}]", {k: v for k, v in table.items() if v != []}))
    if profile.facts:
        tables.append(("[facts]", dict(profile.facts)))
    tables += [("[[published]]", dict(vars(figure))) for figure in profile.published]
    for name, sweep in profile.sweeps.items():
        rows = [list(map(_number, row)) for row in sweep.rows]
        tables.append((f"[sweeps.{_key(name)}]", {"columns": [*sweep.columns], "rows": rows}))
    return _toml_text(head, tables)


def _from_tables(raw: Mapping[str, Any]) -> HardwareProfile:
    device, hbm, costs = raw["device"], raw["hbm"], raw["costs"]
    check_keys(raw, "", (*_HEAD, *_TABLES, *_OTHERS))
    for name, keys in _TABLES.items():
        check_keys(raw.get(name, {}), name, keys)
    for kind in COSTS:
        check_keys(costs.get(kind, {}), f"costs.{kind}", _fields(OpCosts))
    for table in raw.get("remote", []):
        check_keys(table, "remote", _fields(RemoteTier))
    for table in raw.get("published", []):
        check_keys(table, "published", _fields(Published))
    for name, table in raw.get("sweeps", {}).items():
        check_keys(table, f"sweeps.{name}", _fields(Sweep))
    compute: dict[Dtype, ComputeRate] = {}
    for dtype, table in raw["compute"].items():
        if dtype not in DTYPE_BYTES:
            raise bad(f"compute.{dtype} is unknown", ", ".join(DTYPE_BYTES))
        check_keys(table, f"compute.{dtype}", ("peak_flops_per_s", "measured"))
        points = tuple((n, _float(rate)) for n, rate in table.get("measured", []))
        compute[dtype] = ComputeRate(peak=_float(table["peak_flops_per_s"]), measured=points)
    return HardwareProfile(
        name=raw["name"],
        description=raw["description"],
        provenance=Provenance(**raw["provenance"]),
        device=device["kind"],
        device_name=device["name"],
        sms=device["sms"],
        clusters=tuple(device.get("clusters", ())),
        hbm_capacity_bytes=hbm["capacity_bytes"],
        hbm_bytes_per_s=hbm["bytes_per_s"],
        context_bytes=costs["context_bytes"],
        linear=_op_costs(costs["linear"]),
        attention=_op_costs(costs["attention"]),
        **{kind: _op_costs(costs[kind]) for kind in OPTIONAL_COSTS if kind in costs},
        staged_seconds=costs.get("staged_seconds", STAGED_SECONDS),
        kernel_model=KernelModel(**raw.get("kernel_model", {})),
        remote=tuple(RemoteTier(**table) for table in raw.get("remote", [])),
        compute=compute,
        link_groups=raw.get("link_groups", {}),
        hbm_group=hbm.get("group", ""),
        facts=raw.get("facts", {}),
        sweeps={
            name: Sweep(
                columns=tuple(table["columns"]),
                rows=tuple(tuple(map(_float, row)) for row in table["rows"]),
            )
            for name, table in raw.get("sweeps", {}).items()
        },
        published=tuple(Published(**table) for table in raw.get("published", [])),
    )


def _op_costs(table: Mapping[str, Any]) -> OpCosts:
    return OpCosts(**{name: tuple(values) for name, values in table.items()})


def _float(value: object) -> float:
    """`value` as a float; raises TypeError unless it is a number."""
    if not is_number(value):
        raise TypeError(f"{value!r} is not a number")
    return float(value)  # type: ignore[arg-type]


def _number(value: float) -> float:
    """`value` as an int where it is whole, for readability."""
    return int(value) if value.is_integer() and abs(value) < 2**53 else value


def _toml_text(
    head: Mapping[str, object], tables: Iterable[tuple[str, Mapping[str, object]]]
) -> str:
    """TOML text: the values of `head`, then each table under its heading, such as "[device]".

    Lists of more than four lists are written with a line for each.
    """
    parts = [("", head), *((f"{heading}\n", values) for heading, values in tables)]
    return "\n".join(
        heading + "".join(f"{_key(name)} = {_value(value)}\n" for name, value in values.items())
        for heading, values in parts
    )


def _key(name: str) -> str:
    """`name` as a TOML key: bare where TOML allows it."""
    return name if re.fullmatch("[A-Za-z0-9_-]+", name) else _value(name)


def _value(value: object) -> str:
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list):
        texts = [_value(item) for item in value]
        if value and all(isinstance(item, list) for item in value) and len(value) > 4:
            return "[\n" + "".join(f"  {text},\n" for text in texts) + "]"
        return "[" + ", ".join(texts) + "]"
    return repr(value)
