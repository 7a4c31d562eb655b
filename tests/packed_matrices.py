"""Packed matrices in several tiers, in every kind of split."""

import itertools
from collections.abc import Sequence

import torch

from dakrun.formats import PACKED16, Split
from dakrun.geometry import ROWS_PER_BLOCK, row_block_count
from dakrun.memory.matrix import MatrixPart, TieredMatrix

# Rows, columns, and the tiers: a single row block, many waves with a smaller last group, several
# tiers with ragged rows, an empty tier and steps wider than the matrix.
CASES = (
    (8, 64, (Split(1, 1, 1, 64),)),
    (203, 200, (Split(26, 2, 3, 128),)),
    (330, 520, (Split(20, 3, 4, 192), Split(22, 1, 5, 64))),
    (100, 1000, (Split(0, 0, 1, 64), Split(12, 2, 16, 1024), Split(1, 4, 2, 256))),
)


def normal(*shape: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Random numbers, the same for the same arguments and on any device."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(device, dtype)


def packed(weight: torch.Tensor, splits: Sequence[Split]) -> TieredMatrix:
    """`weight` [M, K], its row blocks assigned as in `splits`; on a GPU the first tier is in HBM.

    The others are then page-locked.
    """
    assert sum(split.row_blocks for split in splits) == row_block_count(weight.shape[0])
    ends = itertools.accumulate(ROWS_PER_BLOCK * split.row_blocks for split in splits)
    parts = []
    for number, (split, end) in enumerate(zip(splits, ends, strict=True)):
        data = PACKED16.pack(weight[end - ROWS_PER_BLOCK * split.row_blocks : end], split)
        if number and weight.is_cuda:
            data = tuple(array.cpu().pin_memory() for array in data)
        parts.append(MatrixPart(f"tier {number}", split, PACKED16, data))
    return TieredMatrix((weight.shape[0], weight.shape[1]), weight.dtype, tuple(parts))
