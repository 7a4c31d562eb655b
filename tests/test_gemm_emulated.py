"""SplitK_GEMM's CUDA source on the CPU, in many interleavings of its threads and copies."""

import dataclasses
import itertools
import math
import shutil
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from cards import hopper
from cases import cases, few_examples
from emulated import EmulatedKernel, atoms_map, of_name
from hypothesis import given
from hypothesis import strategies as st
from moved_parts import Movable
from torch.nn import functional as F

from dakrun.config import Activation
from dakrun.formats import PACKED16
from dakrun.geometry import row_block_count
from dakrun.kernels.gemm import FusedNorm, HalvesWorkspace, look_ahead, splitk_gemm

# Inner modules: kernels, tensor maps and the choice of halves are replaced, macros are asked for.
from dakrun.kernels.gemm import splitk as gemm
from dakrun.kernels.runtime import jit, operands
from dakrun.launches import (
    GemmConfig,
    Ring,
    TierAccess,
    gemm_config,
    ring_bytes,
    split_row_blocks,
    tiles_for,
)
from dakrun.launches import splitk as splitk_launches
from dakrun.memory.matrix import MatrixPart, TieredMatrix

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
SMS = 3
ACCESS = (TierAccess(), TierAccess(sms=2, window_bytes=32 * 1024))
EPS = 0.02
Build = Callable[..., EmulatedKernel]


@pytest.fixture(scope="module", params=[1, 0], ids=["wgmma", "mma"])
def build(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Build:
    named = of_name(lambda: tmp_path_factory.mktemp("kernel"))
    return lambda source, name, defines: named(source, name, {**defines, "WGMMA": request.param})


def variant(
    build: Build, x_tiles: int = 1, *, norm: bool = False, mixes: bool = False,
    dtype: torch.dtype = torch.float16,
) -> EmulatedKernel:  # fmt: skip
    """The kernel of a variant."""
    return build(gemm.SOURCE, "splitk_gemm", gemm.defines(dtype, x_tiles, norm, mixes))


@pytest.fixture(autouse=True)
def on_the_cpu(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "kernel", build)
    monkeypatch.setattr(gemm, "atoms_map", atoms_map)
    monkeypatch.setattr(operands, "check_gpu", lambda _: None)


def normal(*shape: int, dtype: torch.dtype = torch.float16, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (scale * torch.randn(shape, generator=generator)).to(dtype)


def packed(
    weight: torch.Tensor, row_blocks: Sequence[int], access: Sequence[TierAccess], *, even: bool
) -> TieredMatrix:
    splits = split_row_blocks(row_blocks, access, card=hopper(SMS, even_waves=even))
    parts, row = [], 0
    for tier, split in zip(("hbm", "host", "peer"), splits, strict=False):
        data = PACKED16.pack(weight[row : row + 8 * split.row_blocks], split)
        parts.append(MatrixPart(tier, split, PACKED16, data))
        row += 8 * split.row_blocks
    return TieredMatrix((weight.shape[0], weight.shape[1]), weight.dtype, tuple(parts))


def run(
    weight: torch.Tensor,
    n: int,
    row_blocks: Sequence[int] = (),
    access: Sequence[TierAccess] = ACCESS,
    *,
    even: bool = True,
    x: torch.Tensor | None = None,
    activation: Activation = "none",
    norm: FusedNorm = "none",
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    ahead: torch.Tensor | None = None,
) -> torch.Tensor:
    """Y of `x`, or of a random one that depends on the shapes alone."""
    m, k = weight.shape
    row_blocks = row_blocks or (row_block_count(m),)
    access = access[: len(row_blocks)]
    matrix = packed(weight, row_blocks, access, even=even)
    splits = [part.split for part in matrix.parts]
    config = gemm_config(n, splits, access, card=hopper(SMS), cols=k if norm == "none" else 0)
    workspace = HalvesWorkspace.empty(config, "cpu")
    x = normal(n, k, dtype=weight.dtype) if x is None else x
    out = torch.full((n, m // 2 if activation == "silu_mul" else m), math.nan, dtype=weight.dtype)
    splitk_gemm(
        x, matrix, config, out, bias=bias, residual=residual, activation=activation, norm=norm,
        eps=EPS, workspace=workspace, ahead=ahead,
    )  # fmt: skip
    assert not workspace.arrivals.any()
    return out


@pytest.mark.parametrize("access", [ACCESS, (TierAccess(), TierAccess(sms=2, mixed=True))])
@pytest.mark.parametrize("n", [5, 64])
def test_parts_that_moved(n: int, access: Sequence[TierAccess]) -> None:
    weight, row_blocks = normal(8 * 27, 200), (16, 11)
    movable = Movable(packed(weight, row_blocks, access, even=True))
    config = gemm_config(n, [part.split for part in movable.matrix.parts], access, card=hopper(SMS))
    wanted = run(weight, n, row_blocks, access)
    for _ in range(2):
        out = torch.full_like(wanted, math.nan)
        workspace = HalvesWorkspace.empty(config, "cpu")
        splitk_gemm(normal(n, 200), movable.matrix, config, out, workspace=workspace)
        assert torch.equal(out, wanted)
        movable.move(out.device)


def scaled(x: torch.Tensor, norm: FusedNorm) -> torch.Tensor:
    """x in float64, each row scaled as `norm` does."""
    x = x.double()
    if norm == "none":
        return x
    spread = x.var(1, correction=0) if norm == "layer" else x.square().mean(1)
    return x / (spread + EPS).sqrt()[:, None]


def error(got: torch.Tensor, exact: torch.Tensor) -> float:
    return ((got.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("n", [1, 3, 7, 8, 13, 16, 24, 33, 64])
@pytest.mark.parametrize(("m", "k"), [(8, 8), (203, 1000), (130, 2120)])
def test_it_is_exact(m: int, k: int, n: int) -> None:
    weight, bias, residual = normal(m, k, scale=k**-0.5), normal(m), normal(n, m)
    exact = F.linear(normal(n, k).double(), weight.double(), bias.double()) + residual.double()
    assert error(run(weight, n, bias=bias, residual=residual), exact) < 5e-4


@pytest.mark.parametrize("norm", ["none", "rms"])
@pytest.mark.parametrize("activation", ["relu", "silu_mul"])
@pytest.mark.parametrize(("n", "dtype"), [(8, torch.float16), (13, torch.bfloat16)])
def test_epilogues(norm: FusedNorm, activation: Activation, n: int, dtype: torch.dtype) -> None:
    m, k = 90, 520
    weight, bias = normal(m, k, dtype=dtype, scale=k**-0.5), normal(m, dtype=dtype)
    x = 0.1 * normal(n, k, dtype=dtype)
    exact = F.linear(scaled(x, norm), weight.double(), bias.double())
    if activation == "silu_mul":
        exact = F.silu(exact[:, ::2]) * exact[:, 1::2]
    found = run(weight, n, x=x, activation=activation, norm=norm, bias=bias)
    assert error(found, exact.relu() if activation == "relu" else exact) < 5e-3


@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize(
    ("n", "dtype"),
    [*((n, torch.float16) for n in (1, 7, 8, 24, 33, 64)), (9, torch.bfloat16)],
)
def test_rows_of_x_are_normalised(
    norm: FusedNorm, n: int, dtype: torch.dtype, build: Build
) -> None:
    """Warpgroups take turns or divide groups, one or more a CTA; rows differ in size and mean."""
    m, k = 180, 520
    weight, bias, residual = (
        normal(*shape, dtype=dtype, scale=0.05) for shape in [(m, k), (m,), (n, m)]
    )
    by_row = torch.linspace(0.5, 2, n)[:, None]
    x = (by_row * (normal(n, k) + by_row)).to(dtype)
    exact = F.linear(scaled(x, norm), weight.double(), bias.double()) + residual.double()
    found = []
    for seed, (row_blocks, even) in enumerate(
        [((23,), True), ((21, 2), True), ((2, 21), True), ((21, 2), False)]
    ):
        variant(build, tiles_for(n), norm=True, dtype=dtype).seed = 1000 * seed
        found.append(
            run(
                weight,
                n,
                row_blocks,
                even=even,
                x=x,
                norm=norm,
                bias=bias,
                residual=residual,
            )
        )
    assert error(found[0], exact) < (5e-4 if dtype == torch.float16 else 4e-3)
    assert all(torch.equal(other, found[0]) for other in found)


@pytest.mark.parametrize("n", [33, 64])
def test_halves_of_k(n: int, build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """By neighbouring CTAs, and by one CTA alone, in one wave and in two."""
    m, k = 317, 1000
    weight, bias, residual = normal(m, k, scale=k**-0.5), normal(m), normal(n, m)
    exact = F.linear(normal(n, k).double(), weight.double(), bias.double()) + residual.double()
    monkeypatch.setattr(splitk_launches, "half_columns", lambda *_: 512)  # also where it is slower
    free, found = (TierAccess(), TierAccess(sms=2)), []
    for seed, (row_blocks, access, even) in enumerate(
        [((40,), ACCESS, True), ((28, 12), free, True), ((27, 13), ACCESS, False)]
    ):
        kernel = variant(build, tiles_for(n))
        kernel.seed, kernel.together = 1001 * seed, SMS - seed
        found.append(run(weight, n, row_blocks, access, even=even, bias=bias, residual=residual))
    assert error(found[0], exact) < 5e-4
    assert all(torch.equal(other, found[0]) for other in found)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"workspace": None}, "a workspace for halves of 8 row blocks"),
        ({"norm": "rms"}, "no norm and a half of K"),
    ],
)
def test_what_halves_of_k_cannot_do(change: dict[str, Any], message: str) -> None:
    weight = normal(64, 1280)
    matrix = packed(weight, (8,), ACCESS[:1], even=True)
    splits = [part.split for part in matrix.parts]
    config = dataclasses.replace(
        gemm_config(64, splits, ACCESS[:1], card=hopper(SMS)), half_cols=512
    )
    given = {"workspace": HalvesWorkspace.empty(config, "cpu"), **change}
    with pytest.raises(ValueError, match=message):
        splitk_gemm(normal(64, 1280), matrix, config, normal(64, 64), **given)


def test_an_unknown_norm_is_refused() -> None:
    with pytest.raises(ValueError, match="a norm of none, rms, layer, got batch"):
        run(normal(8, 64), 1, norm="batch")  # type: ignore[arg-type]


@pytest.mark.parametrize("n", [8, 13, 24, 64])
def test_no_bit_depends_on_how_it_is_run(n: int, build: Build) -> None:
    weight = normal(203, 1416, scale=0.03)
    kernel, wanted = variant(build, tiles_for(n)), run(weight, n)
    assert not wanted.isnan().any()
    windows = (TierAccess(window_bytes=1), TierAccess(1, 64 * 1024))
    for seed, (row_blocks, access, even) in enumerate(
        [
            ((26,), ACCESS, True), ((21, 5), ACCESS, True), ((13, 13), ACCESS, False),
            ((0, 26), ACCESS, True), ((26,), ACCESS, False), ((20, 6), windows, True),
        ]
    ):  # fmt: skip
        kernel.seed = 1000 * seed
        assert torch.equal(run(weight, n, row_blocks, access, even=even), wanted), row_blocks


@pytest.mark.parametrize(
    ("n", "norm"),
    cases(
        itertools.product((8, 13, 24, 64), ("none", "layer")),
        lambda n, norm: n == 8 or norm == ("none" if n == 24 else "layer"),
    ),
)
def test_tiers_that_share_ctas_change_no_bit(n: int, norm: FusedNorm, build: Build) -> None:
    """One CTA, several, and more groups than CTAs; beside a tier that has CTAs of its own."""
    weight = normal(403, 712, scale=0.03)
    wanted = run(weight, n, norm=norm)
    kernel = variant(build, tiles_for(n), norm=norm != "none", mixes=n < 64)
    mixed = (TierAccess(), TierAccess(mixed=True))
    for seed, (row_blocks, access, even) in enumerate(
        [
            ((50, 1), mixed, True), ((1, 50), mixed, True), ((33, 18), mixed, False),
            ((47, 4), mixed, True), ((20, 12, 19), (*mixed, TierAccess(1)), True),
            ((20, 12, 19), (mixed[0], TierAccess(1), mixed[1]), True),
        ]
    ):  # fmt: skip
        kernel.seed = 1000 * seed
        found = run(weight, n, row_blocks, access, even=even, norm=norm)
        assert torch.equal(found, wanted), row_blocks


@few_examples(20)
@given(
    st.integers(1, 60), st.integers(1, 90), st.integers(1, 64), st.booleans(),
    st.sampled_from([None, 1, 40_000]), st.integers(0, 2**31),
)  # fmt: skip
def test_any_shape(
    build: Build, m: int, eights: int, n: int, remote: bool, window: int | None, seed: int
) -> None:
    weight, count = normal(m, 8 * eights, scale=0.1), row_block_count(m)
    row_blocks = (count - count // 2, count // 2) if remote and count > 1 else (count,)
    access = (TierAccess(), TierAccess(1, window))
    variant(build).seed = seed
    exact = normal(n, 8 * eights).double() @ weight.double().T
    assert error(run(weight, n, row_blocks, access), exact) < 1e-3


@pytest.mark.parametrize("row_blocks", [(), (9, 8), (0, 17)])
def test_looking_ahead_changes_nothing(row_blocks: tuple[int, ...]) -> None:
    weight = normal(130, 520, scale=0.05)
    ahead = torch.zeros(4096, dtype=torch.uint8)
    assert run(weight, 8, row_blocks).equal(run(weight, 8, row_blocks, ahead=ahead))


def test_what_is_ahead_is_bytes() -> None:
    with pytest.raises(ValueError, match="ahead as contiguous bytes on x's GPU"):
        run(normal(8, 8), 1, ahead=normal(8, 8))


@pytest.mark.parametrize(("rows", "found"), [(8, 32 * 1024), (64, 0)])
def test_what_is_ahead_follows_the_first_copies(rows: int, found: int) -> None:
    weight = normal(3 * 8 * 16, 1024)
    matrix = packed(weight, (48,), ACCESS[:1], even=True)
    config = gemm_config(rows, [matrix.parts[0].split], ACCESS[:1], card=hopper(SMS))
    ahead = look_ahead(matrix, dataclasses.replace(config, half_cols=512 * (rows == 64)))
    (data,), (ring,) = matrix.parts[0].arrays, config.rings
    first = 1024 * matrix.parts[0].split.wave * ring.atoms * ring.stages
    if found:
        assert ahead is not None and ahead.data_ptr() == data.data_ptr() + first
        assert ahead.numel() == min(3 * found, data.numel() - first) > 0
    else:
        assert ahead is None


def outcome(config: GemmConfig, kernel: EmulatedKernel, seed: int) -> str:
    weight = normal(64, 1280, scale=0.03)
    data = PACKED16.pack(weight, config.splits[0])
    matrix = TieredMatrix(
        (64, 1280), weight.dtype, (MatrixPart("hbm", config.splits[0], PACKED16, data),)
    )
    x, out = normal(8, 1280), torch.full((8, 64), math.nan, dtype=weight.dtype)
    kernel.seed = seed
    try:
        splitk_gemm(x, matrix, config, out, ahead=data[0])
    except AssertionError as problem:
        return str(problem)
    return "right" if error(out, x.double() @ weight.double().T) < 1e-3 else "wrong"


def single(ring: Ring) -> GemmConfig:
    """A launch of one CTA with this ring."""
    splits = split_row_blocks((8,), ACCESS[:1], card=hopper(1))
    config = gemm_config(8, splits, ACCESS[:1], card=hopper(1))
    size = ring_bytes(splits[0], ring, config.x_tiles)
    return dataclasses.replace(config, rings=(ring,), shared_bytes=size)


@pytest.mark.parametrize("atoms", [1, 2])
@pytest.mark.parametrize("stages", [2, 3, 4, 5])
def test_any_number_of_stages(stages: int, atoms: int, build: Build) -> None:
    for window in range(1, stages + 1):
        config = single(Ring(atoms, stages, window))
        for seed in range(2):
            assert outcome(config, variant(build), 50 * seed) == "right"


def test_shared_memory_that_is_too_small_is_found(build: Build) -> None:
    config = single(Ring(2, 5, 5))
    kernel = variant(build)
    short = dataclasses.replace(config, shared_bytes=config.shared_bytes - 4096)
    assert "shared memory at" in outcome(short, kernel, 0)
