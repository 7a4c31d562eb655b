"""Packed matrices in several tiers, in every kind of split."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import torch

from dakrun.formats import PACKED16, Split, stretches
from dakrun.formats.device_layout import CODES, Quantised
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
# Every code with the groups, scales and zeros that checkpoints have.
LAYOUTS = (
    *(
        Quantised(code, group, scale_bytes, zeros)
        for code, group, scale_bytes, zeros in itertools.product(
            CODES[:2], (32, 64, 128), (2, 4), (False, True)
        )
    ),
    Quantised("e2m1", 16, 1),
    Quantised("e4m3", 128, 4),
    Quantised("e4m3", 128),
)
# Of these, the ones that `make test` runs with every kernel.
FEW_LAYOUTS = (Quantised("int4", 128), Quantised("int8", 32, 2, True), *LAYOUTS[-3:-1])


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


def stored_of(
    layout: Quantised, rows: int, cols: int, dtype: torch.dtype = torch.float16
) -> tuple[torch.Tensor, ...]:
    """Random tensors for the layout's `write`: codes, scales, and zeros or factors.

    Values have about the size of normal numbers / sqrt(cols).
    """
    generator = torch.Generator().manual_seed(rows + cols)
    codes = torch.randint(0, 1 << layout.bits, (rows, cols), generator=generator).to(torch.uint8)
    codes[codes % 128 == 127] = 1  # e4m3's NaN
    groups = -(-cols // layout.group)
    size = {"int4": 5.0, "int8": 75.0, "e2m1": 3.0, "e4m3": 100.0}[layout.code]
    scales = (torch.rand(rows, groups, generator=generator) + 0.5) / (size * cols**0.5)
    if layout.scale_bytes == 1:
        factors = torch.rand(rows, generator=generator) + 0.5
        return codes, (128 * scales).to(torch.float8_e4m3fn), factors / 128
    if layout.scale_bytes == 2:
        scales = scales.to(dtype)
    if not layout.zeros:
        return codes, scales
    middle = 1 << layout.bits - 1
    spread = torch.randint(-middle // 4, middle // 4, (rows, groups), generator=generator)
    return codes, scales, middle + spread


def quantised(
    layout: Quantised,
    rows: int,
    cols: int,
    splits: Sequence[Split],
    *,
    dtype: torch.dtype,
    device: str,
) -> TieredMatrix:
    """A matrix of stored_of(), its row blocks assigned as in `splits`; tiers as of packed()."""
    stored = [tensor.to(device) for tensor in stored_of(layout, rows, cols, dtype)]
    parts, row = [], 0
    for number, split in enumerate(splits):
        end = min(row + ROWS_PER_BLOCK * split.row_blocks, rows)
        data = [
            torch.empty(array.nbytes(end - row), dtype=torch.uint8, device=device)
            for array in layout.arrays(cols)
        ]
        for first, count in stretches(split, split.row_blocks):
            top = row + ROWS_PER_BLOCK * first
            of = slice(top, min(top + ROWS_PER_BLOCK * count, end))
            layout.write(data, split, first, *(tensor[of] for tensor in stored))
        if number and device != "cpu":
            data = [array.cpu().pin_memory() for array in data]
        parts.append(MatrixPart(f"tier {number}", split, layout, tuple(data)))
        row = end
    return TieredMatrix((rows, cols), dtype, tuple(parts))


def elsewhere(
    matrix: TieredMatrix, experts: int, device: str
) -> tuple[TieredMatrix, list[torch.Tensor]]:
    """The matrix with copies of all experts that are not cut, which are to be kept.

    At their addresses is garbage.
    """
    shifts, copies = torch.zeros(experts, dtype=torch.int64), []
    for expert in range(experts):
        if (of := matrix.stacked(expert, experts)) is None:
            continue
        (home,) = of.arrays
        copies.append(home.clone().to(device))
        shifts[expert] = copies[-1].data_ptr() - home.data_ptr()
        home.fill_(0x7F)
    return replace(matrix, shifts=shifts.to(device)), copies
