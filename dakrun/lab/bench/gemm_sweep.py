"""`dakrun bench --kernel gemm`: weight shapes, rows of X and offload ratios, and their cases.

Parses the command line's values; needs no GPU and no torch.
"""

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from dakrun.config import DTYPE_BYTES, ModelConfig, Workload
from dakrun.errors import UsageError
from dakrun.formats import PACKED16
from dakrun.geometry import CHUNK, row_block_count
from dakrun.lab.bench.ceilings import Effort
from dakrun.lab.bench.sweep import BenchDtype, Case, Sweep, parse_ratios, units_by_tier
from dakrun.models import model_config
from dakrun.plan import Op, decode_ops, linear_op
from dakrun.units import ceil_div


@dataclass(frozen=True)
class Shape:
    """A weight [M, K] of `rows` x `cols`; `ops` names the ops of a model that have this shape."""

    rows: int
    cols: int
    ops: tuple[str, ...] = ()

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


# A small square weight, and o, fc1 and fc2 of OPT-30B.
DEFAULT_SHAPES = (Shape(4096, 4096), Shape(7168, 7168), Shape(28672, 7168), Shape(7168, 28672))


@dataclass(frozen=True, kw_only=True)
class GemmCase(Case):
    """X [n, K] times a weight of `shape`; the units are row blocks."""

    shape: Shape
    n: int

    @property
    def label(self) -> str:
        return f"{self.shape} N={self.n}"

    def op(self, dtype: BenchDtype) -> Op:
        shape = (self.shape.rows, self.shape.cols)
        return linear_op(str(self.shape), shape, n=self.n, element_bytes=DTYPE_BYTES[dtype])


@dataclass(frozen=True, kw_only=True)
class GemmSweep(Sweep):
    """Every shape with every number of rows of X and every offload ratio.

    With `ablations` every case is also measured without the congestion window and without wave
    alignment.
    """

    kernel = "gemm"
    operand = "weights"
    shapes: tuple[Shape, ...]
    rows: tuple[int, ...]
    ablations: bool

    def cases(self, turning_point: float, effort: Effort, *, tiers: int) -> Iterator[GemmCase]:
        """The cases by shape, rows of X and ratio."""
        for shape, n, requested in itertools.product(self.shapes, self.rows, self.ratios):
            row_blocks, size = row_block_count(shape.rows), PACKED16.row_block_bytes(shape.cols)
            yield GemmCase(
                shape=shape,
                n=n,
                requested=requested,
                units=units_by_tier(row_blocks, requested, turning_point, tiers=tiers),
                unit_bytes=size,
                launches=effort.launches(row_blocks * size),
            )


def gemm_sweep(
    *,
    shapes: Iterable[str],
    model: str | None,
    rows: Sequence[int],
    ratios: Iterable[str],
    remote: str,
    dtype: BenchDtype,
    ablations: bool,
) -> GemmSweep:
    """The sweep of the command line's options: its shapes and the model's, or DEFAULT_SHAPES.

    Raises UsageError if an option is malformed.
    """
    named = [parse_shape(text) for text in shapes]
    if model is not None:
        named += model_shapes(model_config(model))
    return GemmSweep(
        shapes=merged(named) or DEFAULT_SHAPES,
        rows=tuple(dict.fromkeys(rows)),
        ratios=parse_ratios(ratios),
        remote=remote,
        dtype=dtype,
        ablations=ablations,
    )


def parse_shape(text: str) -> Shape:
    """The shape in a text such as "28672x7168"; UsageError for anything else."""
    match = re.fullmatch(r"([0-9]+)x([0-9]+)", text.strip().lower())
    if match is None:
        raise UsageError(
            f"{text!r} is not a shape MxK",
            hint="write the rows and columns of a weight, as in --shape 28672x7168",
        )
    return Shape(int(match[1]), int(match[2]))


def model_shapes(model: ModelConfig) -> list[Shape]:
    """The weights of a decode step's linear ops in order, lm_head included."""
    one = Workload(batch_size=1, prompt_len=1, new_tokens=1, max_model_len=1)
    linear = [op for op in decode_ops(model, one) if op.category == "linear"]
    return [Shape(*op.shape, (op.name,)) for op in linear]


def merged(shapes: Iterable[Shape]) -> tuple[Shape, ...]:
    """The shapes without repetitions; equal shapes join their ops."""
    ops: dict[tuple[int, int], tuple[str, ...]] = {}
    for shape in shapes:
        size = (shape.rows, shape.cols)
        ops[size] = ops.get(size, ()) + shape.ops
    return tuple(Shape(*size, names) for size, names in ops.items())
