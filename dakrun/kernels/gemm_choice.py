"""Which kernel computes a product of few rows of X: SplitK_GEMM or the tiled GEMM.

Needs no GPU, and no shape is special. The two sum in different orders, so the choice depends on
shapes and the GPU alone, not on where a matrix lies.
"""

import functools

from dakrun.kernels.heuristics import (
    ATOM_BYTES,
    MAX_ROWS,
    TierAccess,
    half_columns,
    ring,
    split_octets,
    tiles_for,
)
from dakrun.kernels.packing import ATOM_COLS
from dakrun.kernels.tiled_heuristics import predicted_cycles
from dakrun.kernels.tiled_shapes import Limits
from dakrun.units import ceil_div

FROM_ROWS = 65  # of X: with fewer SplitK_GEMM has them all; 33 lets predictions decide
# Cycles of an SM at 1.75 GHz: of a launch of SplitK_GEMM, of one that normalizes, and what is lost
# where a kernel's CTAs leave those of others no room beside them (7 us, seen in decode steps).
# Bytes that each SM takes in a cycle: of W from HBM, of W and X where all groups are a wave, and of
# several.
SPLITK_CYCLES = 7000
NORMALIZE_CYCLES = 4500
ALONE_CYCLES = 12000
HBM_BYTES = 18
WAVE_BYTES = 25.5
WAVES_BYTES = 36


@functools.cache
def tiles_are_faster(
    n: int, octets: int, cols: int, *, sms: int, limits: Limits, normalized: bool
) -> bool:
    """Whether the tiled GEMM takes less for `n` rows of X and a W of `octets` and `cols` columns.

    `normalized` says that rows of X are normalized, which SplitK_GEMM does itself. It reads all of
    X for every group of octets, which counts from the most rows that it has a kernel for. From more
    rows than a launch of it takes the tiled GEMM always is.
    """
    if n > MAX_ROWS or n < FROM_ROWS:
        return n > MAX_ROWS
    tiled = ALONE_CYCLES + predicted_cycles(n, octets, cols, sms=sms, limits=limits)
    tiled += NORMALIZE_CYCLES if normalized else 0
    return tiled < _splitk_cycles(n, octets, cols, sms=sms, normalized=normalized)


def _splitk_cycles(n: int, octets: int, cols: int, *, sms: int, normalized: bool) -> float:
    """What a launch takes that reads W from HBM, and X from L2 for each group or two."""
    (split,) = split_octets([octets], [TierAccess()], sms=sms)
    halves = half_columns(octets, 0 if normalized else cols, tiles_for(n), sms) > 0
    groups = ceil_div(octets, split.group)
    reads = groups / (2 if halves else ring(split, TierAccess(), tiles_for(n)).groups)
    w, x = (ATOM_BYTES * ceil_div(cols, ATOM_COLS) * count for count in (octets, tiles_for(n)))
    together = WAVE_BYTES if groups <= sms else WAVES_BYTES
    return SPLITK_CYCLES + max(w / HBM_BYTES, (w + reads * x) / together) / sms
