"""Packed matrices in memory tiers: allocated for the kernels' layout, written piece by piece.

Knows row blocks, tiers and how they are read; not what the rows mean.
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

PIECE_ELEMENTS = 1 << 22  # elements to write at a time: packing needs as much memory again


@dataclass(frozen=True)
class Piece:
    """Rows `rows` of a matrix, which are the row blocks of `part` from its row block `first` on."""

    part: PackedPart
    first: int
    rows: slice


def can_pack(dtype: torch.dtype, cols: int) -> bool:
    """Whether the GEMM kernels take a weight of `dtype` with `cols` columns."""
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
    """Allocate an uninitialised matrix [M, K] by `placement`, (tier, row blocks) in row order.

    The local tier comes first; `access` has the limits of reading each tier, by a GPU with `sms`
    SMs. Every tier gets a part, which may be empty.
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
    """Divide a matrix, in row order, into pieces of up to `elements`; one group at least."""
    (height, cols), before = weight.shape, 0
    for part in weight.parts:
        for first, count in stretches(part.split, elements // (ROWS_PER_BLOCK * cols)):
            top = before + first
            yield Piece(part, first, slice(first_row(top, height), first_row(top + count, height)))
        before += part.split.row_blocks


def write(piece: Piece, rows: torch.Tensor) -> None:
    """Pack rows [M, K], in the matrix's dtype and on the device that reads the tier, into a piece.

    A GPU writes by itself, to host memory too, in the order of torch's current stream.
    """
    data = device_view(piece.part.data, rows.device)
    packing.write(rows, piece.part.split, data, piece.first)
