"""Decode attention from the rows of tiles, for up to 64 query heads per KV head.

On the CPU the kernels run in the emulator; on a GPU as they are.
"""

import shutil
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from attended import Case
from cards import hold_to, hopper
from cases import cases
from emulated import EmulatedKernel

from dakrun.geometry import KV_BLOCK
from dakrun.kernels import store_kv
from dakrun.kernels.attention import BlockTables, KVShape, RowTiles, prompt_attn, row_tiles
from dakrun.kernels.attention.prompt import PromptTile

LENGTHS = (0, 63, -1, 64, 200, 5)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Launches on the CPU go to the emulator."""
    if request.param == "cpu":
        if shutil.which("g++") is None:
            pytest.skip("needs g++")
        emulated: Callable[..., EmulatedKernel] = request.getfixturevalue("emulated_kernels")

        def kernel(source: str, name: str, defines: dict[str, int]) -> EmulatedKernel:
            return emulated(source, name, {**defines, "WGMMA": 1})

        monkeypatch.setattr("dakrun.kernels.runtime.jit.kernel", kernel)
        monkeypatch.setattr("dakrun.kernels.runtime.operands.check_gpu", lambda _: None)
        hold_to(hopper(3), monkeypatch)
    return torch.device(request.param)


def attended(case: Case, tiles: RowTiles, slots: Sequence[torch.Tensor]) -> torch.Tensor:
    """The launches of a decode step's attention; row i is slot i."""
    n, heads, dim = case.q.shape
    starts = torch.tensor([slot.data_ptr() for slot in slots], device=case.device)
    tables = BlockTables.of_slots(starts, case.shape)
    lengths = torch.tensor(case.lengths, dtype=torch.int32, device=case.device)
    numbers = torch.arange(n, dtype=torch.int32, device=case.device)
    qkv = torch.cat((case.q, case.k, case.v), dim=1).contiguous()
    out = torch.full((n, heads * dim), torch.nan, dtype=case.dtype, device=case.device)
    tiles.assign(lengths, numbers, tables, pdl=True)
    store_kv(
        qkv,
        lengths,
        tiles.kv_addresses[:n],
        0,
        kv_heads=case.kv_heads,
        rotations=case.turns,
        pdl=True,
    )
    return prompt_attn(qkv[:, :heads], tables, tiles.work(n), out, scale=dim**-0.5, pdl=True)


CASES = [
    (64, 1, 64, torch.float16, False), (32, 1, 128, torch.bfloat16, True),
    (48, 2, 64, torch.bfloat16, True), (17, 1, 80, torch.float16, True),
    (64, 1, 128, torch.float16, True),
]  # fmt: skip


@pytest.mark.parametrize(
    ("group", "kv_heads", "dim", "dtype", "rope"), cases(CASES, lambda *case: case in CASES[:3])
)
def test_rows_attend_to_all_of_their_slots(
    group: int, kv_heads: int, dim: int, dtype: torch.dtype, rope: bool, device: torch.device
) -> None:
    """And append their keys and values; rows without a request stay as they are."""
    case = Case(LENGTHS, kv_heads, group, dim, dtype, rope, device)
    tiles, slots = RowTiles(8, 1, case.shape, group, device), case.slots()
    case.check(attended(case, tiles, slots), slots, 2e-3 if dtype == torch.float16 else 1.6e-2)


def test_ranges_of_long_slots_add_up(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("row_tiles", "prompt"):
        monkeypatch.setattr(f"dakrun.kernels.attention.{module}.SPLIT_BLOCKS", 1)
    case = Case((300, 64, 10, 190), 1, 64, 64, device=device)
    tiles, slots = RowTiles(4, 1, case.shape, 64, device, alike=True), case.slots()
    assert tiles.splits(4) == tiles.splits(1) == 5
    found = attended(case, tiles, slots)
    case.check(found, slots, 2e-3)
    made = [PromptTile(*tile) for tile in tiles.tiles.tolist()]
    assert [sum(t.blocks > 0 for t in made if t.row == row) for row in range(4)] == [5, 2, 1, 3]


def test_a_launch_does_other_work_with_other_rows(device: torch.device) -> None:
    """As in a graph: lengths and slots are read on the device."""
    shape = KVShape(1, 64, 4 * KV_BLOCK)
    tiles = RowTiles(3, 1, shape, 32, device)
    tables = BlockTables(
        torch.arange(12, device=device).view(3, 4) * shape.layer_bytes, shape.layer_bytes
    )
    for lengths, slots in (((70, -1, 0), (2, 0, 1)), ((-1, 130, 63), (1, 2, 0))):
        of = [torch.tensor(part, dtype=torch.int32, device=device) for part in (lengths, slots)]
        tiles.assign(*of, tables)
        made = [PromptTile(*tile) for tile in tiles.tiles.tolist()]
        for row, (length, slot, tile) in enumerate(zip(lengths, slots, made, strict=True)):
            key = tiles.kv_addresses[row].tolist()
            if length < 0:
                assert tile.blocks == tile.queries == 0 and key == [0, 0, 0]
                continue
            assert (tile.row, tile.queries, tile.position, tile.slot) == (row, 1, length, slot)
            assert (tile.first_block, tile.blocks, tile.length) == (0, length // 64 + 1, length + 1)
            block = int(tables.addresses[slot, length // KV_BLOCK])
            assert key[0] == block + length % KV_BLOCK * shape.layout.row_bytes


def test_operands_that_do_not_fit() -> None:
    shape = KVShape(1, 64, KV_BLOCK)
    tables = BlockTables(torch.zeros(2, 1, dtype=torch.int64), shape.layer_bytes)
    rows = torch.zeros(3, dtype=torch.int32)
    cpu: Any = torch.device("cpu")
    with pytest.raises(ValueError, match="up to 2 rows of one token, got 3 of 1"):
        RowTiles(2, 1, shape, 64, cpu).assign(rows, rows, tables)
    with pytest.raises(ValueError, match="rows of one token, got 3 of 2"):
        RowTiles(4, 2, shape, 64, cpu).assign(rows, rows, tables)
    with pytest.raises(ValueError, match="expected slots as"):
        RowTiles(4, 1, shape, 64, cpu).assign(rows, rows[:2], tables)
    assert row_tiles.SOURCE == "row_tiles.cu"
