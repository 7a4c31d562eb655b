"""What `dakrun evaluate` measures: points and their results. charts.py says where they are shown.

A point says what is measured, so that figures may share it; its time also depends on the machine,
the commit, and whether the run is quick, which the store keeps beside it. Imports no torch.
"""

import json
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

from dakrun.models.modules import Fused
from dakrun.plan import Strategy

Source = Literal["measured", "predicted"]


@dataclass(frozen=True, kw_only=True)
class Point:
    """Something to measure. `kind` is its class in keys and in CSV."""

    kind: ClassVar[str]

    @property
    def key(self) -> str:
        """The point as text: equal keys, equal points."""
        return json.dumps({"kind": self.kind, **self.figures()}, sort_keys=True)

    def figures(self) -> dict[str, Any]:
        """The fields by name."""
        return {of.name: getattr(self, of.name) for of in fields(self)}


@dataclass(frozen=True, kw_only=True)
class StepPoint(Point):
    """A decode step of `model` for `batch_size` requests of `prompt_len` and `new_tokens` tokens.

    `ratio` of weight and KV bytes lie outside HBM (None: the planner's choice). `by` is dakrun or
    a rival; `without` names techniques that are switched off (see cases.ablated).
    """

    kind = "step"
    model: str
    batch_size: int = 8
    prompt_len: int = 32
    new_tokens: int
    ratio: float | None = 0.0
    transport: Literal["direct", "staged"] | None = None
    strategy: Strategy = "auto"
    hbm_budget: int | None = None
    remote: str = "host"
    without: tuple[str, ...] = ()
    by: str = "dakrun"


@dataclass(frozen=True, kw_only=True)
class OpPoint(Point):
    """A single op of a layer of `model`, `ratio` of its operand remote."""

    model: str
    ratio: float
    remote: str = "host"
    without: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ProductPoint(OpPoint):
    """X [n, K] times the weight of the linear op `op`, or times a matrix that it names: "MxK"."""

    kind = "product"
    op: str
    n: int


@dataclass(frozen=True, kw_only=True)
class AttentionPoint(OpPoint):
    """Decode attention: `batch_size` slots of `length` positions each."""

    kind = "attention"
    batch_size: int
    length: int


@dataclass(frozen=True, kw_only=True)
class ReadPoint(Point):
    """A remote tier read by `sms` SMs with `in_flight` bytes, and HBM by `hbm_sms` others."""

    kind = "read"
    remote: str
    sms: int
    in_flight: int
    hbm_sms: int


@dataclass(frozen=True, kw_only=True)
class BatchPoint(Point):
    """A batched product: X [heads, n, cols] times matrices [heads, rows, cols] of `bits`, in HBM.

    Each launch reads the same matrices, which stay in L2 as far as they fit. `by` is cuBLAS, in 16
    bits alone, or one of this project's kernels.
    """

    kind = "batch"
    heads: int
    rows: int
    cols: int
    n: int
    bits: Literal[4, 16]
    by: Literal["splitk", "tiled", "cublas"]


@dataclass(frozen=True, kw_only=True)
class PartPoint(Point):
    """A part of a decode step of `model` with everything in HBM: one of PARTS."""

    kind = "part"
    model: str
    batch_size: int
    prompt_len: int
    new_tokens: int
    part: str


LINEAR, ATTENTION, OTHER = "linear layers", "attention", "other"
FUSED: dict[str, Fused] = {"norms": "norms", "activation": "activation", "RoPE": "rope"}
PARTS = (LINEAR, ATTENTION, *FUSED, OTHER)
PART_OF = {"linear": LINEAR, "experts": LINEAR, "attention": ATTENTION}  # by an op's category


@dataclass(frozen=True, kw_only=True)
class FilePoint(Point):
    """A whole file: `requests` of random lengths, with prompts and completions up to `longest`."""

    kind = "file"
    model: str
    requests: int
    longest: int
    ratio: float | None
    remote: str = "host"


@dataclass(frozen=True, kw_only=True)
class Result:
    """The figures of a point; None is what does not apply or was not measured.

    `seconds` is the median time of a step, a launch or a file; `predicted_s` the planner's.
    `ratio` is the one that was met, `read_bytes` what a step or launch reads in all,
    `remote_bytes` what it reads from remote tiers; `link_bytes` counts what crosses the link, with
    repetitions, in a product of many rows that the link limits. `problem` says why there is no
    time, `short_of_memory` that the reason is a lack of memory, and `again` that a later run should
    try anew.
    """

    source: Source
    seconds: float | None = None
    predicted_s: float | None = None
    limit_s: float | None = None
    ratio: float | None = None
    required_ratio: float | None = None
    weight_bytes: float | None = None
    read_bytes: float | None = None
    remote_bytes: float | None = None
    link_bytes: float | None = None
    hbm_bytes_per_s: float | None = None
    remote_bytes_per_s: float | None = None
    tokens_per_s: float | None = None
    problem: str | None = None
    short_of_memory: bool | None = None
    again: bool | None = None

    @property
    def eb(self) -> float | None:
        """Effective bandwidth in bytes/s: weight bytes over the step's time."""
        return self.weight_bytes / self.seconds if self.seconds and self.weight_bytes else None

    @property
    def rate(self) -> float | None:
        """Bytes read over the time."""
        return self.read_bytes / self.seconds if self.seconds and self.read_bytes else None
