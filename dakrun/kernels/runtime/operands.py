"""Shared by wrappers of kernels: checks of operands, fields of argument structs, order of CTAs.

Knows no kernel.
"""

import ctypes
from collections.abc import Mapping
from typing import Any

import torch

from dakrun.units import ceil_div

DTYPES = (torch.float16, torch.bfloat16)  # of activations, weights and KV
ALIGNMENT = 16  # bytes of a vector load

Wanted = tuple[torch.Tensor | None, tuple[int, ...], torch.dtype]  # an operand, its shape, dtype


def fields(kind: Any, *names: str) -> tuple[tuple[str, Any], ...]:
    """Consecutive fields of one ctypes type, for a Structure's `_fields_`."""
    return tuple((name, kind) for name in names)


def pointers(*names: str) -> tuple[tuple[str, Any], ...]:
    """Consecutive pointer fields."""
    return fields(ctypes.c_uint64, *names)


def ints(*names: str) -> tuple[tuple[str, Any], ...]:
    """Consecutive fields of type int."""
    return fields(ctypes.c_int, *names)


def address(tensor: torch.Tensor | None) -> int:
    """Address of an optional operand; 0, a null pointer, for None."""
    return 0 if tensor is None else tensor.data_ptr()


class CtaOrder(ctypes.Structure):
    """CtaOrder of native/common.cuh: how logical CTAs, local ones first, spread over the grid."""

    _fields_ = ints("local_ctas", "remote_share")

    @classmethod
    def of(cls, local_ctas: int, ctas: int) -> "CtaOrder":
        """For `ctas` CTAs, the first `local_ctas` of which read the GPU's own memory."""
        return cls(local_ctas, ceil_div((ctas - local_ctas) << 16, ctas))


def check_operands(
    device: torch.device, wanted: Mapping[str, Wanted], *, contiguous: bool = True
) -> None:
    """Check operands by name; None is skipped.

    Raises ValueError for a wrong shape, dtype or device, and, if they are to be `contiguous`, for
    other strides or an address that vector loads (16-bit types) or the dtype do not allow.
    """
    for name, (tensor, shape, dtype) in wanted.items():
        if tensor is None:
            continue
        if tensor.shape != shape or tensor.dtype != dtype or tensor.device != device:
            raise ValueError(
                f"expected {name} as {list(shape)} of {dtype} on {device}, got "
                f"{list(tensor.shape)} of {tensor.dtype} on {tensor.device}"
            )
        alignment = ALIGNMENT if dtype in DTYPES else dtype.itemsize
        if contiguous and (not tensor.is_contiguous() or tensor.data_ptr() % alignment):
            raise ValueError(f"expected {name} to be contiguous and aligned to {alignment} bytes")


def check_gpu(device: torch.device) -> None:
    """Raise ValueError for any device but the current GPU."""
    if device.type != "cuda" or device.index != torch.cuda.current_device():
        raise ValueError(f"expected operands on the current GPU, got {device}")


def defines(dtype: torch.dtype) -> dict[str, int]:
    """Macros of a kernel with one variant per dtype."""
    return {"BFLOAT16": int(dtype == torch.bfloat16)}
