"""Published checkpoints of 4 and 8 bits by name: what they are made from, and their settings."""

from collections.abc import Mapping
from typing import Any

# Their quantization_config, without what plans do not need.
_FP8 = {
    "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}  # fmt: skip
_AWQ = {
    "quant_method": "awq", "version": "gemm", "bits": 4, "group_size": 128, "zero_point": True,
}  # fmt: skip
_GPTQ = {
    "quant_method": "gptq", "checkpoint_format": "gptq", "bits": 4, "group_size": 128,
    "sym": True, "desc_act": False,
}  # fmt: skip
_CHANNELS = {
    "quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True},
            "input_activations": {"num_bits": 8, "type": "float", "strategy": "token"},
        }
    },
}  # fmt: skip

# By the end of the names: that of the hub ids, the settings, and the names of the 16-bit models.
_QUANTIZED: Mapping[str, tuple[str, Mapping[str, Any], tuple[str, ...]]] = {
    "-fp8": ("-FP8", _FP8, (
        "qwen3-0.6b", "qwen3-1.7b", "qwen3-4b", "qwen3-8b", "qwen3-14b", "qwen3-32b",
        "qwen3-30b-a3b", "qwen3-coder-30b-a3b", "qwen3-235b-a22b", "qwen3-coder-480b-a35b",
    )),
    "-awq": ("-AWQ", _AWQ, ("qwen3-4b", "qwen3-8b", "qwen3-14b", "qwen3-32b")),
    "-gptq-int4": ("-GPTQ-Int4", _GPTQ, ("qwen3-30b-a3b", "qwen3-235b-a22b")),
}  # fmt: skip
_OF_GLM = "glm-4.5-air", "glm-4.5", "glm-4.6"

# By name: the name of the 16-bit model, the end of the hub id, and the quantization_config.
QUANTIZED: Mapping[str, tuple[str, str, Mapping[str, Any]]] = {
    **{
        base + end: (base, hub_end, settings)
        for end, (hub_end, settings, bases) in _QUANTIZED.items()
        for base in bases
    },
    **{f"{base}-fp8": (base, "-FP8", _CHANNELS) for base in _OF_GLM},
}
