"""Qwen3 (arXiv 2505.09388): Llama with RMSNorms of query and key heads."""

from dakrun.config import ModelConfig
from dakrun.models.decoder import Decoder
from dakrun.models.llama import llama


def qwen3(c: ModelConfig) -> Decoder:
    """The Qwen3 model of `c`, without experts."""
    return llama(c, head_norms=(c.head_dim, c.head_dim))
