"""What was packed comes back, whole or in pieces, from whichever tiers; nothing else is written."""

import pytest
import torch
from cases import cases
from moved_parts import Movable
from packed_matrices import CASES, FEW_LAYOUTS, LAYOUTS, normal, packed, quantised

from dakrun.formats import Split
from dakrun.formats.device_layout import Quantised
from dakrun.kernels import unpack
from dakrun.kernels.runtime import DTYPES
from dakrun.memory.matrix import MatrixPart, TieredMatrix


def guarded(like: torch.Tensor) -> torch.Tensor:
    """Rows of NaN in the shape of `like`, and 8 behind them that nobody may write."""
    return like.new_full((len(like) + 8, like.shape[1]), torch.nan)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "cols", "splits"), [*CASES, (16, 2120, (Split(2, 1, 2, 512),))])
def test_all_rows(
    rows: int, cols: int, splits: tuple[Split, ...], dtype: torch.dtype, kernel_device: str
) -> None:
    dense = normal(rows, cols, dtype=dtype, device=kernel_device)
    room = guarded(dense)
    assert unpack(packed(dense, splits), room[:rows]).data_ptr() == room.data_ptr()
    assert torch.equal(room[:rows], dense) and bool(room[rows:].isnan().all())


@pytest.mark.parametrize(("rows", "cols", "splits"), CASES)
def test_parts_that_moved(
    rows: int, cols: int, splits: tuple[Split, ...], kernel_device: str
) -> None:
    dense = normal(rows, cols, dtype=torch.float16, device=kernel_device)
    movable = Movable(packed(dense, splits))
    for _ in range(2):
        assert torch.equal(unpack(movable.matrix, torch.empty_like(dense)), dense)
        movable.move(dense.device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "layout", cases([(layout,) for layout in LAYOUTS], FEW_LAYOUTS.__contains__), ids=str
)
def test_elements_of_fewer_bits(layout: Quantised, dtype: torch.dtype, kernel_device: str) -> None:
    """Values are rounded once; the last unit and the last row block are not whole."""
    rows, cols, splits = 203, 456, (Split(10, 2, 3, 256), Split(16, 1, 2, 128))
    weight = quantised(layout, rows, cols, splits, dtype=dtype, device=kernel_device)
    room = guarded(weight.dense(kernel_device))
    unpack(weight, room[:rows])
    assert torch.equal(room[:rows], weight.dense(kernel_device))
    assert bool(room[rows:].isnan().all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_code_that_is_no_number(dtype: torch.dtype, kernel_device: str) -> None:
    layout = Quantised("e4m3", 128, 4)
    codes = torch.arange(256, dtype=torch.uint8, device=kernel_device).repeat(8, 1)
    scales = torch.ones(8, 2, device=kernel_device)
    data = torch.empty(2 * layout.unit_bytes, dtype=torch.uint8, device=kernel_device)
    split = Split(1, 1, 1, 128)
    layout.write([data], split, 0, codes, scales)
    weight = TieredMatrix((8, 256), dtype, (MatrixPart("hbm", split, layout, (data,)),))
    out = unpack(weight, torch.empty(8, 256, dtype=dtype, device=kernel_device))
    numbers = codes.view(torch.float8_e4m3fn).to(dtype)
    assert torch.equal(out.isnan(), numbers.isnan()) and out.isnan().sum() == 16
    assert torch.equal(out.nan_to_num(), numbers.nan_to_num())


@pytest.mark.parametrize("piece", [8, 64, 104])
def test_pieces(piece: int, kernel_device: str) -> None:
    rows, cols, splits = CASES[2]
    dense = normal(rows, cols, dtype=torch.float16, device=kernel_device)
    weight = packed(dense, splits)
    for first in range(0, rows, piece):
        wanted = dense[first : first + piece]
        room = guarded(wanted)
        unpack(weight, room[: len(wanted)], first_row=first)
        assert torch.equal(room[: len(wanted)], wanted)
        assert bool(room[len(wanted) :].isnan().all())


@pytest.mark.parametrize(
    ("shape", "first", "message"),
    [
        ((8, 64), 4, "got 8 from row 4"),
        ((8, 64), 16, "got 8 from row 16"),
        ((8, 64), -8, "got 8 from row -8"),
        ((0, 64), 0, "got 0 from row 0"),
        ((8, 72), 0, r"out as \[8, 64\] .*got \[8, 72\]"),
        ((20, 64), 0, "current GPU"),
    ],
)
def test_what_does_not_fit_is_refused(shape: tuple[int, int], first: int, message: str) -> None:
    weight = packed(torch.zeros(20, 64).half(), (Split(3, 1, 2, 64),))
    with pytest.raises(ValueError, match=message):
        unpack(weight, torch.zeros(shape).half(), first_row=first)
