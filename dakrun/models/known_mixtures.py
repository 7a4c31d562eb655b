"""Published mixtures of experts by name: what differs in their config.json, and their hub ids."""

from collections.abc import Mapping
from typing import Any

from dakrun.config import ModelConfig
from dakrun.models.hf_config import parse_model_config

# Keys of config.json that the models of a family share.
_QWEN3 = {
    "model_type": "qwen3_moe", "vocab_size": 151_936, "head_dim": 128, "num_key_value_heads": 4,
    "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "rms_norm_eps": 1e-6,
    "rope_theta": 1e6, "max_position_embeddings": 40_960, "eos_token_id": 151_645,
}  # fmt: skip
_CODER = {"rope_theta": 1e7, "max_position_embeddings": 262_144}
_QWEN3_30B = _QWEN3 | {
    "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
    "num_hidden_layers": 48, "num_attention_heads": 32,
}  # fmt: skip
_MIXTRAL = {
    "model_type": "mixtral", "num_key_value_heads": 8, "num_local_experts": 8,
    "num_experts_per_tok": 2, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "eos_token_id": 2,
}  # fmt: skip
_OLMOE = {
    "model_type": "olmoe", "vocab_size": 50_304, "hidden_size": 2048, "intermediate_size": 1024,
    "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 16,
    "num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False, "rms_norm_eps": 1e-5,
    "rope_theta": 1e4, "max_position_embeddings": 4096, "eos_token_id": 50_279,
}  # fmt: skip
_GLM = {
    "model_type": "glm4_moe", "vocab_size": 151_552, "head_dim": 128, "num_attention_heads": 96,
    "num_key_value_heads": 8, "num_experts_per_tok": 8, "n_shared_experts": 1, "n_group": 1,
    "topk_group": 1, "norm_topk_prob": True, "attention_bias": True, "rms_norm_eps": 1e-5,
    "rope_theta": 1e6, "partial_rotary_factor": 0.5, "max_position_embeddings": 131_072,
    "num_nextn_predict_layers": 1, "eos_token_id": [151_329, 151_336, 151_338],
}  # fmt: skip
_GLM_355B = _GLM | {
    "hidden_size": 5120, "intermediate_size": 12_288, "moe_intermediate_size": 1536,
    "num_hidden_layers": 92, "n_routed_experts": 160, "first_k_dense_replace": 3,
    "routed_scaling_factor": 2.5, "use_qk_norm": True,
}  # fmt: skip

_CONFIGS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "qwen3-30b-a3b": ("Qwen/Qwen3-30B-A3B", _QWEN3_30B),
    "qwen3-coder-30b-a3b": (
        "Qwen/Qwen3-Coder-30B-A3B-Instruct", _QWEN3_30B | _CODER | {"intermediate_size": 5472},
    ),
    "qwen3-235b-a22b": (
        "Qwen/Qwen3-235B-A22B",
        _QWEN3 | {
            "hidden_size": 4096, "intermediate_size": 12_288, "moe_intermediate_size": 1536,
            "num_hidden_layers": 94, "num_attention_heads": 64,
        },
    ),
    "qwen3-coder-480b-a35b": (
        "Qwen/Qwen3-Coder-480B-A35B-Instruct",
        _QWEN3 | _CODER | {
            "hidden_size": 6144, "intermediate_size": 8192, "moe_intermediate_size": 2560,
            "num_hidden_layers": 62, "num_attention_heads": 96, "num_key_value_heads": 8,
            "num_experts": 160,
        },
    ),
    "mixtral-8x7b": (
        "mistralai/Mixtral-8x7B-v0.1",
        _MIXTRAL | {
            "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 14_336,
            "num_hidden_layers": 32, "num_attention_heads": 32, "max_position_embeddings": 32_768,
        },
    ),
    "mixtral-8x22b": (
        "mistralai/Mixtral-8x22B-v0.1",
        _MIXTRAL | {
            "vocab_size": 32_000, "hidden_size": 6144, "intermediate_size": 16_384,
            "num_hidden_layers": 56, "num_attention_heads": 48, "max_position_embeddings": 65_536,
        },
    ),
    "olmoe-1b-7b": ("allenai/OLMoE-1B-7B-0924", _OLMOE),
    "glm-4.5-air": (
        "zai-org/GLM-4.5-Air",
        _GLM | {
            "hidden_size": 4096, "intermediate_size": 10_944, "moe_intermediate_size": 1408,
            "num_hidden_layers": 46, "n_routed_experts": 128, "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.0, "use_qk_norm": False,
        },
    ),
    "glm-4.5": ("zai-org/GLM-4.5", _GLM_355B),
    "glm-4.6": ("zai-org/GLM-4.6", _GLM_355B | {"max_position_embeddings": 202_752}),
}  # fmt: skip

NAMES = list(_CONFIGS)


def known_mixture(name: str) -> ModelConfig | None:
    """The architecture published as `name`, in lower case, or None."""
    if name not in _CONFIGS:
        return None
    return parse_model_config({"dtype": "bfloat16", **_CONFIGS[name][1]}, name=name)


def mixture_hub_id(name: str) -> str | None:
    """The hub id of a known mixture's checkpoint, or None."""
    return _CONFIGS[name][0] if name in _CONFIGS else None
