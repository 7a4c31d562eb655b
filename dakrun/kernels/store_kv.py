"""Keys and values of prompts into packed slots, with RoPE; wraps native/store_kv.cu.

Knows tokens and where each one's keys and values go, no slots and no requests.
"""

import ctypes
import math

import torch

from dakrun.geometry import CHUNK, ELEMENTWISE_THREADS, HEAD_DIMS
from dakrun.kernels.runtime import jit, operands
from dakrun.units import ceil_div

SOURCE = "store_kv.cu"


class _Args(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("qkv", "positions", "rotations", "places")),
        *((name, ctypes.c_int) for name in ("n", "layer", "q_heads", "kv_heads", "head_dim")),
        ("swizzle", ctypes.c_int),
    )


def store_kv(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    places: torch.Tensor,
    layer: int,
    *,
    kv_heads: int,
    rotations: torch.Tensor | None = None,
) -> None:
    """Store the keys and values of qkv [N, Hq + 2 Hkv, D], 16 bits, as kv_blocks.py packs them.

    Token i, at position positions[i] (int32) of its slot, goes to places[i] (int64 [N, 3]): the
    address of its key in the slot's first head in layer 0, and how many bytes further each layer
    and each head lie. With `rotations`, float32 [P, D / 2, 2], cosines and sines of positions, its
    queries and keys are rotated first, also in `qkv`.
    Raises ValueError where an operand does not fit the others.
    """
    n, heads, dim = qkv.shape
    if dim not in HEAD_DIMS or not 0 < 2 * kv_heads < heads:
        raise ValueError(
            f"expected heads of {HEAD_DIMS}, of queries, keys and values, got {list(qkv.shape)}"
        )
    room = 0 if rotations is None else len(rotations)
    operands.check_operands(
        qkv.device,
        {
            "qkv": (qkv, (n, heads, dim), qkv.dtype),
            "positions": (positions, (n,), torch.int32),
            "places": (places, (n, 3), torch.int64),
            "rotations": (rotations, (room, dim // 2, 2), torch.float32),
        },
    )
    operands.check_gpu(qkv.device)
    q_heads = heads - 2 * kv_heads
    args = _Args(
        qkv=qkv.data_ptr(),
        positions=positions.data_ptr(),
        rotations=0 if rotations is None else rotations.data_ptr(),
        places=places.data_ptr(),
        n=n,
        layer=layer,
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=dim,
        swizzle=math.gcd(dim // CHUNK, 8),
    )
    moved = heads - (q_heads if rotations is None else 0)
    threads = n * moved * (dim // (2 * CHUNK))
    kernel = jit.kernel(SOURCE, "store_kv", operands.defines(qkv.dtype))
    kernel.launch(ceil_div(threads, ELEMENTWISE_THREADS), ELEMENTWISE_THREADS, args)
