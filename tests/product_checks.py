"""Checks of products on a GPU: errors against cuBLAS's for every epilogue, and a chain of launches
over matrices in several tiers.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from packed_linear import normal, poisoned, weight_of, written
from torch.nn import functional as F

from dakrun.kernels.gemm import FusedNorm

Run = Callable[..., torch.Tensor]  # of x, out and options
Epilogue = tuple[str, bool, bool]  # the activation, and whether there are bias and residual

FEW_SMS = 16  # give small matrices as many waves as large ones have on a whole GPU
SHAPES = ((1, 8), (30, 72), (1000, 200), (264, 1000), (776, 2048), (4104, 4096))
EPILOGUES: list[Epilogue] = [
    (activation, *operands)
    for activation in ("none", "relu", "silu_mul")
    for operands in itertools.product((False, True), repeat=2)
    if activation != "silu_mul" or not operands[1]
]
EPS = 0.01
WIDTH = 1024  # of the matrices of a chain
CHAIN = (
    (128,),
    (64, 64),
    (0, 128),
    (127, 1),
    (128,),
    (43, 43, 42),
) * 2  # their row blocks per tier


def check(
    run: Run,
    n: int,
    m: int,
    k: int,
    dtype: torch.dtype,
    epilogue: Epilogue,
    *,
    norm: FusedNorm = "none",
    **options: Any,
) -> None:
    """Errors of `run` against float64 are at most twice those of cuBLAS."""
    activation, biased, added = epilogue
    x, weight = normal(n, k, dtype=dtype), weight_of(m, k, dtype)
    bias = normal(m, dtype=dtype) if biased else None
    residual = normal(n, m, dtype=dtype) if added else None
    out = poisoned(n, m // 2 if activation == "silu_mul" else m, dtype)
    options |= _options(norm)
    run(x, out, bias=bias, residual=residual, activation=activation, **options)
    operands = (x, weight, bias, residual)
    exact = _reference(*(None if t is None else t.double() for t in operands), activation, norm)
    errors = [
        (y.double() - exact).abs().max().item()
        for y in (out, _reference(*operands, activation, norm))
    ]
    assert written(out), (n, m, k, epilogue)
    assert errors[0] <= 2 * errors[1] + 1e-6, (n, m, k, epilogue)


def check_shapes(of: Callable[..., Run], n: int, dtype: torch.dtype, **options: Any) -> None:
    """Check all SHAPES and EPILOGUES; `of` makes a run from a shape and `options`."""
    for (m, k), epilogue in itertools.product(SHAPES, EPILOGUES):
        if m % 2 == 0 or epilogue[0] != "silu_mul":
            check(of(m, k, dtype, **options), n, m, k, dtype, epilogue)


def chain(
    of: Callable[..., Run],
    x: torch.Tensor,
    outs: Sequence[torch.Tensor],
    *,
    pdl: bool,
    norms: Sequence[FusedNorm] = ("none",),
) -> None:
    """Launch CHAIN: each launch reads its predecessor's output and writes the next of `outs`."""
    for row_blocks, out, norm in zip(
        CHAIN, itertools.cycle(outs), itertools.cycle(norms), strict=False
    ):
        run = of(WIDTH, WIDTH, x.dtype, row_blocks)
        run(x, out, residual=x, activation="relu", pdl=pdl, **_options(norm))
        x = out


def run_of_chain(
    of: Callable[..., Run], n: int, count: int, **options: Any
) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
    """x, poisoned outputs, and the outputs expected, from a chain without PDL."""
    x = normal(n, WIDTH, dtype=torch.float16)
    expected, outs = ([poisoned(n, WIDTH, x.dtype) for _ in range(count)] for _ in range(2))
    chain(of, x, expected, pdl=False, **options)
    assert all(written(out) for out in expected)
    return x, outs, expected


def placements(count: int) -> list[tuple[int, ...]]:
    """Placements of `count` row blocks in up to three tiers, not all in the first."""
    third = count // 3
    return [
        (count, 0), (count - 1, 1), (count - count // 2, count // 2), (0, count),
        (third, 0, count - third), (third, third, count - 2 * third),
    ]  # fmt: skip


def _options(norm: FusedNorm) -> dict[str, Any]:
    return {} if norm == "none" else {"norm": norm, "eps": EPS}


def _scaled(x: torch.Tensor, norm: FusedNorm) -> torch.Tensor:
    """x, each row scaled as `norm` does, in float32 or wider."""
    if norm == "none":
        return x
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    spread = wide.var(1, correction=0) if norm == "layer" else wide.square().mean(1)
    return (wide * (spread + EPS).rsqrt()[:, None]).to(x.dtype)


def _reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    activation: str,
    norm: FusedNorm,
) -> torch.Tensor:
    y = F.linear(_scaled(x, norm), weight, bias)
    if activation == "relu":
        y = F.relu(y)
    elif activation == "silu_mul":
        y = F.silu(y[:, ::2]) * y[:, 1::2]
    return y if residual is None else y + residual
