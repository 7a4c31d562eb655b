"""RMSNorm of query and key heads; wraps native/normalize_heads.cu."""

import ctypes
from typing import NamedTuple

import torch

from dakrun.geometry import CHUNK, ELEMENTWISE_THREADS
from dakrun.kernels.runtime import jit, operands
from dakrun.kernels.runtime.needs import Macros, Needs, compiled_ahead
from dakrun.units import ceil_div

WARP = 32  # threads, of which each has a chunk of a head
SOURCE = "normalize_heads.cu"


class HeadNorms(NamedTuple):
    """RMSNorms of query and key heads: weights [D] and the epsilon."""

    q_weight: torch.Tensor
    k_weight: torch.Tensor
    eps: float


class _Args(ctypes.Structure):
    _fields_ = (
        *operands.pointers("qkv", "q_weight", "k_weight"),
        *operands.ints("n", "q_heads", "kv_heads", "head_dim"),
        ("eps", ctypes.c_float),
    )


def normalize_heads(
    qkv: torch.Tensor,
    norms: HeadNorms,
    *,
    kv_heads: int,
    pdl: bool = False,
) -> None:
    """Normalize the query and key heads of qkv [N, Hq + 2 Hkv, D] in place.

    All operands have one 16-bit dtype and are on one GPU; statistics are float32. A normalized head
    is rounded before it multiplies its weight, as in Qwen3. With `pdl` the launch may start before
    its predecessor ends, and reads the weights early. Raises ValueError if an operand has the wrong
    shape, dtype, device or alignment.
    """
    n, heads, dim = qkv.shape
    q_heads = heads - 2 * kv_heads
    if qkv.dtype not in operands.DTYPES or dim % CHUNK or dim > WARP * CHUNK or q_heads < 1:
        raise ValueError(
            f"expected qkv as [N, Hq + {2 * kv_heads}, D] in 16 bits with D a multiple of {CHUNK} "
            f"up to {WARP * CHUNK}, got {list(qkv.shape)} of {qkv.dtype}"
        )
    wanted: dict[str, operands.Wanted] = {
        "qkv": (qkv, (n, heads, dim), qkv.dtype),
        "q_weight": (norms.q_weight, (dim,), qkv.dtype),
        "k_weight": (norms.k_weight, (dim,), qkv.dtype),
    }
    operands.check_operands(qkv.device, wanted)
    operands.check_gpu(qkv.device)
    ctas = ceil_div(n * (q_heads + kv_heads) * WARP, ELEMENTWISE_THREADS)
    args = _Args(
        qkv=qkv.data_ptr(),
        q_weight=norms.q_weight.data_ptr(),
        k_weight=norms.k_weight.data_ptr(),
        n=n,
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=dim,
        eps=norms.eps,
    )
    kernel = jit.kernel(SOURCE, "normalize_heads", operands.defines(qkv.dtype))
    kernel.launch(ctas, ELEMENTWISE_THREADS, args, pdl=pdl)


@compiled_ahead(SOURCE)
def _variants(needs: Needs) -> list[Macros]:
    return [operands.defines(needs.dtype)]
