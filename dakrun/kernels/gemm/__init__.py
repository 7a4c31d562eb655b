"""X W^T over a packed W in several tiers: SplitK_GEMM for few rows of X, the tiled GEMM for many.

dakrun/launches chooses the kernel and its launch; dispatch.py asks it, and holds the workspaces.
splitk.py and tiled.py launch one kernel each. packed_matrix.py makes an argument of W.
native/gemm.md describes the kernels.
"""

from dakrun.kernels.gemm.packed_matrix import addresses
from dakrun.kernels.gemm.scaled_rows import ScaledRows, factor_of
from dakrun.kernels.gemm.splitk import (
    NORMS,
    FusedNorm,
    HalvesWorkspace,
    look_ahead,
    splitk_gemm,
)
from dakrun.kernels.gemm.tiled import (
    AFTER_REMOTE,
    StreamKWorkspace,
    tiled_gemm,
)

__all__ = [
    "AFTER_REMOTE",
    "NORMS",
    "FusedNorm",
    "HalvesWorkspace",
    "ScaledRows",
    "StreamKWorkspace",
    "addresses",
    "factor_of",
    "look_ahead",
    "splitk_gemm",
    "tiled_gemm",
]
