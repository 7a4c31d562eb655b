"""SplitK_GEMM on a GPU: as exact as cuBLAS, and the same bits wherever its weight lies and however
it is run: eagerly or in a graph, alone or overlapping the launches around it.
"""

import ctypes
import itertools
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from packed_linear import (
    ACCESS,
    all_sms,
    linear,
    normal,
    poisoned,
    same_bits,
    weight_of,
    written,
)
from torch.nn import functional as F

from dakrun.kernels import heuristics
from dakrun.kernels.gemm import NORMS, Norm, splitk_gemm
from dakrun.kernels.heuristics import TierAccess, gemm_config, split_octets
from dakrun.kernels.packing import DTYPES
from dakrun.octets import octet_count

pytestmark = pytest.mark.gpu
KIB = 1024
ROWS = (1, 3, 7, 8, 13, 16, 24, 32, 33, 48, 64)
FEW_SMS = 16  # by which large matrices are dealt out as larger ones are to a whole GPU
SHAPES = ((1, 8), (30, 72), (1000, 200), (264, 1000), (776, 2048), (4104, 4096))
EPILOGUES = [
    (activation, *operands)
    for activation in ("none", "relu", "silu_mul")
    for operands in itertools.product((False, True), repeat=2)
    if activation != "silu_mul" or not operands[1]
]
EPS = 0.01
CHAINS = ((1, 0), (16, 0), (24, 0), (64, 0), (64, 512))  # rows, columns of the first half of sums
PROGRAMMATIC = 1  # CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC
WIDTH = 1024  # of the matrices of a chain
CHAIN = ((128,), (64, 64), (0, 128), (127, 1), (128,), (43, 43, 42)) * 2  # their octets per tier


def scaled(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    """x, each row scaled as `norm` does, reckoned in float32 or more."""
    if norm == "none":
        return x
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    spread = wide.var(1, correction=0) if norm == "layer" else wide.square().mean(1)
    return (wide * (spread + EPS).rsqrt()[:, None]).to(x.dtype)


def reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    activation: str,
    norm: Norm,
) -> torch.Tensor:
    y = F.linear(scaled(x, norm), weight, bias)
    if activation == "relu":
        y = F.relu(y)
    elif activation == "silu_mul":
        y = F.silu(y[:, ::2]) * y[:, 1::2]
    return y if residual is None else y + residual


def check(
    run: Callable[..., torch.Tensor],
    n: int,
    m: int,
    k: int,
    dtype: torch.dtype,
    epilogue: Any,
    norm: Norm = "none",
) -> None:
    """Errors of `run` against float64 are at most twice those of cuBLAS."""
    activation, biased, added = epilogue
    x, weight = normal(n, k, dtype=dtype), weight_of(m, k, dtype)
    bias = normal(m, dtype=dtype) if biased else None
    residual = normal(n, m, dtype=dtype) if added else None
    out = poisoned(n, m // 2 if activation == "silu_mul" else m, dtype)
    run(x, out, bias=bias, residual=residual, activation=activation, norm=norm, eps=EPS)
    operands = (x, weight, bias, residual)
    exact = reference(*(None if t is None else t.double() for t in operands), activation, norm)
    errors = [
        (y.double() - exact).abs().max().item()
        for y in (out, reference(*operands, activation, norm))
    ]
    assert written(out), (m, k, epilogue)
    assert errors[0] <= 2 * errors[1] + 1e-6, (m, k, epilogue)


@pytest.mark.parametrize("sms", [0, FEW_SMS])
@pytest.mark.parametrize("n", ROWS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_errors_are_at_most_twice_those_of_cublas(dtype: torch.dtype, n: int, sms: int) -> None:
    for (m, k), epilogue in itertools.product(SHAPES, EPILOGUES):
        if m % 2 == 0 or epilogue[0] != "silu_mul":
            check(linear(m, k, dtype, sms=sms), n, m, k, dtype, epilogue)


@pytest.mark.parametrize("sms", [0, FEW_SMS])
@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("n", ROWS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_err_at_most_twice_as_much_as_before_cublas(
    dtype: torch.dtype, n: int, norm: Norm, sms: int
) -> None:
    for m, k in SHAPES:
        for epilogue in [("none", True, False), ("relu", True, True), ("silu_mul", False, False)]:
            if m % 2 == 0 or epilogue[0] != "silu_mul":
                check(linear(m, k, dtype, sms=sms), n, m, k, dtype, epilogue, norm)


@pytest.mark.parametrize("sms", [0, FEW_SMS])
@pytest.mark.parametrize("n", [33, 48, 64])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_of_halves(
    dtype: torch.dtype, n: int, sms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heuristics, "half_columns", lambda *_: 512)
    for m, k in [(264, 1000), (776, 2048), (1544, 1096), (4104, 4096)]:
        for epilogue in EPILOGUES:
            check(linear(m, k, dtype, sms=sms), n, m, k, dtype, epilogue)


@pytest.mark.parametrize("window", [None, 1])
@pytest.mark.parametrize("m", [24, 40, 72])
@pytest.mark.parametrize("n", [8, 64])
def test_rings_of_any_number_of_turns(n: int, m: int, window: int | None) -> None:
    """On one SM that takes few and many stages for a group of octets."""
    for k in [64 * i for i in range(1, 50)] + [4096, 8200]:
        run = linear(m, k, torch.float16, access=(TierAccess(window_bytes=window),), sms=1)
        check(run, n, m, k, torch.float16, ("none", False, False))


@pytest.mark.parametrize("norm", ["none", "layer"])
@pytest.mark.parametrize("sms", [0, FEW_SMS])
@pytest.mark.parametrize("n", [1, 13, 24, 33, 64])
@pytest.mark.parametrize(("m", "k"), [(1, 8), (1000, 200), (776, 2048)])
def test_no_bit_depends_on_where_a_weight_lies(
    m: int, k: int, n: int, sms: int, norm: Norm
) -> None:
    count, third, dtype = octet_count(m), octet_count(m) // 3, torch.float16
    x = normal(n, k, dtype=dtype)
    added = {"bias": normal(m, dtype=dtype), "residual": normal(n, m, dtype=dtype)}
    options: dict[str, Any] = {**added, "norm": norm, "eps": EPS}
    expected = linear(m, k, dtype, sms=sms)(x, poisoned(n, m, dtype), **options)
    assert written(expected)
    for octets in [
        (count, 0), (count - 1, 1), (count - count // 2, count // 2), (0, count),
        (third, 0, count - third), (third, third, count - 2 * third),
    ]:  # fmt: skip
        run = linear(m, k, dtype, octets, sms=sms)
        out = run(x, poisoned(n, m, dtype), **options)
        assert same_bits(out, expected) and written(out), octets


@pytest.mark.parametrize(("n", "half"), [(3, 0), (16, 0), (24, 0), (64, 0), (64, 512)])
def test_no_bit_depends_on_windows_sms_or_groups(
    n: int, half: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heuristics, "half_columns", lambda _, cols, *__: cols and half)
    m, k, dtype = 1544, 1096, torch.bfloat16
    x = normal(n, k, dtype=dtype)
    expected = linear(m, k, dtype)(x, poisoned(n, m, dtype))
    windows = (1, 64 * KIB, 256 * KIB, None)
    for window, sms, aligned in itertools.product(windows, (1, 5, 100), (True, False)):
        access = (TierAccess(window_bytes=window), TierAccess(sms, window))
        run = linear(m, k, dtype, (101, 92), access=access, aligned=aligned)
        out = run(x, poisoned(n, m, dtype))
        assert same_bits(out, expected) and written(out), (window, sms, aligned)


def chain(x: torch.Tensor, outs: Sequence[torch.Tensor], *, overlap: bool) -> None:
    """Launches each of which reads what the one before wrote, and writes the next of `outs`."""
    steps = zip(CHAIN, itertools.cycle(outs), itertools.cycle(NORMS), strict=False)
    for octets, out, norm in steps:
        run = linear(WIDTH, WIDTH, x.dtype, octets)
        run(x, out, residual=x, activation="relu", norm=norm, eps=EPS, overlap=overlap)
        x = out


def run_of_chain(n: int, count: int) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
    """x, poisoned outputs, and what comes to stand in them without overlap."""
    x = normal(n, WIDTH, dtype=torch.float16)
    expected, outs = ([poisoned(n, WIDTH, x.dtype) for _ in range(count)] for _ in range(2))
    chain(x, expected, overlap=False)
    assert all(written(out) for out in expected)
    return x, outs, expected


@pytest.mark.parametrize("count", [2, len(CHAIN)])  # of two, each launch overwrites what was read
@pytest.mark.parametrize(("n", "half"), CHAINS)
def test_overlapping_launches_change_no_bit(
    n: int, half: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heuristics, "half_columns", lambda _, cols, *__: cols and half)
    x, outs, expected = run_of_chain(n, count)
    for delay in range(20):
        for out in outs:
            out.fill_(math.nan)
        torch.cuda._sleep(1000 * delay)  # cycles
        chain(x, outs, overlap=True)
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
    """Of the edges between the nodes of a captured graph; cuda.bindings gives freed memory."""
    driver, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_size_t()
    handle = ctypes.c_void_p(int(graph.raw_cuda_graph()))
    assert driver.cuGraphGetEdges_v2(handle, None, None, None, ctypes.byref(count)) == 0
    nodes, edges = (ctypes.c_void_p * count.value), (Edge * count.value)()
    assert driver.cuGraphGetEdges_v2(handle, nodes(), nodes(), edges, ctypes.byref(count)) == 0
    return [edge.type for edge in edges]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("n", "half"), CHAINS)
def test_a_graph_changes_no_bit(
    n: int, half: int, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heuristics, "half_columns", lambda _, cols, *__: cols and half)
    x, outs, expected = run_of_chain(n, len(CHAIN))
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        chain(x, outs, overlap=overlap)
    assert edge_types(graph) == [PROGRAMMATIC * overlap] * (len(CHAIN) - 1)
    for _ in range(3):
        for out in outs:
            out.fill_(math.nan)
        graph.replay()
        assert all(map(same_bits, outs, expected))


@pytest.mark.parametrize(("n", "half"), CHAINS)
def test_a_thousand_replays_under_delays(
    n: int, half: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heuristics, "half_columns", lambda _, cols, *__: cols and half)
    x, outs, expected = run_of_chain(n, 3)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for out in outs:
            out.fill_(math.nan)
        chain(x, outs, overlap=True)
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
        (64, 12, {}, "columns in eights, got 12 on cuda:0"),
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
    splits = split_octets((octet_count(m),), ACCESS[:1], sms=given["config"])
    given["config"] = gemm_config(8, splits, ACCESS[:1], sms=given["config"])
    with pytest.raises(ValueError, match=message):
        splitk_gemm(weight=run.weight, **given)
