"""Which kernel computes a product, and the workspaces of streams and graphs; on a GPU, products on
concurrent streams and graphs give the bits that they give alone.
"""

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cards import H200, PORTABLE, hold_to, hopper
from moved_parts import Movable
from packed_linear import linear, normal, poisoned, same_bits, written
from packed_matrices import packed
from torch.nn import functional as F

from dakrun.formats import PACKED16, Quantised, Split, WeightFormat
from dakrun.geometry import WARPGROUPS, row_block_count
from dakrun.hardware import LOCAL

# Inner modules: kernels, the GPU's limits and the current stream are replaced.
from dakrun.kernels.gemm import dispatch as products
from dakrun.kernels.gemm import splitk as gemm
from dakrun.kernels.gemm import tiled as tiled_gemm
from dakrun.kernels.gemm.dispatch import Products
from dakrun.launches import TierAccess, shapes, split_row_blocks, tiled_config
from dakrun.memory.matrix import MatrixPart, TieredMatrix

CPU = torch.device("cpu")
CARDS = PORTABLE, H200  # without the tiled GEMM, and with it
ACCESS = (TierAccess(), TierAccess(8, 256 * 1024))
SPLITS = (Split(3, 2, 1, 64), Split(2, 1, 1, 64))
COLS = 72


def weight(*, remote: bool) -> TieredMatrix:
    splits = SPLITS if remote else (Split(5, 2, 1, 64), Split(0, 0, 1, 64))
    found = packed(torch.randn(40, COLS, dtype=torch.float16), splits)
    here, there = found.parts
    parts = replace(here, tier=LOCAL), replace(there, tier="host")
    return TieredMatrix(found.shape, found.dtype, parts)


@pytest.mark.parametrize(
    ("tiles", "remote", "rows"),
    [
        (True, False, {1: "splitk", 64: "splitk", 65: "tiled", 5000: "tiled"}),
        (True, True, {64: "splitk", 65: "tiled"}),
        (False, False, {64: "splitk", 128: "splitk", 129: "torch"}),
        (False, True, {64: "splitk", 65: "torch"}),
    ],
)
def test_what_computes(tiles: bool, remote: bool, rows: dict[int, str]) -> None:
    found = Products(CPU, CARDS[tiles])
    assert {n: found.kernel_for(n, weight(remote=remote)) for n in rows} == rows


@pytest.mark.parametrize(
    ("m", "k", "by"),
    [
        (3072, 768, "splitk"), (4096, 1024, "splitk"), (16384, 768, "tiled"),
        (1024, 4096, "tiled"), (2048, 2048, "tiled"),
    ],
)  # fmt: skip
def test_small_weights_are_splitk_gemms_up_to_64_rows(m: int, k: int, by: str) -> None:
    """Of OPT-125m and OPT-350m: the tiled GEMM's start and end would take longer."""
    split = Split(row_block_count(m), 132, 1, 64)
    part = MatrixPart(LOCAL, split, PACKED16, (torch.empty(2 * m * k, dtype=torch.uint8),))
    small = TieredMatrix((m, k), torch.float16, (part,))
    found = {n: Products(CPU, H200).kernel_for(n, small) for n in (32, 33, 64, 65)}
    assert found == {32: "splitk", 33: by, 64: by, 65: "tiled"}


def test_variants() -> None:
    half = torch.float16
    few = list(Products(CPU, PORTABLE).variants((8, 40, 100, 1000), half))
    assert few == [(gemm.SOURCE, gemm.defines(half, n)) for n in (1, 8)]
    mixed = list(Products(CPU, PORTABLE).variants((8, 40), half, mixes=True))
    assert mixed == [few[0], (gemm.SOURCE, gemm.defines(half, 1, mixes=True)), few[1]]
    many = list(Products(CPU, H200).variants((32, 33), half))
    assert many[:2] == [(gemm.SOURCE, gemm.defines(half, n)) for n in (4, 8)]
    every = tiled_gemm.all_defines(half, wgmma=True)
    assert many[2:] == [(tiled_gemm.SOURCE, macros) for macros in every]
    needed = [tiled_gemm.defines(half, shape) for shape in shapes(H200)]
    assert all((tiled_gemm.SOURCE, macros) in many for macros in needed)


class Kernels:
    """Stand-ins for the kernels that record launches: kernel, rows, norm."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.launched: list[tuple[str, int, str]] = []
        self.workspaces: list[Any] = []
        self.pad_grid = False
        monkeypatch.setattr(gemm, "splitk_gemm", self.kernel("splitk"))
        monkeypatch.setattr(tiled_gemm, "tiled_gemm", self.kernel("tiled"))
        monkeypatch.setattr(products, "normalize", self.normalize)

    def kernel(self, by: str) -> Any:
        def launch(
            x: torch.Tensor, weight: TieredMatrix, config: Any, out: torch.Tensor, *,
            bias: torch.Tensor, residual: torch.Tensor, workspace: Any, pdl: bool,
            activation: str, norm: str = "none", eps: float = 0.0,
            ahead: torch.Tensor | None = None, scaled: None = None, scales: None = None,
        ) -> None:  # fmt: skip
            assert activation == "none" and ahead is None and scaled is None and scales is None
            assert pdl
            self.launched.append((by, len(x), norm))
            self.workspaces.append(workspace)
            out.copy_(F.linear(x.float(), weight.dense().float(), bias.float()) + residual)

        return launch

    def normalize(
        self,
        x: torch.Tensor,
        out: torch.Tensor,
        norm: str,
        *,
        eps: float,
        pdl: bool,
        pad_grid: bool,
    ) -> Any:
        assert pdl
        self.pad_grid = pad_grid
        self.launched.append(("normalize", len(x), norm))
        return out.copy_(x)


@pytest.mark.parametrize(
    ("tiles", "n", "wanted"),
    [
        (True, 32, [("splitk", 32, "rms")]),
        (
            True, 8200,
            [("normalize", 8200, "rms"), *(("tiled", n, "none") for n in (4096, 4096, 8))],
        ),
        (False, 33, [("normalize", 33, "rms"), ("splitk", 33, "none")]),
        (False, 128, [("normalize", 128, "rms"), *[("splitk", 64, "none")] * 2]),
    ],
)  # fmt: skip
def test_launches(
    tiles: bool, n: int, wanted: list[tuple[str, int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many rows as a launch takes, with their residual; a large x is normalized first."""
    kernels, w = Kernels(monkeypatch), weight(remote=False)
    x, bias, residual = (torch.randn(shape).half() for shape in ((n, COLS), (40,), (n, 40)))
    out = torch.full((n, 40), torch.nan).half()
    found = Products(CPU, CARDS[tiles])
    found(x, w, ACCESS, out, bias=bias, residual=residual, norm="rms", eps=1e-5, pdl=True)
    assert kernels.launched == wanted
    assert kernels.pad_grid == (not tiles and n > 32)
    exact = F.linear(x.float(), w.dense().float(), bias.float()) + residual
    torch.testing.assert_close(out.float(), exact, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(("tier", "launches"), [(LOCAL, 1), ("host", 2)])
def test_staged_rows_need_no_launch_of_their_own(
    tier: str, launches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Staged rows are computed with local ones, as one tier."""
    asked: list[Any] = []
    monkeypatch.setattr(
        tiled_gemm, "tiled_gemm", lambda _x, _w, config, *_, **__: asked.append(config.launches)
    )
    here, there = weight(remote=True).parts
    parts = here, replace(there, tier=tier)
    w = TieredMatrix((40, COLS), torch.float16, parts)
    x, out = torch.zeros(500, COLS).half(), torch.zeros(500, 40).half()
    access = (TierAccess(), TierAccess() if tier == LOCAL else ACCESS[1])
    Products(CPU, H200)(x, w, access, out)
    assert [len(found) for found in asked] == [launches]


@pytest.mark.parametrize("tiles", [True, False])
def test_what_is_prefetched_ahead(tiles: bool) -> None:
    """Local row blocks behind those of the first copies, for few rows of X."""
    splits = split_row_blocks((60, 4), ACCESS, card=hopper(10))
    data = torch.randn(512, 4096, dtype=torch.float16)
    here, there = packed(data, splits).parts
    near, far = replace(here, tier=LOCAL), replace(there, tier="host")
    wide = TieredMatrix(data.shape, data.dtype, (near, far))
    found = Products(CPU, replace(CARDS[tiles], sms=10))
    for n in (1, 8, 32):
        ahead = found.ahead(n, wide, ACCESS)
        assert ahead is not None and ahead.dtype == torch.uint8
        begin = ahead.data_ptr() - here.arrays[0].data_ptr()
        assert begin > 0 and begin + ahead.numel() <= here.arrays[0].numel()
    assert found.ahead(33, wide, ACCESS) is None
    away = replace(here, tier="host"), far
    assert found.ahead(8, TieredMatrix(wide.shape, wide.dtype, away), ACCESS) is None


def bytes_of(stored: WeightFormat, split: Split) -> tuple[torch.Tensor, ...]:
    """Arrays of a part with 256 columns."""
    sizes = (array.nbytes(8 * split.row_blocks) for array in stored.arrays(256))
    return tuple(torch.zeros(size, dtype=torch.uint8) for size in sizes)


def test_which_products_keep_attention_from_their_sms() -> None:
    """Of quantized weights that mix tiers, with 9 or more rows; no others."""
    found, tiers = Products(CPU, H200), (TierAccess(), TierAccess(mixed=True))
    for stored, mixed in itertools.product((PACKED16, Quantised("int4", 128)), (False, True)):
        accesses = tiers if mixed else ACCESS
        splits = split_row_blocks(
            (60, 4), accesses, card=hopper(10), atom_bytes=stored.atom_bytes
        )  # fmt: skip
        parts = (
            MatrixPart(tier, split, stored, bytes_of(stored, split))
            for tier, split in zip((LOCAL, "host"), splits, strict=True)
        )
        weight = TieredMatrix((512, 256), torch.float16, tuple(parts))
        held = [n for n in (1, 8, 9, 16) if found.holds_up_attention(n, weight)]
        assert held == ([9, 16] if mixed and stored != PACKED16 else [])


def test_streams_and_graphs_have_memory_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    now = SimpleNamespace(stream=1, capture=0)
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=now.stream)
    )
    monkeypatch.setattr(products, "capture_id", lambda: now.capture)
    monkeypatch.setattr(products, "_current", {})
    hold_to(H200, monkeypatch)

    def at(stream: int, capture: int = 0) -> Products:
        now.stream, now.capture = stream, capture
        return products.products(CPU)

    eager = at(1)
    assert at(1) is eager and at(2) is not eager and at(1) is eager
    first = at(3, 7)
    assert at(3, 7) is first and at(4, 7) is not first
    assert at(3, 8) is not first and at(1) is eager


def test_memory_is_taken_once() -> None:
    Products(CPU, PORTABLE).reserve()  # nothing without the tiled GEMM
    found = Products(CPU, hopper(2))
    found.reserve()
    kept = found.stream_k_workspace
    assert kept is found.stream_k_workspace and not kept.flags.any()
    # of two launches, each with two CTAs on both SMs
    assert kept.flags.numel() == 2 * 2 * 2 * 4 * WARPGROUPS


def uses_stream_k(n: int, m: int, k: int) -> bool:
    """Whether an H200 computes this product with Stream-K."""
    return tiled_config(n, (row_block_count(m),), ACCESS[:1], cols=k, card=H200).stream_k_ctas > 0


@pytest.mark.gpu
def test_streams_and_graphs_beside_each_other() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    m, k = 22016, 4096
    n = next(n for n in range(40, 4000, 8) if uses_stream_k(n, m, k))
    w = linear(m, k, torch.float16).weight
    xs = [normal(n, k, dtype=torch.float16) * scale for scale in (1, 2, 4)]
    alone = [poisoned(n, m, torch.float16) for _ in xs]
    for x, out in zip(xs, alone, strict=True):
        products.products(device)(x, w, ACCESS[:1], out)
        assert written(out)
    torch.cuda.synchronize()
    outs = [poisoned(n, m, torch.float16) for _ in range(2 * len(xs))]
    graphs, streams = [], [torch.cuda.Stream() for _ in outs]
    for x, out in zip(xs, outs, strict=False):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):  # all of them captured from one stream
            for _ in range(2):
                products.products(device)(x, w, ACCESS[:1], out, pdl=True)
        graphs.append(graph)
    for _ in range(30):
        for out in outs:
            out.fill_(torch.nan)
        torch.cuda.synchronize()
        for graph, stream in zip(graphs, streams, strict=False):
            with torch.cuda.stream(stream):
                graph.replay()
        for x, out, stream in zip(xs, outs[3:], streams[3:], strict=True):
            with torch.cuda.stream(stream):
                products.products(device)(x, w, ACCESS[:1], out, pdl=True)
        torch.cuda.synchronize()
        assert all(map(same_bits, outs, itertools.chain(alone, alone)))


@pytest.mark.gpu
@pytest.mark.parametrize("n", [8, 64, 256])
def test_a_captured_product_follows_parts_that_move(n: int) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    m, k = 4096, 4096
    part = linear(m, k, torch.float16, (448, 64), access=ACCESS)
    movable, x = Movable(part.weight), normal(n, k, dtype=torch.float16)
    wanted, out = (poisoned(n, m, torch.float16) for _ in range(2))
    product = products.products(device)
    product(x, part.weight, ACCESS, wanted)
    product(x, movable.matrix, ACCESS, out)
    assert written(wanted) and same_bits(out, wanted)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        products.products(device)(x, movable.matrix, ACCESS, out, pdl=True)
    for _ in range(3):
        movable.move(device)
        out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert same_bits(out, wanted)
