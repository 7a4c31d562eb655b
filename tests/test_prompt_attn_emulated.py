"""Prompt attention's own source on the CPU, in many interleavings of its threads and copies."""

import itertools
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from cards import H200, SMALL, hold_to, hopper
from cases import cases, few_examples
from emulated import EmulatedKernel
from hypothesis import given
from hypothesis import strategies as st
from prompt_cases import PromptCase

from dakrun.geometry import HEAD_DIMS
from dakrun.kernels.attention import BlockTables, PromptSegment, PromptWork, prompt

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
EXACT = [
    ([(0, 1)], 1, 1, 64, torch.float16),
    ([(0, 64), (63, 2), (200, 31)], 2, 4, 128, torch.float16),
    ([(64, 130), (1, 65), (0, 2)], 1, 1, 64, torch.float16),
    ([(200, 65), (63, 31)], 1, 8, 80, torch.float16),
    ([(64, 64), (1, 1)], 2, 3, 96, torch.bfloat16),
    ([(0, 130), (63, 1)], 1, 16, 128, torch.bfloat16),
    ([(70, 3), (63, 2)], 1, 32, 64, torch.float16),
    ([(70, 3), (0, 1)], 1, 64, 128, torch.bfloat16),
]
EVERY_HEAD = [
    ([(0, 70), (63, 2)], 2, 4, *head)
    for head in itertools.product(HEAD_DIMS, (torch.float16, torch.bfloat16))
]


Build = Callable[[torch.dtype, int], EmulatedKernel]


@pytest.fixture(params=[1, 0], ids=["wgmma", "mma"])
def wgmma(request: pytest.FixtureRequest) -> int:
    """Whether warpgroups multiply, as on a Hopper, or warps."""
    return request.param


@pytest.fixture(scope="module")
def build(emulated_kernels: Callable[..., EmulatedKernel]) -> Build:
    """The kernel's variant for a dtype and a head size."""

    def variant(dtype: torch.dtype, dim: int) -> EmulatedKernel:
        defines = {**prompt.defines(dtype, dim, H200), "WGMMA": 1}
        return emulated_kernels(prompt.SOURCE, "prompt_attn", defines)

    return variant


@pytest.fixture(autouse=True)
def on_the_cpu(
    request: pytest.FixtureRequest,
    emulated_kernels: Callable[..., EmulatedKernel],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Launches go to the emulator, for which there is no other hook."""
    wgmma = request.getfixturevalue("wgmma") if "wgmma" in request.fixturenames else 1

    def kernel(source: str, name: str, defines: dict[str, int]) -> EmulatedKernel:
        return emulated_kernels(source, name, {**defines, "WGMMA": wgmma})

    monkeypatch.setattr("dakrun.kernels.runtime.jit.kernel", kernel)
    monkeypatch.setattr("dakrun.kernels.runtime.operands.check_gpu", lambda _: None)
    on_sms(3, monkeypatch)


def on_sms(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    hold_to(hopper(count), monkeypatch)


def allowed(dtype: torch.dtype) -> float:
    return 2e-3 if dtype == torch.float16 else 1.6e-2


@pytest.mark.parametrize(
    ("segments", "kv_heads", "group", "dim", "dtype"),
    cases([*EXACT, *EVERY_HEAD], lambda *case: case in EXACT),
)
def test_it_is_exact(
    segments: Sequence[tuple[int, int]],
    kv_heads: int,
    group: int,
    dim: int,
    dtype: torch.dtype,
    wgmma: int,
) -> None:
    case = PromptCase(segments, kv_heads, group, dim, dtype)
    case.check(case.run(), allowed(dtype))


@pytest.mark.parametrize(
    ("blocks", "segments", "group"),
    [
        (1, [(700, 3), (0, 1), (130, 40)], 4),
        (2, [(640, 20), (63, 130)], 8),
        (1, [(200, 9)], 1),
        (1, [(300, 3), (190, 1)], 64),
        (2, [(400, 2)], 33),
    ],
)
def test_splits_add_up(
    blocks: int,
    segments: Sequence[tuple[int, int]],
    group: int,
    wgmma: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Up to 11 splits of a tile, some past the last position that its first queries see."""
    monkeypatch.setattr("dakrun.kernels.attention.prompt.SPLIT_BLOCKS", blocks)
    case = PromptCase(segments, 2, group, 64)
    work = case.work()
    assert len(work.arrivals) > 0
    case.check(case.run(work), 2e-3)


def test_a_range_that_no_query_of_a_part_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first 64 of these queries see nothing of the second block, which is a split."""
    monkeypatch.setattr("dakrun.kernels.attention.prompt.SPLIT_BLOCKS", 1)
    case = PromptCase([(0, 130)], 1, 1, 64)
    tiles = case.work().tiles
    assert max(tiles[:, 8]) > 1
    case.check(case.run(), 2e-3)


def test_no_bit_depends_on_other_requests_or_sms(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dakrun.kernels.attention.prompt.SPLIT_BLOCKS", 2)
    case = PromptCase([(500, 9), (0, 150), (320, 1), (64, 40), (63, 2)], 2, 4, 64)
    wanted = case.run()
    case.check(wanted, 2e-3)
    for seed, (sms, order) in enumerate([(1, ()), (40, (4, 2, 0, 3, 1)), (7, (1,)), (2, (3, 0))]):
        on_sms(sms, monkeypatch)
        build(case.dtype, case.dim).seed = 1000 * seed
        found = case.run(case.work(order))
        for number in order or range(5):
            row, length = case.starts[number], case.segments[number][1]
            part = slice(row, row + length)
            assert torch.equal(found[part], wanted[part]), (sms, number)


@pytest.mark.parametrize("wgmma", [1, 0], ids=["wgmma", "mma"], indirect=True)
@pytest.mark.parametrize(
    ("stages", "dim"),
    cases(
        itertools.product(range(2, 12), (64, 96)),
        lambda stages, dim: (stages, dim) in ((2, 64), (3, 64), (5, 64), (6, 96)),
    ),
)
def test_any_ring(
    stages: int,
    dim: int,
    wgmma: int,
    emulated_kernels: Callable[..., EmulatedKernel],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rings of a card with less shared memory: no deadlock in any order, and no other bit."""
    case = PromptCase([(130, 40), (0, 66), (63, 2), (250, 1)], 1, 4, dim)
    wanted = case.run()
    card = replace(SMALL, sms=2, shared_bytes_per_sm=stages * prompt.stage_bytes(dim) + 2048)
    hold_to(card, monkeypatch)
    assert prompt.ring_stages(dim, card) == stages
    defines = {**prompt.defines(case.dtype, dim, card), "WGMMA": wgmma}
    kernel = emulated_kernels(prompt.SOURCE, "prompt_attn", defines)
    for seed in range(6):
        kernel.seed = 77 * seed
        assert torch.equal(case.run().view(torch.int16), wanted.view(torch.int16)), seed


def test_launches_share_their_work() -> None:
    """As those of all layers do."""
    case = PromptCase([(100, 40), (0, 3)], 2, 4, 64)
    work = case.work()
    first = case.run(work)
    assert torch.equal(case.run(work).view(torch.int16), first.view(torch.int16))


def test_tiles_and_their_number_are_read_from_the_device() -> None:
    """So that the same launch, in a graph, can do other work."""
    case = PromptCase([(100, 40), (0, 3), (70, 70)], 2, 4, 64)
    work, other = case.work(), case.work([0, 1])
    wanted = case.run(other)
    work.tiles[: len(other.tiles)] = other.tiles
    work.count.copy_(other.count)
    assert torch.equal(case.run(work).view(torch.int16), wanted.view(torch.int16))


def check_segments(build: Build, case: PromptCase, split_blocks: int, seed: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dakrun.kernels.attention.prompt.SPLIT_BLOCKS", split_blocks)
        build(case.dtype, case.dim).seed = seed
        case.check(case.run(), 2e-3)


@few_examples(5)
@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(1, 140)), min_size=1, max_size=5),
    st.integers(1, 3), st.integers(1, 16), st.integers(1, 4), st.integers(0, 2**31),
)  # fmt: skip
def test_any_segments(
    build: Build,
    segments: Sequence[tuple[int, int]],
    kv_heads: int,
    group: int,
    split_blocks: int,
    seed: int,
) -> None:
    check_segments(build, PromptCase(segments, kv_heads, group, 64), split_blocks, seed)


@few_examples(2)
@given(
    st.lists(st.tuples(st.integers(0, 200), st.integers(1, 4)), min_size=1, max_size=2),
    st.sampled_from([17, 23, 32, 48, 64]), st.integers(1, 4), st.integers(0, 2**31),
)  # fmt: skip
def test_any_segments_of_large_groups(
    build: Build,
    segments: Sequence[tuple[int, int]],
    group: int,
    split_blocks: int,
    seed: int,
) -> None:
    check_segments(build, PromptCase(segments, 1, group, 64), split_blocks, seed)


@given(
    st.lists(st.tuples(st.integers(0, 9000), st.integers(1, 3000)), min_size=1, max_size=6),
    st.integers(1, 40), st.integers(1, 64),
)  # fmt: skip
def test_tiles_cover_each_query_once(
    segments: Sequence[tuple[int, int]], kv_heads: int, group: int
) -> None:
    """With all positions that it sees, in splits that follow each other; long ones come first."""
    starts = [sum(length for _, length in segments[:i]) for i in range(len(segments))]
    queries = [
        PromptSegment(row, slot, *segment)
        for slot, (row, segment) in enumerate(zip(starts, segments, strict=True))
    ]
    work = PromptWork.of(
        queries, kv_heads=kv_heads, group=group, head_dim=64, device=torch.device("cpu")
    )
    tiles = [prompt.PromptTile(*tile) for tile in work.tiles.tolist()]
    assert [tile.blocks for tile in tiles] == sorted((t.blocks for t in tiles), reverse=True)
    assert work.count.tolist() == [len(tiles)]
    ends = {}
    rows, counters = [], []
    for tile in sorted(tiles, key=lambda tile: (tile.row, tile.split)):
        s = queries[tile.slot]
        assert tile.position - s.start == tile.row - s.row and tile.length == s.start + s.length
        assert tile.first_block == ends.get(tile.row, 0) and tile.blocks > 0
        ends[tile.row] = tile.first_block + tile.blocks
        if tile.split + 1 == tile.splits:
            assert ends[tile.row] == (tile.position + tile.queries - 1) // 64 + 1
            rows += range(tile.row, tile.row + tile.queries)
            if tile.splits > 1:
                counters.append((tile.arrivals, tile.partial, tile.splits * tile.queries * group))
                assert tile.splits * kv_heads <= prompt.SPLIT_ITEMS
                assert tile.blocks >= prompt.SPLIT_BLOCKS
    assert rows == list(range(sum(length for _, length in segments)))
    partials = 0
    for number, (arrivals, partial, size) in enumerate(sorted(counters)):
        assert (arrivals, partial) == (number * 2 * kv_heads, partials)
        partials += size
    assert len(work.arrivals) == len(counters) * 2 * kv_heads
    assert work.partials.numel() == partials * kv_heads * 68


def test_operands_that_do_not_fit() -> None:
    case = PromptCase([(5, 6)], 2, 2, 64)
    work = case.work()
    q, out = case.qkv[:, :4], torch.zeros(len(case.qkv), 256, dtype=torch.float16)

    def launch(q: torch.Tensor, tables: BlockTables, out: torch.Tensor) -> None:
        prompt.prompt_attn(q, tables, work, out, scale=1.0)

    with pytest.raises(ValueError, match=r"in 16 bits, got .* torch.float32"):
        launch(q.float(), case.tables, out)
    with pytest.raises(ValueError, match=r"expected q as \[T, 4, D\]"):
        launch(q[:, :3], case.tables, out)
    with pytest.raises(ValueError, match="7 contiguous rows of q"):
        launch(q[:3], case.tables, out)
    with pytest.raises(ValueError, match="expected out as"):
        launch(q, case.tables, out[1:])
    with pytest.raises(ValueError, match="expected tables as"):
        launch(q, BlockTables(case.tables.addresses[:, :0], 0), out)
    for bad in ([], [PromptSegment(0, 0, 5, 0)]):
        with pytest.raises(ValueError, match="a query or more"):
            PromptWork.of(bad, kv_heads=2, group=2, head_dim=64, device=q.device)
    with pytest.raises(ValueError, match="1 to 64 query heads"):
        PromptWork.of(
            [PromptSegment(0, 0, 0, 1)], kv_heads=2, group=65, head_dim=64, device=q.device
        )
