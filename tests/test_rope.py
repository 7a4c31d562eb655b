"""Cosines and sines of config.json's RoPE against transformers', in keys that contradict others."""

from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeRotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from dakrun.models import parse_model_config
from dakrun.models.functional import rope_table

ROTARY: dict[str, Any] = {
    "llama": LlamaRotaryEmbedding,
    "phi3": Phi3RotaryEmbedding,
    "glm4_moe": Glm4MoeRotaryEmbedding,
}
RAW = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 8192,
    "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
FACTORS = {"short_factor": [1 + i / 4 for i in range(8)], "long_factor": [9.0] * 8}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 40}


@pytest.mark.parametrize(
    ("family", "changed", "positions"),
    [
        ("phi3", {"rope_scaling": {"type": "longrope", **FACTORS}}, 4096),
        (
            "phi3",
            {
                "rope_scaling": {
                    "type": "longrope", "original_max_position_embeddings": 512, **FACTORS
                }
            },
            4096,
        ),
        (
            "phi3",
            {
                "original_max_position_embeddings": 512,
                "rope_scaling": {"type": "yarn", "factor": 2.0, **FACTORS},
            },
            512,
        ),
        ("llama", {"rope_scaling": {**YARN, "mscale": 0.7, "mscale_all_dim": 0}}, 8192),
        ("llama", {"rope_scaling": {**YARN, "beta_fast": 0, "beta_slow": None}}, 8192),
        ("llama", {"rope_scaling": {**YARN, "truncate": None}}, 8192),
        ("llama", {"rope_scaling": {**YARN, "original_max_position_embeddings": 40.0}}, 8192),
        ("llama", {"rope_scaling": YARN, "max_position_embeddings": 40}, 160),
        ("llama", {"rope_scaling": {**YARN, "factor": 1.5}, "max_position_embeddings": 64}, 64),
        (
            "glm4_moe",
            {
                "partial_rotary_factor": 0.25,
                "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5},
            },
            8192,
        ),
    ],
)  # fmt: skip
def test_equal_transformers(family: str, changed: dict[str, Any], positions: int) -> None:
    raw = {**RAW, "model_type": family, **changed}
    model = parse_model_config(raw, name="m")
    assert model.max_positions == positions
    theirs = ROTARY[family](CONFIG_MAPPING[family].from_dict(raw))
    found = theirs(torch.zeros(1), torch.arange(64)[None])
    for ours, of_both in zip(rope_table(model, 64, torch.float32), found, strict=True):
        torch.testing.assert_close(ours, of_both[0, :, : model.rotary_dim // 2])
