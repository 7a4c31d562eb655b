"""Torch modules with operands that lie partly in a remote tier and are read where they lie.

dakrun.nn.huggingface, which imports transformers, gives attention to models of that library.
"""

from dakrun.nn.attention import SplitKFlashAttn
from dakrun.nn.gemm import SplitKGEMM, replace_linears
from dakrun.nn.kv_cache import PartitionedKVCache

__all__ = ["PartitionedKVCache", "SplitKFlashAttn", "SplitKGEMM", "replace_linears"]
