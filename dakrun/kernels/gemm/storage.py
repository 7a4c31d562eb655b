"""Packed matrices in their tiers: memory dealt out as it is read, written piece by piece.

Knows row blocks, tiers and how they are read; not what the rows are.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from dakrun.geometry import CHUNK, ROWS_PER_BLOCK, first_row
from dakrun.kernels.gemm import packing
from dakrun.kernels.gemm.packing import DTYPES, PackedPart, PackedTensor, row_block_bytes, stretches
from dakrun.kernels.gemm.splitk_config import TierAccess, split_row_blocks
from dakrun.memory.device import device_view
from dakrun.memory.tiers import Tier

PIECE_ELEMENTS = 1 << 24  # to write at a time, as packing takes memory, too


@dataclass(frozen=True)
class Piece:
    """Rows `rows` of a matrix: row blocks of `part` from its row block `first` on."""

    part: PackedPart
    first: int
    rows: slice


def can_pack(dtype: torch.dtype, cols: int) -> bool:
    """Whether SplitK_GEMM takes a weight of that dtype and that many columns."""
    return dtype in DTYPES and cols % CHUNK == 0


def allocate(
    shape: tuple[int, int],
    dtype: torch.dtype,
    placement: Sequence[tuple[str, int]],
    access: Sequence[TierAccess],
    tiers: Mapping[str, Tier],
    *,
    sms: int,
) -> PackedTensor:
    """A matrix [M, K] of no particular values; `placement` gives (tier, row blocks) in their order.

    The local tier comes first, and `access` says how each is read, by a GPU of `sms` SMs. There
    is a part for every tier, empty ones included.
    """
    splits = split_row_blocks([row_blocks for _, row_blocks in placement], access, sms=sms)
    parts = [
        PackedPart(
            tier,
            split,
            tiers[tier].allocate((split.row_blocks * row_block_bytes(shape[1]),), torch.uint8),
        )
        for (tier, _), split in zip(placement, splits, strict=True)
    ]
    return PackedTensor(shape, dtype, tuple(parts))


def pieces(weight: PackedTensor, elements: int) -> Iterator[Piece]:
    """A matrix in pieces of up to `elements`, at least a group of row blocks each, in order."""
    (height, cols), before = weight.shape, 0
    for part in weight.parts:
        for first, count in stretches(part.split, elements // (ROWS_PER_BLOCK * cols)):
            top = before + first
            yield Piece(part, first, slice(first_row(top, height), first_row(top + count, height)))
        before += part.split.row_blocks


def write(piece: Piece, rows: torch.Tensor) -> None:
    """Pack the rows [M, K] of a piece, of the matrix's dtype, into its tier.

    They are on the device that reads the tier. On a GPU this only starts it, on torch's current
    stream, and it is the GPU that writes, also to host memory.
    """
    data = device_view(piece.part.data, rows.device)
    packing.write(rows, piece.part.split, data, piece.first)
