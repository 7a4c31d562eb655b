"""SplitK_GEMM over elements of 4 and 8 bits: its CUDA source on the CPU, in many interleavings."""

import dataclasses
import math
import shutil
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from cards import hopper
from cases import cases, few_examples
from emulated import EmulatedKernel, atoms_map
from hypothesis import example, given
from hypothesis import strategies as st
from moved_parts import Movable
from packed_matrices import LAYOUTS, normal, quantised
from torch.nn import functional as F

from dakrun.config import Activation
from dakrun.formats.device_layout import Quantised
from dakrun.geometry import ATOM_BYTES, row_block_count
from dakrun.hardware import LOCAL
from dakrun.kernels.gemm import look_ahead, splitk_gemm

# Inner modules: kernels and tensor maps are replaced, macros are asked for.
from dakrun.kernels.gemm import splitk as gemm
from dakrun.kernels.runtime import jit, operands
from dakrun.launches import GemmConfig, TierAccess, gemm_config, split_row_blocks, tiles_for
from dakrun.memory.matrix import TieredMatrix

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
SMS = 3
HALF = torch.float16
ACCESS = (TierAccess(), TierAccess(sms=2, window_bytes=8 * 1024))
INT4 = Quantised("int4", 128)
NVFP4 = Quantised("e2m1", 16, 1)
Build = Callable[..., EmulatedKernel]


@pytest.fixture(scope="module")
def build(emulated_kernels: Build) -> Build:
    return emulated_kernels


@pytest.fixture(autouse=True)
def on_the_cpu(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "kernel", build)
    monkeypatch.setattr(gemm, "atoms_map", atoms_map)
    monkeypatch.setattr(operands, "check_gpu", lambda _: None)


def variant(build: Build, layout: Quantised, n: int, *, mixes: bool = False) -> EmulatedKernel:
    """The kernel of a variant in float16."""
    macros = gemm.defines(HALF, tiles_for(n), mixes=mixes)
    return build(gemm.SOURCE, "splitk_gemm", {**macros, **layout.macros})


def matrix_of(
    layout: Quantised,
    m: int,
    k: int,
    row_blocks: Sequence[int] = (),
    access: Sequence[TierAccess] = ACCESS,
    *,
    even: bool = True,
    dtype: torch.dtype = HALF,
) -> TieredMatrix:
    """A random matrix, the same wherever its row blocks lie."""
    row_blocks = row_blocks or (row_block_count(m),)
    splits = split_row_blocks(
        row_blocks, access[: len(row_blocks)], card=hopper(SMS, even_waves=even),
        atom_bytes=layout.atom_bytes,
    )  # fmt: skip
    return quantised(layout, m, k, splits, dtype=dtype, device="cpu")


def config_of(matrix: TieredMatrix, n: int, access: Sequence[TierAccess] = ACCESS) -> GemmConfig:
    splits = [part.split for part in matrix.parts]
    return gemm_config(
        n, splits, access[: len(splits)], card=hopper(SMS), atom_bytes=matrix.format.atom_bytes
    )


def run(
    matrix: TieredMatrix,
    n: int,
    access: Sequence[TierAccess] = ACCESS,
    activation: Activation = "none",
    **options: Any,
) -> torch.Tensor:
    """Y of a random X that depends on the shapes alone."""
    m, k = matrix.shape
    x = normal(n, k, dtype=matrix.dtype, device="cpu")
    width = m // 2 if activation == "silu_mul" else m
    out = torch.full((n, width), math.nan, dtype=matrix.dtype)
    config = config_of(matrix, n, access)
    splitk_gemm(x, matrix, config, out, activation=activation, **options)
    return out


def exact(matrix: TieredMatrix, n: int) -> torch.Tensor:
    x = normal(n, matrix.shape[1], dtype=matrix.dtype, device="cpu")
    return x.double() @ matrix.dense().double().T


def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((got.double() - wanted).norm() / wanted.norm()).item()


@pytest.mark.parametrize(
    ("layout", "n"),
    cases(
        [(layout, n) for layout in LAYOUTS for n in (1, 8, 16)],
        lambda layout, n: layout == INT4 or (n == 16 and layout.group * layout.scale_bytes < 65),
    ),
    ids=str,
)
@pytest.mark.parametrize(("m", "k", "shares"), [(203, 1000, 4), (40, 640, 8), (150, 1160, 8)])
def test_it_is_exact(layout: Quantised, n: int, m: int, k: int, shares: int) -> None:
    matrix = matrix_of(layout, m, k)
    four = n > 8 and 2 * layout.atom_bytes >= ATOM_BYTES  # codes of 8 bits
    assert config_of(matrix, n).k_shares == (4 if four else shares)
    assert error(run(matrix, n), exact(matrix, n)) < 7e-4


@pytest.mark.parametrize(
    ("layout", "n"),
    [(INT4, 9), (Quantised("int8", 32, 2, True), 9), (LAYOUTS[-2], 9), (NVFP4, 9), (NVFP4, 7)],
    ids=str,
)
def test_bfloat16(layout: Quantised, n: int) -> None:
    matrix = matrix_of(layout, 90, 520, dtype=torch.bfloat16)
    assert error(run(matrix, n), exact(matrix, n)) < 5e-3


@pytest.mark.parametrize("activation", ["relu", "silu_mul"])
def test_epilogues(activation: Activation) -> None:
    matrix, n = matrix_of(INT4, 90, 520), 13
    bias = normal(90, dtype=HALF, device="cpu")
    wanted = exact(matrix, n) + bias.double()
    if activation == "silu_mul":
        wanted = F.silu(wanted[:, ::2]) * wanted[:, 1::2]
        assert error(run(matrix, n, activation=activation, bias=bias), wanted) < 2e-3
        return
    residual = normal(n, 90, dtype=HALF, device="cpu")
    found = run(matrix, n, activation=activation, bias=bias, residual=residual)
    assert error(found, wanted.relu() + residual.double()) < 7e-4


def test_a_weight_that_is_no_number_spoils_its_row_alone() -> None:
    layout = Quantised("e4m3", 128, 4)
    matrix = matrix_of(layout, 24, 256)
    wanted = run(matrix, 3)
    part = matrix.parts[0]
    codes, scales, _, _ = layout.unpacked(part.arrays[0].view(3, 2, -1).transpose(0, 1))
    codes[9, 200] = 0xFF
    layout.write(part.arrays, part.split, 0, codes, scales.view(torch.float32))
    found = run(matrix, 3)
    assert bool(found[:, 9].isnan().all())
    others = [row for row in range(24) if row != 9]
    assert torch.equal(found[:, others], wanted[:, others])


@pytest.mark.parametrize("n", [8, 13])
def test_no_bit_depends_on_how_it_is_run(n: int, build: Build) -> None:
    """On one tier and several, in full groups and small ones, through windows."""
    kernel, wanted = variant(build, INT4, n), run(matrix_of(INT4, 203, 1416), n)
    assert not wanted.isnan().any()
    windows = (TierAccess(window_bytes=1), TierAccess(1, 64 * 1024))
    for seed, (row_blocks, access, even) in enumerate(
        [
            ((26,), ACCESS, True), ((21, 5), ACCESS, True), ((13, 13), ACCESS, False),
            ((0, 26), ACCESS, True), ((26,), ACCESS, False), ((20, 6), windows, True),
        ]
    ):  # fmt: skip
        kernel.seed = 1000 * seed
        matrix = matrix_of(INT4, 203, 1416, row_blocks, access, even=even)
        assert torch.equal(run(matrix, n, access), wanted), row_blocks


@pytest.mark.parametrize("n", [1, 8])
@pytest.mark.parametrize("k", [1416, 200])  # units: more than shares of K, or fewer
def test_no_bit_of_eight_shares_depends_on_how_it_is_run(n: int, k: int, build: Build) -> None:
    """Also where a tier has so few CTAs that its groups would be taller."""
    kernel, resident = variant(build, INT4, n), matrix_of(INT4, 180, k)
    wanted = run(resident, n)
    assert error(wanted, exact(resident, n)) < 7e-4
    windows = (TierAccess(window_bytes=1), TierAccess(1, 64 * 1024))
    for seed, (row_blocks, access, groups) in enumerate(
        [
            ((0, 23), ACCESS, (1, 6)), ((20, 3), ACCESS, (5, 2)), ((20, 3), windows, (5, 4)),
            ((3, 20), windows, (2, 4)), ((22, 1), windows, (6, 2)),
        ]
    ):  # fmt: skip
        kernel.seed = 1000 * seed
        matrix = matrix_of(INT4, 180, k, row_blocks, access)
        assert tuple(part.split.group for part in matrix.parts) == groups
        assert config_of(matrix, n, access).k_shares == 8
        assert torch.equal(run(matrix, n, access), wanted), row_blocks


def test_groups_too_tall_for_eight_shares_are_refused() -> None:
    matrix = matrix_of(INT4, 180, 256, even=False)
    with pytest.raises(ValueError, match="at most 8 row blocks with 8 shares"):
        run(matrix, 8)


@pytest.mark.parametrize("n", [1, 8])
def test_eight_shares_of_mixed_tiers_change_no_bit(n: int, build: Build) -> None:
    wanted = run(matrix_of(INT4, 180, 712), n)
    kernel = variant(build, INT4, n, mixes=True)
    mixed = (TierAccess(), TierAccess(mixed=True))
    for seed, (row_blocks, access) in enumerate(
        [((22, 1), mixed), ((1, 22), mixed), ((9, 9, 5), (*mixed, TierAccess(1)))]
    ):
        kernel.seed = 1000 * seed
        matrix = matrix_of(INT4, 180, 712, row_blocks, access)
        config = config_of(matrix, n, access)
        assert config.mixes and config.k_shares == 8
        assert torch.equal(run(matrix, n, access), wanted), row_blocks


def test_tiers_that_share_ctas_change_no_bit(build: Build) -> None:
    n, wanted = 8, run(matrix_of(INT4, 403, 712), 8)
    kernel = variant(build, INT4, n, mixes=True)
    mixed = (TierAccess(), TierAccess(mixed=True))
    for seed, (row_blocks, access, even) in enumerate(
        [
            ((50, 1), mixed, True), ((1, 50), mixed, True), ((33, 18), mixed, False),
            ((20, 12, 19), (*mixed, TierAccess(1)), True),
        ]
    ):  # fmt: skip
        kernel.seed = 1000 * seed
        matrix = matrix_of(INT4, 403, 712, row_blocks, access, even=even)
        assert torch.equal(run(matrix, n, access), wanted), row_blocks


def test_parts_that_moved() -> None:
    movable = Movable(matrix_of(INT4, 8 * 27, 200, (16, 11)))
    wanted = run(movable.matrix, 5)
    for _ in range(2):
        movable.move(wanted.device)
        assert torch.equal(run(movable.matrix, 5), wanted)


@example(m=1, eights=92, n=1, remote=False, window=1, seed=92)  # a sum of 736 that cancels out
@few_examples(15)
@given(
    st.integers(1, 60), st.integers(1, 190), st.integers(1, 16), st.booleans(),
    st.sampled_from([None, 1, 20_000]), st.integers(0, 2**31),
)  # fmt: skip
def test_any_shape(
    build: Build, m: int, eights: int, n: int, remote: bool, window: int | None, seed: int
) -> None:
    count = row_block_count(m)
    row_blocks = (count - count // 2, count // 2) if remote and count > 1 else (count,)
    access = (TierAccess(), TierAccess(1, window))
    variant(build, INT4, n).seed = seed
    matrix = matrix_of(INT4, m, 8 * eights, row_blocks, access)
    # Of the size that random sums have: those of a single output may cancel out.
    x = normal(n, 8 * eights, dtype=matrix.dtype, device="cpu").double()
    size = torch.outer(x.norm(dim=1), matrix.dense().double().norm(dim=1)).norm()
    worst = 1e-3 * size / (8 * eights) ** 0.5
    assert (run(matrix, n, access).double() - exact(matrix, n)).norm() < worst


def test_looking_ahead_changes_nothing() -> None:
    matrix = matrix_of(INT4, 8 * 16 * 8, 2048)
    local = dataclasses.replace(matrix.parts[0], tier=LOCAL)
    matrix = dataclasses.replace(matrix, parts=(local,))
    ahead = look_ahead(matrix, config_of(matrix, 8))
    assert ahead is not None and ahead.data_ptr() > matrix.parts[0].arrays[0].data_ptr()
    assert run(matrix, 8).equal(run(matrix, 8, ahead=ahead))


def test_shared_memory_that_is_too_small_is_found(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrix = matrix_of(INT4, 8 * 7, 8192)
    config = config_of(matrix, 8)
    short = dataclasses.replace(config, shared_bytes=config.shared_bytes - 2048)
    monkeypatch.setattr("test_units_emulated.config_of", lambda *_: short)
    with pytest.raises(AssertionError, match="shared memory at"):
        run(matrix, 8)


def test_too_many_rows_are_refused() -> None:
    matrix = matrix_of(INT4, 16, 128)
    with pytest.raises(ValueError, match="at most 16 rows"):
        run(matrix, 17)
