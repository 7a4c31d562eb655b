"""Phi-3 and Phi-4 (arXiv 2412.08905): Llama with fewer, larger matrices in its checkpoints."""

from functools import partial

from dakrun.config import ModelConfig
from dakrun.models.decoder import Decoder
from dakrun.models.llama import gated, llama


def phi3(c: ModelConfig) -> Decoder:
    """The Phi-3 model of `c`."""
    return llama(
        c,
        qkv={"self_attn.qkv_proj": c.q_size + 2 * c.kv_size},
        feed_forward=partial(gated, modules={"mlp.gate_up_proj": 2 * c.ffn_size}),
    )
