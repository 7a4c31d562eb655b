"""Memory tiers: HBM, page-locked host memory and peer GPUs. Only this folder allocates them.

tiers.py has the tiers, matrix.py matrices that lie in several; device.py GPU memory and peer
access; host.py pages of host memory; limits.py how much host memory there is (without importing
torch).
"""
