"""The measuring commands: bench/, probe/ (`dakrun profile`) and evaluate/, and their common parts.

samples.py: medians and spreads. chain.py: times of CUDA graphs. memory.py: buffers in tiers, and
the bandwidths of reading them, the ceilings of ceilings.py. cases.py: launches of kernels as cases,
which chains/ measures. output.py: tables, CSV and JSON. panel.py: axes with series, and PNGs of
them. rivals/: other programs. Importing this folder imports no torch.
"""
