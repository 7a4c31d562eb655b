"""Formats by short names, as quantizers use them by default: for plans and random weights."""

from collections.abc import Callable, Mapping

from dakrun.formats.awq import Awq
from dakrun.formats.fp8 import Fp8
from dakrun.formats.gptq import Gptq
from dakrun.formats.int8 import Int8
from dakrun.formats.nvfp4 import Nvfp4
from dakrun.formats.pack_quantized import PackQuantized
from dakrun.formats.quantization import LINEARS, Quantization
from dakrun.formats.stored import Stored

# By the dtype of scales, where that is the model's.
_FORMATS: Mapping[str, Callable[[str], Stored]] = {
    "awq": Awq,
    "gptq": Gptq,
    "w4a16": PackQuantized,
    "nvfp4": lambda dtype: Nvfp4(),
    "fp8": lambda dtype: Fp8("float32", (128, 128), "weight_scale_inv"),
    "fp8-channel": lambda dtype: Fp8(dtype, (1, 0)),
    "int8": Int8,
}
NAMES = tuple(_FORMATS)


def named_quantization(name: str, dtype: str) -> Quantization:
    """All linear modules but the lm_head in the format `name`, one of NAMES, scales in `dtype`."""
    return Quantization(name, ((LINEARS, _FORMATS[name](dtype)),), ("lm_head",))
