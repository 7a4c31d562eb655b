"""Launches of single kernels as cases: operands, their bytes in tiers, and predicted times.

An operand is what a kernel reads from a tier. Each kernel has a class of operands here, and a class
of launches in chains/. Pure arithmetic; needs no GPU and no torch.
"""

import itertools
import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from dakrun import plan
from dakrun.config import DTYPE_BYTES, Dtype
from dakrun.errors import UsageError
from dakrun.formats import PACKED16, KVLayout
from dakrun.geometry import CHUNK, KV_BLOCK, MAX_GROUP_HEADS, PROMPT_PART_ROWS, row_block_count
from dakrun.hardware import HardwareProfile
from dakrun.lab.ceilings import Effort
from dakrun.units import ceil_div

TURNING_POINT: Literal["turning-point"] = "turning-point"
EXAMPLE = "as in --case 64:32/8:2048"

Ratio = float | Literal["turning-point"]


@dataclass(frozen=True)
class Weight:
    """A weight [M, K] of `rows` x `cols`, times X of `n` rows; the units are row blocks.

    `ops` names the ops of a model that have this shape.
    """

    rows: int
    cols: int
    ops: tuple[str, ...] = ()
    n: int = 1

    kernel, stored, key, baseline = "gemm", "weights", "weight", "cublas"
    min_launches = None  # of a chain: as the effort says

    def __post_init__(self) -> None:
        if self.rows < 1 or self.cols < 1:
            raise UsageError(f"a weight of {self} is empty", hint="both sizes are at least 1")
        if self.cols % CHUNK:
            more = ceil_div(self.cols, CHUNK) * CHUNK
            raise UsageError(
                f"a weight of {self}: the columns are no multiple of {CHUNK}",
                hint=f"the next shape that the kernel supports is {self.rows}x{more}",
            )

    def __str__(self) -> str:
        return f"{self.rows}x{self.cols}"

    @property
    def label(self) -> str:
        return f"{self} N={self.n}"

    @property
    def scale(self) -> float:
        """Standard deviation of random elements: outputs keep the scale of X."""
        return self.cols**-0.5

    @property
    def units(self) -> int:
        return row_block_count(self.rows)

    def unit_bytes(self, dtype: Dtype) -> int:
        """Bytes that a unit takes in memory, padding included."""
        return PACKED16.row_block_bytes(self.cols)

    def read_bytes(self, counts: Sequence[int], dtype: Dtype) -> tuple[int, ...]:
        """Bytes that a launch reads of each tier's units, `counts` of them."""
        return tuple(count * self.unit_bytes(dtype) for count in counts)

    def op(self, dtype: Dtype) -> plan.Op:
        """The planner's description of the launch."""
        shape = (self.rows, self.cols)
        return plan.linear_op(str(self), shape, n=self.n, element_bytes=DTYPE_BYTES[dtype])

    def figures(self) -> dict[str, Any]:
        """The first figures of a row."""
        return {"shape": str(self), "ops": "+".join(self.ops), "n": self.n}


@dataclass(frozen=True)
class Slots:
    """A decode step of `batch` slots of `length` positions each, the last of which is a new token.

    `heads` query heads of `head_dim` attend to `kv_heads` KV heads in equal groups. With
    `shortest`, the slots' lengths are drawn uniformly from `shortest` to `length`. The units are
    slots, each with room for the longest.
    """

    batch: int
    heads: int
    kv_heads: int
    length: int
    shortest: int | None = None
    head_dim: int = 128
    lengths: tuple[int, ...] = field(init=False, repr=False, compare=False)  # of each slot

    kernel, stored, key, baseline = "attention", "KV", "kv", "sdpa"
    min_launches, scale, most_heads = 4, 1.0, MAX_GROUP_HEADS

    def __post_init__(self) -> None:
        ends = (self.length if self.shortest is None else self.shortest, self.length)
        if min(self.batch, self.heads, self.kv_heads, *ends) < 1:
            raise UsageError(
                f"a case of {self} is empty", hint=f"all numbers are at least 1, {EXAMPLE}"
            )
        if self.heads % self.kv_heads or self.heads > self.most_heads * self.kv_heads:
            raise UsageError(
                f"a case of {self}: {self.heads} query heads for {self.kv_heads} KV heads",
                hint=f"the kernel supports 1 to {self.most_heads} for each, {EXAMPLE}",
            )
        if ends[0] > self.length:
            raise UsageError(
                f"a case of {self}: the shortest length is above the longest",
                hint="write the shortest first, as in --case 64:32/8:1-8192",
            )
        draw = random.Random(0)
        drawn = tuple(draw.randint(*ends) for _ in range(self.batch))
        object.__setattr__(self, "lengths", drawn)

    def __str__(self) -> str:
        lengths = str(self.length) if self.shortest is None else f"{self.shortest}-{self.length}"
        return f"{self.batch}:{self.heads}/{self.kv_heads}:{lengths}"

    @property
    def label(self) -> str:
        return str(self)

    @property
    def units(self) -> int:
        return self.batch

    @property
    def positions(self) -> int:
        """Positions of a slot's KV blocks."""
        return ceil_div(self.length, KV_BLOCK) * KV_BLOCK

    def unit_bytes(self, dtype: Dtype) -> int:
        return self.positions * 2 * self.kv_heads * self.head_dim * DTYPE_BYTES[dtype]

    def read_bytes(self, counts: Sequence[int], dtype: Dtype) -> tuple[int, ...]:
        """Bytes of the slots' own positions, the new tokens' included."""
        position, lengths = self.unit_bytes(dtype) // self.positions, iter(self.lengths)
        return tuple(position * sum(itertools.islice(lengths, count)) for count in counts)

    def op(self, dtype: Dtype) -> plan.Op:
        """Attention to slots of the mean length; its bytes have no padding."""
        layout = KVLayout(self.kv_heads, self.head_dim, DTYPE_BYTES[dtype])
        length = statistics.fmean(self.lengths)
        return plan.attention_op(
            self.heads, layout, n=self.batch, length=length, positions=self.positions
        )

    def figures(self) -> dict[str, Any]:
        sizes = {name: getattr(self, name) for name in ("batch", "heads", "kv_heads", "length")}
        mean = {"mean_length": statistics.fmean(self.lengths), "head_dim": self.head_dim}
        return {"case": str(self), **sizes, **mean}


@dataclass(frozen=True)
class Prompts(Slots):
    """Causal attention of `batch` prompts of `length` tokens each, all new, to themselves."""

    kernel = "prompt-attention"
    min_launches, most_heads = 1, PROMPT_PART_ROWS

    def __post_init__(self) -> None:
        if self.shortest is not None:
            raise UsageError(
                f"a case of {self}: prompts have one length", hint=f"write one, {EXAMPLE}"
            )
        super().__post_init__()

    @property
    def flops(self) -> float:
        """Two products over half of the square: 4 B S^2 / 2 H d, as articles count them."""
        return 2.0 * self.batch * self.length**2 * self.heads * self.head_dim

    def op(self, dtype: Dtype) -> plan.Op:
        """Attention of all tokens."""
        op = super().op(dtype)
        return replace(op, batch_size=self.batch * self.length, flops=self.flops)


Operand = Weight | Slots


@dataclass(frozen=True, kw_only=True)
class Case:
    """A launch whose operand has `units` in each tier, the local tier first.

    `requested` is the offload ratio that they were computed from. A chain has `launches`, each with
    its own operand.
    """

    operand: Operand
    dtype: Dtype
    requested: Ratio
    units: tuple[int, ...]
    launches: int

    @classmethod
    def of(
        cls, operand: Operand, dtype: Dtype, ratio: Ratio, turning: float, tiers: int, by: Effort
    ) -> "Case":
        """The case with `ratio` of the units in the second of `tiers`, as long as `by` asks for."""
        remote = remote_units(operand.units, ratio, turning)
        units = (operand.units - remote, remote)[:tiers]
        launches = by.launches(sum(operand.read_bytes(units, dtype)), operand.min_launches)
        return cls(operand=operand, dtype=dtype, requested=ratio, units=units, launches=launches)

    @property
    def ratio(self) -> float:
        """Remote units over all units."""
        return sum(self.units[1:]) / sum(self.units)

    @property
    def held_bytes(self) -> tuple[int, ...]:
        """Bytes of the operand in each tier, padding included."""
        return tuple(count * self.operand.unit_bytes(self.dtype) for count in self.units)

    @property
    def tier_bytes(self) -> tuple[int, ...]:
        """Bytes that a launch reads from each tier."""
        return self.operand.read_bytes(self.units, self.dtype)

    @property
    def read_bytes(self) -> int:
        """Bytes of the operand that a launch reads from all tiers."""
        return sum(self.tier_bytes)


@dataclass(frozen=True)
class Forecast:
    """The predicted seconds of a case, and the SMs that a plan would assign to each tier."""

    seconds: float
    sms: tuple[int, ...]


def forecast(
    case: Case,
    profile: HardwareProfile,
    remote: Sequence[str],
    sms: tuple[int, ...] | None = None,
) -> Forecast:
    """The planner's prediction for a case whose remote units lie in the tiers `remote`.

    The planner chooses the SMs of each tier unless `sms` gives them.
    """
    op = case.operand.op(case.dtype)
    compute = plan.compute_time(op, profile, case.dtype)
    ratios = [count / sum(case.units) for count in case.units]
    lines = plan.Links.of(profile, remote).lines(op.read_bytes, compute)
    kernel, link = plan.bound_times(lines, ratios)
    sms = sms or plan.sms_by_tier(op, [case.units], compute, max(kernel, link), profile, remote)
    launched = plan.launch_times(op, case.units, sms, compute, profile, remote)
    kernel, link = max(kernel, launched[0]), max(link, launched[1])
    return Forecast(plan.predicted_time(op, kernel, profile, link=link), sms)


def remote_units(units: int, requested: Ratio, turning_point: float) -> int:
    """The remote units, rounded to the nearest number.

    At the turning point they are rounded down: with one more unit the remote tier would finish
    after the local tier.
    """
    if requested == TURNING_POINT:
        return math.floor(units * turning_point)
    return math.floor(units * requested + 0.5)


def buffer_bytes(cases: Sequence[Case], alignment: int) -> list[int]:
    """Bytes of a buffer in each tier that fits the operands of any of the `cases`.

    The local buffer also fits all operands whole, each aligned to `alignment` bytes: the baseline
    reads them there.
    """
    whole = max(case.launches * (sum(case.held_bytes) + alignment) for case in cases)
    held = ([case.launches * nbytes for nbytes in case.held_bytes] for case in cases)
    local, *remote = (max(sizes) for sizes in zip(*held, strict=True))
    return [ceil_div(size, alignment) * alignment for size in (max(whole, local), *remote)]
