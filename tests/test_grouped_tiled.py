"""Products of rows sorted by expert: as exact as plain torch, and the same bits wherever W lies."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from cards import H200, SMALL, here, hold_to, hopper
from emulated import EmulatedKernel, atoms_map, boxes_map
from packed_matrices import FEW_LAYOUTS, elsewhere, normal, packed, quantised
from torch.nn import functional as F

from dakrun.config import Activation, Routing
from dakrun.formats import KERNEL_FORMATS, PACKED16
from dakrun.formats.device_layout import Quantised
from dakrun.geometry import ROWS_PER_BLOCK, TILED_TALL_SIZES
from dakrun.hardware import Card
from dakrun.kernels.experts import grouped_tiled, reference
from dakrun.kernels.experts.dispatch import ExpertProducts
from dakrun.kernels.experts.grouped_tiled import grouped_tiled_gemm, tile_counters
from dakrun.kernels.experts.permute import combine, permute
from dakrun.kernels.experts.route import Routed, route
from dakrun.kernels.gemm.tiled import defines
from dakrun.kernels.runtime import DTYPES, jit
from dakrun.launches import (
    Launch,
    Shape,
    TierAccess,
    TierTiles,
    expert_splits,
    grouped_launch,
    grouped_shape,
)
from dakrun.memory.matrix import TieredMatrix

NARROW = Shape(8, 2)  # of cards without wgmma, but others have the variant, too
TALL = replace(NARROW, tiles=max(TILED_TALL_SIZES))
SMALL_ROOM = replace(TALL, room=min(TILED_TALL_SIZES))  # for 64 rows
RAGGED = (0, 5, 131, 0, 64, 1, 0)  # rows of each expert
CASES = {"ragged": RAGGED, "one": (0, 0, 0, 201, 0, 0, 0), "few": (0, 0, 0, 0, 0, 0, 3)}


@pytest.fixture(autouse=True)
def tensor_maps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    callspec = getattr(request.node, "callspec", None)
    if callspec and callspec.params.get("kernel_device") == "cpu":
        monkeypatch.setattr(grouped_tiled, "atoms_map", atoms_map)
        monkeypatch.setattr(grouped_tiled, "boxes_map", boxes_map)


def launch_of(shape: Shape, *tiers: TierTiles, stages: int = 3) -> Launch:
    return Launch(shape, stages, tiers)


def needs_wgmma(shape: Shape, device: str) -> None:
    """Skips the test on a GPU that has no variant for `shape`."""
    if shape.tiles == TALL.tiles and device == "cuda" and not here().has_wgmma:
        pytest.skip("tall tiles need wgmma")


def some_card(device: str) -> Card:
    """A card of 3 SMs: torch's GPU, or on the CPU a Hopper."""
    return hopper(3) if device == "cpu" else here(3)


def shape_of(device: str, atom_bytes: int) -> Shape:
    """That of torch's GPU, or on the CPU of an H200; skips the test where no ring has room."""
    found = grouped_shape(H200 if device == "cpu" else here(), atom_bytes)
    return found or pytest.skip(f"no tiles for {atom_bytes} bytes on this card")


def weight_of(
    experts: int,
    m: int,
    k: int,
    device: str,
    row_blocks: Sequence[int] = (),
    *,
    dtype: torch.dtype = torch.float16,
) -> TieredMatrix:
    """Experts' matrices of random elements, the same wherever their row blocks lie."""
    row_blocks = row_blocks or (experts * m // 8,)
    dense = normal(experts * m, k, dtype=dtype, device=device) / k**0.5
    splits = expert_splits(row_blocks, expert_row_blocks=m // 8, top_k=2, card=hopper(3))
    return packed(dense, splits)


def run(
    counts: Sequence[int],
    weight: TieredMatrix,
    launch: Launch,
    device: str,
    *,
    activation: Activation = "none",
    x: torch.Tensor | None = None,
) -> torch.Tensor:
    """Outputs of `counts` rows of each expert, of a random X with some rows of NaN behind them."""
    n, (rows, k) = sum(counts), weight.shape
    m = rows // len(counts)
    behind = torch.full((9, k), math.nan, dtype=weight.dtype, device=device)
    x = normal(n, k, dtype=weight.dtype, device=device) if x is None else x
    width = m // 2 if activation == "silu_mul" else m
    out = torch.full((n + 9, width), math.nan, dtype=weight.dtype, device=device)
    ends = torch.tensor(counts, device=device).cumsum(0).int()
    counters = tile_counters(device)
    for _ in range(2):  # counters are left as they were
        grouped_tiled_gemm(
            torch.cat([x, behind]), ends, weight, launch, out, counters=counters,
            activation=activation,
        )  # fmt: skip
        assert not counters.any()
    assert out[n:].isnan().all() and not out[:n].isnan().any()
    return out[:n]


def exact(
    counts: Sequence[int], weight: TieredMatrix, device: str, activation: Activation = "none"
) -> torch.Tensor:
    x = normal(sum(counts), weight.shape[1], dtype=weight.dtype, device=device).double()
    matrices = weight.dense(device).double().unflatten(0, (len(counts), -1))
    found = [rows @ of.T for rows, of in zip(x.split(tuple(counts)), matrices, strict=True)]
    y = torch.cat(found)
    return F.silu(y[:, ::2]) * y[:, 1::2] if activation == "silu_mul" else y


def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((got.double() - wanted).norm() / wanted.norm()).item()


@pytest.mark.parametrize("activation", ["none", "silu_mul"])
@pytest.mark.parametrize("counts", CASES.values(), ids=CASES)
@pytest.mark.parametrize(
    "shape",
    [NARROW, TALL, SMALL_ROOM, Shape(8, 1)],
    ids=["narrow", "tall", "small-room", "along-x"],
)
def test_each_row_is_multiplied_by_its_expert(
    shape: Shape, counts: Sequence[int], activation: Activation, kernel_device: str
) -> None:
    """Experts of more rows of W than a tile has, the last tile with fewer; of more of X, too."""
    needs_wgmma(shape, kernel_device)
    weight = weight_of(len(counts), 8 * 27, 136, kernel_device)
    launch = launch_of(shape, TierTiles(2, min(14, shape.row_blocks)))
    found = run(counts, weight, launch, kernel_device, activation=activation)
    assert error(found, exact(counts, weight, kernel_device, activation)) < 5e-4


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tall_tile_multiplies_as_many_rows_as_it_has(
    dtype: torch.dtype, kernel_device: str
) -> None:
    """Each number of rows that has code of its own; the last expert has two tiles."""
    needs_wgmma(TALL, kernel_device)
    counts = (3, 70, 100, 0, 200, 217, 256, 260, 280, 300, 321)
    weight = weight_of(len(counts), 72, 72, kernel_device, dtype=dtype)
    found = run(counts, weight, launch_of(TALL, TierTiles(2, 9)), kernel_device)
    limit = 5e-4 if dtype == torch.float16 else 4e-3
    assert error(found, exact(counts, weight, kernel_device)) < limit


@pytest.mark.parametrize("activation", ["none", "silu_mul"])
def test_no_bit_depends_on_the_room_for_rows(activation: Activation, kernel_device: str) -> None:
    """Of tall tiles, with as many stages as fit; experts of more rows have several tiles."""
    needs_wgmma(TALL, kernel_device)
    counts = (64, 0, 1, 97, 220, 321)
    weight = weight_of(len(counts), 8 * 13, 328, kernel_device)
    found, card = [], some_card(kernel_device)
    for room in TILED_TALL_SIZES[::2]:
        shape = replace(TALL, room=room)
        launch = launch_of(shape, TierTiles(2, 7), stages=shape.stages(card, 7))
        found.append(
            run(counts, weight, launch.with_max_blocks(card), kernel_device, activation=activation)
        )
    assert error(found[0], exact(counts, weight, kernel_device, activation)) < 5e-4
    assert all(outputs.equal(found[0]) for outputs in found)


def test_gated_outputs_of_a_tall_tile_that_begins_with_an_odd_row_block(kernel_device: str) -> None:
    """They begin at a multiple of 8 bytes, and end within a chunk."""
    needs_wgmma(TALL, kernel_device)
    counts = (33, 0, 70)
    weight = weight_of(len(counts), 8 * 27, 72, kernel_device)
    launch = launch_of(TALL, TierTiles(2, 9))
    found = run(counts, weight, launch, kernel_device, activation="silu_mul")
    assert error(found, exact(counts, weight, kernel_device, "silu_mul")) < 5e-4


@pytest.mark.parametrize("activation", ["none", "silu_mul"])
def test_no_bit_depends_on_the_blocks_of_outputs(
    activation: Activation, kernel_device: str
) -> None:
    """Few are stored one at a time, more in batches; tiles with and without a whole last block."""
    needs_wgmma(TALL, kernel_device)
    counts = (31, 96, 129, 224, 265, 320)
    weight = weight_of(len(counts), 72, 72, kernel_device)
    wanted = exact(counts, weight, kernel_device, activation)
    found = [
        run(
            counts,
            weight,
            replace(launch_of(TALL, TierTiles(2, 9)), blocks=blocks),
            kernel_device,
            activation=activation,
        )
        for blocks in (3, 5, 7)
    ]
    assert error(found[0], wanted) < 5e-4
    assert all(outputs.equal(found[0]) for outputs in found)


@pytest.mark.parametrize("activation", ["none", "silu_mul"])
def test_a_card_without_wgmma(
    activation: Activation, kernel_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within 100 KiB an SM, and without clusters."""
    hold_to(SMALL, monkeypatch)
    weight = weight_of(len(RAGGED), 8 * 27, 136, kernel_device)
    launch = grouped_launch(201, len(RAGGED), (27 * 7,), [TierAccess()], card=SMALL)
    assert launch.shape == NARROW == grouped_shape(SMALL)
    launch = replace(launch, tiers=(replace(launch.tiers[0], clusters=3),))
    found = run(RAGGED, weight, launch, kernel_device, activation=activation)
    assert error(found, exact(RAGGED, weight, kernel_device, activation)) < 5e-4


PLACES: list[tuple[tuple[int, ...], tuple[TierTiles, ...]]] = [
    ((189,), (TierTiles(1, 16),)),
    ((100, 89), (TierTiles(2, 14), TierTiles(1, 14, window=1))),
    ((0, 189), (TierTiles(0, 7), TierTiles(3, 7, window=2))),
    ((60, 3, 126), (TierTiles(1, 9), TierTiles(1, 9, window=2), TierTiles(2, 9))),
]


@pytest.mark.parametrize("shape", [NARROW, TALL, SMALL_ROOM], ids=["narrow", "tall", "small-room"])
def test_no_bit_depends_on_where_experts_lie(
    shape: Shape, kernel_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts in one tier, or cut between two; CTAs run beside each other, in any order."""
    needs_wgmma(shape, kernel_device)
    kernel = jit.kernel(grouped_tiled.SOURCE, "tiled_gemm", defines(torch.float16, shape))
    wanted = None
    for seed, (row_blocks, tiers) in enumerate(PLACES):
        if isinstance(kernel, EmulatedKernel):
            monkeypatch.setattr(kernel, "seed", 100 * seed)
            monkeypatch.setattr(kernel, "together", 1 + 3 * (seed % 2))
        weight = weight_of(7, 8 * 27, 328, kernel_device, row_blocks)
        found = run(RAGGED, weight, launch_of(shape, *tiers), kernel_device)
        wanted = found if wanted is None else wanted
        assert torch.equal(found, wanted), row_blocks
    assert wanted is not None
    assert error(wanted, exact(RAGGED, weight_of(7, 8 * 27, 328, kernel_device), kernel_device)) < (
        5e-4
    )


def test_no_bit_depends_on_how_many_rows_an_expert_has(kernel_device: str) -> None:
    """Nor on the tiles that its rows are in."""
    needs_wgmma(TALL, kernel_device)
    weight = weight_of(3, 80, 200, kernel_device)
    x = normal(150, 200, dtype=torch.float16, device=kernel_device)
    tall, narrow = (launch_of(shape, TierTiles(2, 10)) for shape in (TALL, NARROW))
    many = run((0, 150, 0), weight, tall, kernel_device, x=x)
    for row in (0, 63, 64, 149):
        alone = run((0, 1, 0), weight, narrow, kernel_device, x=x[row : row + 1])
        assert torch.equal(alone[0], many[row])


@pytest.mark.parametrize("layout", [None, FEW_LAYOUTS[0]], ids=str)
def test_experts_lie_elsewhere_than_at_their_indices(
    layout: Quantised | None, kernel_device: str
) -> None:
    """Those that are not cut, of which two groups are one tile; garbage is at their addresses."""
    counts, splits = (3, 0, 70, 1), expert_splits(
        (40, 64), expert_row_blocks=26, top_k=2, card=hopper(3)
    )  # fmt: skip
    stored = layout or PACKED16
    shape = shape_of(kernel_device, stored.atom_bytes)
    if layout:
        weight = quantised(layout, 8 * 104, 392, splits, dtype=torch.float16, device=kernel_device)
    else:
        weight = packed(
            normal(8 * 104, 392, dtype=torch.float16, device=kernel_device) / 20, splits
        )
    launch = launch_of(shape, TierTiles(2, 16, window=3), TierTiles(1, 16))
    wanted = run(counts, weight, launch, kernel_device)
    moved, copies = elsewhere(weight, 4, kernel_device)
    assert len(copies) == 3, "one is cut"
    assert run(counts, moved, launch, kernel_device).equal(wanted)


@pytest.mark.parametrize("layout", FEW_LAYOUTS, ids=str)
def test_experts_of_fewer_bits(layout: Quantised, kernel_device: str) -> None:
    counts, rows = (3, 0, 70, 1), 8 * 13
    shape, outs = shape_of(kernel_device, layout.atom_bytes), []
    for row_blocks, tiers in (
        ((52,), (TierTiles(2, 7, window=3),)),
        ((17, 35), (TierTiles(1, 12, window=3), TierTiles(1, 12))),
    ):
        splits = expert_splits(row_blocks, expert_row_blocks=13, top_k=2, card=hopper(3))
        weight = quantised(layout, 4 * rows, 392, splits, dtype=torch.float16, device=kernel_device)
        outs.append(run(counts, weight, launch_of(shape, *tiers), kernel_device))
        assert error(outs[-1], exact(counts, weight, kernel_device)) < 5e-4
    assert torch.equal(*outs)


def mixture(
    n: int, experts: int, hidden: int, inner: int, top_k: int, device: str, **options: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states behind a feed-forward of experts, by kernels and by plain torch in float64."""
    dtype = options.pop("dtype", torch.bfloat16)
    card = hopper(3) if device == "cpu" else here()
    rule = Routing(experts=experts, top_k=top_k)
    x, residual = (normal(n, hidden + i, dtype=dtype, device=device)[:, :hidden] for i in (0, 8))
    x, residual = x.contiguous(), residual.contiguous()
    router = normal(experts, hidden, dtype=torch.float32, device=device)
    up = normal(2 * experts * inner, hidden, dtype=dtype, device=device) / hidden**0.5
    down = normal(experts * hidden, inner, dtype=dtype, device=device) / inner**0.5
    pairs = n * top_k
    out = route(x, router, rule, Routed.allocate(n, rule, x.shape[1], device), **options)
    counters = tile_counters(device)
    rows = torch.full((pairs, hidden), math.nan, dtype=dtype, device=device)
    permute(x, out.pairs, rows)
    inner_rows = torch.full((pairs, inner), math.nan, dtype=dtype, device=device)
    access = [TierAccess()]
    for given, matrix, to, activation in (
        (rows, up, inner_rows, "silu_mul"),
        (inner_rows, down, rows, "none"),
    ):
        row_blocks = (len(matrix) // 8,)
        height = len(matrix) // experts // 8
        split = expert_splits(row_blocks, expert_row_blocks=height, top_k=top_k, card=card)
        launch = grouped_launch(pairs, experts, row_blocks, access, card=card)
        weight = packed(matrix, split)
        grouped_tiled_gemm(
            given, out.ends, weight, launch, to, counters=counters, activation=activation
        )
    found = combine(rows, out.pairs, out.weights, residual, residual.clone())
    logits = x.double() @ router.double().T
    chosen, weights = reference.choose(logits, None, rule)
    gate_ups = up.double().view(experts, 2 * inner, hidden)
    downs = down.double().view(experts, hidden, inner)
    wanted = residual.double()
    for token in range(n):
        for expert, weight_of_expert in zip(chosen[token], weights[token], strict=True):
            y = gate_ups[expert] @ x[token].double()
            wanted[token] += weight_of_expert * (downs[expert] @ (F.silu(y[::2]) * y[1::2]))
    return found, wanted, residual


@pytest.mark.parametrize(
    ("n", "experts", "hidden", "inner", "top_k"),
    [
        (70, 5, 136, 72, 2),
        (9, 40, 64, 16, 3),
        pytest.param(64, 128, 2048, 768, 8, marks=pytest.mark.gpu),
        pytest.param(1000, 16, 512, 256, 4, marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_feed_forward_of_experts(
    n: int,
    experts: int,
    hidden: int,
    inner: int,
    top_k: int,
    dtype: torch.dtype,
    kernel_device: str,
) -> None:
    found, wanted, _ = mixture(n, experts, hidden, inner, top_k, kernel_device, dtype=dtype)
    assert error(found, wanted) < (1e-3 if dtype == torch.float16 else 8e-3)


def test_rows_without_a_request_stay_as_they_are(kernel_device: str) -> None:
    lengths = torch.arange(40, dtype=torch.int32, device=kernel_device)
    lengths[[0, 7, 39]] = -1
    found, wanted, residual = mixture(40, 9, 72, 40, 2, kernel_device, lengths=lengths)
    others = (lengths >= 0).cpu()
    assert error(found[others], wanted[others]) < 8e-3
    assert torch.equal(found[~others], residual[~others])


def test_sums_have_the_order_of_experts(kernel_device: str) -> None:
    """In float32: large terms, exact ones, cancel before the small one is added."""
    products = torch.tensor(
        [[2.0**15], [1.0], [2.0**15]], dtype=torch.float16, device=kernel_device
    )
    products = products.repeat(1, 8)
    weights = torch.tensor([2.0**20, 1.0, -(2.0**20)], device=kernel_device)
    residual = torch.zeros(2, 8, dtype=torch.float16, device=kernel_device)
    for pairs, wanted in (([0, 2, 1], 1.0), ([0, 1, 2], 0.0)):
        given = torch.tensor([pairs, [-1] * 3], dtype=torch.int32, device=kernel_device)
        room = torch.cat([products, products])
        more = torch.cat([weights, weights])
        found = combine(room, given, more, residual, torch.full_like(residual, math.nan))
        assert found.tolist() == [[wanted] * 8, [0.0] * 8]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(5, 64)}, r"x as \[5, 64\] of torch.float16"),
        ({"ends": torch.zeros(3, dtype=torch.int32)}, "3 matrices of whole row blocks, got 64"),
        ({"ends": torch.zeros(4)}, r"ends as \[4\] of torch.int32"),
        ({"out": torch.zeros(5, 8).half()}, r"out as \[5, 16\]"),
        ({"counters": torch.zeros(1, dtype=torch.int32)}, r"counters as \[9\]"),
        ({}, "current GPU"),
    ],
)
def test_operands_that_do_not_fit(change: dict[str, Any], message: str) -> None:
    given = {
        "x": torch.zeros(5, 64).half(), "ends": torch.zeros(4, dtype=torch.int32),
        "weight": weight_of(4, 16, 64, "cpu"), "launch": launch_of(NARROW, TierTiles(2, 2)),
        "out": torch.zeros(5, 16).half(), "counters": tile_counters("cpu"),
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        grouped_tiled_gemm(**(given | change))


def test_rows_to_permute_that_do_not_fit() -> None:
    x, pairs = torch.zeros(2, 16).half(), torch.zeros(2, 3, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"out as \[6, 16\]"):
        permute(x, pairs, torch.zeros(5, 16).half())
    with pytest.raises(ValueError, match="16-bit elements in multiples of 8"):
        permute(x[:, :12].contiguous(), pairs, torch.zeros(6, 12).half())
    with pytest.raises(ValueError, match=r"weights as \[6\] of torch.float32"):
        combine(torch.zeros(6, 16).half(), pairs, torch.zeros(6).half(), x, x)


@pytest.mark.parametrize("card", [H200, SMALL, hopper(8)], ids=["hopper", "small", "few-sms"])
def test_launches(card: Card) -> None:
    """Each tier has CTAs, no more than there are SMs, whose copies fit in its window."""
    limited = TierAccess(sms=6, window_bytes=200 * 1024)
    counts = (24576, 0), (20000, 4576), (0, 24576), (1, 24575)
    accesses = [TierAccess(), limited], [TierAccess(), TierAccess()]
    for row_blocks, tiers, pairs in itertools.product(counts, accesses, (64, 4096, 32768)):
        launch = grouped_launch(pairs, 128, row_blocks, tiers, card=card)
        clusters = [tier.clusters for tier in launch.tiers]
        assert [count > 0 for count in clusters] == [count > 0 for count in row_blocks]
        assert sum(clusters) <= card.sms and launch.shared_bytes <= card.lone_ring_bytes
        if row_blocks[0]:
            assert sum(clusters) == card.sms
        if row_blocks[1] and tiers[1] == limited:
            tier = launch.tiers[1]
            size = 1024 * tier.tile_row_blocks
            assert tier.clusters <= 6 and tier.clusters * tier.window * size <= 200 * 1024


@pytest.mark.parametrize(
    "layout", [None, *KERNEL_FORMATS[1:], Quantised("int4", 128, 2, True)], ids=str
)
def test_whole_stages_fill_the_window_of_a_remote_tier(layout: Quantised | None) -> None:
    """With a stage for each of 8 SMs, FP8 had half of its window in flight."""
    window, atom = 256 * 1024, layout.atom_bytes if layout else 1024
    tiers = [TierAccess(124), TierAccess(8, window)]
    launch = grouped_launch(2048, 128, (20000, 4576), tiers, card=H200, atom_bytes=atom)
    tier = launch.tiers[1]
    stage = launch.shape.copy_bytes * tier.tile_row_blocks
    assert 0.85 * window <= tier.clusters * tier.window * stage <= 1.15 * window
    assert tier.clusters == (16 if layout else 8)


def test_a_remote_tier_leaves_the_sms_to_the_local_one_that_has_most_row_blocks() -> None:
    """A fast link's window is larger than the rings of its SMs."""
    fast, fp8 = TierAccess(32, 4 << 20), KERNEL_FORMATS[-1]
    for row_blocks, clusters in (((22400, 2176), 32), ((18000, 6576), 64), ((12000, 12576), 64)):
        launch = grouped_launch(
            2048, 128, row_blocks, [TierAccess(), fast], card=H200, atom_bytes=fp8.atom_bytes
        )
        assert launch.tiers[1].clusters == clusters


def test_a_tile_holds_the_rows_of_nearly_all_experts() -> None:
    """The smaller their room, the more stages fit."""

    def launch(rows: int, card: Card = H200) -> Launch:
        return grouped_launch(8 * rows, 128, (24576,), [TierAccess()], card=card)

    launches = [launch(rows) for rows in (1, 512, 1024, 1536, 2048, 3072, 4096)]
    assert [one.shape.rows for one in launches] == [64, 64, 96, 128, 192, 256, 320]
    assert [one.stages for one in launches] == [8, 8, 7, 6, 5, 4, 3]
    assert {replace(one.shape, room=0) for one in launches} == {TALL}
    assert launch(8 * 4096).shape == grouped_shape(H200) and TALL.rows == 320
    assert launch(1, SMALL).shape == launch(4096, SMALL).shape == NARROW and NARROW.rows == 64


def test_rooms_on_a_card_with_less_shared_memory() -> None:
    """The largest one that fits, if none that fits has all rows."""
    card = replace(H200, shared_bytes_per_sm=100 * 1024)
    shapes = [
        grouped_launch(pairs, 128, (24576,), [TierAccess()], card=card).shape
        for pairs in (8, 512 * 8, 1024 * 8, 4096 * 8)
    ]
    assert [shape.rows for shape in shapes] == [64, 64, 96, 128]
    assert grouped_shape(card) == shapes[-1]


def test_a_room_holds_whole_boxes() -> None:
    """Of the rows of an expert's last tile, too; all of them are multiplied."""
    assert all(ROWS_PER_BLOCK * tiles % grouped_tiled.REST_ROWS == 0 for tiles in TILED_TALL_SIZES)
    assert list(TILED_TALL_SIZES) == sorted(TILED_TALL_SIZES)


def test_a_card_without_room() -> None:
    layout = Quantised("int8", 32, 4, True)
    card = replace(SMALL, shared_bytes_per_sm=80 * 1024)
    assert grouped_shape(SMALL, layout.atom_bytes) and not grouped_shape(card, layout.atom_bytes)
    with pytest.raises(ValueError, match="no tiles for 8 rows"):
        grouped_launch(8, 4, (16,), [TierAccess()], card=card, atom_bytes=layout.atom_bytes)


@pytest.mark.parametrize("row_blocks", [(24, 0), (13, 11)])
def test_many_rows_and_few_in_turn(row_blocks: tuple[int, int], kernel_device: str) -> None:
    """Rows of several launches; the buffers serve passes of any number of rows."""
    rule, card = Routing(experts=6, top_k=2), some_card(kernel_device)
    dtype, hidden, ffn, most = torch.float16, 64, 16, 520
    x = normal(most, hidden, dtype=dtype, device=kernel_device)
    router = normal(6, hidden, dtype=torch.float32, device=kernel_device)
    lengths = torch.zeros(most, dtype=torch.int32, device=kernel_device)
    accesses, matrices = (TierAccess(), TierAccess(sms=1)), []
    for m, k in ((2 * ffn, hidden), (hidden, ffn)):
        counts = [count * m // 32 for count in row_blocks]
        splits = expert_splits(counts, expert_row_blocks=m // 8, top_k=2, card=card)
        matrices.append(packed(normal(6 * m, k, dtype=dtype, device=kernel_device) / 8, splits))
    gates, downs = matrices
    products = ExpertProducts(most, rule, hidden, ffn, x, card)
    found = []
    for n in (most, 20):
        choices = products.route(x[:n], router, None, lengths[:n])
        inner = products.gate_up(x[:n], choices, gates, accesses)
        found.append(products.down(inner, choices, downs, accesses, x[:n].clone()))
    assert error(found[0][:20], found[1].double()) < 1e-3
    wide = x.double().cpu()
    chosen = reference.route(wide.float(), router.cpu(), None, rule)
    dense = (matrix.dense().double().unflatten(0, (6, -1)) for matrix in matrices)
    gate_ups, down_of = (matrix.cpu() for matrix in dense)
    wanted, first = wide.clone(), 0
    for expert, count in chosen.counts.items():
        of = slice(first, first + count)
        y = wide[chosen.tokens[of]] @ gate_ups[expert].T
        y = (F.silu(y[:, ::2]) * y[:, 1::2]) @ down_of[expert].T
        wanted.index_add_(0, chosen.tokens[of], chosen.weights[of, None].double() * y)
        first += count
    assert error(found[0].cpu(), wanted) < 1e-3


@pytest.mark.gpu
def test_launches_that_overlap() -> None:
    """Layers one behind the other in a graph have the bits of launches that wait for each other."""
    rule, card, dtype = Routing(experts=32, top_k=4), here(), torch.bfloat16
    rows, hidden, ffn, layers = 600, 512, 256, 12
    x = normal(rows, hidden, dtype=dtype, device="cuda")
    lengths = torch.zeros(rows, dtype=torch.int32, device="cuda")
    accesses, given = (TierAccess(), TierAccess(sms=4, window_bytes=1 << 18)), []
    for layer in range(layers):
        router = normal(32, hidden + layer, dtype=torch.float32, device="cuda")[:, :hidden]
        matrices = []
        for m, k in ((2 * ffn, hidden), (hidden, ffn)):
            # Halved: gates times ups grow with the square of x, from layer to layer.
            dense = normal(32 * m, k + 8 * layer, dtype=dtype, device="cuda")[:, :k] / k**0.5 / 2
            counts = (31 * m // 8, m // 8)
            splits = expert_splits(counts, expert_row_blocks=m // 8, top_k=4, card=card)
            matrices.append(packed(dense.contiguous(), splits))
        given.append((router.contiguous(), *matrices))
    products = ExpertProducts(rows, rule, hidden, ffn, x, card)
    out = torch.empty_like(x)

    def run(wait: Any) -> None:
        out.copy_(x)
        for router, gates, downs in given:
            choices = products.route(out, router, None, lengths)
            wait()
            inner = products.gate_up(out, choices, gates, accesses)
            wait()
            products.down(inner, choices, downs, accesses, out)
            wait()

    run(torch.cuda.synchronize)
    wanted = out.clone()
    assert wanted.isfinite().all() and not wanted.equal(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(lambda: None)
    for _ in range(50):
        out.fill_(math.nan)
        graph.replay()
        assert out.equal(wanted)
