"""The kernel variants that a model needs, so that they are compiled ahead and in parallel.

Needs no GPU.
"""

from collections.abc import Iterable, Sequence

import torch

from dakrun.geometry import FEW_ROWS, TILED_X_TILES
from dakrun.kernels import embed, normalize, select_greedy, store_kv, unpack
from dakrun.kernels.attention import splitk as attention
from dakrun.kernels.gemm import splitk as gemm
from dakrun.kernels.gemm import tiled as tiled_gemm
from dakrun.kernels.gemm.splitk_config import tiles_for
from dakrun.kernels.runtime import operands

Variant = tuple[str, dict[str, int]]  # a file of native/, and the macros of the variant


def variants(
    dtype: torch.dtype,
    rows: Iterable[int],
    x_tiles: Sequence[int],
    *,
    head_dim: int,
    group: int = 1,
    mixes: bool = False,
) -> list[Variant]:
    """Variants for a model with `head_dim` and `group` query heads per KV head, slowest first.

    SplitK_GEMM is launched for each of `rows` rows of X, with a fused norm up to FEW_ROWS, and with
    `mixes` also for weights with mixed tiers. `x_tiles` are the GPU's variants of the tiled GEMM,
    for many rows; if some are missing, torch multiplies unpacked weights instead.
    Raises ValueError for `rows` that SplitK_GEMM does not take.
    """
    few = {(tiles_for(n), norm) for n in rows for norm in (False, n <= FEW_ROWS)}
    skinny = [
        (gemm.SOURCE, macros)
        for x_tiles, norm in sorted(few, reverse=True)
        for macros in gemm.defines_of_tiers(dtype, x_tiles, norm, mixes=mixes)
    ]
    many = [(tiled_gemm.SOURCE, macros) for macros in tiled_gemm.all_defines(dtype)]
    small = (select_greedy, normalize, embed, store_kv)
    return [
        *(many if tuple(x_tiles) == TILED_X_TILES else [(unpack.SOURCE, {})]),
        (attention.SOURCE, attention.defines(dtype, head_dim, group)),
        *skinny,
        *((kernel.SOURCE, operands.defines(dtype)) for kernel in small),
    ]
