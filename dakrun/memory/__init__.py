"""Memory tiers: HBM, page-locked host memory, peer GPUs; only this folder allocates them."""
