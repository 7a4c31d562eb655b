"""From CUDA sources to launches.

nvrtc compiles, jit caches, loads and launches, graph captures, copy_engine copies between tiers,
tensor_map describes matrices to TMA, operands has what wrappers share.
"""
