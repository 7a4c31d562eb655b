"""CUDA sources to launches: NVRTC, the cubin cache, CuPy modules, graphs, copies, tensor maps."""
