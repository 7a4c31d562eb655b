"""The tiled GEMM on a GPU: as exact as cuBLAS, and the same bits wherever its weight lies and
however it is run: in any tiles, eagerly or in a graph, alone or overlapping the launches around it.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from cards import here
from packed_linear import Linear, all_sms, linear, normal, poisoned, same_bits, written
from product_checks import CHAIN, FEW_SMS, chain, check, check_shapes, placements, run_of_chain

from dakrun.geometry import TILED_THREADS, TILED_WIDE_TILES, TILED_X_TILES, row_block_count
from dakrun.hardware import BARRIER_BYTES, Card
from dakrun.kernels.gemm import StreamKWorkspace, tiled_gemm
from dakrun.kernels.gemm.tiled import SOURCE, defines
from dakrun.kernels.runtime import DTYPES, kernel
from dakrun.launches import (
    Launch,
    Shape,
    TierAccess,
    TiledConfig,
    local_tier,
    shapes,
    tiled_config,
    wide_tiles,
    x_tiles,
)

pytestmark = pytest.mark.gpu
ROWS = (33, 64, 65, 100, 128, 129, 256, 300, 512, 1000, 4096)


class Shared:
    """One workspace for all launches; each leaves its flags zero."""

    def __init__(self) -> None:
        self.found: StreamKWorkspace | None = None

    def __call__(self, config: TiledConfig) -> StreamKWorkspace:
        if self.found is None:
            size = 2 * all_sms() * 32 * 4096
            flags = torch.zeros(2 * all_sms() * 8, dtype=torch.int32, device="cuda")
            poison = torch.full((size,), 0xFF, dtype=torch.uint8, device="cuda")
            self.found = StreamKWorkspace(poison, flags)
        assert self.found.fits(config)
        return self.found


SHARED = Shared()


@pytest.fixture(autouse=True)
def flags_are_left_zero() -> Iterator[None]:
    yield
    if SHARED.found is not None:
        assert not SHARED.found.flags.any()


@dataclass(frozen=True)
class Tiled:
    """A packed weight and how its tiers are read."""

    of: Linear

    def __call__(self, x: torch.Tensor, out: torch.Tensor, **options: Any) -> torch.Tensor:
        config = options.pop("config", None) or self.config(x.shape[0])
        return tiled_gemm(x, self.of.weight, config, out, workspace=SHARED(config), **options)

    def config(self, n: int, **options: Any) -> TiledConfig:
        row_blocks = [part.split.row_blocks for part in self.of.weight.parts]
        card = replace(here(), **options)
        return tiled_config(n, row_blocks, self.of.access, cols=self.of.weight.shape[1], card=card)


def tiled(*args: Any, **options: Any) -> Tiled:
    return Tiled(linear(*args, **options))


def test_the_card_has_the_clusters_that_the_kernel_runs_in() -> None:
    """Of one CTA per SM; a small kernel stands in for this one where the driver is asked."""
    card = here()
    tiles = kernel(SOURCE, "tiled_gemm", defines(torch.float16, Shape(8, 1)))
    sizes = range(2, card.max_cluster + 1)
    found = [tiles.clusters(n, TILED_THREADS, card.shared_bytes - BARRIER_BYTES) for n in sizes]
    assert tuple(found) == card.clusters and card.max_clusters(1) == all_sms()


@pytest.mark.parametrize("n", ROWS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_errors_are_at_most_twice_those_of_cublas(dtype: torch.dtype, n: int) -> None:
    check_shapes(tiled, n, dtype)


def local(run: Tiled, n: int, shape: Shape, sms: int, card: Card, *, stream_k: bool) -> TiledConfig:
    """A launch for a weight that is all in HBM, as given."""
    (part,), cols = run.of.weight.parts, run.of.weight.shape[1]
    tier = local_tier(
        n, part.split.row_blocks, shape, -(-cols // 64), replace(card, sms=sms), stream_k=stream_k
    )
    launch = Launch(shape, shape.stages(card, tier.tile_row_blocks), (tier,))
    return TiledConfig((launch.with_max_blocks(card),))


@pytest.mark.parametrize(
    "kernel", [*((n, False) for n in TILED_X_TILES), *((n, True) for n in TILED_WIDE_TILES)]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_shape(dtype: torch.dtype, kernel: tuple[int, bool]) -> None:
    """With the shared memory of this GPU, and of a small one; few and many tiles, shared or not.

    Bits depend on segments alone.
    """
    if kernel not in ((shape.tiles, shape.wide) for shape in shapes(here())):
        pytest.skip("no such tiles on this GPU")
    m, k = 784, 1000  # half of m is a multiple of 8, too
    run = tiled(m, k, dtype, sms=FEW_SMS)
    for n in (65, 300, 1000):
        found: dict[int, torch.Tensor] = {}
        for card in (here(), replace(here(), shared_bytes_per_sm=100 * 1024)):
            options = [shape for shape in shapes(card) if (shape.tiles, shape.wide) == kernel]
            for shape, sms, stream_k in itertools.product(
                options, (8, FEW_SMS, all_sms()), (False, True)
            ):
                config = local(run, n, shape, sms, card, stream_k=stream_k)
                epilogue = ("silu_mul", True, False) if stream_k else ("relu", True, True)
                check(run, n, m, k, dtype, epilogue, config=config)
                check(run, n, m, k, dtype, (epilogue[0], False, False), config=config)
                x, bias = normal(n, k, dtype=dtype), normal(m, dtype=dtype)
                out = run(x, poisoned(n, m, dtype), bias=bias, config=config)
                assert same_bits(out, found.setdefault(shape.k_ctas, out)), (
                    n,
                    shape,
                    sms,
                    stream_k,
                )


@pytest.mark.parametrize(
    "shape",
    [
        *(Shape(8, 1), Shape(32, 2), Shape(32, 2, 2), Shape(16, 1), Shape(32, 1, 1, 8)),
        *(Shape(24, 1, wide=True), Shape(28, 1, 2, wide=True)),
    ],
)
def test_partial_tiles_of_stream_k(shape: Shape) -> None:
    """In repeated launches, beside other launches' CTAs."""
    wgmma = here().has_wgmma
    if shape.tiles not in (wide_tiles(wgmma=wgmma) if shape.wide else x_tiles(wgmma=wgmma)):
        pytest.skip("no such tiles on this GPU")
    m, k, n, dtype = 4104, 1096, 1500, torch.float16
    run = tiled(m, k, dtype)
    x, bias = normal(n, k, dtype=dtype), normal(m, dtype=dtype)
    wanted = run(
        x, poisoned(n, m, dtype), bias=bias,
        config=local(run, n, Shape(8, 2), all_sms(), here(), stream_k=False),
    )  # fmt: skip
    seen = set()
    for sms in (all_sms(), *range(8, all_sms(), 12)):
        config = local(run, n, shape, sms, here(), stream_k=True)
        seen.add(config.launches[0].tiers[0].stream_k)
        for _ in range(3):
            out = poisoned(n, m, dtype)
            for _ in range(3):
                run(x, out, bias=bias, config=config, pdl=True)
            assert written(out) and same_bits(out, wanted), sms
    assert True in seen


@pytest.mark.parametrize("n", [65, 300, 600, 1000, 2048, 4096])
@pytest.mark.parametrize("row_blocks", [(0, 193), (97, 96), (150, 23, 20), (0, 100, 93)])
def test_multicast_changes_no_bit(n: int, row_blocks: tuple[int, ...]) -> None:
    m, k, dtype = 1544, 1096, torch.float16
    x, residual = normal(n, k, dtype=dtype), normal(n, m, dtype=dtype)
    expected = tiled(m, k, dtype)(x, poisoned(n, m, dtype), residual=residual)
    run = tiled(m, k, dtype, row_blocks)
    for multicast, pdl in itertools.product((False, True), repeat=2):
        config = run.config(n, multicast=multicast)
        out = poisoned(n, m, dtype)
        for _ in range(3):
            run(x, out, residual=residual, config=config, pdl=pdl)
        assert written(out) and same_bits(out, expected), (multicast, pdl)


@pytest.mark.parametrize("epilogue", [("relu", True, True), ("silu_mul", True, False)])
@pytest.mark.parametrize("n", [65, 300, 1000])
def test_no_bit_depends_on_where_the_weight_lies(n: int, epilogue: Any) -> None:
    m, k, dtype = 1544, 1096, torch.float16
    activation, _, added = epilogue
    x = normal(n, k, dtype=dtype)
    options = {
        "bias": normal(m, dtype=dtype),
        "residual": normal(n, m, dtype=dtype) if added else None,
        "activation": activation,
    }
    width = m // 2 if activation == "silu_mul" else m
    expected = tiled(m, k, dtype)(x, poisoned(n, width, dtype), **options)
    assert written(expected)
    for row_blocks, sms in itertools.product(placements(row_block_count(m)), (0, FEW_SMS)):
        out = tiled(m, k, dtype, row_blocks, sms=sms)(x, poisoned(n, width, dtype), **options)
        assert same_bits(out, expected) and written(out), (row_blocks, sms)


@pytest.mark.parametrize("n", [65, 300])
def test_no_bit_depends_on_windows_sms_or_groups(n: int) -> None:
    m, k, dtype = 1544, 1096, torch.bfloat16
    x = normal(n, k, dtype=dtype)
    expected = tiled(m, k, dtype)(x, poisoned(n, m, dtype))
    windows = (1, 64 * 1024, 256 * 1024, None)
    for window, sms, even_waves in itertools.product(windows, (1, 5, 100), (True, False)):
        access = (
            TierAccess(window_bytes=window),
            TierAccess(sms, window),
        )
        run = tiled(m, k, dtype, (101, 92), access=access, even_waves=even_waves)
        config = run.config(n, even_waves=even_waves)
        out = run(x, poisoned(n, m, dtype), config=config)
        assert same_bits(out, expected) and written(out), (window, sms, even_waves)


@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("count", [2, len(CHAIN)])  # of two, each launch overwrites what was read
@pytest.mark.parametrize("n", [65, 300])
def test_a_graph_changes_no_bit(n: int, count: int, pdl: bool) -> None:
    x, outs, expected = run_of_chain(tiled, n, count)
    chain(tiled, x, outs, pdl=pdl)
    assert all(map(same_bits, outs, expected))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain(tiled, x, outs, pdl=pdl)
    for delay in range(20):
        for out in outs:
            out.fill_(math.nan)
        torch.cuda._sleep(1000 * delay)  # cycles
        graph.replay()
        assert all(map(same_bits, outs, expected)), delay


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": (80, 128, "cpu")}, "expected out as .* on cpu, got .* on cuda:0"),
        ({"out": (80, 64, "cpu")}, "expected out as .* on cuda:0, got .* on cpu"),
        ({"activation": "silu_mul"}, r"expected out as \[80, 32\] .*got \[80, 64\]"),
        ({"x": (5000, 128), "out": (5000, 64)}, "is not one for 5000 rows and this weight"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    run = tiled(64, 128, torch.float16)
    given: dict[str, Any] = {"x": (80, 128), "out": (80, 64), **change}
    for name in ("x", "out"):
        rows, cols, device = (*given[name], "cuda")[:3]
        given[name] = torch.zeros(rows, cols, dtype=torch.float16, device=device)
    with pytest.raises(ValueError, match=message):
        tiled_gemm(weight=run.of.weight, config=run.config(80), **given)
