"""Single ops on a CPU, in plain torch: both tiers are its memory, so that ratios change nothing."""

import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from dakrun.lab.evaluate.cases import attention_case, product_case
from dakrun.lab.evaluate.points import AttentionPoint, Point, ProductPoint, Result
from dakrun.lab.evaluate.scope import Scope

RUNS = 3
NO_TECHNIQUE = "a technique of GPUs"
NO_SMS = "a CPU has no SMs"


def op_on_cpu(point: Point, scope: Scope) -> Result:
    """Measure a product or decode attention; other points have no meaning on a CPU."""
    if getattr(point, "without", ()):
        return Result(source="measured", problem=NO_TECHNIQUE)
    match point:
        case ProductPoint():
            return _product(point, scope)
        case AttentionPoint():
            return _attention(point, scope)
    return Result(source="measured", problem=NO_SMS)


def _product(point: ProductPoint, scope: Scope) -> Result:
    case = product_case(scope, point)
    dtype = getattr(torch, scope.models[point.model].dtype)
    x = torch.randn(point.n, case.shape.cols, dtype=dtype)
    weight = torch.randn(case.shape.rows, case.shape.cols, dtype=dtype)
    local, remote = (weight.nbytes * count / sum(case.units) for count in case.units)
    return Result(
        source="measured",
        seconds=_median_s(lambda: F.linear(x, weight)),
        ratio=case.ratio,
        weight_bytes=weight.nbytes,
        read_bytes=local + remote,
        remote_bytes=remote,
        link_bytes=remote,
    )


def _attention(point: AttentionPoint, scope: Scope) -> Result:
    case, model = attention_case(scope, point), scope.models[point.model]
    dtype = getattr(torch, model.dtype)
    q = torch.randn(point.batch_size, model.num_heads, 1, model.head_dim, dtype=dtype)
    size = (point.batch_size, model.num_kv_heads, point.length, model.head_dim)
    k, v = torch.randn(size, dtype=dtype), torch.randn(size, dtype=dtype)
    grouped = model.num_heads > model.num_kv_heads
    nbytes = k.nbytes + v.nbytes
    return Result(
        source="measured",
        seconds=_median_s(lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=grouped)),
        ratio=case.ratio,
        read_bytes=nbytes,
        remote_bytes=nbytes * case.ratio,
        link_bytes=nbytes * case.ratio,
    )


def _median_s(launch: Callable[[], object]) -> float:
    """Median seconds of RUNS calls, after one to warm up."""
    launch()
    times = []
    for _ in range(RUNS):
        start = time.perf_counter()
        launch()
        times.append(time.perf_counter() - start)
    return statistics.median(times)
