"""X W^T over a packed W in several tiers: SplitK_GEMM for few rows of X, the tiled GEMM for many.

dispatch.py chooses between them and holds their workspaces. splitk.py and tiled.py launch one
kernel each, as dakrun/launches chooses. packed_matrix.py makes an argument of W. native/README.md
describes the kernels.
"""

from typing import TYPE_CHECKING

from dakrun.kernels.gemm.packed_matrix import PackedMatrix, addresses, packed_matrix
from dakrun.kernels.gemm.splitk import (
    ACTIVATIONS,
    NORMS,
    FusedNorm,
    HalvesWorkspace,
    look_ahead,
    splitk_gemm,
)
from dakrun.kernels.gemm.tiled import (
    AFTER_REMOTE,
    StreamKWorkspace,
    row_blocks_by_tier,
    tiled_gemm,
)

if TYPE_CHECKING:
    from dakrun.kernels.gemm.dispatch import Products, products

__all__ = [
    "ACTIVATIONS",
    "AFTER_REMOTE",
    "NORMS",
    "FusedNorm",
    "HalvesWorkspace",
    "PackedMatrix",
    "Products",
    "StreamKWorkspace",
    "addresses",
    "look_ahead",
    "packed_matrix",
    "products",
    "row_blocks_by_tier",
    "splitk_gemm",
    "tiled_gemm",
]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Import dispatch at its first use: it imports kernels that import this folder."""
        if name not in ("Products", "products"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from dakrun.kernels.gemm import dispatch

        return getattr(dispatch, name)
