"""Elements of 4 and 8 bits in units: what is packed is read again, in the fragments' order."""

import itertools

import pytest
import torch
from packed_matrices import LAYOUTS, stored_of

from dakrun.formats import Split, stretches
from dakrun.formats.device_layout import Code, Quantised
from dakrun.geometry import ROWS_PER_BLOCK, row_block_count

ROWS, COLS = 43, 384  # 6 row blocks, the last of 3 rows, and 3 units
SPLITS = (Split(6), Split(6, 2, 2, 128), Split(6, 1, 4, 256))


def value(code: int, kind: Code) -> float:
    """A code's value by its definition."""
    if kind.startswith("int"):
        return code
    mantissa_bits, bias = (1, 1) if kind == "e2m1" else (3, 7)
    bits = 4 if kind == "e2m1" else 8
    sign = -1.0 if code >> bits - 1 else 1.0
    size = code & (1 << bits - 1) - 1
    exponent, fraction = size >> mantissa_bits, size & (1 << mantissa_bits) - 1
    if exponent:
        return sign * 2.0 ** (exponent - bias) * (1 + fraction / (1 << mantissa_bits))
    return sign * 2.0 ** (1 - bias) * fraction / (1 << mantissa_bits)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_rows_are_read_as_they_were_packed(layout: Quantised, split: Split) -> None:
    stored = stored_of(layout, ROWS, COLS)
    (array,) = layout.arrays(COLS)
    data = torch.empty(array.nbytes(ROWS), dtype=torch.uint8)
    for first, count in stretches(split, 4):
        rows = slice(ROWS_PER_BLOCK * first, ROWS_PER_BLOCK * (first + count))
        layout.write([data], split, first, *(tensor[rows] for tensor in stored))
    found = layout.read([data], split, COLS, torch.float16)[:ROWS]
    codes, scales, *more = stored
    values = torch.tensor([value(code, layout.code) for code in range(256)])[codes.long()]
    zero = {"int4": 8.0, "int8": 128.0}.get(layout.code, 0.0)
    zeros = more[0].float() if layout.zeros else torch.full(scales.shape, zero)
    factors = more[0][:, None] if layout.scale_bytes == 1 else 1.0
    per_column = [t.repeat_interleave(layout.group, 1) for t in (zeros, scales.float() * factors)]
    assert torch.equal(found, ((values - per_column[0]) * per_column[1]).half())


@pytest.mark.parametrize("scale_bytes", [2, 4])
def test_scales_below_zero_and_codes_that_are_no_numbers(scale_bytes: int) -> None:
    layout = Quantised("e4m3", 128, scale_bytes)
    codes, scales = stored_of(layout, ROWS, COLS, torch.bfloat16)
    scales[::2] *= -1
    codes[::5, 300] = 0x7F
    data = torch.empty(layout.arrays(COLS)[0].nbytes(ROWS), dtype=torch.uint8)
    layout.write([data], Split(6), 0, codes, scales)
    found = layout.read([data], Split(6), COLS, torch.float32 if scale_bytes == 4 else scales.dtype)
    wide = scales.float().repeat_interleave(128, 1) * codes.view(torch.float8_e4m3fn).float()
    assert torch.equal(found[:ROWS].isnan(), wide.isnan()) and wide.isnan().sum() == 9
    assert torch.equal(found[:ROWS].nan_to_num(), wide.to(found.dtype).nan_to_num())


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_unit_is_in_whole_copies(layout: Quantised) -> None:
    assert layout.unit_bytes % 16 == 0 and layout.row_block_bytes(COLS) == 3 * layout.unit_bytes
    assert layout.atom_bytes * 2 == layout.unit_bytes


@pytest.mark.parametrize("bits", [4, 8])
def test_a_lane_has_the_columns_of_its_fragments(bits: int) -> None:
    layout = Quantised("int4" if bits == 4 else "int8", 128)
    rows, cols = 8, 128
    codes = torch.randint(0, 1 << bits, (rows, cols), dtype=torch.uint8)
    (array,) = layout.arrays(cols)
    data = torch.empty(array.nbytes(rows), dtype=torch.uint8)
    layout.write([data], Split(row_block_count(rows)), 0, codes, torch.ones(rows, 1).half())
    words = data[: rows * cols * bits // 8].view(torch.int32).tolist()
    of_lane = bits // 2  # words of an atom
    for lane, atom, step, half, j in itertools.product(range(32), *map(range, (2, 4, 2, 2))):
        column = 64 * atom + 16 * step + 8 * half + lane % 4 * 2 + j
        if bits == 4:
            word, shift = step // 2, 4 * (4 * j + 2 * (step % 2) + half)
        else:
            word, shift = step, 8 * (2 * j + half)
        found = words[(atom * 32 + lane) * of_lane + word] >> shift & (1 << bits) - 1
        assert found == codes[lane // 4, column]


@pytest.mark.parametrize(
    "wrong",
    [("int3", 128, 2, False), ("int4", 48, 2, False), ("e4m3", 128, 2, True), ("e2m1", 16, 3, 0)],
)
def test_a_layout_that_does_not_exist(wrong: tuple[Code, int, int, bool]) -> None:
    with pytest.raises(ValueError, match="no layout"):
        Quantised(*wrong)
