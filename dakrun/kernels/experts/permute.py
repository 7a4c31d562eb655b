"""Rows by expert, and the sum of a row's experts; wraps native/permute.cu."""

import ctypes

import torch

from dakrun.geometry import CHUNK, ELEMENTWISE_THREADS
from dakrun.kernels.runtime import jit, operands
from dakrun.kernels.runtime.needs import Macros, Needs, compiled_ahead
from dakrun.units import ceil_div

SOURCE = "permute.cu"


class _PermuteArgs(ctypes.Structure):
    _fields_ = (
        *operands.pointers("x", "pairs", "out"),
        *operands.ints("cols", "top_k", "row_ctas"),
    )


class _CombineArgs(ctypes.Structure):
    _fields_ = (
        *operands.pointers("products", "pairs", "weights", "residual", "out"),
        *operands.ints("cols", "top_k", "row_ctas"),
    )


def permute(
    x: torch.Tensor, pairs: torch.Tensor, out: torch.Tensor, *, pdl: bool = False
) -> torch.Tensor:
    """out [N k, K]: rows of x [N, K] in the order of pairs, as a router numbers them.

    `pairs`, int32 [N, k], are the pairs of each row (Routed). Rows behind the last pair are left
    as they are. With `pdl` the launch may start before its predecessor ends; the next one starts
    when all that came before this launch is complete. Raises ValueError for a wrong shape, dtype,
    device or alignment.
    """
    (n, cols), top_k = x.shape, pairs.shape[1]
    _check(x, pairs, {"out": (out, (n * top_k, cols), x.dtype)})
    row_ctas = ceil_div(cols, CHUNK * ELEMENTWISE_THREADS)
    args = _PermuteArgs(
        x=x.data_ptr(), pairs=pairs.data_ptr(), out=out.data_ptr(),
        cols=cols, top_k=top_k, row_ctas=row_ctas,
    )  # fmt: skip
    kernel = jit.kernel(SOURCE, "permute", operands.defines(x.dtype))
    kernel.launch(n * row_ctas, ELEMENTWISE_THREADS, args, pdl=pdl)
    return out


def combine(
    products: torch.Tensor,
    pairs: torch.Tensor,
    weights: torch.Tensor,
    residual: torch.Tensor,
    out: torch.Tensor,
    *,
    pdl: bool = False,
) -> torch.Tensor:
    """out [N, K] = residual [N, K] + the sum of each row's `products` [N k, K] by its `weights`.

    `pairs`, int32 [N, k], are a row's pairs, `weights`, float32 [N k], those of the pairs. Sums
    are float32, in the order of `pairs`, rounded once. `out` may be the residual. With `pdl` the
    launch may start before its predecessor ends. Raises ValueError for a wrong shape, dtype, device
    or alignment.
    """
    (n, cols), top_k = residual.shape, pairs.shape[1]
    wanted: dict[str, operands.Wanted] = {
        "products": (products, (n * top_k, cols), residual.dtype),
        "weights": (weights, (n * top_k,), torch.float32),
        "out": (out, (n, cols), residual.dtype),
    }
    _check(residual, pairs, wanted)
    row_ctas = ceil_div(cols, CHUNK * ELEMENTWISE_THREADS)
    args = _CombineArgs(
        products=products.data_ptr(), pairs=pairs.data_ptr(), weights=weights.data_ptr(),
        residual=residual.data_ptr(), out=out.data_ptr(),
        cols=cols, top_k=top_k, row_ctas=row_ctas,
    )  # fmt: skip
    kernel = jit.kernel(SOURCE, "combine", operands.defines(residual.dtype))
    kernel.launch(n * row_ctas, ELEMENTWISE_THREADS, args, pdl=pdl)
    return out


def _check(rows: torch.Tensor, pairs: torch.Tensor, wanted: dict[str, operands.Wanted]) -> None:
    """Check `rows` [N, K], `pairs` [N, k] and the other operands."""
    (n, cols), top_k = rows.shape, pairs.shape[1]
    if rows.dtype not in operands.DTYPES or cols % CHUNK or not rows.numel():
        raise ValueError(
            f"expected rows of 16-bit elements in multiples of {CHUNK}, got {list(rows.shape)} of "
            f"{rows.dtype}"
        )
    wanted = {"rows": (rows, (n, cols), rows.dtype), **wanted}
    wanted["pairs"] = (pairs, (n, top_k), torch.int32)
    operands.check_operands(rows.device, wanted)
    operands.check_gpu(rows.device)


@compiled_ahead(SOURCE)
def _variants(needs: Needs) -> list[Macros]:
    return [operands.defines(needs.dtype)] if needs.every or needs.routing else []
