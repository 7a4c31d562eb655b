"""OLMoE (arXiv 2409.02060): RMSNorms of all queries and of all keys of a token, and experts."""

from dakrun.config import ModelConfig
from dakrun.models.decoder import Decoder
from dakrun.models.llama import llama
from dakrun.models.qwen3_moe import mixture


def olmoe(c: ModelConfig) -> Decoder:
    """The OLMoE model of `c`."""
    return llama(c, head_norms=(c.q_size, c.kv_size), feed_forward=mixture)
