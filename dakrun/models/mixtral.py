"""Mixtral (arXiv 2401.04088): Mistral with experts, under other names in its checkpoints."""

from functools import partial

from dakrun.config import ModelConfig
from dakrun.models.decoder import Decoder
from dakrun.models.llama import llama
from dakrun.models.qwen3_moe import mixture


def mixtral(c: ModelConfig) -> Decoder:
    """The Mixtral model of `c`."""
    experts = partial(mixture, block="block_sparse_moe", gate="w1", up="w3", down="w2")
    return llama(c, feed_forward=experts)
