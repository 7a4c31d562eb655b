"""The tiled GEMM's own source on the CPU, in many interleavings of its threads and copies."""

import math
import shutil
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from emulated import EmulatedKernel, atoms_map, of_name
from torch.nn import functional as F

from dakrun.kernels import jit, operands, tiled_gemm
from dakrun.kernels.gemm import Activation
from dakrun.kernels.heuristics import TierAccess, split_octets
from dakrun.kernels.packing import PackedPart, PackedTensor, pack
from dakrun.kernels.tiled_heuristics import (
    PORTABLE_X_TILES,
    X_TILES,
    TierTiles,
    TiledConfig,
    ring_bytes,
)
from dakrun.octets import octet_count

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
    monkeypatch.setattr(operands, "check_gpu", lambda _: None)


def normal(*shape: int, dtype: torch.dtype = torch.float16, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (scale * torch.randn(shape, generator=generator)).to(dtype)


def packed(weight: torch.Tensor, octets: Sequence[int], sms: int) -> PackedTensor:
    access = [TierAccess(sms=2)] * len(octets)
    parts, row = [], 0
    for tier, split in enumerate(split_octets(octets, access, sms=sms)):
        data = pack(weight[row : row + 8 * split.octets], split)
        parts.append(PackedPart(f"tier {tier}", split, data))
        row += 8 * split.octets
    return PackedTensor((weight.shape[0], weight.shape[1]), weight.dtype, tuple(parts))


def config(*tiers: TierTiles, x_tiles: int = 8) -> TiledConfig:
    sizes = [ring_bytes(x_tiles, tier.row_groups, tier.stages) for tier in tiers]
    return TiledConfig(x_tiles, max(sizes), tiers)


ALONE = config(TierTiles(2, 2, 16, 1, 3, 3))


def run(
    weight: torch.Tensor,
    n: int,
    how: TiledConfig = ALONE,
    octets: Sequence[int] = (),
    *,
    sms: int = 3,
    x: torch.Tensor | None = None,
    activation: Activation = "none",
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Y of `x`, or of a random one, which depends on the shapes alone."""
    m, k = weight.shape
    matrix = packed(weight, octets or (octet_count(m),), sms)
    x = normal(n, k, dtype=weight.dtype) if x is None else x
    out = torch.full((n, m // 2 if activation == "silu_mul" else m), math.nan, dtype=weight.dtype)
    return tiled_gemm.tiled_gemm(
        x, matrix, how, out, bias=bias, residual=residual, activation=activation
    )


def error(got: torch.Tensor, exact: torch.Tensor) -> float:
    return ((got.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("activation", ["none", "relu", "silu_mul"])
@pytest.mark.parametrize(
    ("m", "k", "n", "dtype"),
    [(136, 72, 67, torch.float16), (90, 200, 130, torch.bfloat16), (211, 64, 40, torch.float16)],
)
def test_epilogues(
    m: int, k: int, n: int, dtype: torch.dtype, activation: Activation, residual: bool
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
    found = run(weight, n, x=x, activation=activation, bias=bias, residual=more)
    assert error(found, exact) < (5e-4 if dtype == torch.float16 else 4e-3)


@pytest.mark.parametrize("x_tiles", X_TILES)
@pytest.mark.parametrize("row_groups", [1, 2])
def test_tiles(x_tiles: int, row_groups: int, wgmma: int) -> None:
    if not wgmma and x_tiles not in PORTABLE_X_TILES:
        return
    m, k, n = 208, 136, 16 * x_tiles - 5
    weight, bias = normal(m, k, scale=k**-0.5), normal(m)
    how = config(TierTiles(2, row_groups, 8 * row_groups - 1, 1, 2, 2), x_tiles=x_tiles)
    exact = F.linear(normal(n, k).double(), weight.double(), bias.double())
    assert error(run(weight, n, how, bias=bias), exact) < 5e-4


@pytest.mark.parametrize("sms", [1, 3, 30])
def test_no_bit_depends_on_how_it_is_run(sms: int, build: Build) -> None:
    """Groups of 1 to 16 octets, in tiles of other sizes, in one tier or several."""
    m, k, n = 235, 328, 150
    weight, bias = normal(m, k, scale=k**-0.5), normal(m)
    kernel = build(tiled_gemm.SOURCE, "tiled_gemm", tiled_gemm.defines(torch.float16, 8))
    wanted = run(weight, n, bias=bias)
    exact = F.linear(normal(n, k).double(), weight.double(), bias.double())
    assert error(wanted, exact) < 5e-4
    local, remote, windowed = (
        TierTiles(2, 2, 13, 2, 4, 4), TierTiles(1, 1, 8, 1, 3, 3), TierTiles(2, 1, 5, 3, 5, 2),
    )  # fmt: skip
    cases: list[tuple[tuple[int, ...], Any]] = [
        ((30,), (local,)), ((21, 9), (local, remote)), ((17, 13), (local, windowed)),
        ((0, 30), (TierTiles(0, 2, 1, 1, 2, 2), windowed)),
        ((10, 9, 11), (local, remote, windowed)),
    ]  # fmt: skip
    for seed, (octets, tiers) in enumerate(cases):
        kernel.seed = 1000 * seed + sms
        found = run(weight, n, config(*tiers), octets, sms=sms, bias=bias)
        assert torch.equal(found, wanted), octets


@pytest.mark.parametrize("stages", [2, 3, 8])
@pytest.mark.parametrize("atoms", [1, 2, 5])
def test_any_number_of_stages(stages: int, atoms: int, build: Build) -> None:
    weight = normal(40, 64 * atoms, scale=0.05)
    exact = normal(130, 64 * atoms).double() @ weight.double().T
    kernel = build(tiled_gemm.SOURCE, "tiled_gemm", tiled_gemm.defines(torch.float16, 8))
    for window in range(1, stages + 1):
        kernel.seed = 77 * window
        how = config(TierTiles(1, 1, 3, 2, stages, window))
        assert error(run(weight, 130, how), exact) < 5e-4


def test_shared_memory_that_is_too_small_is_found() -> None:
    short = TiledConfig(8, ALONE.shared_bytes - 4096, ALONE.tiers)
    with pytest.raises(AssertionError, match="shared memory at"):
        run(normal(128, 256), 64, short)


@pytest.mark.parametrize(
    ("m", "options", "message"),
    [
        (65, {"activation": "silu_mul"}, "an even number of rows"),
        (64, {"activation": "silu_mul", "residual": normal(70, 64)}, "no residual with silu_mul"),
        (64, {"bias": normal(63)}, r"expected bias as \[64\]"),
        (64, {"how": config(*ALONE.tiers * 2)}, "not one for 70 rows and this weight"),
        (64, {"how": config(TierTiles(0, 2, 1, 1, 2, 2))}, "expected CTAs for the octets"),
    ],
)
def test_what_does_not_fit_is_refused(m: int, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(normal(m, 64), 70, **options)
