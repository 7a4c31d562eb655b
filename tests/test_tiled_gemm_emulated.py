"""The tiled GEMM's CUDA source on the CPU, in many interleavings of its threads and copies."""

import itertools
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from cards import hopper
from cases import cases
from emulated import EmulatedKernel, atoms_map, boxes_map, of_name
from moved_parts import Movable
from torch.nn import functional as F

from dakrun.config import Activation
from dakrun.formats import PACKED16
from dakrun.geometry import (
    TILED_MIN_OUTPUT_BLOCKS,
    TILED_PORTABLE_X_TILES,
    TILED_WIDE_TILES,
    TILED_X_TILES,
    row_block_count,
)
from dakrun.kernels.gemm import StreamKWorkspace
from dakrun.kernels.gemm import tiled as tiled_gemm  # for its macros, and to replace tensor maps
from dakrun.kernels.runtime import jit, operands
from dakrun.launches import (
    MAX_OUTPUT_BLOCKS,
    Launch,
    Shape,
    TierAccess,
    TierTiles,
    TiledConfig,
    split_row_blocks,
)
from dakrun.memory.matrix import MatrixPart, TieredMatrix

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
Build = Callable[..., EmulatedKernel]


@pytest.fixture(scope="module", params=[1, 0], ids=["wgmma", "mma"])
def wgmma(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture(scope="module")
def build(wgmma: int, tmp_path_factory: pytest.TempPathFactory) -> Build:
    named = of_name(lambda: tmp_path_factory.mktemp("kernel"))
    return lambda source, name, defines: named(source, name, {**defines, "WGMMA": wgmma})


@pytest.fixture(autouse=True)
def on_the_cpu(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "kernel", build)
    monkeypatch.setattr(tiled_gemm, "atoms_map", atoms_map)
    monkeypatch.setattr(tiled_gemm, "boxes_map", boxes_map)
    monkeypatch.setattr(operands, "check_gpu", lambda _: None)


def normal(*shape: int, dtype: torch.dtype = torch.float16, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (scale * torch.randn(shape, generator=generator)).to(dtype)


def packed(
    weight: torch.Tensor, row_blocks: Sequence[int], sms: int, name: str = "tier {}"
) -> TieredMatrix:
    access = [TierAccess(sms=2)] * len(row_blocks)
    parts, row = [], 0
    for tier, split in enumerate(split_row_blocks(row_blocks, access, card=hopper(sms))):
        data = PACKED16.pack(weight[row : row + 8 * split.row_blocks], split)
        parts.append(MatrixPart(name.format(tier), split, PACKED16, data))
        row += 8 * split.row_blocks
    return TieredMatrix((weight.shape[0], weight.shape[1]), weight.dtype, tuple(parts))


ALONG_W, ALONG_X, WIDE = Shape(8, 2), Shape(8, 1), Shape(12, 1, wide=True)


def launch(*tiers: TierTiles, shape: Shape = ALONG_W, stages: int = 3) -> Launch:
    return Launch(shape, stages, tiers)


def config(*tiers: TierTiles, shape: Shape = ALONG_W, stages: int = 3) -> TiledConfig:
    return TiledConfig((launch(*tiers, shape=shape, stages=stages),))


def kernel_of(shape: Shape, build: Build) -> EmulatedKernel:
    macros = tiled_gemm.defines(torch.float16, shape)
    return build(tiled_gemm.SOURCE, "tiled_gemm", macros)


@pytest.fixture(autouse=True)
def there_is_such_a_kernel(wgmma: int, request: pytest.FixtureRequest) -> None:
    shape = getattr(request.node, "callspec", None) and request.node.callspec.params.get("shape")
    if shape and not wgmma and (shape.wide or shape.tiles not in TILED_PORTABLE_X_TILES):
        pytest.skip("only with wgmma")


NOBODY = TierTiles(0)
ALONE = config(TierTiles(2, 16))


def run(
    weight: torch.Tensor,
    n: int,
    how: TiledConfig = ALONE,
    row_blocks: Sequence[int] = (),
    *,
    sms: int = 3,
    x: torch.Tensor | None = None,
    activation: Activation = "none",
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Y of `x`, or of a random one that depends on the shapes alone."""
    m, k = weight.shape
    matrix = packed(weight, row_blocks or (row_block_count(m),), sms)
    x = normal(n, k, dtype=weight.dtype) if x is None else x
    out = torch.full((n, m // 2 if activation == "silu_mul" else m), math.nan, dtype=weight.dtype)
    workspace = StreamKWorkspace.empty(how, "cpu")
    workspace.partials.fill_(0xFF)
    tiled_gemm.tiled_gemm(
        x, matrix, how, out, bias=bias, residual=residual, activation=activation,
        workspace=workspace,
    )  # fmt: skip
    assert not workspace.flags.any()
    return out


@pytest.mark.parametrize("shape", [ALONG_W, ALONG_X, WIDE])
@pytest.mark.parametrize("row_blocks", [(20, 7), (3, 24), (0, 27), (11, 9, 7)])
def test_parts_of_one_tier_are_computed_as_one(row_blocks: tuple[int, ...], shape: Shape) -> None:
    """Local and staged rows: tiles cross their border, and bits are the same."""
    weight, x = normal(211, 200), normal(130, 200)
    how = config(TierTiles(2, shape.row_blocks, stream_k=True), shape=shape)
    out = torch.full((130, 211), math.nan, dtype=weight.dtype)
    matrix = packed(weight, row_blocks, 3, "hbm")
    assert matrix.row_blocks_by_tier == (("hbm", 27),)
    workspace = StreamKWorkspace.empty(how, "cpu")
    tiled_gemm.tiled_gemm(x, matrix, how, out, workspace=workspace)
    assert torch.equal(out, run(weight, 130, how, x=x))
    assert error(out, x.double() @ weight.double().T) < 1e-3


def test_parts_that_moved() -> None:
    weight, how = normal(8 * 27, 200), config(TierTiles(1, 16), TierTiles(1, 11))
    movable, x = Movable(packed(weight, (16, 11), 3)), normal(70, 200)
    wanted = run(weight, 70, how, (16, 11))
    for _ in range(2):
        out = torch.full_like(wanted, math.nan)
        tiled_gemm.tiled_gemm(x, movable.matrix, how, out)
        assert torch.equal(out, wanted)
        movable.move(out.device)


def error(got: torch.Tensor, exact: torch.Tensor) -> float:
    return ((got.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("shape", [ALONG_W, WIDE])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("activation", ["none", "relu", "silu_mul"])
@pytest.mark.parametrize(
    ("m", "k", "n", "dtype"),
    [(136, 72, 67, torch.float16), (90, 200, 130, torch.bfloat16), (211, 64, 40, torch.float16)],
)
def test_epilogues(
    m: int,
    k: int,
    n: int,
    dtype: torch.dtype,
    activation: Activation,
    residual: bool,
    shape: Shape,
) -> None:
    gated = activation == "silu_mul"
    if gated and (m % 2 or residual):
        return
    weight, bias = normal(m, k, dtype=dtype, scale=k**-0.5), normal(m, dtype=dtype)
    x, more = normal(n, k, dtype=dtype), normal(n, m, dtype=dtype) if residual else None
    exact = F.linear(x.double(), weight.double(), bias.double())
    if gated:
        exact = F.silu(exact[:, ::2]) * exact[:, 1::2]
    if activation == "relu":
        exact = exact.relu()
    if more is not None:
        exact += more.double()
    how = config(TierTiles(2, shape.row_blocks), shape=shape)
    found = run(weight, n, how, x=x, activation=activation, bias=bias, residual=more)
    assert error(found, exact) < (5e-4 if dtype == torch.float16 else 4e-3)


@pytest.mark.parametrize("shape", [ALONG_W, WIDE])
def test_gated_tiles_that_begin_with_any_row_block(shape: Shape) -> None:
    m, k, n = 240, 72, 67
    weight, bias = normal(m, k, scale=k**-0.5), normal(m)
    exact = F.linear(normal(n, k).double(), weight.double(), bias.double())
    exact = F.silu(exact[:, ::2]) * exact[:, 1::2]
    how = config(TierTiles(2, 7), TierTiles(1, 8), shape=shape)
    found = run(weight, n, how, (17, 13), bias=bias, activation="silu_mul")
    assert error(found, exact) < 5e-4


@pytest.mark.parametrize(
    "shape",
    [
        *(Shape(tiles, row_groups) for tiles in TILED_X_TILES for row_groups in (1, 2)),
        *(Shape(tiles, 1, wide=True) for tiles in TILED_WIDE_TILES),
        Shape(12, 2, wide=True),
    ],
)
def test_tiles(shape: Shape) -> None:
    m, k, n = 8 * shape.row_blocks + 80, 136, 2 * shape.rows - 5
    weight, bias = normal(m, k, scale=k**-0.5), normal(m)
    how = config(TierTiles(2, shape.row_blocks - 1), shape=shape, stages=2)
    exact = F.linear(normal(n, k).double(), weight.double(), bias.double())
    assert error(run(weight, n, how, bias=bias), exact) < 5e-4


@pytest.mark.parametrize("shape", [Shape(16, 2), Shape(24, 1, wide=True), ALONG_X])
@pytest.mark.parametrize(
    ("residual", "m"),
    cases(itertools.product((False, True), (240, 235)), lambda residual, m: residual == (m == 235)),
)
def test_any_number_of_blocks(shape: Shape, residual: bool, m: int, build: Build) -> None:
    """Output blocks, for a Y whose rows tensor maps take, or do not."""
    k, n = 72, 300
    weight, bias = normal(m, k, scale=k**-0.5), normal(m)
    more = normal(n, m) if residual else None
    wanted = run(weight, n, bias=bias, residual=more)
    kernel = kernel_of(shape, build)
    for blocks in (TILED_MIN_OUTPUT_BLOCKS, 4, 7, MAX_OUTPUT_BLOCKS):
        for tile_row_blocks in (min(15, shape.row_blocks), shape.row_blocks):
            kernel.seed = blocks
            only = replace(launch(TierTiles(2, tile_row_blocks), shape=shape), blocks=blocks)
            found = run(weight, n, TiledConfig((only,)), bias=bias, residual=more)
            assert torch.equal(found, wanted), (blocks, tile_row_blocks)


@pytest.mark.parametrize("row_blocks", [1, 5, 11])
def test_wide_tiles_of_few_row_blocks(row_blocks: int, wgmma: int) -> None:
    """Warpgroups read more row blocks than a stage has."""
    if not wgmma:
        pytest.skip("only with wgmma")
    weight, n = normal(8 * row_blocks, 200, scale=0.1), 100
    how = config(TierTiles(1, row_blocks), shape=Shape(28, 1, wide=True))
    assert torch.equal(run(weight, n, how), run(weight, n))


@pytest.mark.parametrize("sms", [1, 3, 30])
def test_no_bit_depends_on_how_it_is_run(sms: int, build: Build) -> None:
    """Groups of 1 to 16 row blocks, in tiles of other sizes, in one tier or several."""
    m, k, n = 235, 328, 150
    weight, bias = normal(m, k, scale=k**-0.5), normal(m)
    kernel = build(tiled_gemm.SOURCE, "tiled_gemm", tiled_gemm.defines(torch.float16, Shape(8, 1)))
    wanted = run(weight, n, bias=bias)
    exact = F.linear(normal(n, k).double(), weight.double(), bias.double())
    assert error(wanted, exact) < 5e-4
    local, remote, windowed = TierTiles(2, 13, 2), TierTiles(1, 8), TierTiles(2, 5, 2, window=2)
    cases: list[tuple[tuple[int, ...], TiledConfig]] = [
        ((30,), config(local, stages=4)),
        ((21, 9), config(local, remote)),
        ((17, 13), config(TierTiles(2, 7), windowed, shape=ALONG_X)),
        ((0, 30), config(NOBODY, windowed, shape=ALONG_X, stages=5)),
        ((10, 9, 11), config(local, remote, windowed)),
        (
            (10, 9, 11),
            TiledConfig(
                (launch(NOBODY, remote, windowed, shape=ALONG_X), launch(local, NOBODY, NOBODY))
            ),
        ),
    ]
    for seed, (row_blocks, how) in enumerate(cases):
        kernel.seed = 1000 * seed + sms
        found = run(weight, n, how, row_blocks, sms=sms, bias=bias)
        assert torch.equal(found, wanted), row_blocks


@pytest.mark.parametrize(
    ("shape", "clusters"),
    cases(
        itertools.product((ALONG_W, ALONG_X, Shape(8, 2, 2), Shape(8, 1, 1, 2), WIDE), (2, 3)),
        lambda shape, clusters: (
            shape == ALONG_W or clusters == (3 if shape in (ALONG_X, Shape(8, 1, 1, 2)) else 2)
        ),
    ),
)
def test_stream_k(shape: Shape, clusters: int, build: Build) -> None:
    """Tiles that one cluster begins and another ends have one cluster's bits, behind any waves."""
    m, k = 300, 200
    weight, bias = normal(m, k, scale=k**-0.5), normal(m)
    kernel = kernel_of(shape, build)
    kernel.together = clusters
    try:
        for n, tile_row_blocks in ((67, 16), (330, 7)):
            wanted = run(weight, n, bias=bias)
            kernel.seed = n
            tier = TierTiles(
                clusters, min(tile_row_blocks, shape.row_blocks), 2, stream_k=True, window=3
            )
            found = run(weight, n, config(tier, shape=shape), bias=bias)
            assert torch.equal(found, wanted), (n, tile_row_blocks)
    finally:
        kernel.together = 1


@pytest.mark.parametrize(
    "shape",
    [
        *(Shape(8, 2, 2), Shape(8, 1, 4), Shape(8, 2, 1, 2), Shape(8, 1, 1, 4), Shape(8, 2, 8)),
        *(Shape(12, 1, 2, wide=True), Shape(12, 1, 1, 2, wide=True)),
    ],
)
def test_clusters_that_share_w_or_x(shape: Shape, build: Build) -> None:
    """Ragged in both directions: some CTAs compute nothing, and still copy their part."""
    m, k, n = 235, 328, 150
    weight, bias, more = normal(m, k, scale=k**-0.5), normal(m), normal(n, m)
    kernel = kernel_of(shape, build)
    wanted = run(weight, n, bias=bias, residual=more)
    cases = ((shape.row_blocks, 3, (30,)), (5, 1, (19, 11)), (3, 2, (19, 11)))
    for seed, (tile_row_blocks, window, row_blocks) in enumerate(cases):
        kernel.seed = seed
        tiers = TierTiles(2, tile_row_blocks, 2), TierTiles(1, tile_row_blocks, window=window)
        how = config(*tiers[: len(row_blocks)], shape=shape, stages=4)
        found = run(weight, n, how, row_blocks, bias=bias, residual=more)
        assert torch.equal(found, wanted), (tile_row_blocks, window, row_blocks)


@pytest.mark.parametrize(
    ("shape", "activation", "segments"),
    cases(
        itertools.product(
            (Shape(8, 1), Shape(16, 1), Shape(32, 1), WIDE), ("relu", "silu_mul"), (2, 3, 4, 5)
        ),
        lambda shape, activation, segments: (
            (activation == "relu") == (segments in (2, 5))
            and (shape == WIDE or (segments > 3) == (shape.tiles == 16))
        ),
    ),
)
def test_segments_of_k(shape: Shape, segments: int, activation: Activation, build: Build) -> None:
    """Bits are the same in any tiles, one or several a cluster, with W shared or not."""
    shape = replace(shape, k_ctas=segments)
    stages = 7 if shape.tiles == 8 else 5
    m, k, n = 134, 392, 150
    weight, bias = normal(m, k, scale=k**-0.5), normal(m)
    more = normal(n, m) if activation == "relu" else None
    exact = F.linear(normal(n, k).double(), weight.double(), bias.double())
    if more is None:
        exact = F.silu(exact[:, ::2]) * exact[:, 1::2]
    else:
        exact = exact.relu() + more.double()
    kernel = kernel_of(shape, build)
    found = []
    for seed, (row_blocks, tiers) in enumerate(
        [((17,), (TierTiles(1, 8),)), ((9, 8), (TierTiles(2, 5), TierTiles(1, 3, window=1)))]
    ):
        kernel.seed = seed
        how = config(*tiers, shape=shape, stages=stages)
        found.append(
            run(weight, n, how, row_blocks, bias=bias, residual=more, activation=activation)
        )
        assert error(found[-1], exact) < 5e-4
    both = config(TierTiles(1, 8), shape=replace(shape, x_ctas=2), stages=stages)
    found.append(run(weight, n, both, bias=bias, residual=more, activation=activation))
    assert all(torch.equal(other, found[0]) for other in found)


def test_segments_without_columns(build: Build) -> None:
    weight = normal(40, 64, scale=0.1)
    how = config(TierTiles(1, 5), shape=Shape(8, 1, k_ctas=2))
    assert torch.equal(run(weight, 70, how), run(weight, 70))


@pytest.mark.parametrize("stages", [2, 3, 8])
@pytest.mark.parametrize("atoms", [1, 2, 5])
def test_any_number_of_stages(stages: int, atoms: int, build: Build) -> None:
    weight = normal(40, 64 * atoms, scale=0.05)
    exact = normal(130, 64 * atoms).double() @ weight.double().T
    kernel = build(tiled_gemm.SOURCE, "tiled_gemm", tiled_gemm.defines(torch.float16, Shape(8, 1)))
    for window in range(1, stages + 1):
        kernel.seed = 77 * window
        how = config(TierTiles(1, 3, 2, window=window), shape=ALONG_X, stages=stages)
        assert error(run(weight, 130, how), exact) < 5e-4


@pytest.mark.parametrize("shape", [ALONG_W, Shape(8, 1, 2), Shape(16, 1), replace(WIDE, w_ctas=2)])
@pytest.mark.parametrize(
    "n", cases(([n] for n in (1, 8, 63, 64, 65, 80, 100, 128, 200)), lambda n: n in (8, 65, 200))
)
def test_few_rows_behind_x_are_copied(
    n: int, shape: Shape, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows of the last warpgroup along X have a box of their own size."""
    rows = list[int]()

    def noted(*args: Any) -> tuple[int, ...]:
        rows.append(args[3])
        return atoms_map(*args)

    monkeypatch.setattr(tiled_gemm, "atoms_map", noted)
    weight = normal(16 * shape.row_blocks, 192, scale=192**-0.5)
    sharing = TierTiles(1, shape.row_blocks)
    y = run(weight, n, config(sharing, shape=shape))
    assert error(y, F.linear(normal(n, 192).double(), weight.double())) < 5e-4
    whole, rest = (shape.w_ctas * box for box in rows)
    assert whole == 8 * shape.x_tiles
    assert n % whole == 0 or n % whole <= rest < n % whole + 8 * shape.w_ctas


def test_shared_memory_that_is_too_small_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    smaller = ALONE.launches[0].shared_bytes - 4096
    monkeypatch.setattr(Launch, "shared_bytes", property(lambda _: smaller))
    with pytest.raises(AssertionError, match="shared memory at"):
        run(normal(128, 256), 64)


@pytest.mark.parametrize(
    ("m", "options", "message"),
    [
        (65, {"activation": "silu_mul"}, "even number of rows"),
        (64, {"activation": "silu_mul", "residual": normal(70, 64)}, "no residual"),
        (64, {"bias": normal(63)}, r"expected bias as \[64\]"),
        (64, {"how": config(TierTiles(1), TierTiles(1))}, "not one for this weight"),
        (64, {"how": TiledConfig(())}, "not one for 70 rows"),
        (64, {"how": config(TierTiles(0))}, "one launch for the row blocks"),
        (64, {"how": TiledConfig(ALONE.launches * 2)}, "one launch for the row blocks"),
        (64, {"how": config(TierTiles(1), stages=1)}, "two stages or more"),
        (
            64,
            {"how": config(TierTiles(1, stream_k=True), shape=Shape(8, 2, 1, 1, 2))},
            "no Stream-K with segments of K",
        ),
    ],
)
def test_what_does_not_fit_is_refused(m: int, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(normal(m, 64), 70, **options)
