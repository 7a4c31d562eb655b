"""Weight formats: a format of two arrays goes every way of 16-bit weights with no other code."""

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from cards import H200, PORTABLE

from dakrun.engine import Staging, staged_bytes
from dakrun.formats import (
    KERNEL_FORMATS,
    PACKED16,
    Array,
    KVLayout,
    Quantised,
    Rows,
    Split,
    WeightFormat,
)
from dakrun.geometry import ATOM_COLS, ROWS_PER_BLOCK, SPLITK_X_TILES
from dakrun.hardware import LOCAL, Card
from dakrun.kernels import gemm, reference, variants
from dakrun.kernels.attention import KVShape
from dakrun.launches import expert_splits
from dakrun.memory.matrix import TieredMatrix, allocated_bytes
from dakrun.memory.tiers import allocate_tiers
from dakrun.models.modules import Linear
from dakrun.models.operands import Scope
from dakrun.plan.ops import matrix_op
from dakrun.units import ceil_div

CPU = torch.device("cpu")
SHAPE = (45, 128)  # 6 row blocks, the last of 5 rows
PLACEMENT = (("hbm", 1), ("host", 3), ("peer:1", 2))


class Int8(WeightFormat):
    """8-bit elements, each to be multiplied by the float32 scale of its row."""

    name = "int8"
    for_kernels = True
    macros: ClassVar = {"INT8": 1}

    @property
    def packed(self) -> WeightFormat:
        return self

    def arrays(self, cols: int) -> tuple[Array, ...]:
        elements = Array("elements", ROWS_PER_BLOCK * cols, 16, padded=True)
        return elements, Array("scales", 4 * ROWS_PER_BLOCK, 4, padded=True)

    def takes(self, cols: int) -> bool:
        return cols % ATOM_COLS == 0

    def write(
        self, arrays: Sequence[torch.Tensor], split: Split, first: int, *stored: torch.Tensor
    ) -> None:
        elements, scales = stored
        top, cols = ROWS_PER_BLOCK * first, elements.shape[1]
        arrays[0].view(torch.int8).view(-1, cols)[top : top + len(elements)] = elements
        arrays[1].view(torch.float32)[top : top + len(scales)] = scales

    def read(
        self, arrays: Sequence[torch.Tensor], split: Split, cols: int, dtype: torch.dtype
    ) -> torch.Tensor:
        elements = arrays[0].view(torch.int8).view(-1, cols).float()
        return (elements * arrays[1].view(torch.float32)[:, None]).to(dtype)


INT8 = Int8()


@pytest.fixture
def int8() -> tuple[TieredMatrix, torch.Tensor]:
    """A matrix in three tiers, and its rows in float32."""
    elements = torch.randint(-127, 128, SHAPE, dtype=torch.int8)
    scales = torch.rand(SHAPE[0])
    sizes = allocated_bytes(INT8, SHAPE, [count for _, count in PLACEMENT])
    tiers = allocate_tiers(dict(zip((t for t, _ in PLACEMENT), sizes, strict=True)), CPU)
    matrix = TieredMatrix.empty(SHAPE, torch.float16, INT8, PLACEMENT, tiers)
    assert all(tier.free == 0 for tier in tiers.values())
    for piece in matrix.pieces(1000):
        piece.write(elements[piece.rows], scales[piece.rows])
    return matrix, elements * scales[:, None]


@pytest.mark.parametrize("ahead", range(1, 13))
def test_experts_behind_one_that_is_cut_begin_with_whole_lines(ahead: int) -> None:
    """As copies over a link should; a row block of 128 columns of this format has 1056 bytes."""
    stored, shape, height = KERNEL_FORMATS[-1], (3 * 12 * 8, 128), 12
    placement = (("hbm", 36 - 24 - ahead), ("host", 24 + ahead))
    counts = [count for _, count in placement]
    sizes = allocated_bytes(stored, shape, counts, height)
    splits = expert_splits(
        counts, expert_row_blocks=height, top_k=2, card=H200, atom_bytes=stored.atom_bytes
    )
    tiers = allocate_tiers(dict(zip(("hbm", "host"), sizes, strict=True)), CPU)
    matrix = TieredMatrix.empty(shape, torch.float16, stored, placement, tiers, splits)
    assert all(tier.free == 0 for tier in tiers.values())
    assert splits[1].group == 12 and stored.atom_bytes == 528
    whole = [matrix.stacked(number, 3) for number in (1, 2)]
    assert all(part and part.arrays[0].data_ptr() % 128 == 0 for part in whole)


def test_a_tier_without_rows_takes_no_bytes() -> None:
    """Nor are any left free ahead of none, where an expert is cut there."""
    stored, shape = KERNEL_FORMATS[-1], (2 * 12 * 8, 128)
    assert allocated_bytes(stored, shape, (10, 0, 14), 12)[1] == 0


def test_groups_of_experts_over_a_link_are_whole_lines() -> None:
    """In HBM alone those of 352 row blocks have 11: 90.75 lines a unit of 8 bits."""
    whole = 128 * 352

    def groups(counts: Sequence[int], atom_bytes: int) -> list[int]:
        how = {"expert_row_blocks": 352, "top_k": 8}
        return [of.group for of in expert_splits(counts, **how, card=H200, atom_bytes=atom_bytes)]

    assert groups([whole], 528) == [11]
    assert groups([whole - 900, 900], 528) == [8, 8]
    assert groups([whole - 900, 900], 1024) == [11, 11]


def test_products_and_rows_are_those_of_the_elements(
    int8: tuple[TieredMatrix, torch.Tensor],
) -> None:
    matrix, exact = int8
    assert torch.equal(matrix.dense(), exact.half())
    x, ids = torch.randn(3, SHAPE[1]).half(), torch.tensor([44, 0, 8, 7, 31])
    wanted = x.double() @ exact.half().double().T
    assert torch.allclose(reference.linear(x, matrix).double(), wanted, rtol=1e-2, atol=0.5)
    assert torch.equal(reference.gather_rows(matrix, ids), exact.half()[ids])


def test_all_arrays_are_staged(int8: tuple[TieredMatrix, torch.Tensor]) -> None:
    matrix, exact = int8
    remote = [array for part in matrix.parts[1:] for array in part.arrays]
    assert len(remote) == 4 and staged_bytes(matrix) >= sum(array.nbytes for array in remote)
    ring = torch.empty(2 * staged_bytes(matrix), dtype=torch.uint8)
    staging = Staging({"m": matrix, "n": matrix}, ["m", "n"], ring, together=1)
    staging.fill()
    staging.begin()
    for name in "mn":
        found = staging.fetch(name)
        assert [part.tier for part in found.parts] == [LOCAL] * 3
        begin, end = ring.data_ptr(), ring.data_ptr() + ring.numel()
        moved = [array.data_ptr() for part in found.parts[1:] for array in part.arrays]
        assert all(begin <= address < end for address in moved) and len({*moved}) == 4
        assert torch.equal(found.dense(), exact.half())
        staging.release(name)


def test_the_plan_counts_all_arrays() -> None:
    linear = Linear(Scope(""), "m", {"m": 48}, 128)
    op = matrix_op(linear, INT8, n=2, element_bytes=2)
    assert op.resident_bytes == op.read_bytes == 48 * (128 + 4)
    assert op.tier_bytes((1, 3, 2)) == [8 * 132, 24 * 132, 16 * 132]
    assert op.stored(packed=True) is INT8
    assert op.arithmetic_intensity == 2 * 2 * 48 * 128 / (48 * 132 + 2 * 2 * (128 + 48))


@pytest.mark.parametrize("card", [H200, PORTABLE])
def test_kernels_are_compiled_for_each_format(card: Card) -> None:
    """Elements of fewer bits need no norms, and no tiles of more than 16 rows of X."""
    rows = [8 * tiles for tiles in SPLITK_X_TILES]
    layout = Quantised("int4", 128)
    one, both = (
        variants(torch.float16, rows, card, head_dim=64, formats=formats)
        for formats in ([PACKED16], [PACKED16, layout])
    )
    more = [variant for variant in both if variant not in one]
    assert len(both) == len(one) + len(more) and all(variant in both for variant in one)
    assert all(macros.items() >= layout.macros.items() for _, macros in more)
    sources = [source for source, _ in more]
    many = "tiled_gemm.cu" if card.tiled else "unpack.cu"
    assert {*sources} == {"splitk_gemm.cu", many, "embed.cu"}
    sizes = [(m["TILES"], m["NORM"]) for source, m in more if source == "splitk_gemm.cu"]
    assert sorted(sizes) == [(1, 0), (2, 0)]


def test_kernels_take_parts_of_one_format_that_they_read(
    int8: tuple[TieredMatrix, torch.Tensor],
) -> None:
    matrix, _ = int8
    assert matrix.for_kernels and gemm.addresses(matrix, CPU)
    for stored, names in ((Rows(2), "'int8', 'rows'"), (PACKED16, "'16-bit', 'int8'")):
        tiers = allocate_tiers({"hbm": 1 << 14}, CPU)
        one = TieredMatrix.empty((48, 128), torch.float16, stored, [("hbm", 6)], tiers)
        assert one.for_kernels == (stored is PACKED16)
        mixed = TieredMatrix((93, 128), torch.float16, (*one.parts, *matrix.parts))
        with pytest.raises(ValueError, match=rf"in one packed format.* in \[{names}\]"):
            gemm.addresses(mixed, CPU)


def test_a_layout_of_keys_and_values() -> None:
    layout = KVLayout(kv_heads=3, head_dim=80, element_bytes=2)
    assert layout.position_bytes == 2 * 3 * 80 * 2
    assert layout.block_bytes == 64 * layout.position_bytes == KVShape(3, 80, 1).layer_bytes
    assert layout.has_kernels(3) and layout.has_kernels(192) and not layout.has_kernels(195)
    assert not replace(layout, element_bytes=4).has_kernels(3)
    assert not replace(layout, head_dim=72).has_kernels(3)


@pytest.mark.parametrize("stored", [PACKED16, Rows(2)])
@pytest.mark.parametrize("cols", [64, 200])
def test_bytes_of_rows(stored: WeightFormat, cols: int) -> None:
    dense = torch.randn(45, cols).bfloat16()
    arrays = stored.pack(dense, Split(6))
    assert [array.nbytes for array in arrays] == [stored.nbytes(45, cols)]
    assert torch.equal(stored.read(arrays, Split(6), cols, torch.bfloat16)[:45], dense)
    padded = 2 * 48 * 64 * ceil_div(cols, 64)
    assert stored.nbytes(45, cols) == (padded if stored is PACKED16 else 2 * 45 * cols)
