"""X W^T over a packed W in several tiers: SplitK_GEMM for few rows of X, the tiled GEMM for many.

dispatch.py chooses between them and holds their workspaces. splitk.py and tiled.py launch one
kernel each, as splitk_config.py and tiled_config.py choose, the latter among tiled_shapes.py.
packed_matrix.py makes an argument of W. native/README.md describes the kernels.
"""

from typing import TYPE_CHECKING

from dakrun.kernels.gemm.packed_matrix import PackedMatrix, addresses, packed_matrix
from dakrun.kernels.gemm.splitk import (
    ACTIVATIONS,
    NORMS,
    Activation,
    Norm,
    SplitKWorkspace,
    look_ahead,
    splitk_gemm,
)
from dakrun.kernels.gemm.splitk_config import (
    STEP_ATOMS,
    GemmConfig,
    Ring,
    TierAccess,
    gemm_config,
    ring_bytes,
    split_k_columns,
    split_row_blocks,
    tiles_for,
)
from dakrun.kernels.gemm.tiled import (
    AFTER_REMOTE,
    StreamKWorkspace,
    limits,
    row_blocks_by_tier,
    tiled_gemm,
    x_tiles,
)
from dakrun.kernels.gemm.tiled_config import local_tier, shapes, tiled_config
from dakrun.kernels.gemm.tiled_shapes import (
    BARRIER_BYTES,
    H200,
    MAX_CLUSTER,
    MAX_OUTPUT_BLOCKS,
    OUTPUT_BLOCK_BYTES,
    Launch,
    Limits,
    Shape,
    TierTiles,
    TiledConfig,
)

if TYPE_CHECKING:
    from dakrun.kernels.gemm.dispatch import By, Products, products, tiles

__all__ = [
    "ACTIVATIONS",
    "AFTER_REMOTE",
    "BARRIER_BYTES",
    "H200",
    "MAX_CLUSTER",
    "MAX_OUTPUT_BLOCKS",
    "NORMS",
    "OUTPUT_BLOCK_BYTES",
    "STEP_ATOMS",
    "Activation",
    "By",
    "GemmConfig",
    "Launch",
    "Limits",
    "Norm",
    "PackedMatrix",
    "Products",
    "Ring",
    "Shape",
    "SplitKWorkspace",
    "StreamKWorkspace",
    "TierAccess",
    "TierTiles",
    "TiledConfig",
    "addresses",
    "gemm_config",
    "limits",
    "local_tier",
    "look_ahead",
    "packed_matrix",
    "products",
    "ring_bytes",
    "row_blocks_by_tier",
    "shapes",
    "split_k_columns",
    "split_row_blocks",
    "splitk_gemm",
    "tiled_config",
    "tiled_gemm",
    "tiles",
    "tiles_for",
    "x_tiles",
]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Import dispatch at its first use: it imports kernels that import this folder."""
        if name not in ("By", "Products", "products", "tiles"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from dakrun.kernels.gemm import dispatch

        return getattr(dispatch, name)
