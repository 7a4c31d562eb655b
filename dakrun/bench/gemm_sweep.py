"""What `dakrun bench --kernel gemm` is asked to measure: shapes, rows of X, remote shares.

Knows how users write them; needs no GPU and no torch.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dakrun.bench.sweep import BenchDtype, Sweep, parse_ratios
from dakrun.config import ModelConfig, Workload
from dakrun.errors import UsageError
from dakrun.models.hub import model_config
from dakrun.plan.ops import decode_ops
from dakrun.units import ceil_div

COLS_STEP = 8  # 16 bytes, by which the tensor memory accelerator addresses rows of X


@dataclass(frozen=True)
class Shape:
    """A weight [M, K]: `rows` x `cols`. `ops` names the ops of a model that have it."""

    rows: int
    cols: int
    ops: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.rows < 1 or self.cols < 1:
            raise UsageError(f"a weight of {self} is empty", hint="both sizes are at least 1")
        if self.cols % COLS_STEP:
            more = ceil_div(self.cols, COLS_STEP) * COLS_STEP
            raise UsageError(
                f"a weight of {self}: the kernel takes columns in eights",
                hint=f"the next that it takes is {self.rows}x{more}",
            )

    def __str__(self) -> str:
        return f"{self.rows}x{self.cols}"


# A square one that is soon read, and OPT-30B's: o, fc1 and fc2.
DEFAULT_SHAPES = (Shape(4096, 4096), Shape(7168, 7168), Shape(28672, 7168), Shape(7168, 28672))


@dataclass(frozen=True, kw_only=True)
class GemmSweep(Sweep):
    """Every shape with every number of rows of X and every remote share.

    With `ablations` every case is also measured with the window off and with the alignment off.
    """

    shapes: tuple[Shape, ...]
    rows: tuple[int, ...]
    ablations: bool


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
    """What the command line asks for: its shapes and the model's, or else DEFAULT_SHAPES.

    Raises UsageError where something of it is malformed.
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
    """The weights of a decode step's linear ops, lm_head included, in their order."""
    one = Workload(batch_size=1, prompt_len=1, new_tokens=1, max_model_len=1)
    linear = [op for op in decode_ops(model, one) if op.category == "linear"]
    return [Shape(*op.shape, (op.name,)) for op in linear]


def merged(shapes: Iterable[Shape]) -> tuple[Shape, ...]:
    """Each shape once, with the ops of all that are alike."""
    ops: dict[tuple[int, int], tuple[str, ...]] = {}
    for shape in shapes:
        size = (shape.rows, shape.cols)
        ops[size] = ops.get(size, ()) + shape.ops
    return tuple(Shape(*size, of) for size, of in ops.items())
