"""Memory tiers: HBM, page-locked host memory, peer GPUs; the one place that allocates host memory."""
