"""Tiny random checkpoints of every family, whose every matrix has at least five row blocks."""

import copy
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    Glm4MoeConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    OlmoeConfig,
    OPTConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

VOCAB = 331
ORIGINAL = "original_max_position_embeddings"
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
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, ORIGINAL: 40}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1 + i / 20 for i in range(32)],
    "long_factor": [3.0] * 32,
}

CONFIGS: dict[str, PreTrainedConfig] = {
    "opt-like-125m": OPTConfig(hidden_size=320, num_attention_heads=5, ffn_dim=1100, **_OPT),
    "opt-like-350m": OPTConfig(
        hidden_size=384, num_attention_heads=6, ffn_dim=1100, word_embed_proj_dim=320,
        do_layer_norm_before=False, **_OPT,
    ),
    "opt-no-bias": OPTConfig(
        hidden_size=320, num_attention_heads=5, ffn_dim=640, enable_bias=False,
        layer_norm_elementwise_affine=False, tie_word_embeddings=False, **_OPT,
    ),
    "llama-mha": LlamaConfig(num_attention_heads=6, **_LLAMA),
    "llama-gqa3-tied": LlamaConfig(
        num_attention_heads=6, num_key_value_heads=2, tie_word_embeddings=True, **_LLAMA
    ),
    "llama-gqa4-rope3": LlamaConfig(
        num_attention_heads=8, num_key_value_heads=2, rope_parameters=_LLAMA3_ROPE, **_LLAMA
    ),
    "llama-gqa8-sharded": LlamaConfig(
        num_attention_heads=8, num_key_value_heads=1, head_dim=80, attention_bias=True,
        mlp_bias=True, **_LLAMA,
    ),
    "mistral": MistralConfig(
        num_attention_heads=4, num_key_value_heads=2, head_dim=80, sliding_window=160,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 1e6, "factor": 2.0}, **_LLAMA,
    ),
    "qwen2-tied-yarn": Qwen2Config(
        num_attention_heads=6, num_key_value_heads=1, tie_word_embeddings=True,
        rope_parameters=_YARN, **_LLAMA,
    ),
    "qwen3-linear": Qwen3Config(
        num_attention_heads=8, num_key_value_heads=2, head_dim=64,
        rope_parameters={"rope_type": "linear", "rope_theta": 1e6, "factor": 2.0}, **_LLAMA,
    ),
    "phi3-longrope": Phi3Config(
        num_attention_heads=6, num_key_value_heads=2, rope_parameters=_LONGROPE,
        original_max_position_embeddings=160, **(_LLAMA | {"max_position_embeddings": 640}),
    ),
    "qwen3-moe-sharded": Qwen3MoeConfig(
        num_attention_heads=6, num_key_value_heads=2, head_dim=64, num_experts=7,
        num_experts_per_tok=3, moe_intermediate_size=50, norm_topk_prob=True, mlp_only_layers=[1],
        **_LLAMA,
    ),
    "mixtral": MixtralConfig(
        num_attention_heads=6, num_key_value_heads=3, num_local_experts=4, num_experts_per_tok=2,
        **(_LLAMA | {"intermediate_size": 200}),
    ),
    "olmoe": OlmoeConfig(
        num_attention_heads=6, num_key_value_heads=3, num_experts=8, num_experts_per_tok=3,
        **(_LLAMA | {"intermediate_size": 72}),
    ),
    "glm4-moe": Glm4MoeConfig(
        num_attention_heads=6, num_key_value_heads=2, head_dim=80, n_routed_experts=12,
        num_experts_per_tok=3, moe_intermediate_size=56, n_shared_experts=2, n_group=4,
        topk_group=2, routed_scaling_factor=2.5, attention_bias=True, use_qk_norm=True,
        **(_LLAMA | {"intermediate_size": 1096}),
    ),
}  # fmt: skip


@cache
@torch.inference_mode(False)  # whichever test asks first: others may not change inference tensors
def reference(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """transformers' model of that name with seeded random weights, biases and norms included."""
    torch.manual_seed(sum(name.encode()))
    config = copy.deepcopy(CONFIGS[name])  # which gets the dtype in which the model is saved
    config._experts_implementation = "eager"  # others need rows of a multiple of 16 bytes
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.1 * torch.randn_like(parameter)
        for label, buffer in model.named_buffers():
            if label.endswith("e_score_correction_bias"):
                buffer += 0.1 * torch.randn_like(buffer)
    return model.to(dtype).eval()


def kernel_models(
    common: dict[str, Any], *, std: float, **sizes: dict[str, int]
) -> dict[str, PreTrainedConfig]:
    """One configuration for each kind of decoder on the kernels: `common` values and own `sizes`.

    With sizes of `mqa` there is one whose only KV head has more query heads than
    SplitK_FlashAttn takes. `std` is the standard deviation of the weights.
    """
    opt, llama = common | {"init_std": std}, common | {"initializer_range": std}
    positions, heads = common["max_position_embeddings"], sizes["llama_gqa"]["num_attention_heads"]
    factors = torch.linspace(1, 2, common["hidden_size"] // heads // 2).tolist()
    longrope = {"rope_type": "longrope", "rope_theta": 1e4}
    longrope |= {"short_factor": factors, "long_factor": [9 * factor for factor in factors]}
    mqa = {"head_dim": 64, "num_key_value_heads": 1, "sliding_window": None} | llama
    own = {"mistral-mqa": MistralConfig(**mqa, **sizes["mqa"])} if "mqa" in sizes else {}
    return own | {
        "opt": OPTConfig(**opt, **sizes["opt"]),
        "opt-like-350m": OPTConfig(do_layer_norm_before=False, **opt, **sizes["opt_350m"]),
        "llama-gqa": LlamaConfig(**llama, **sizes["llama_gqa"]),
        "llama-tied": LlamaConfig(tie_word_embeddings=True, **llama, **sizes["llama_tied"]),
        "qwen3": Qwen3Config(head_dim=64, **llama, **sizes["llama_gqa"]),
        "phi3-longrope": Phi3Config(
            rope_parameters=longrope,
            original_max_position_embeddings=positions,
            **(llama | sizes["llama_gqa"] | {"max_position_embeddings": 4 * positions}),
        ),
        **{name: _mixture(name, llama | sizes["llama_gqa"]) for name in MIXTURES},
    }


MIXTURES = ("mixtral", "qwen3-moe", "olmoe", "glm4-moe")


def _mixture(name: str, common: dict[str, Any]) -> PreTrainedConfig:
    """A mixture on the kernels, with `common` values; an expert has 72 rows."""
    moe = {"num_experts_per_tok": 3, "moe_intermediate_size": 72}
    small = common | {"intermediate_size": 72}
    match name:
        case "mixtral":
            config = MixtralConfig(num_local_experts=6, num_experts_per_tok=2, **small)
        case "qwen3-moe":
            config = Qwen3MoeConfig(
                head_dim=64,
                num_experts=9,
                norm_topk_prob=True,
                mlp_only_layers=[1],
                **moe,
                **common,
            )
        case "olmoe":
            config = OlmoeConfig(num_experts=8, num_experts_per_tok=3, **small)
        case _:
            config = Glm4MoeConfig(
                head_dim=64, n_routed_experts=12, n_shared_experts=2, n_group=4, topk_group=2,
                routed_scaling_factor=2.5, attention_bias=True, use_qk_norm=True,
                first_k_dense_replace=1, **moe, **common,
            )  # fmt: skip
    config._experts_implementation = "eager"  # others need rows of a multiple of 16 bytes
    return config


def save_half(config: PreTrainedConfig, directory: Path, *, repeats: bool = False) -> Path:
    """Write a checkpoint of `config` in float16, with random weights, norms and biases.

    Texts of a model that `repeats` soon repeat themselves: the logits of 13 tokens are larger than
    others. Where input embeddings grow with them, so do the logits of the token before.
    """
    torch.manual_seed(0)
    reference = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, parameter in reference.named_parameters():
        if "norm" in name or "bias" in name:
            torch.nn.init.normal_(parameter, float("norm" in name and "weight" in name), 0.1)
    if repeats:
        head = reference.get_output_embeddings().weight.data
        head[:: len(head) // 12] *= 3 if config.tie_word_embeddings else 8
    reference.half().save_pretrained(directory)  # which also rounds the frequencies of RoPE
    return directory


def damage(path: Path, name: str, at: int | tuple[int, int], value: float = torch.nan) -> None:
    """Set an element, or a row, of a tensor of the checkpoint to `value`."""
    file = path / "model.safetensors"
    tensors = load_file(file)
    tensors[name][at] = value
    save_file(tensors, file, metadata={"format": "pt"})


def save(name: str, directory: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Write the checkpoint as transformers does; in many files where the name says so."""
    shards = "1MB" if "sharded" in name else "10GB"
    reference(name, dtype).save_pretrained(directory, max_shard_size=shards)
    return directory
