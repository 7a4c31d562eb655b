"""Which kernels a model needs, so that they are compiled side by side, ahead.

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

Variant = tuple[str, dict[str, int]]  # a file of native/, and its macros


def variants(
    dtype: torch.dtype,
    rows: Iterable[int],
    x_tiles: Sequence[int],
    *,
    head_dim: int,
    group: int = 1,
    mixes: bool = False,
) -> list[Variant]:
    """Of a model's kernels, the longest to compile first.

    Its heads have `head_dim` dimensions, and there are `group` query heads to a KV head. Products
    are of many rows of X, and by SplitK_GEMM of so many `rows`, with a norm up to FEW_ROWS of them;
    with `mixes` also of weights whose tiers are mixed. `x_tiles` are those of the GPU's tiled GEMM;
    torch computes many rows where some are missing.
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
