"""The tiled GEMM over elements of 4 and 8 bits: its CUDA source on the CPU."""

import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from cards import hopper
from cases import cases
from emulated import EmulatedKernel, atoms_map, boxes_map, of_name
from packed_matrices import LAYOUTS, normal, quantised

from dakrun.formats.device_layout import Quantised
from dakrun.geometry import row_block_count
from dakrun.kernels.gemm import StreamKWorkspace
from dakrun.kernels.gemm import tiled as tiled_gemm  # for its macros, and to replace tensor maps
from dakrun.kernels.runtime import jit, operands
from dakrun.launches import Launch, Shape, TierAccess, TierTiles, TiledConfig, split_row_blocks
from dakrun.memory.matrix import TieredMatrix

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
Build = Callable[..., EmulatedKernel]
INT4 = Quantised("int4", 128)
NOBODY = TierTiles(0)
ALONG_W = Shape(8, 2, atom_bytes=INT4.atom_bytes)
ALONG_X = replace(ALONG_W, row_groups=1)
SHARING = replace(ALONG_W, ctas_per_sm=2)
SEED = 40


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    return of_name(lambda: tmp_path_factory.mktemp("kernel"))


@pytest.fixture(autouse=True)
def on_the_cpu(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "kernel", build)
    monkeypatch.setattr(tiled_gemm, "atoms_map", atoms_map)
    monkeypatch.setattr(tiled_gemm, "boxes_map", boxes_map)
    monkeypatch.setattr(operands, "check_gpu", lambda _: None)


def matrix_of(
    layout: Quantised,
    m: int,
    k: int,
    row_blocks: Sequence[int] = (),
    dtype: torch.dtype = torch.float16,
) -> TieredMatrix:
    """A random matrix, the same wherever its row blocks lie."""
    row_blocks = row_blocks or (row_block_count(m),)
    access = [TierAccess(sms=2)] * len(row_blocks)
    splits = split_row_blocks(row_blocks, access, card=hopper(3), atom_bytes=layout.atom_bytes)
    return quantised(layout, m, k, splits, dtype=dtype, device="cpu")


def config(*tiers: TierTiles, shape: Shape = ALONG_W, stages: int = 3) -> TiledConfig:
    return TiledConfig((Launch(shape, stages, tiers),))


def run(matrix: TieredMatrix, n: int, how: TiledConfig) -> torch.Tensor:
    """Y of a random X that depends on the shapes alone."""
    m, k = matrix.shape
    x = normal(n, k, dtype=matrix.dtype, device="cpu")
    out = torch.full((n, m), math.nan, dtype=matrix.dtype)
    workspace = StreamKWorkspace.empty(how, "cpu")
    tiled_gemm.tiled_gemm(x, matrix, how, out, workspace=workspace)
    assert not workspace.flags.any()
    return out


def exact(matrix: TieredMatrix, n: int) -> torch.Tensor:
    x = normal(n, matrix.shape[1], dtype=matrix.dtype, device="cpu")
    return x.double() @ matrix.dense().double().T


def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((got.double() - wanted).norm() / wanted.norm()).item()


@pytest.mark.parametrize("layout", [INT4, *LAYOUTS[-4:]], ids=str)
def test_it_is_exact(layout: Quantised) -> None:
    """The last unit and the last row block are not whole, and a tile is smaller than the others."""
    matrix, shape = matrix_of(layout, 203, 456), replace(ALONG_W, atom_bytes=layout.atom_bytes)
    found = run(matrix, 70, config(TierTiles(2, 14, window=3), shape=shape))
    assert error(found, exact(matrix, 70)) < 5e-4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "layout", cases([(layout,) for layout in LAYOUTS], LAYOUTS[-3:].__contains__), ids=str
)
def test_weights_are_rounded_once(layout: Quantised, dtype: torch.dtype) -> None:
    """Rows of X that are zero but for a 1 give columns of W.

    In bfloat16 a float32 scale is two numbers, which have 16 bits together: some weights that lie
    between two numbers become the other one.
    """
    n = 64
    matrix = matrix_of(layout, 203, 456, dtype=dtype)
    columns = torch.randperm(456, generator=torch.Generator().manual_seed(SEED))[:n]
    x, out = torch.zeros(n, 456, dtype=dtype), torch.full((n, 203), math.nan, dtype=dtype)
    x[torch.arange(n), columns] = 1
    how = config(TierTiles(2, 14, window=3), shape=replace(ALONG_W, atom_bytes=layout.atom_bytes))
    tiled_gemm.tiled_gemm(x, matrix, how, out)
    bits, wanted = (  # of 0, not of -0
        (y + 0).view(torch.int16).int() for y in (out, matrix.dense()[:, columns].T.contiguous())
    )
    apart = (bits - wanted).abs()
    assert apart.max() <= 1 and apart.count_nonzero() <= 0.01 * apart.numel()


def test_a_weight_that_is_no_number_spoils_its_row_alone() -> None:
    layout = Quantised("e4m3", 128, 4)
    matrix = matrix_of(layout, 24, 256, dtype=torch.bfloat16)
    part = matrix.parts[0]
    how = config(TierTiles(1, 3), shape=replace(ALONG_W, atom_bytes=layout.atom_bytes))
    wanted = run(matrix, 9, how)
    codes, scales, _, _ = layout.unpacked(part.arrays[0].view(3, 2, -1).transpose(0, 1))
    codes[9, 200] = 0xFF
    layout.write(part.arrays, part.split, 0, codes, scales.view(torch.float32))
    found = run(matrix, 9, how)
    assert bool(found[:, 9].isnan().all())
    others = [row for row in range(24) if row != 9]
    assert torch.equal(found[:, others], wanted[:, others])


@pytest.mark.parametrize(
    ("layout", "shape"),
    [(INT4, ALONG_W), (INT4, ALONG_X), (LAYOUTS[-3], ALONG_W), (LAYOUTS[-1], SHARING)],
    ids=str,
)
def test_no_bit_depends_on_how_it_is_run(layout: Quantised, shape: Shape, build: Build) -> None:
    """Stream-K begins in the middle of units; CTAs share W or X; a tier has a window."""
    m, k, n = 211, 712, 130
    size, shape = shape.row_blocks, replace(shape, atom_bytes=layout.atom_bytes)
    macros = tiled_gemm.defines(torch.float16, shape)
    kernel = build(tiled_gemm.SOURCE, "tiled_gemm", {**macros, **layout.macros})
    kernel.together = 3
    wanted = run(matrix_of(layout, m, k), n, config(TierTiles(1, size, window=3), shape=shape))
    assert error(wanted, exact(matrix_of(layout, m, k), n)) < 5e-4
    for seed, (row_blocks, how) in enumerate(
        [
            ((27,), config(TierTiles(2, size, stream_k=True, window=2), shape=shape, stages=2)),
            ((20, 7), config(TierTiles(1, size), TierTiles(1, 3, window=1), shape=shape)),
            ((27,), config(TierTiles(1, 5, window=3), shape=replace(shape, w_ctas=2))),
        ]
    ):
        kernel.seed = SEED * seed
        assert torch.equal(run(matrix_of(layout, m, k, row_blocks), n, how), wanted), seed


@pytest.mark.parametrize("layout", [INT4, LAYOUTS[-3]], ids=str)
def test_ctas_that_share_an_sm_give_the_same_bits(layout: Quantised) -> None:
    """They go along K unit by unit, and the last one has an atom alone."""
    matrix = matrix_of(layout, 211, 712)
    found = [
        run(matrix, 130, config(TierTiles(2, 14, window=3), shape=shape))
        for shape in (replace(SHARING, atom_bytes=layout.atom_bytes, ctas_per_sm=n) for n in (1, 2))
    ]
    assert torch.equal(*found)


def test_ctas_that_share_w(build: Build) -> None:
    matrix, n = matrix_of(INT4, 211, 712), 200
    wanted = run(matrix, n, config(TierTiles(1, 16, window=3)))
    shared = replace(ALONG_W, x_ctas=2)
    assert torch.equal(run(matrix, n, config(TierTiles(1, 16, window=2), shape=shared)), wanted)


@pytest.mark.parametrize(("layout", "segments"), [(INT4, 2), (INT4, 3), (LAYOUTS[-3], 2)], ids=str)
def test_segments_of_k(layout: Quantised, segments: int) -> None:
    matrix = matrix_of(layout, 211, 712)
    shape = replace(ALONG_W, k_ctas=segments, atom_bytes=layout.atom_bytes)
    found = run(matrix, 70, config(TierTiles(1, 16, window=3), shape=shape))
    assert error(found, exact(matrix, 70)) < 5e-4
    with_window = config(NOBODY, TierTiles(1, 9, window=1), shape=shape)
    moved = matrix_of(layout, 211, 712, (0, 27))
    assert torch.equal(run(moved, 70, with_window), found)
