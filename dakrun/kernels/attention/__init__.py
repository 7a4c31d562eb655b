"""Attention over a KV cache in several tiers: of a token per request, and of several.

splitk.py launches SplitK_FlashAttn, for decoding, as config.py chooses, for the work items that
work_items.py lists; prompt.py launches prompt attention, and cascade.py that of decode rows to the
prefixes that they share, which shared_prefixes.py finds. row_tiles.py has the work of prompt
attention for decode rows with more query heads per KV head than SplitK_FlashAttn takes.
kv_blocks.py has the layout of KV blocks.
"""

from dakrun.kernels.attention import kv_blocks
from dakrun.kernels.attention.cascade import PrefixAttention, RowGroup
from dakrun.kernels.attention.config import (
    AttentionConfig,
    attention_config,
    split_sizes,
    stage_bytes,
)
from dakrun.kernels.attention.kv_blocks import BlockTables, KVShape
from dakrun.kernels.attention.prompt import PromptSegment, PromptWork, prompt_attn
from dakrun.kernels.attention.row_tiles import RowTiles
from dakrun.kernels.attention.shared_prefixes import SharedPrefix, shared_prefixes
from dakrun.kernels.attention.splitk import cta_threads, splitk_flash_attn
from dakrun.kernels.attention.work_items import AttentionWorkspace, list_items

__all__ = [
    "AttentionConfig",
    "AttentionWorkspace",
    "BlockTables",
    "KVShape",
    "PrefixAttention",
    "PromptSegment",
    "PromptWork",
    "RowGroup",
    "RowTiles",
    "SharedPrefix",
    "attention_config",
    "cta_threads",
    "kv_blocks",
    "list_items",
    "prompt_attn",
    "shared_prefixes",
    "split_sizes",
    "splitk_flash_attn",
    "stage_bytes",
]
