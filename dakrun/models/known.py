"""Published architectures by name, to plan without a checkpoint.

Holds the numbers of their config.json and their hub ids; reads no file and no network.
"""

from dataclasses import replace
from typing import Any

from dakrun.config import FamilyName, Llama3Rope, ModelConfig
from dakrun.models.known_mixtures import NAMES, known_mixture, mixture_hub_id
from dakrun.models.known_quantized import QUANTIZED
from dakrun.models.quantization import parse_quantization

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
    "llama-3.3-70b": (8192, 28672, 80, 64, 8, "meta-llama/Llama-3.3-70B-Instruct"),
}

# Mistral 7B v0.3, Nemo (2407) and Small 3 (2501), Qwen2.5 (arXiv 2412.15115), Qwen3 (arXiv
# 2505.09388, the chat models) and Phi-4 (arXiv 2412.08905), with heads of 128 where they are not
# hidden_size / heads; columns as above.
_OTHERS: dict[str, tuple[Any, ...]] = {
    "mistral-7b": (4096, 14336, 32, 32, 8, "mistralai/Mistral-7B-v0.3"),
    "mistral-nemo-12b": (5120, 14336, 40, 32, 8, "mistralai/Mistral-Nemo-Base-2407"),
    "mistral-small-24b": (5120, 32768, 40, 32, 8, "mistralai/Mistral-Small-24B-Base-2501"),
    "qwen2.5-0.5b": (896, 4864, 24, 14, 2, "Qwen/Qwen2.5-0.5B"),
    "qwen2.5-1.5b": (1536, 8960, 28, 12, 2, "Qwen/Qwen2.5-1.5B"),
    "qwen2.5-3b": (2048, 11008, 36, 16, 2, "Qwen/Qwen2.5-3B"),
    "qwen2.5-7b": (3584, 18944, 28, 28, 4, "Qwen/Qwen2.5-7B"),
    "qwen2.5-14b": (5120, 13824, 48, 40, 8, "Qwen/Qwen2.5-14B"),
    "qwen2.5-32b": (5120, 27648, 64, 40, 8, "Qwen/Qwen2.5-32B"),
    "qwen2.5-72b": (8192, 29568, 80, 64, 8, "Qwen/Qwen2.5-72B"),
    "qwen3-0.6b": (1024, 3072, 28, 16, 8, "Qwen/Qwen3-0.6B"),
    "qwen3-1.7b": (2048, 6144, 28, 16, 8, "Qwen/Qwen3-1.7B"),
    "qwen3-4b": (2560, 9728, 36, 32, 8, "Qwen/Qwen3-4B"),
    "qwen3-8b": (4096, 12288, 36, 32, 8, "Qwen/Qwen3-8B"),
    "qwen3-14b": (5120, 17408, 40, 40, 8, "Qwen/Qwen3-14B"),
    "qwen3-32b": (5120, 25600, 64, 64, 8, "Qwen/Qwen3-32B"),
    "phi-4": (5120, 17920, 40, 40, 10, "microsoft/phi-4"),
}
_SMALL_QWENS = ("qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-3b")
_TIED = (*_SMALL_QWENS, "qwen3-0.6b", "qwen3-1.7b", "qwen3-4b")
_HEAD_128 = ("mistral-nemo", "mistral-small", "qwen3")
_VOCABULARIES = {"mistral-7b": 32_768, "mistral": 131_072, "qwen2.5": 152_064, "qwen3": 151_936}
_POSITIONS = {"mistral-nemo": 131_072, "mistral": 32_768, "qwen2.5": 131_072, "qwen3": 40_960}
_ROPE_BASES = {"mistral-small": 1e8, "phi": 250_000.0}

_LLAMA_2: dict[str, Any] = {"vocab_size": 32_000, "max_positions": 4096, "eos_token_ids": (2,)}
_LLAMA_3: dict[str, Any] = {
    "vocab_size": 128_256,
    "max_positions": 8192,
    "dtype": "bfloat16",
    "rope_theta": 500_000.0,
    "eos_token_ids": (128_001,),
}


def known_names() -> list[str]:
    """All names that `known_model` takes, family by family."""
    return [*_OPT, *_LLAMA, *_OTHERS, *NAMES, *QUANTIZED]


def known_model(name: str) -> ModelConfig | None:
    """The architecture published as `name` (upper or lower case), or None."""
    name = name.lower()
    if name in QUANTIZED:
        base, _, settings = QUANTIZED[name]
        config = known_model(base)
        assert config
        found = parse_quantization(settings, name=name, dtype=config.dtype)
        return replace(config, name=name, quantization=found)
    if name in _OPT:
        return _opt(name)
    if name in _OTHERS:
        return _other(name)
    return _llama(name) if name in _LLAMA else known_mixture(name)


def hub_id(name: str) -> str | None:
    """The Hugging Face hub id of a known model's checkpoint, or None."""
    name = name.lower()
    if name in QUANTIZED:
        base, end, _ = QUANTIZED[name]
        return f"{hub_id(base)}{end}"
    if name in _OPT:
        return f"facebook/{name}"
    row = _LLAMA.get(name) or _OTHERS.get(name)
    return row[-1] if row else mixture_hub_id(name)


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
        o_bias=True,
        mlp_bias=True,
        pre_norm=not is_350m,
        final_norm=not is_350m,
        eos_token_ids=(2,),
    )


def _llama(name: str) -> ModelConfig:
    sizes = _sizes(*_LLAMA[name][:-1])
    generation = dict(_LLAMA_2 if name.startswith("llama-2") else _LLAMA_3)
    if name.startswith(("llama-3.1", "llama-3.2", "llama-3.3")):
        factor = 32.0 if name.startswith("llama-3.2") else 8.0
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


def _other(name: str) -> ModelConfig:
    def of(table: dict[str, Any], default: Any) -> Any:
        return next((value for key, value in table.items() if name.startswith(key)), default)

    families: dict[str, FamilyName] = {"mistral": "mistral", "qwen2": "qwen2", "qwen3": "qwen3"}
    family: FamilyName = of(families, "phi3")
    sizes = _sizes(*_OTHERS[name][:-1])
    if name.startswith(_HEAD_128):
        sizes["head_dim"] = 128
    small = name in _SMALL_QWENS
    large_qwen = name in ("qwen2.5-14b", "qwen2.5-32b", "qwen2.5-72b")
    eos = {"mistral": 2, "qwen2": 151_643, "qwen3": 151_645}
    return ModelConfig(
        name=name,
        family=family,
        **sizes,
        vocab_size=151_936 if small else of(_VOCABULARIES, 100_352),
        max_positions=32_768 if small else of(_POSITIONS, 16_384),
        embed_size=sizes["hidden_size"],
        tied_embeddings=name in _TIED,
        dtype="bfloat16",
        attention_bias=family == "qwen2",
        norm_eps=1e-6 if family.startswith("qwen") and not large_qwen else 1e-5,
        rope_theta=of(_ROPE_BASES, 1e6),
        eos_token_ids=(of(eos, 100_265),),
    )


def _sizes(hidden: int, ffn: int, layers: int, heads: int, kv_heads: int) -> dict[str, Any]:
    """A row of the tables above as arguments of ModelConfig."""
    names = ("hidden_size", "ffn_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")
    return dict(zip(names, (hidden, ffn, layers, heads, kv_heads, hidden // heads), strict=True))
