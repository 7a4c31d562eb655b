"""Decode attention over a KV cache in several tiers: SplitK_FlashAttn.

splitk.py launches the kernel, as config.py chooses. kv_blocks.py has the packed layout of a slot,
kv_cache.py the slots of all tiers.
"""

from dakrun.kernels.attention import kv_blocks
from dakrun.kernels.attention.config import (
    AttentionConfig,
    attention_config,
    split_sizes,
    stage_bytes,
)
from dakrun.kernels.attention.kv_blocks import BlockTables, KVShape
from dakrun.kernels.attention.kv_cache import KVCache, RowLayout
from dakrun.kernels.attention.splitk import AttentionWorkspace, cta_threads, splitk_flash_attn

__all__ = [
    "AttentionConfig",
    "AttentionWorkspace",
    "BlockTables",
    "KVCache",
    "KVShape",
    "RowLayout",
    "attention_config",
    "cta_threads",
    "kv_blocks",
    "split_sizes",
    "splitk_flash_attn",
    "stage_bytes",
]
