"""dakrun: offline batch inference whose weights and KV cache lie in several memory tiers.

Importing the package imports nothing else; the Python API is in `dakrun.llm`.
"""

__version__ = "0.1.0"
