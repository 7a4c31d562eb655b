"""Embeddings are rows of the table, bit for bit, in whichever tier and however it is dealt out."""

from typing import Any

import pytest
import torch
from cases import cases
from packed_matrices import CASES, FEW_LAYOUTS, LAYOUTS, normal, packed, quantised

from dakrun.formats import Split
from dakrun.formats.device_layout import Quantised
from dakrun.kernels import embed
from dakrun.kernels.runtime import DTYPES


def integers(*values: int, device: str) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "cols", "splits"), CASES)
def test_rows_of_the_table(
    rows: int, cols: int, splits: tuple[Split, ...], dtype: torch.dtype, kernel_device: str
) -> None:
    dense = normal(rows, cols, dtype=dtype, device=kernel_device)
    tokens = integers(*range(0, rows, 1 + rows // 25), rows - 1, device=kernel_device)
    out = dense.new_full((len(tokens), cols), torch.nan)
    assert embed(tokens, packed(dense, splits), out) is out
    assert torch.equal(out, dense[tokens.long()])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_positions(dtype: torch.dtype, kernel_device: str) -> None:
    rows, cols, splits = CASES[2]
    dense = normal(rows, cols, dtype=dtype, device=kernel_device)
    positions = normal(12, cols, dtype=dtype, device=kernel_device)
    tokens = integers(5, 200, 329, 17, 17, device=kernel_device)
    lengths = integers(0, 3, 9, -1, -7, device=kernel_device)
    out = dense.new_full((5, cols), torch.nan)
    embed(tokens, packed(dense, splits), out, positions=positions, lengths=lengths, offset=2)
    rounded_once = dense[tokens.long()].float() + positions[lengths.clamp(min=0).long() + 2].float()
    assert torch.equal(out, rounded_once.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "layout", cases([(layout,) for layout in LAYOUTS], FEW_LAYOUTS.__contains__), ids=str
)
def test_elements_of_fewer_bits(layout: Quantised, dtype: torch.dtype, kernel_device: str) -> None:
    rows, cols, splits = 203, 456, (Split(10, 2, 3, 256), Split(16, 1, 2, 128))
    table = quantised(layout, rows, cols, splits, dtype=dtype, device=kernel_device)
    tokens = integers(202, 0, 77, 13, device=kernel_device)
    out = torch.full((4, cols), torch.nan, dtype=dtype, device=kernel_device)
    assert torch.equal(embed(tokens, table, out), table.dense(kernel_device)[tokens.long()])


def test_wide_rows(kernel_device: str) -> None:
    """For which a CTA has too few threads."""
    dense = normal(24, 5000, dtype=torch.float16, device=kernel_device)
    tokens = integers(23, 0, 8, device=kernel_device)
    out = dense.new_full((3, 5000), torch.nan)
    embed(tokens, packed(dense, (Split(3, 2, 2, 512),)), out)
    assert torch.equal(out, dense[tokens.long()])


def test_what_lies_outside_takes_the_nearest_row(kernel_device: str) -> None:
    dense = normal(20, 64, dtype=torch.float16, device=kernel_device)
    positions = normal(6, 64, dtype=torch.float16, device=kernel_device)
    tokens = integers(-1, 20, 2**31 - 1, -(2**31), device=kernel_device)
    lengths = integers(5, 4, 10**6, 0, device=kernel_device)
    out = dense.new_full((4, 64), torch.nan)
    table = packed(dense, (Split(3, 1, 2, 64),))
    embed(tokens, table, out, positions=positions, lengths=lengths, offset=2)
    assert torch.equal(out, dense[[0, 19, 19, 0]] + positions[[5, 5, 5, 2]])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": torch.zeros(3)}, r"tokens as \[3\] of torch.int32 .* torch.float32"),
        ({"out": torch.zeros(3, 72)}, r"out as \[3, 72\]"),
        (
            {"lengths": torch.zeros(2, dtype=torch.int32)},
            r"lengths as \[3\] .*got \[2\]",
        ),
        ({"positions": torch.zeros(9, 64).half()}, r"positions as \[9, 72\]"),
        ({"lengths": None}, "or neither"),
        ({"out": torch.zeros(72, 3).half().T}, "out .* contiguous"),
        ({"out": torch.zeros(217).half()[1:].view(3, 72)}, "contiguous and aligned to 16 bytes"),
        ({}, "current GPU"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    operands = {
        "tokens": torch.zeros(3, dtype=torch.int32),
        "out": torch.zeros(3, 72).half(),
        "positions": torch.zeros(9, 72).half(),
        "lengths": torch.zeros(3, dtype=torch.int32),
        "table": packed(torch.zeros(20, 72).half(), (Split(3, 1, 2, 64),)),
    }
    with pytest.raises(ValueError, match=message):
        embed(**{**operands, **change})


def test_tables_that_kernels_cannot_read(kernel_device: str) -> None:
    tokens = integers(0, device=kernel_device)
    for cols, tiers, message in ((12, 1, "got 12 columns and 1 "), (64, 10, "64 columns and 10 ")):
        dense = normal(8 * tiers, cols, dtype=torch.float16, device=kernel_device)
        table = packed(dense, tiers * (Split(1, 1, 1, 64),))
        with pytest.raises(ValueError, match=f"columns .* tiers.*{message}"):
            embed(tokens, table, dense[:1])
