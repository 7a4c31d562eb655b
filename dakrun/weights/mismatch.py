"""Errors for tensors of a checkpoint that do not fit its config.json, by their names.

Reads no file.
"""

import re
from collections.abc import Iterable
from pathlib import Path

from dakrun.config import ModelConfig
from dakrun.errors import CannotRun

# Ends of names that quantizers give to packed weights; the last three are bitsandbytes'.
QUANTIZED = (
    *(".qweight", ".qzeros", ".weight_packed", ".weight_scale", ".weight_scale_inv"),
    *(".weight.absmax", ".weight.quant_map", ".SCB"),
)
# Ends of names of tensors that change what a layer computes.
CHANGING = (
    *(".weight", ".bias", ".scales", ".weight_scale_2", ".weight_global_scale"),
    *(".weight_zero_point", ".weight_g_idx", *QUANTIZED),
)
_WRAPPER = re.compile(r"_orig_mod\.")  # torch.compile's, also around a part of a model


def missing(directory: Path, name: str, there: Iterable[str], config: ModelConfig) -> CannotRun:
    """The error for a tensor that is not in `directory`, by the names of those that are `there`."""
    names = sorted(there)
    for stored in names:
        if stored.endswith(QUANTIZED):
            return CannotRun(
                f"{directory}: the checkpoint is quantized (tensor {stored}), but "
                f"config.json does not say so of {name}",
                hint="copy config.json again; supported are AWQ, GPTQ, FP8, INT8, NVFP4 and "
                "compressed-tensors",
            )
    for stored in names:
        wrapped = _WRAPPER.search(stored)
        prefix = wrapped[0] if wrapped else stored.removesuffix(name)
        if prefix.endswith("."):
            return CannotRun(
                f"{directory}: the names of its tensors have {prefix!r} added, as in {stored}",
                hint="save the model inside the wrapper (torch.compile adds _orig_mod, "
                f"DataParallel module), or take {prefix!r} out of the names in the "
                "safetensors files",
            )
    return CannotRun(
        f"{directory}: tensor {name} is missing",
        hint=expert_hint(name, config)
        or "config.json and the safetensors files do not belong together, or a file was not copied",
    )


def expert_hint(name: str, config: ModelConfig) -> str | None:
    """The hint for a tensor of an expert that is missing or one too many."""
    if config.mixture is None or ".experts." not in name:
        return None
    count = config.mixture.routing.experts
    return f"config.json says {count} experts; compare it and the files with the published ones"
