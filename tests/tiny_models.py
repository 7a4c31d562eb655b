"""Tiny random OPT and Llama checkpoints whose every matrix has at least five row blocks."""

from functools import cache
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, OPTConfig, PreTrainedModel

VOCAB = 331
_OPT = {
    "vocab_size": VOCAB,
    "num_hidden_layers": 3,
    "max_position_embeddings": 160,
    "init_std": 0.08,
    "eos_token_id": None,
    "bos_token_id": 1,
    "pad_token_id": 0,
}
_LLAMA = {
    "vocab_size": VOCAB,
    "hidden_size": 384,
    "intermediate_size": 1100,
    "num_hidden_layers": 3,
    "max_position_embeddings": 160,
    "initializer_range": 0.08,
    "eos_token_id": None,
    "bos_token_id": 1,
    "pad_token_id": 0,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

CONFIGS = {
    "opt-like-125m": OPTConfig(hidden_size=320, num_attention_heads=5, ffn_dim=1100, **_OPT),
    "opt-like-350m": OPTConfig(
        hidden_size=384,
        num_attention_heads=6,
        ffn_dim=1100,
        word_embed_proj_dim=320,
        do_layer_norm_before=False,
        **_OPT,
    ),
    "opt-no-bias": OPTConfig(
        hidden_size=320,
        num_attention_heads=5,
        ffn_dim=640,
        enable_bias=False,
        layer_norm_elementwise_affine=False,
        tie_word_embeddings=False,
        **_OPT,
    ),
    "llama-mha": LlamaConfig(num_attention_heads=6, **_LLAMA),
    "llama-gqa3-tied": LlamaConfig(
        num_attention_heads=6, num_key_value_heads=2, tie_word_embeddings=True, **_LLAMA
    ),
    "llama-gqa4-rope3": LlamaConfig(
        num_attention_heads=8, num_key_value_heads=2, rope_parameters=_LLAMA3_ROPE, **_LLAMA
    ),
    "llama-gqa8-sharded": LlamaConfig(
        num_attention_heads=8,
        num_key_value_heads=1,
        head_dim=80,
        attention_bias=True,
        mlp_bias=True,
        **_LLAMA,
    ),
}


@cache
def reference(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """transformers' model of that name with seeded random weights, biases and norms included."""
    torch.manual_seed(sum(name.encode()))
    model = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.1 * torch.randn_like(parameter)
    return model.to(dtype).eval()


def save(name: str, directory: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Write the checkpoint as transformers does; in many files where the name says so."""
    shards = "1MB" if "sharded" in name else "10GB"
    reference(name, dtype).save_pretrained(directory, max_shard_size=shards)
    return directory
