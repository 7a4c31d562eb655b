"""Stores keys and values of prompts in KV blocks, with RoPE; wraps native/store_kv.cu.

Knows tokens and the address of each one's keys and values, no slots and no requests.
"""

import ctypes
import math

import torch

from dakrun.geometry import CHUNK, ELEMENTWISE_THREADS, HEAD_DIMS
from dakrun.kernels.runtime import jit, operands
from dakrun.kernels.runtime.needs import Macros, Needs, compiled_ahead
from dakrun.units import ceil_div

SOURCE = "store_kv.cu"


class _Args(ctypes.Structure):
    _fields_ = (
        *operands.pointers("qkv", "positions", "rotations", "kv_addresses"),
        *operands.ints("n", "layer", "q_heads", "kv_heads", "head_dim", "swizzle"),
    )


def store_kv(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    kv_addresses: torch.Tensor,
    layer: int,
    *,
    kv_heads: int,
    rotations: torch.Tensor | None = None,
    pdl: bool = False,
) -> None:
    """Store the keys and values of qkv [N, Hq + 2 Hkv, D], 16-bit, in the layout of kv_blocks.py.

    Token i is at position positions[i] (int32 [N]) of its slot; a negative one says to skip it.
    kv_addresses[i] (int64 [N, 3]) has the address of its key in the slot's first head in layer 0,
    the bytes from layer to layer, and those from head to head. With `rotations`, float32
    [P, D / 2, 2] of cosines and sines per position, queries and keys are rotated first (RoPE), in
    place. With `pdl` the launch may start before its predecessor ends.
    Raises ValueError if an operand has the wrong shape, dtype, device or alignment.
    """
    n, heads, dim = qkv.shape
    if dim not in HEAD_DIMS or not 0 < 2 * kv_heads < heads:
        raise ValueError(
            f"expected qkv as [N, Hq + {2 * kv_heads}, D] with D in {HEAD_DIMS}, got "
            f"{list(qkv.shape)}"
        )
    room = 0 if rotations is None else len(rotations)
    operands.check_operands(
        qkv.device,
        {
            "qkv": (qkv, (n, heads, dim), qkv.dtype),
            "positions": (positions, (n,), torch.int32),
            "kv_addresses": (kv_addresses, (n, 3), torch.int64),
            "rotations": (rotations, (room, dim // 2, 2), torch.float32),
        },
    )
    operands.check_gpu(qkv.device)
    q_heads = heads - 2 * kv_heads
    args = _Args(
        qkv=qkv.data_ptr(),
        positions=positions.data_ptr(),
        rotations=operands.address(rotations),
        kv_addresses=kv_addresses.data_ptr(),
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
    kernel.launch(ceil_div(threads, ELEMENTWISE_THREADS), ELEMENTWISE_THREADS, args, pdl=pdl)


@compiled_ahead(SOURCE)
def _variants(needs: Needs) -> list[Macros]:
    return [operands.defines(needs.dtype)]
