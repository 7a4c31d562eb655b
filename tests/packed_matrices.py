"""Packed matrices whose rows several tiers hold, dealt out in every way that the packing knows."""

import itertools
from collections.abc import Sequence

import torch

from dakrun.kernels.gemm.packing import (
    OCTET_ROWS,
    PackedPart,
    PackedTensor,
    Split,
    octet_count,
    pack,
)

# Rows, columns, and the tiers: a single octet, many waves with a smaller last group, several tiers
# with ragged rows, an empty tier and steps wider than the matrix.
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


def packed(weight: torch.Tensor, splits: Sequence[Split]) -> PackedTensor:
    """`weight` [M, K], whose octets are dealt out as `splits`; on a GPU the first tier is in HBM.

    The others are then page-locked.
    """
    assert sum(split.octets for split in splits) == octet_count(weight.shape[0])
    ends = itertools.accumulate(OCTET_ROWS * split.octets for split in splits)
    parts = []
    for number, (split, end) in enumerate(zip(splits, ends, strict=True)):
        data = pack(weight[end - OCTET_ROWS * split.octets : end], split)
        if number and data.is_cuda:
            data = data.cpu().pin_memory()
        parts.append(PackedPart(f"tier {number}", split, data))
    return PackedTensor((weight.shape[0], weight.shape[1]), weight.dtype, tuple(parts))
