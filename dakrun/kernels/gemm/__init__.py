"""X W^T over a packed W in several tiers: SplitK_GEMM for few rows, the tiled GEMM for many."""
