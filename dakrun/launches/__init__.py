"""Launch configurations of the GEMM kernels: which kernel, tiles, rings, clusters and SMs by tier.

Pure functions of shapes, row blocks per tier and the card (hardware.Card). The kernels' wrappers
call them to launch, the planner to know what will be launched. choice.py chooses the kernel,
splitk.py the launch of SplitK_GEMM, tiled.py the launches of the tiled GEMM, from the shapes of
tiled_shapes.py by the costs of tiled_costs.py, experts.py and grouped_tiled.py those of products
with experts, of few rows and of many. tiers.py says how tiers are read. Imports no torch and needs
no GPU.
"""

from dakrun.launches.choice import By, few_rows, kernel_for, splitk_rows, tiled_rows
from dakrun.launches.experts import (
    EXPERT_CHUNK_ROWS,
    MAX_EXPERTS,
    ROUTER_COLS,
    ROUTER_EXPERTS,
    ROUTER_LOGITS,
    ROUTER_MAX_ROWS,
    ROUTER_TILE_ROWS,
    SPREAD,
    GroupedConfig,
    expert_buffer_bytes,
    expert_chunks,
    expert_splits,
    few_expert_rows,
    grouped_config,
    grouped_tiles,
    router_ctas,
    router_logits,
    router_rows,
)
from dakrun.launches.grouped_tiled import grouped_launch, grouped_shapes
from dakrun.launches.splitk import (
    K_SHARES,
    STEP_ATOMS,
    GemmConfig,
    Ring,
    can_mix,
    gemm_config,
    group_sizes,
    half_columns,
    ring_bytes,
    split_row_blocks,
    tiles_for,
)
from dakrun.launches.tiers import TierAccess
from dakrun.launches.tiled import local_tier, shapes, tiled_config
from dakrun.launches.tiled_shapes import (
    MAX_OUTPUT_BLOCKS,
    OUTPUT_BLOCK_BYTES,
    PARTIAL_BYTES,
    Launch,
    Shape,
    TierTiles,
    TiledConfig,
    beside,
    sharing_tiles,
    wide_tiles,
    x_tiles,
)

__all__ = [
    "EXPERT_CHUNK_ROWS",
    "K_SHARES",
    "MAX_EXPERTS",
    "MAX_OUTPUT_BLOCKS",
    "OUTPUT_BLOCK_BYTES",
    "PARTIAL_BYTES",
    "ROUTER_COLS",
    "ROUTER_EXPERTS",
    "ROUTER_LOGITS",
    "ROUTER_MAX_ROWS",
    "ROUTER_TILE_ROWS",
    "SPREAD",
    "STEP_ATOMS",
    "By",
    "GemmConfig",
    "GroupedConfig",
    "Launch",
    "Ring",
    "Shape",
    "TierAccess",
    "TierTiles",
    "TiledConfig",
    "beside",
    "can_mix",
    "expert_buffer_bytes",
    "expert_chunks",
    "expert_splits",
    "few_expert_rows",
    "few_rows",
    "gemm_config",
    "group_sizes",
    "grouped_config",
    "grouped_launch",
    "grouped_shapes",
    "grouped_tiles",
    "half_columns",
    "kernel_for",
    "local_tier",
    "ring_bytes",
    "router_ctas",
    "router_logits",
    "router_rows",
    "shapes",
    "sharing_tiles",
    "split_row_blocks",
    "splitk_rows",
    "tiled_config",
    "tiled_rows",
    "tiles_for",
    "wide_tiles",
    "x_tiles",
]
