"""Checkpoints' formats: what a quantizer wrote is decoded and packed without a changed bit."""

from typing import Any

import pytest
import torch
from quantised import FORMATS

from dakrun.formats import QuantisedRows, Split
from dakrun.formats.device_layout import Quantised
from dakrun.formats.stored import Malformed, Stored
from dakrun.geometry import ROWS_PER_BLOCK, row_block_count
from dakrun.models.quantization import parse_quantization

ROWS, COLS = 120, 256


def stored_of(settings: dict[str, Any], dtype: str) -> Stored:
    found = parse_quantization(settings, name="model", dtype=dtype).of("model.layers.3.mlp.up_proj")
    assert found is not None
    return found


def some_weight(dtype: torch.dtype, rows: int = ROWS, cols: int = COLS) -> torch.Tensor:
    weight = torch.randn(rows, cols, generator=torch.Generator().manual_seed(rows)) / 8
    return (weight + torch.linspace(-0.1, 0.1, rows)[:, None]).to(dtype)


def parts_of(
    stored: Stored, tensors: dict[str, torch.Tensor], rows: slice, shape: tuple[int, int]
) -> list[torch.Tensor]:
    """The rows of each part that `rows` need, as the loader reads them."""
    found = []
    for part in stored.parts(*shape):
        tensor = tensors.get(part.suffix, torch.empty(0, dtype=torch.int32))
        if part.suffix in tensors:
            assert [n for n in tensor.shape if n > 1] == [n for n in part.shape if n > 1]
            tensor = tensor.reshape(part.shape)
        needed = part.needed(rows)
        found.append(tensor if needed is None else tensor[needed])
    return found


def dense_of(
    stored: Stored, tensors: dict[str, torch.Tensor], dtype: str, shape: tuple[int, int]
) -> torch.Tensor:
    """The weight in `dtype`, decoded in pieces that begin anywhere, and read from both formats."""
    layout = stored.layout(dtype, shape[1])
    pieces: dict[bool, list[torch.Tensor]] = {False: [], True: []}
    for rows in (slice(0, 4), slice(4, 60), slice(60, shape[0])):
        parts = parts_of(stored, tensors, rows, shape)
        decoded = stored.decode(parts, rows, shape[1], layout)
        count = rows.stop - rows.start
        split = Split(row_block_count(count))
        for format in (layout, QuantisedRows(layout)):
            sizes = [array.nbytes(count) for array in format.arrays(shape[1])]
            data = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
            format.write(data, split, 0, *decoded)
            read = format.read(data, split, shape[1], getattr(torch, dtype))
            pieces[format.for_kernels].append(read[:count])
    found, packed = (torch.cat(pieces[for_kernels]) for for_kernels in (False, True))
    assert torch.equal(found, packed)
    return found


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("name", FORMATS)
def test_no_bit_changes(name: str, dtype: str) -> None:
    settings, write = FORMATS[name]
    tensors, exact = write(some_weight(torch.bfloat16))
    found = dense_of(stored_of(settings, "bfloat16"), tensors, dtype, (ROWS, COLS))
    assert torch.equal(found, exact.to(getattr(torch, dtype)))
    error = (exact - some_weight(torch.bfloat16).float()).abs().max()
    assert 0 < error < 0.2  # the writer has quantised this weight


@pytest.mark.parametrize("block", [(128, 128), (24, 32)])
def test_blocks_at_the_edges_are_smaller(block: tuple[int, int]) -> None:
    from quantised import fp8

    tensors, exact = fp8(some_weight(torch.float32, 131, 200), block=block)
    settings = {"quant_method": "fp8", "weight_block_size": list(block)}
    found = dense_of(stored_of(settings, "bfloat16"), tensors, "bfloat16", (131, 200))
    assert torch.equal(found, exact.bfloat16())


def test_a_scale_of_the_products_dtype_takes_two_bytes() -> None:
    stored = stored_of(FORMATS["awq"][0], "bfloat16")
    assert stored.layout("float16", 256) == Quantised("int4", 32, 2, zeros=True)
    assert stored.layout("bfloat16", 256) == Quantised("int4", 32, 4, zeros=True)
    assert stored.layout("float32", 256) == Quantised("int4", 32, 4, zeros=True)
    assert stored.layout("float16", 128).unit_bytes == ROWS_PER_BLOCK * (64 + 4 * 2 + 4 * 2)


def test_what_a_format_does_not_allow() -> None:
    from quantised import gptq

    weight = some_weight(torch.float16)
    stored = stored_of({"quant_method": "gptq", "bits": 4, "group_size": 32}, "float16")
    everything, shape = slice(0, ROWS), (ROWS, COLS)
    layout = stored.layout("float16", COLS)
    tensors, _ = gptq(weight, sym=False)
    with pytest.raises(Malformed, match="half the range"):
        parts = parts_of(stored, tensors, everything, shape)
        stored.decode(parts, everything, COLS, layout)
    tensors, _ = gptq(weight)
    tensors["g_idx"] = tensors["g_idx"].flip(0)
    with pytest.raises(Malformed, match="desc_act"):
        parts = parts_of(stored, tensors, everything, shape)
        stored.decode(parts, everything, COLS, layout)
    del tensors["g_idx"]
    parts = parts_of(stored, tensors, everything, shape)
    assert len(stored.decode(parts, everything, COLS, layout)) == 2
    with pytest.raises(ValueError, match="groups of 32 do not divide its 200 columns"):
        stored.layout("float16", 200)
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 8}
    with pytest.raises(ValueError, match="groups of 8 columns are not multiples of 16"):
        stored_of(settings, "float16").layout("float16", 64)
