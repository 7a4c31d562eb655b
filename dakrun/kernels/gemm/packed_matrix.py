"""A matrix in tiers as an argument of kernels that read any of its rows (native/packed.cuh)."""

import ctypes

import torch

from dakrun.formats import WeightFormat
from dakrun.geometry import ATOM_COLS, CHUNK, MAX_TIERS, ROWS_PER_BLOCK, unit_atoms
from dakrun.kernels.runtime.operands import DTYPES, ints, pointers
from dakrun.memory.matrix import TieredMatrix
from dakrun.units import ceil_div


class PackedTier(ctypes.Structure):
    """PackedTier of native/packed.cuh."""

    _fields_ = (*ints("first_row_block", "wave_row_blocks", "group_row_blocks", "step_atoms"),)


class PackedMatrix(ctypes.Structure):
    """PackedMatrix of native/packed.cuh."""

    _fields_ = (
        *pointers("addresses"),
        *ints("tier_count", "atoms"),
        ("tiers", PackedTier * (MAX_TIERS + 1)),
    )


def addresses(weight: TieredMatrix, device: torch.device) -> int:
    """The table of the addresses of `weight` on `device`, for kernels there to read.

    Raises ValueError for a matrix that kernels cannot read: of another dtype than DTYPES, with more
    than MAX_TIERS tiers, or in formats that differ, have no kernel or do not take its columns.
    """
    parts, cols = weight.parts, weight.shape[1]
    stored = weight.format
    if (
        weight.dtype not in DTYPES
        or len(parts) > MAX_TIERS
        or any(part.format != stored for part in parts)
        or not stored.for_kernels
        or not stored.takes(cols)
    ):
        names = sorted({part.format.name for part in parts})
        raise ValueError(
            f"expected a float16 or bfloat16 matrix in one packed format, with columns in "
            f"multiples of {CHUNK} and at most {MAX_TIERS} tiers, got {cols} columns and "
            f"{len(parts)} tiers of {weight.dtype} in {names}"
        )
    return weight.addresses(device).data_ptr()


def check_stacked(weight: TieredMatrix, experts: int) -> None:
    """Raise ValueError unless `weight` is stored expert after expert (launches.expert_splits)."""
    height = weight.shape[0] // experts // ROWS_PER_BLOCK
    if any(part.split.row_blocks and part.split.height != height for part in weight.parts):
        raise ValueError("expected a matrix stored expert after expert (expert_splits)")


def atom_count(cols: int, stored: WeightFormat) -> int:
    """Atoms along `cols` columns, in whole units of a format that has units."""
    unit = unit_atoms(stored.atom_bytes)
    return unit * ceil_div(cols, unit * ATOM_COLS)


def packed_matrix(weight: TieredMatrix, device: torch.device) -> PackedMatrix:
    """Describe `weight` to kernels on `device`. Raises ValueError as `addresses` does."""
    if device not in weight.descriptions:
        weight.descriptions[device] = _packed_matrix(weight, device)
    found: PackedMatrix = weight.descriptions[device]
    return found


def _packed_matrix(weight: TieredMatrix, device: torch.device) -> PackedMatrix:
    matrix = PackedMatrix(
        addresses=addresses(weight, device),
        tier_count=len(weight.parts),
        atoms=atom_count(weight.shape[1], weight.format),
    )
    row_block = 0
    for number, part in enumerate(weight.parts):
        split = part.split
        matrix.tiers[number] = PackedTier(
            first_row_block=row_block,
            wave_row_blocks=split.wave,
            group_row_blocks=split.group,
            step_atoms=atom_count(split.step_cols, weight.format),
        )
        row_block += split.row_blocks
    matrix.tiers[len(weight.parts)] = PackedTier(first_row_block=row_block)  # the last tier's end
    return matrix
