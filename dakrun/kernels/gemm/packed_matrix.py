"""A PackedTensor as an argument of kernels that read any of its rows (native/packed.cuh)."""

import ctypes

from dakrun.geometry import ATOM_COLS, CHUNK, MAX_TIERS
from dakrun.kernels.gemm.packing import PackedTensor, padded_cols
from dakrun.kernels.runtime.operands import ALIGNMENT, ints, pointers


class PackedTier(ctypes.Structure):
    """PackedTier of native/packed.cuh."""

    _fields_ = (
        *pointers("base"),
        *ints("first_row_block", "wave_row_blocks", "group_row_blocks", "step_atoms"),
    )


class PackedMatrix(ctypes.Structure):
    """PackedMatrix of native/packed.cuh."""

    _fields_ = (*ints("tier_count", "atoms"), ("tiers", PackedTier * (MAX_TIERS + 1)))


def packed_matrix(weight: PackedTensor) -> PackedMatrix:
    """Describe where `weight` lies.

    Raises ValueError for more than MAX_TIERS tiers, or where 16-byte loads do not fit.
    """
    parts, cols = weight.parts, weight.shape[1]
    aligned = all(part.data.data_ptr() % ALIGNMENT == 0 for part in parts)
    if len(parts) > MAX_TIERS or cols % CHUNK or not aligned:
        raise ValueError(
            f"expected a multiple of {CHUNK} columns and at most {MAX_TIERS} tiers, aligned to "
            f"{ALIGNMENT} bytes, got {cols} columns and {len(parts)} tiers"
        )
    matrix = PackedMatrix(tier_count=len(parts), atoms=padded_cols(cols) // ATOM_COLS)
    row_block = 0
    for number, part in enumerate(parts):
        split = part.split
        matrix.tiers[number] = PackedTier(
            base=part.data.data_ptr(),
            first_row_block=row_block,
            wave_row_blocks=split.wave,
            group_row_blocks=split.group,
            step_atoms=split.step_cols // ATOM_COLS,
        )
        row_block += split.row_blocks
    matrix.tiers[len(parts)] = PackedTier(first_row_block=row_block)  # the end of the last tier
    return matrix
