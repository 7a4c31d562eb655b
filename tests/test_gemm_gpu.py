"""SplitK_GEMM on a GPU: as exact as cuBLAS, and the same bits wherever its weight lies and however
it is run: eagerly or in a graph, alone or overlapping the launches around it.
"""

import ctypes
import itertools
import math
import random
from typing import Any

import pytest
import torch
from cards import here
from packed_linear import ACCESS, all_sms, linear, normal, poisoned, same_bits, written
from product_checks import (
    CHAIN,
    EPILOGUES,
    EPS,
    FEW_SMS,
    SHAPES,
    chain,
    check,
    check_shapes,
    placements,
    run_of_chain,
)

from dakrun.geometry import row_block_count
from dakrun.kernels.gemm import NORMS, FusedNorm, splitk_gemm
from dakrun.kernels.runtime import DTYPES
from dakrun.launches import TierAccess, gemm_config, split_row_blocks
from dakrun.launches import splitk as splitk_launches

pytestmark = pytest.mark.gpu
KIB = 1024
ROWS = (1, 3, 7, 8, 13, 16, 24, 32, 33, 48, 64)
CHAINS = ((1, 0), (16, 0), (24, 0), (64, 0), (64, 512))  # rows, columns of the first half of K
PROGRAMMATIC = 1  # CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC


@pytest.mark.parametrize("sms", [0, FEW_SMS])
@pytest.mark.parametrize("n", ROWS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_errors_are_at_most_twice_those_of_cublas(dtype: torch.dtype, n: int, sms: int) -> None:
    check_shapes(linear, n, dtype, sms=sms)


@pytest.mark.parametrize("sms", [0, FEW_SMS])
@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("n", ROWS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_err_at_most_twice_as_much_as_before_cublas(
    dtype: torch.dtype, n: int, norm: FusedNorm, sms: int
) -> None:
    for m, k in SHAPES:
        for epilogue in [("none", True, False), ("relu", True, True), ("silu_mul", False, False)]:
            if m % 2 == 0 or epilogue[0] != "silu_mul":
                check(linear(m, k, dtype, sms=sms), n, m, k, dtype, epilogue, norm=norm)


@pytest.mark.parametrize("sms", [0, FEW_SMS])
@pytest.mark.parametrize("n", [33, 48, 64])
@pytest.mark.parametrize("dtype", DTYPES)
def test_halves_of_k(dtype: torch.dtype, n: int, sms: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splitk_launches, "half_columns", lambda *_: 512)
    for m, k in [(264, 1000), (776, 2048), (1544, 1096), (4104, 4096)]:
        for epilogue in EPILOGUES:
            check(linear(m, k, dtype, sms=sms), n, m, k, dtype, epilogue)


@pytest.mark.parametrize("window", [None, 1])
@pytest.mark.parametrize("m", [24, 40, 72])
@pytest.mark.parametrize("n", [8, 64])
def test_rings_of_any_number_of_turns(n: int, m: int, window: int | None) -> None:
    """On one SM, with few and with many stages for a group."""
    for k in [64 * i for i in range(1, 50)] + [4096, 8200]:
        run = linear(m, k, torch.float16, access=(TierAccess(window_bytes=window),), sms=1)
        check(run, n, m, k, torch.float16, ("none", False, False))


@pytest.mark.parametrize("norm", ["none", "layer"])
@pytest.mark.parametrize("sms", [0, FEW_SMS])
@pytest.mark.parametrize("n", [1, 13, 24, 33, 64])
@pytest.mark.parametrize(("m", "k"), [(1, 8), (1000, 200), (776, 2048)])
def test_no_bit_depends_on_where_a_weight_lies(
    m: int, k: int, n: int, sms: int, norm: FusedNorm
) -> None:
    dtype = torch.float16
    x = normal(n, k, dtype=dtype)
    added = {"bias": normal(m, dtype=dtype), "residual": normal(n, m, dtype=dtype)}
    options: dict[str, Any] = {**added, "norm": norm, "eps": EPS}
    expected = linear(m, k, dtype, sms=sms)(x, poisoned(n, m, dtype), **options)
    assert written(expected)
    for row_blocks in placements(row_block_count(m)):
        run = linear(m, k, dtype, row_blocks, sms=sms)
        out = run(x, poisoned(n, m, dtype), **options)
        assert same_bits(out, expected) and written(out), row_blocks


@pytest.mark.parametrize(("n", "half"), [(3, 0), (16, 0), (24, 0), (64, 0), (64, 512)])
def test_no_bit_depends_on_windows_sms_or_groups(
    n: int, half: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(splitk_launches, "half_columns", lambda _, cols, *__: cols and half)
    m, k, dtype = 1544, 1096, torch.bfloat16
    x = normal(n, k, dtype=dtype)
    expected = linear(m, k, dtype)(x, poisoned(n, m, dtype))
    windows = (1, 64 * KIB, 256 * KIB, None)
    for window, sms, even_waves in itertools.product(windows, (1, 5, 100), (True, False)):
        access = (TierAccess(window_bytes=window), TierAccess(sms, window))
        run = linear(m, k, dtype, (101, 92), access=access, even_waves=even_waves)
        out = run(x, poisoned(n, m, dtype))
        assert same_bits(out, expected) and written(out), (window, sms, even_waves)


@pytest.mark.parametrize("norm", ["none", "rms"])
@pytest.mark.parametrize("n", [3, 16, 24, 64])
def test_no_bit_depends_on_which_ctas_read_a_tier(n: int, norm: FusedNorm) -> None:
    """The local CTAs also read one of two remote tiers, in one wave and in several."""
    m, k, dtype = 1544, 1096, torch.float16
    x = normal(n, k, dtype=dtype)
    options: dict[str, Any] = {"norm": norm, "eps": EPS, "pdl": True}
    expected = linear(m, k, dtype)(x, poisoned(n, m, dtype), **options)
    for row_blocks, mixed, sms in itertools.product(
        [(100, 40, 53), (191, 1, 1), (1, 2, 190)], (1, 2), (7, 60, 0)
    ):
        access = tuple(
            TierAccess(sms=2 if number else None, mixed=number == mixed) for number in range(3)
        )
        run = linear(m, k, dtype, row_blocks, access=access, sms=sms)
        out = run(x, poisoned(n, m, dtype), **options)
        assert same_bits(out, expected) and written(out), (row_blocks, mixed, sms)


@pytest.mark.parametrize("count", [2, len(CHAIN)])  # of two, each launch overwrites what was read
@pytest.mark.parametrize(("n", "half"), CHAINS)
def test_overlapping_launches_change_no_bit(
    n: int, half: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(splitk_launches, "half_columns", lambda _, cols, *__: cols and half)
    x, outs, expected = run_of_chain(linear, n, count, norms=NORMS)
    for delay in range(20):
        for out in outs:
            out.fill_(math.nan)
        torch.cuda._sleep(1000 * delay)  # cycles
        chain(linear, x, outs, pdl=True, norms=NORMS)
        assert all(map(same_bits, outs, expected)), delay


class Edge(ctypes.Structure):
    """CUgraphEdgeData."""

    _fields_ = (
        ("from_port", ctypes.c_uint8),
        ("to_port", ctypes.c_uint8),
        ("type", ctypes.c_uint8),
        ("reserved", ctypes.c_uint8 * 5),
    )


def edge_types(graph: torch.cuda.CUDAGraph) -> list[int]:
    """Types of a captured graph's edges, by ctypes: cuda.bindings returns freed memory."""
    driver, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_size_t()
    handle = ctypes.c_void_p(int(graph.raw_cuda_graph()))
    assert driver.cuGraphGetEdges_v2(handle, None, None, None, ctypes.byref(count)) == 0
    nodes, edges = (ctypes.c_void_p * count.value), (Edge * count.value)()
    assert driver.cuGraphGetEdges_v2(handle, nodes(), nodes(), edges, ctypes.byref(count)) == 0
    return [edge.type for edge in edges]


@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize(("n", "half"), CHAINS)
def test_a_graph_changes_no_bit(
    n: int, half: int, pdl: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(splitk_launches, "half_columns", lambda _, cols, *__: cols and half)
    x, outs, expected = run_of_chain(linear, n, len(CHAIN), norms=NORMS)
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        chain(linear, x, outs, pdl=pdl, norms=NORMS)
    assert edge_types(graph) == [PROGRAMMATIC * pdl] * (len(CHAIN) - 1)
    for _ in range(3):
        for out in outs:
            out.fill_(math.nan)
        graph.replay()
        assert all(map(same_bits, outs, expected))


@pytest.mark.parametrize(("n", "half"), CHAINS)
def test_a_thousand_replays_under_delays(
    n: int, half: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(splitk_launches, "half_columns", lambda _, cols, *__: cols and half)
    x, outs, expected = run_of_chain(linear, n, 3, norms=NORMS)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for out in outs:
            out.fill_(math.nan)
        chain(linear, x, outs, pdl=True, norms=NORMS)
    chosen, aside = random.Random(n), torch.cuda.Stream()
    noise = torch.zeros(1 << 22, device="cuda")
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    for _ in range(1000):
        with torch.cuda.stream(aside):
            for _ in range(4):
                torch.cuda._sleep(chosen.randrange(50_000))  # cycles
                noise[: chosen.randrange(noise.numel())].add_(1)  # on all SMs, beside the chain
        if chosen.random() < 0.3:
            torch.cuda._sleep(chosen.randrange(20_000))
        graph.replay()
        for out, wanted in zip(outs, expected, strict=True):
            wrong += (out.view(torch.int16) != wanted.view(torch.int16)).any()
    assert wrong.item() == 0


@pytest.mark.parametrize(
    ("m", "k", "change", "message"),
    [
        (64, 128, {"x": (8, 128, "cpu")}, "expected out as .* on cpu, got .* on cuda:0"),
        (64, 128, {"out": (8, 64, "cpu")}, "expected out as .* on cuda:0, got .* on cpu"),
        (64, 12, {}, "columns in multiples of 8 .*got 12 columns"),
        (64, 128, {"activation": "silu_mul"}, r"expected out as \[8, 32\] .*got \[8, 64\]"),
        (
            64, 128, {"activation": "silu_mul", "out": (8, 32), "residual": (8, 64)},
            "no residual with silu_mul",
        ),
        (65, 128, {"activation": "silu_mul", "out": (8, 32)}, "an even number of rows"),
        (64, 128, {"x": (64, 128), "out": (64, 64)}, "is not one for 64 rows and this weight"),
        (64, 128, {"config": 1}, "is not one for 8 rows and this weight"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(m: int, k: int, change: dict[str, Any], message: str) -> None:
    run = linear(m, k, torch.float16)
    given: dict[str, Any] = {"x": (8, k), "out": (8, m), "config": all_sms(), **change}
    for name in {"x", "out", "residual"} & set(given):
        rows, cols, device = (*given[name], "cuda")[:3]
        given[name] = torch.zeros(rows, cols, dtype=torch.float16, device=device)
    splits = split_row_blocks((row_block_count(m),), ACCESS[:1], card=here(given["config"]))
    given["config"] = gemm_config(8, splits, ACCESS[:1], card=here(given["config"]))
    with pytest.raises(ValueError, match=message):
        splitk_gemm(weight=run.weight, **given)
