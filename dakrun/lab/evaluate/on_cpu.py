"""Single ops on a CPU, in plain torch: both tiers are its memory, so that ratios change nothing."""

import statistics

import torch
import torch.nn.functional as F

from dakrun.lab.cases import Weight
from dakrun.lab.evaluate.cases import case_of
from dakrun.lab.evaluate.points import AttentionPoint, Point, ProductPoint, Result
from dakrun.lab.evaluate.scope import Scope
from dakrun.lab.samples import call_seconds

RUNS = 3
NO_TECHNIQUE = "a technique of GPUs"
NO_SMS = "a CPU has no SMs"


def op_on_cpu(point: Point, scope: Scope) -> Result:
    """Measure a product or decode attention; other points have no meaning on a CPU."""
    if getattr(point, "without", ()):
        return Result(source="measured", problem=NO_TECHNIQUE)
    if not isinstance(point, ProductPoint | AttentionPoint):
        return Result(source="measured", problem=NO_SMS)
    case = case_of(scope, point)
    operand, dtype = case.operand, getattr(torch, case.dtype)
    if isinstance(operand, Weight):
        x = torch.randn(operand.n, operand.cols, dtype=dtype)
        data = torch.randn(operand.rows, operand.cols, dtype=dtype)
        launch, nbytes = (lambda: F.linear(x, data)), data.nbytes
    else:
        size = (operand.batch, operand.kv_heads, operand.length, operand.head_dim)
        q = torch.randn(operand.batch, operand.heads, 1, operand.head_dim, dtype=dtype)
        k, v = torch.randn(2, *size, dtype=dtype)
        grouped, nbytes = operand.heads > operand.kv_heads, k.nbytes + v.nbytes
        launch = lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=grouped)  # noqa: E731
    return Result(
        source="measured",
        seconds=statistics.median(call_seconds(launch, RUNS)),
        ratio=case.ratio,
        weight_bytes=nbytes if isinstance(operand, Weight) else None,
        read_bytes=nbytes,
        remote_bytes=nbytes * case.ratio,
    )
