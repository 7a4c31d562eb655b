"""An RMSNorm between products over elements of 4 and 8 bits: both products' source, on the CPU."""

import math
import shutil
from typing import Any

import pytest
import torch
from cases import cases
from packed_matrices import FEW_LAYOUTS, normal
from test_units_emulated import (  # noqa: F401  (fixtures)
    HALF,
    INT4,
    Build,
    build,
    config_of,
    error,
    matrix_of,
    on_the_cpu,
    variant,
)
from torch.nn import functional as F

from dakrun.formats.device_layout import Quantised
from dakrun.geometry import ROWS_PER_BLOCK
from dakrun.kernels.gemm import ScaledRows, factor_of, splitk_gemm
from dakrun.launches import TierAccess
from dakrun.memory.matrix import TieredMatrix
from dakrun.models.functional import rms_norm

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
EPS = 1e-5
MIXED = (TierAccess(), TierAccess(mixed=True))
TWO = (TierAccess(), TierAccess(sms=2, window_bytes=8 * 1024))
TIERS: list[tuple[tuple[int, ...], tuple[TierAccess, ...]]] = [
    ((21, 5), TWO), ((0, 26), TWO), ((13, 13), (TierAccess(window_bytes=1), TierAccess(1, 64))),
    ((25, 1), MIXED), ((1, 25), MIXED),
]  # fmt: skip


def poisoned(n: int, weight: torch.Tensor) -> ScaledRows:
    found = ScaledRows.empty(n, weight)
    found.rows.fill_(math.nan)
    found.squares[:, : -(-len(weight) // ROWS_PER_BLOCK)] = math.nan
    return found


def run(
    matrix: TieredMatrix,
    x: torch.Tensor,
    access: tuple[TierAccess, ...] = TWO,
    *,
    gated: bool = False,
    **options: Any,
) -> torch.Tensor:
    m, n = matrix.shape[0], len(x)
    out = torch.full((n, m // 2 if gated else m), math.nan, dtype=matrix.dtype)
    config = config_of(matrix, n, access)
    if gated:
        options["activation"] = "silu_mul"
    return splitk_gemm(x, matrix, config, out, **options)


def weight_of(cols: int, dtype: torch.dtype, size: float = 3.0) -> torch.Tensor:
    return size * normal(cols, dtype=dtype, device="cpu").abs() + 0.1


def block_sums(x: torch.Tensor) -> torch.Tensor:
    padded = F.pad(x.double().square(), (0, -x.shape[1] % ROWS_PER_BLOCK))
    return padded.view(len(x), -1, ROWS_PER_BLOCK).sum(-1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("n", [1, 3, 8, 16])
@pytest.mark.parametrize(
    ("layout", "m", "k"),
    cases(
        [(layout, m, k) for layout in FEW_LAYOUTS for m, k in ((203, 712), (90, 520), (256, 256))],
        lambda layout, m, k: layout == INT4 or m == 90,
    ),
    ids=str,
)
def test_the_first_product(layout: Quantised, m: int, k: int, n: int, dtype: torch.dtype) -> None:
    """Its outputs are as ever, and the others exact for them; rows in full and ragged blocks."""
    matrix, weight = matrix_of(layout, m, k, dtype=dtype), weight_of(m, dtype)
    x, residual = (normal(n, cols, dtype=dtype, device="cpu") for cols in (k, m))
    scales, added = poisoned(n, weight), residual.clone()
    wanted = run(matrix, x, residual=residual)
    config = config_of(matrix, n)
    found = splitk_gemm(x, matrix, config, added, residual=added, scales=scales)  # in place
    assert torch.equal(found, wanted) and not wanted.isnan().any()
    exact = (wanted.float() * (weight.float() * scales.factor)).to(dtype)
    assert torch.equal(scales.rows, exact)
    sums = block_sums(wanted)
    squares, pads = scales.squares.split(
        (sums.shape[1], scales.squares.shape[1] - sums.shape[1]), 1
    )
    torch.testing.assert_close(squares.double(), sums, rtol=1e-6, atol=0)
    assert not pads.any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("n", [1, 3, 8, 16])
@pytest.mark.parametrize(
    ("layout", "m", "k"),
    cases(
        [(layout, m, k) for layout in FEW_LAYOUTS for m, k in ((202, 712), (90, 520), (40, 1032))],
        lambda layout, m, k: layout == INT4 or m == 90,
    ),
    ids=str,
)
@pytest.mark.parametrize("gated", [False, True])
def test_the_second_product(
    layout: Quantised, m: int, k: int, n: int, dtype: torch.dtype, gated: bool
) -> None:
    """At most twice as far from the exact result as a norm and a product that round between."""
    matrix, weight = matrix_of(layout, m, k, dtype=dtype), weight_of(k, dtype)
    x, bias = (normal(*size, dtype=dtype, device="cpu") for size in ((n, k), (m,)))
    x *= torch.logspace(-2, 2, n, dtype=dtype)[:, None]
    scaled = ScaledRows.empty(n, weight)
    scaled.rows.copy_(x.float() * (weight.float() * scaled.factor))
    scaled.squares[:, : -(-k // ROWS_PER_BLOCK)] = block_sums(x)
    found = run(matrix, scaled.rows, gated=gated, bias=bias, scaled=scaled, eps=EPS)

    def product(normed: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        y = F.linear(normed, by, bias.to(by.dtype))
        return F.silu(y[:, ::2]) * y[:, 1::2] if gated else y

    exact = product(rms_norm(x.double(), weight.double(), EPS), matrix.dense().double())
    rounded = product(rms_norm(x, weight, EPS), matrix.dense().to(dtype))
    assert error(found, exact) <= 2 * error(rounded, exact)


@pytest.mark.parametrize("n", [1, 8, 13])
def test_no_bit_depends_on_tiers(n: int, build: Build) -> None:  # noqa: F811
    """Of both products, which pass rows and sums on to each other."""
    weight = weight_of(208, HALF)
    x = normal(n, 264, dtype=HALF, device="cpu")

    def both(row_blocks: tuple[int, ...] = (), access: tuple[TierAccess, ...] = TWO) -> Any:
        scales = poisoned(n, weight)
        first = matrix_of(INT4, 208, 264, row_blocks, access)
        residual = normal(n, 208, dtype=HALF, device="cpu")
        y = run(first, x, access, residual=residual, scales=scales)
        second = matrix_of(INT4, 208, 208, row_blocks, access)
        return (
            y,
            scales.rows,
            scales.squares,
            run(second, scales.rows, access, scaled=scales, eps=EPS),
        )

    wanted = both()
    assert not any(tensor.isnan().any() for tensor in wanted)
    for seed, (row_blocks, access) in enumerate(TIERS):
        variant(build, INT4, n, mixes=access == MIXED).seed = 1000 * seed
        found = both(row_blocks, access)
        assert all(map(torch.equal, found, wanted)), row_blocks


@pytest.mark.parametrize(
    ("weight", "factor"),
    [([0.3, -0.7], 1.0), ([1.0], 1.0), ([1.01], 0.5), ([-5.0, 2.0], 0.125), ([0.06], 16.0),
     ([0.25], 4.0), ([0.0], 1.0), ([math.nan], 1.0), ([math.inf, 1.0], 1.0)],
)  # fmt: skip
def test_factors(weight: list[float], factor: float) -> None:
    assert factor_of(torch.tensor(weight)) == factor


def test_rows_that_do_not_fit_are_refused() -> None:
    matrix, weight = matrix_of(INT4, 64, 128), weight_of(128, HALF)
    scaled = ScaledRows.empty(2, weight)
    x = normal(2, 128, dtype=HALF, device="cpu")
    with pytest.raises(ValueError, match="x to be the scaled rows"):
        run(matrix, x, scaled=scaled)
    with pytest.raises(ValueError, match=r"expected scaled rows as \[2, 64\]"):
        run(matrix, x, scales=scaled)
    with pytest.raises(ValueError, match="silu_mul"):
        run(matrix, x, gated=True, scales=ScaledRows.empty(2, weight_of(64, HALF)))
    with pytest.raises(ValueError, match=r"squares as \[2, 16\]"):
        short = ScaledRows(scaled.rows, scaled.squares[:, :8], weight, 1.0)
        run(matrix, scaled.rows, scaled=short)
