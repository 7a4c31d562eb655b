"""Kernels over partitioned operands. They know tensors and tiers, not models or plans."""
