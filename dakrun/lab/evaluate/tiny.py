"""A tiny model of one layer, with which a CPU goes through every figure in seconds."""

import json
from pathlib import Path
from typing import Any

from dakrun.config import ModelConfig
from dakrun.models import parse_model_config

NAME = "tiny"
_CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "torch_dtype": "float32",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


def tiny_model() -> ModelConfig:
    """Its architecture."""
    return parse_model_config(_CONFIG, name=NAME)


def write_tiny(folder: Path) -> None:
    """Write its config.json into `folder`."""
    (folder / "config.json").write_text(json.dumps(_CONFIG), encoding="utf-8")
