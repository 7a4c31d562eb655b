"""Kernels over operands in several memory tiers. They know tensors and tiers, no models or plans.

gemm/ multiplies by packed weights, experts/ by those of the experts that a router chooses,
attention/ attends to the KV cache, runtime/ compiles and launches; the small kernels have a file
each. variants.py lists what a model needs; reference.py and experts/reference.py are the backend in
plain torch. native/README.md describes the CUDA sources.
"""

from dakrun.kernels import reference
from dakrun.kernels.adjustments import adjustments
from dakrun.kernels.bandwidth import Reader, Window, read_multicast, read_once, read_window
from dakrun.kernels.embed import embed
from dakrun.kernels.normalize import normalize
from dakrun.kernels.normalize_heads import HeadNorms, normalize_heads
from dakrun.kernels.runtime.needs import Variant
from dakrun.kernels.select_in_order import select_in_order
from dakrun.kernels.select_token import (
    SAMPLING_WORDS,
    TokenMask,
    mask_words,
    sampling_words,
    select_token,
    without_options,
)
from dakrun.kernels.store_kv import store_kv
from dakrun.kernels.unpack import unpack
from dakrun.kernels.variants import all_variants, variants

__all__ = [
    "SAMPLING_WORDS",
    "HeadNorms",
    "Reader",
    "TokenMask",
    "Variant",
    "Window",
    "adjustments",
    "all_variants",
    "embed",
    "mask_words",
    "normalize",
    "normalize_heads",
    "read_multicast",
    "read_once",
    "read_window",
    "reference",
    "sampling_words",
    "select_in_order",
    "select_token",
    "store_kv",
    "unpack",
    "variants",
    "without_options",
]
