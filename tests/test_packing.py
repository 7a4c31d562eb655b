"""Packed matrices: `pack` and `dense` are inverses, and the layout is the documented one."""

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dakrun.formats import PACKED16, Split
from dakrun.geometry import (
    ATOM_BYTES,
    ATOM_COLS,
    MAX_GROUP_ROW_BLOCKS,
    ROWS_PER_BLOCK,
    row_block_count,
)
from dakrun.kernels import gemm
from dakrun.kernels.runtime import DTYPES
from dakrun.memory.matrix import MatrixPart, TieredMatrix
from dakrun.memory.tiers import Tier


def random_bits(rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
    """Random bits, some of them NaN."""
    bits = torch.randint(-(2**15), 2**15, (rows, cols), dtype=torch.int16)
    return bits.view(dtype)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(torch.int16), b.view(torch.int16))


def packed(weight: torch.Tensor, splits: list[Split]) -> TieredMatrix:
    """`weight` with its row blocks in as many tiers as there are splits."""
    ends = itertools.accumulate(ROWS_PER_BLOCK * split.row_blocks for split in splits)
    parts = [
        MatrixPart(
            f"tier {i}",
            split,
            PACKED16,
            PACKED16.pack(weight[end - ROWS_PER_BLOCK * split.row_blocks : end], split),
        )
        for i, (split, end) in enumerate(zip(splits, ends, strict=True))
    ]
    rows, cols = weight.shape
    return TieredMatrix((rows, cols), weight.dtype, tuple(parts))


@st.composite
def ways_to_split(draw: st.DrawFn, row_blocks: int) -> Split:
    ctas, group = draw(st.integers(1, 9)), draw(st.integers(1, MAX_GROUP_ROW_BLOCKS))
    return Split(row_blocks, ctas, group, ATOM_COLS * draw(st.integers(1, 9)))


@st.composite
def matrices(draw: st.DrawFn) -> tuple[torch.Tensor, list[Split]]:
    rows, cols = draw(st.integers(1, 400)), draw(st.integers(1, 900))
    row_blocks = row_block_count(rows)
    cuts = sorted(draw(st.lists(st.integers(0, row_blocks), max_size=3)))
    counts = [end - start for start, end in itertools.pairwise([0, *cuts, row_blocks])]
    weight = random_bits(rows, cols, draw(st.sampled_from(DTYPES)))
    return weight, [draw(ways_to_split(count)) for count in counts]


@given(matrices())
def test_what_is_packed_comes_back(matrix: tuple[torch.Tensor, list[Split]]) -> None:
    weight, splits = matrix
    tensor = packed(weight, splits)
    assert same_bits(tensor.dense(), weight) and tensor.dense().is_contiguous()
    stored = row_block_count(weight.shape[0]) * PACKED16.row_block_bytes(weight.shape[1])
    assert sum(part.nbytes for part in tensor.parts) == stored


@given(matrices(), st.integers(1, 60))
def test_pieces_of_any_size_make_the_same(
    matrix: tuple[torch.Tensor, list[Split]], limit: int
) -> None:
    weight, splits = matrix
    expected = packed(weight, splits)
    blank = [
        replace(part, arrays=tuple(torch.full_like(array, 0x7F) for array in part.arrays))
        for part in expected.parts
    ]
    tensor, rows = TieredMatrix(expected.shape, weight.dtype, tuple(blank)), 0
    for piece in tensor.pieces(limit * ROWS_PER_BLOCK * weight.shape[1]):
        row_blocks = row_block_count(piece.rows.stop - piece.rows.start)
        assert piece.rows.start == rows and row_blocks <= max(limit, piece.part.split.group)
        piece.write(weight[piece.rows])
        rows = piece.rows.stop
    assert rows == len(weight)
    for part, whole in zip(tensor.parts, expected.parts, strict=True):
        assert all(map(torch.equal, part.arrays, whole.arrays))


@given(
    st.integers(1, 4), st.integers(1, 40), st.integers(1, MAX_GROUP_ROW_BLOCKS), st.data(),
    st.integers(1, 30),
)  # fmt: skip
def test_a_matrix_of_a_stack_is_one_piece_stored_alike_in_every_tier(
    count: int, height: int, group: int, data: st.DataObject, limit: int
) -> None:
    """Unless it is cut; and pieces of any size make the same."""
    row_blocks, cols, rows = count * height, 136, height * ROWS_PER_BLOCK
    weight = random_bits(row_blocks * ROWS_PER_BLOCK, cols, torch.float16)
    cut = data.draw(st.integers(0, row_blocks))
    splits = [
        Split(cut, 1, group, 128, height=height),
        Split(row_blocks - cut, 1, group, 128, height=height, cut=cut % height),
    ]
    matrix = packed(weight, splits)
    assert same_bits(matrix.dense(), weight)
    pieces = TieredMatrix.empty(
        matrix.shape, weight.dtype, PACKED16, [("hbm", cut), ("host", row_blocks - cut)],
        {name: Tier(name, 2**22, torch.device("cpu")) for name in ("hbm", "host")}, splits,
    )  # fmt: skip
    for piece in pieces.pieces(limit * ROWS_PER_BLOCK * cols):
        piece.write(weight[piece.rows])
    for part, whole in zip(pieces.parts, matrix.parts, strict=True):
        assert all(map(torch.equal, part.arrays, whole.arrays))
    for number in range(count):
        found = matrix.stacked(number, count)
        assert (found is None) == (number * height < cut < (number + 1) * height)
        if found is not None:
            alone = weight[number * rows : (number + 1) * rows]
            assert found.arrays[0].equal(PACKED16.pack(alone, Split(height, 1, group, 128))[0])
            assert found.tier == f"tier {int(number * height >= cut)}"


def slow_offset(row: int, col: int, cols: int, split: Split) -> int:
    """An element's offset in bytes, computed as formats/packed16.py and split.py describe it."""
    row_block, row = divmod(row, 8)
    atoms_along = -(-cols // 64)
    wave = row_block // split.wave * split.wave
    wave_row_blocks = min(split.wave, split.row_blocks - wave)
    group = row_block // split.group * split.group
    group_row_blocks = min(split.group, split.row_blocks - group)
    step_atoms = split.step_cols // 64
    step = col // 64 // step_atoms * step_atoms
    depth = min(step_atoms, atoms_along - step)
    before = wave * atoms_along + wave_row_blocks * step + (group - wave) * depth
    atom = before + (col // 64 - step) * group_row_blocks + (row_block - group)
    chunk = col % 64 // 8
    return atom * ATOM_BYTES + row * 128 + (chunk ^ row) * 16 + col % 8 * 2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "cols", "ctas", "group", "step_cols"),
    [
        (8, 64, 1, 1, 128),
        (13, 130, 2, 1, 64),
        (72, 500, 2, 3, 256),
        (200, 640, 3, 4, 384),
        (150, 200, 1, MAX_GROUP_ROW_BLOCKS, 1024),
    ],
)
def test_the_layout_is_the_documented_one(
    rows: int, cols: int, ctas: int, group: int, step_cols: int, dtype: torch.dtype
) -> None:
    weight = random_bits(rows, cols, dtype)
    split = Split(row_block_count(rows), ctas, group, step_cols)
    expected = torch.zeros(
        split.row_blocks * PACKED16.row_block_bytes(cols) // 2, dtype=torch.int16
    )
    for row, values in enumerate(weight.view(torch.int16)):
        expected[[slow_offset(row, col, cols, split) // 2 for col in range(cols)]] = values
    (data,) = PACKED16.pack(weight, split)
    assert torch.equal(data, expected.view(torch.uint8))


def test_an_atom() -> None:
    weight = torch.arange(8 * 128, dtype=torch.int16).view(8, 128).view(torch.float16)
    (data,) = PACKED16.pack(weight, Split(1, 1, 1, 128))
    atoms = data.view(torch.int16).view(2, 8, 8, 8)
    for atom, row, place in itertools.product(range(2), range(8), range(8)):
        chunk = place ^ row
        first = 128 * row + 64 * atom + 8 * chunk
        assert atoms[atom, row, place].tolist() == list(range(first, first + 8))


def test_padding_is_zero() -> None:
    ones = torch.ones(9, 65, dtype=torch.bfloat16)
    (stored,) = PACKED16.pack(ones, Split(2, 1, 2, 128))
    data = stored.view(torch.bfloat16)
    assert data.numel() == 16 * 128 and data.sum() == 9 * 65


def test_strides_do_not_matter() -> None:
    whole = random_bits(256, 300, torch.float16)
    split = Split(16, 2, 4, 128)
    for view in (whole[:128, :128], whole[::2, 1:129], whole[:128, :128].t(), whole.t()[:128]):
        (data,), (same,) = (PACKED16.pack(some, split) for some in (view, view.contiguous()))
        assert torch.equal(data, same)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"group": 0},
            f"expected groups of 1 to {MAX_GROUP_ROW_BLOCKS} row blocks and steps of a ",
        ),
        ({"group": MAX_GROUP_ROW_BLOCKS + 1}, f"expected groups of 1 to {MAX_GROUP_ROW_BLOCKS}"),
        ({"step_cols": 96}, "multiple of 64 columns, got .*step_cols=96"),
        ({"step_cols": 0}, "multiple of 64 columns, got .*step_cols=0"),
        ({"step_cols": -128}, "multiple of 64 columns, got .*step_cols=-128"),
        ({"ctas": 0}, "at least one CTA, got Split"),
        ({"height": 4}, "one CTA and a part of a matrix, got Split"),
        ({"ctas": 1, "height": 4, "cut": 4}, "one CTA and a part of a matrix, got Split"),
    ],
)
def test_bad_splits(values: dict[str, int], message: str) -> None:
    good = {"row_blocks": 3, "ctas": 2, "group": 2, "step_cols": 256}
    with pytest.raises(ValueError, match=message):
        Split(**{**good, **values})
    assert Split(0, 0, 1, 128).wave == 1, "a tier may have none"


def test_bad_weights() -> None:
    split = Split(2, 1, 2, 128)
    for weight in (torch.zeros(16, 64), torch.zeros(16, 64, dtype=torch.int16)):
        with pytest.raises(
            ValueError, match=f"expected a float16 or bfloat16 matrix, got {weight.dtype}"
        ):
            PACKED16.pack(weight, split)
    for rows in (0, 8, 17):
        with pytest.raises(ValueError, match=f"expected 2 row blocks, got {row_block_count(rows)}"):
            PACKED16.pack(torch.zeros(rows, 64, dtype=torch.float16), split)


def test_bad_parts() -> None:
    split = Split(2, 1, 2, 128)
    (data,) = PACKED16.pack(torch.zeros(16, 100, dtype=torch.float16), split)

    def tensor(
        data: torch.Tensor,
        shape: tuple[int, int] = (16, 100),
        dtype: torch.dtype = torch.float16,
    ) -> TieredMatrix:
        return TieredMatrix(shape, dtype, (MatrixPart("host", split, PACKED16, (data,)),))

    assert tensor(data).dense().shape == (16, 100)
    with pytest.raises(ValueError, match=r"expected a float16 or bfloat16 .* of torch\.float32 in"):
        gemm.addresses(tensor(data, dtype=torch.float32), torch.device("cpu"))
    for bad in (data[1:], data.view(2, 2048), data.view(torch.int16)):
        with pytest.raises(
            ValueError, match=r"expected 4096 bytes of elements in host, .* got \[.*\] of"
        ):
            tensor(bad)
    with pytest.raises(ValueError, match="expected 6144 bytes of elements in host"):
        tensor(data, shape=(16, 129))
    for rows in (8, 17):
        with pytest.raises(ValueError, match=rf"row blocks for a matrix of \({rows}, 100\), got 2"):
            tensor(data, shape=(rows, 100))
