"""Published OPT and Llama architectures by name, to plan without a checkpoint.

Holds the numbers of their config.json and their hub ids; reads no file and no network.
"""

from typing import Any

from dakrun.config import Llama3Rope, ModelConfig

# OPT (arXiv 2205.01068): hidden_size, layers, heads; ffn_size is 4 x hidden_size.
_OPT = {
    "opt-125m": (768, 12, 12),
    "opt-350m": (1024, 24, 16),
    "opt-1.3b": (2048, 24, 32),
    "opt-2.7b": (2560, 32, 32),
    "opt-6.7b": (4096, 32, 32),
    "opt-13b": (5120, 40, 40),
    "opt-30b": (7168, 48, 56),
    "opt-66b": (9216, 64, 72),
}

# Llama 2 (arXiv 2307.09288) and 3 (arXiv 2407.21783), the base models:
# hidden_size, ffn_size, layers, heads, key-value heads, hub id.
_LLAMA: dict[str, tuple[Any, ...]] = {
    "llama-2-7b": (4096, 11008, 32, 32, 32, "meta-llama/Llama-2-7b-hf"),
    "llama-2-13b": (5120, 13824, 40, 40, 40, "meta-llama/Llama-2-13b-hf"),
    "llama-2-70b": (8192, 28672, 80, 64, 8, "meta-llama/Llama-2-70b-hf"),
    "llama-3-8b": (4096, 14336, 32, 32, 8, "meta-llama/Meta-Llama-3-8B"),
    "llama-3-70b": (8192, 28672, 80, 64, 8, "meta-llama/Meta-Llama-3-70B"),
    "llama-3.1-8b": (4096, 14336, 32, 32, 8, "meta-llama/Llama-3.1-8B"),
    "llama-3.1-70b": (8192, 28672, 80, 64, 8, "meta-llama/Llama-3.1-70B"),
    "llama-3.2-1b": (2048, 8192, 16, 32, 8, "meta-llama/Llama-3.2-1B"),
    "llama-3.2-3b": (3072, 8192, 28, 24, 8, "meta-llama/Llama-3.2-3B"),
}

_LLAMA_2: dict[str, Any] = {"vocab_size": 32_000, "max_positions": 4096, "eos_token_ids": (2,)}
_LLAMA_3: dict[str, Any] = {
    "vocab_size": 128_256,
    "max_positions": 8192,
    "dtype": "bfloat16",
    "rope_theta": 500_000.0,
    "eos_token_ids": (128_001,),
}


def known_names() -> list[str]:
    """All names that `known_model` takes, OPT first, small to large."""
    return [*_OPT, *_LLAMA]


def known_model(name: str) -> ModelConfig | None:
    """The architecture published as `name` (upper or lower case), or None."""
    name = name.lower()
    if name in _OPT:
        return _opt(name)
    return _llama(name) if name in _LLAMA else None


def hub_id(name: str) -> str | None:
    """The Hugging Face hub id of a known model's checkpoint, or None."""
    name = name.lower()
    if name in _OPT:
        return f"facebook/{name}"
    return _LLAMA[name][-1] if name in _LLAMA else None


def _opt(name: str) -> ModelConfig:
    hidden, layers, heads = _OPT[name]
    is_350m = name == "opt-350m"  # the only one with post-norms and projected embeddings
    return ModelConfig(
        name=name,
        family="opt",
        vocab_size=50_272,
        **_sizes(hidden, 4 * hidden, layers, heads, heads),
        max_positions=2048,
        embed_size=512 if is_350m else hidden,
        tied_embeddings=True,
        attention_bias=True,
        mlp_bias=True,
        pre_norm=not is_350m,
        final_norm=not is_350m,
        eos_token_ids=(2,),
    )


def _llama(name: str) -> ModelConfig:
    sizes = _sizes(*_LLAMA[name][:-1])
    generation = dict(_LLAMA_2 if name.startswith("llama-2") else _LLAMA_3)
    if name.startswith(("llama-3.1", "llama-3.2")):
        factor = 8.0 if name.startswith("llama-3.1") else 32.0
        generation["max_positions"] = 131_072
        generation["rope_scaling"] = Llama3Rope(
            factor=factor, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192
        )
    return ModelConfig(
        name=name,
        family="llama",
        **sizes,
        embed_size=sizes["hidden_size"],
        tied_embeddings=name.startswith("llama-3.2"),
        **generation,
    )


def _sizes(hidden: int, ffn: int, layers: int, heads: int, kv_heads: int) -> dict[str, Any]:
    """A row of the tables above as arguments of ModelConfig."""
    names = ("hidden_size", "ffn_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")
    return dict(zip(names, (hidden, ffn, layers, heads, kv_heads, hidden // heads), strict=True))
