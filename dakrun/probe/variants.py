"""Which kernels a GPU is measured with, so that they are compiled side by side, ahead.

Needs no GPU.
"""

from collections.abc import Sequence

from dakrun.kernels import (
    attention,
    gemm,
    normalize,
    operands,
    select_greedy,
    tiled_gemm,
    tiled_shapes,
    unpack,
)
from dakrun.kernels.heuristics import MAX_ROWS, tiles_for
from dakrun.octets import FEW_ROWS
from dakrun.probe.attention_costs import HEAD_DIM
from dakrun.probe.effort import Effort
from dakrun.probe.kernel_costs import DTYPE

Variant = tuple[str, dict[str, int]]  # a file of native/, and its macros


def variants(effort: Effort, x_tiles: Sequence[int]) -> list[Variant]:
    """Of the kernels whose costs are measured, the longest to compile first.

    `x_tiles` are those of the GPU's tiled GEMM; torch computes many rows where some are missing.
    """
    tiled = tuple(x_tiles) == tiled_shapes.X_TILES
    rows = {n for n in (*effort.rows, *effort.slots) if n <= (FEW_ROWS if tiled else MAX_ROWS)}
    few = {(tiles_for(n), norm) for n in rows for norm in (False, n <= FEW_ROWS)}
    found = [(tiled_gemm.SOURCE, macros) for macros in tiled_gemm.all_defines(DTYPE)]
    return [
        *(found if tiled else [(unpack.SOURCE, {})]),
        (attention.SOURCE, attention.defines(DTYPE, HEAD_DIM, 1)),
        *((gemm.SOURCE, gemm.defines(DTYPE, *variant)) for variant in sorted(few)),
        (select_greedy.SOURCE, operands.defines(DTYPE)),
        (normalize.SOURCE, operands.defines(DTYPE)),
    ]
