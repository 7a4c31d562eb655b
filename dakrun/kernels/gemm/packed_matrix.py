"""A matrix in tiers as an argument of kernels that read any of its rows (native/packed.cuh)."""

import ctypes

from dakrun.geometry import ATOM_COLS, CHUNK, MAX_TIERS
from dakrun.kernels.runtime.operands import DTYPES, ints, pointers
from dakrun.memory.matrix import TieredMatrix
from dakrun.units import ceil_div


class PackedTier(ctypes.Structure):
    """PackedTier of native/packed.cuh."""

    _fields_ = (
        *pointers("base"),
        *ints("first_row_block", "wave_row_blocks", "group_row_blocks", "step_atoms"),
    )


class PackedMatrix(ctypes.Structure):
    """PackedMatrix of native/packed.cuh."""

    _fields_ = (*ints("tier_count", "atoms"), ("tiers", PackedTier * (MAX_TIERS + 1)))


def addresses(weight: TieredMatrix) -> list[int]:
    """Address of each part of `weight`: the one place where they enter arguments of kernels.

    Raises ValueError for a matrix that kernels cannot read: of another dtype than DTYPES, with more
    than MAX_TIERS tiers, or in formats that differ, have no device code or do not take its columns.
    """
    parts, cols = weight.parts, weight.shape[1]
    stored = parts[0].format
    if (
        weight.dtype not in DTYPES
        or len(parts) > MAX_TIERS
        or any(part.format != stored for part in parts)
        or stored.device_code is None
        or not stored.takes(cols)
    ):
        names = sorted({part.format.name for part in parts})
        raise ValueError(
            f"expected a float16 or bfloat16 matrix in one packed format, with columns in "
            f"multiples of {CHUNK} and at most {MAX_TIERS} tiers, got {cols} columns and "
            f"{len(parts)} tiers of {weight.dtype} in {names}"
        )
    return [part.arrays[0].data_ptr() for part in parts]


def packed_matrix(weight: TieredMatrix) -> PackedMatrix:
    """Describe where `weight` lies. Raises ValueError as `addresses` does."""
    atoms = ceil_div(weight.shape[1], ATOM_COLS)
    matrix = PackedMatrix(tier_count=len(weight.parts), atoms=atoms)
    row_block = 0
    for number, (part, base) in enumerate(zip(weight.parts, addresses(weight), strict=True)):
        split = part.split
        matrix.tiers[number] = PackedTier(
            base=base,
            first_row_block=row_block,
            wave_row_blocks=split.wave,
            group_row_blocks=split.group,
            step_atoms=split.step_cols // ATOM_COLS,
        )
        row_block += split.row_blocks
    matrix.tiers[len(weight.parts)] = PackedTier(first_row_block=row_block)  # the last tier's end
    return matrix
