"""What wrappers of kernels share: checks of operands, packed matrices as kernels' arguments.

Knows neither a kernel nor what it computes.
"""

import ctypes
from collections.abc import Mapping

import torch

from dakrun.geometry import ATOM_COLS, CHUNK, MAX_TIERS
from dakrun.kernels.gemm.packing import DTYPES, PackedTensor, padded_cols
from dakrun.units import ceil_div

Wanted = tuple[torch.Tensor | None, tuple[int, ...], torch.dtype]


class PackedTier(ctypes.Structure):
    """native/packed.cuh's."""

    _fields_ = (
        ("base", ctypes.c_uint64),
        *((name, ctypes.c_int) for name in ("first_row_block", "wave_row_blocks")),
        *((name, ctypes.c_int) for name in ("group_row_blocks", "step_atoms")),
    )


class PackedMatrix(ctypes.Structure):
    """native/packed.cuh's."""

    _fields_ = (
        ("tier_count", ctypes.c_int),
        ("atoms", ctypes.c_int),
        ("tiers", PackedTier * (MAX_TIERS + 1)),
    )


class CtaOrder(ctypes.Structure):
    """native/common.cuh's."""

    _fields_ = (("first_ones", ctypes.c_int), ("others_share", ctypes.c_int))

    @classmethod
    def of(cls, first_ones: int, ctas: int) -> "CtaOrder":
        """Of `ctas`, the first of which read the GPU's own memory."""
        return cls(first_ones, ceil_div((ctas - first_ones) << 16, ctas))


def packed_matrix(weight: PackedTensor) -> PackedMatrix:
    """Where `weight` lies; ValueError where kernels cannot read it in chunks of 16 bytes."""
    parts, cols = weight.parts, weight.shape[1]
    if len(parts) > MAX_TIERS or cols % CHUNK or any(part.data.data_ptr() % 16 for part in parts):
        raise ValueError(
            f"expected columns in eights and at most {MAX_TIERS} tiers, aligned to 16 bytes, got "
            f"{cols} columns and {len(parts)} tiers"
        )
    matrix = PackedMatrix(tier_count=len(parts), atoms=padded_cols(cols) // ATOM_COLS)
    row_block = 0
    for number, part in enumerate(parts):
        split = part.split
        matrix.tiers[number] = PackedTier(
            part.data.data_ptr(), row_block, split.wave, split.group, split.step_cols // ATOM_COLS
        )
        row_block += split.row_blocks
    matrix.tiers[len(parts)] = PackedTier(first_row_block=row_block)
    return matrix


def check_operands(device: torch.device, wanted: Mapping[str, Wanted]) -> None:
    """Raise ValueError for an operand, by its name, of another shape or dtype than it is beside.

    Or on another device, or not contiguous, or, of 16 bits, not aligned to 16 bytes. None fits.
    """
    for name, (tensor, shape, dtype) in wanted.items():
        if tensor is None:
            continue
        if tensor.shape != shape or tensor.dtype != dtype or tensor.device != device:
            raise ValueError(
                f"expected {name} as {list(shape)} of {dtype} on {device}, got "
                f"{list(tensor.shape)} of {tensor.dtype} on {tensor.device}"
            )
        alignment = 16 if dtype in DTYPES else dtype.itemsize
        if not tensor.is_contiguous() or tensor.data_ptr() % alignment:
            raise ValueError(f"expected {name} to be contiguous and aligned to {alignment} bytes")


def check_gpu(device: torch.device) -> None:
    """Raise ValueError for any device but the current GPU."""
    if device.type != "cuda" or device.index != torch.cuda.current_device():
        raise ValueError(f"expected operands on the current GPU, got {device}")


def defines(dtype: torch.dtype) -> dict[str, int]:
    """The macros of a kernel that has one variant for each dtype."""
    return {"BFLOAT16": int(dtype == torch.bfloat16)}
