"""Bytes of the weights in a quantized checkpoint of a 16-bit model that does not fit in HBM."""

import functools
from dataclasses import replace

from dakrun.config import DTYPE_BYTES, ModelConfig
from dakrun.errors import CannotRun
from dakrun.formats.named import named_quantization
from dakrun.models.families import decoder_of
from dakrun.plan.plan import Plan
from dakrun.units import format_bytes

_TRIED = (("4 bits", "w4a16"), ("FP8", "fp8"))  # as users call it, and in formats/named.py


def lossy_text(plan: Plan) -> str | None:
    """The bytes of weights in 4 bits and in FP8, if a 16-bit model does not fit in HBM; else None.

    Says which of them would fit there.
    """
    if plan.required_ratio <= 0:
        return None
    remote = sum(plan.memory(tier)["kv"] for tier in range(1, len(plan.tiers)))
    here = plan.memory(0)
    return lossy_hint(plan.model, plan.budgets[0] - remote - sum(here.values()) + here["weights"])


@functools.cache
def lossy_hint(model: ModelConfig, room: int = 0) -> str | None:
    """The same for HBM that has `room` bytes for weights; None if `model` has no 16 bits."""
    if model.quantization or DTYPE_BYTES[model.dtype] != 2:
        return None
    parts = []
    for name, format in _TRIED:
        quantization = named_quantization(format, model.dtype)
        try:
            taken = _weight_bytes(replace(model, quantization=quantization))
        except CannotRun:  # its columns are no whole groups
            continue
        parts.append(f"{format_bytes(taken)} in {name}" + " (fits in HBM)" * (0 < taken <= room))
    if not parts:
        return None
    now = format_bytes(_weight_bytes(model))
    return f"a quantized checkpoint (lossy) would have {' or '.join(parts)}, not {now} of weights"


def quantization_note(plan: Plan) -> str | None:
    """A line for a run about the format of its weights; None if there is nothing to say."""
    found = plan.model.quantization
    if found and found.unapplied:
        return f"not applied: {' and '.join(found.unapplied)}; products read the weights alone"
    return lossy_text(plan)


def _weight_bytes(model: ModelConfig) -> int:
    """Bytes of all matrices."""
    return sum(matrix.format.nbytes(*matrix.shape) for matrix in decoder_of(model).matrices())
