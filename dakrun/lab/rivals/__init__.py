"""Decode steps of other programs, of the same architecture with random weights.

steps.py measures them all. architecture.py makes transformers' model of one of dakrun's; layers of
it in host memory are prefetch.py's, experts on_demand.py's, and vllm.py has a process of its own.
"""
