"""Copies of one layer of KV blocks to one buffer; wraps native/copy_blocks.cu."""

import ctypes

import torch

from dakrun.geometry import ELEMENTWISE_THREADS
from dakrun.kernels.runtime import jit, operands
from dakrun.kernels.runtime.needs import Macros, Needs, compiled_ahead

SOURCE = "copy_blocks.cu"
CTAS = 16  # 256 KiB in flight: they saturate a link, and do not hold up reads of HBM


class _Args(ctypes.Structure):
    """CopyBlocksArgs of native/copy_blocks.cu."""

    _fields_ = (
        *operands.pointers("count", "blocks", "to"),
        *operands.fields(ctypes.c_int64, "layer_offset", "bytes"),
        ("ctas", ctypes.c_int),
    )


def copy_blocks(
    count: torch.Tensor,
    blocks: torch.Tensor,
    to: torch.Tensor,
    *,
    layer_offset: int,
    pdl: bool = False,
) -> torch.Tensor:
    """Copy the bytes from `layer_offset` on of the first `count` of `blocks` into `to`.

    `count`, int64 [1], and `blocks`, int64 [n] of addresses, are read on the device; `to` is uint8
    [n, bytes], with a multiple of 16 bytes. With `pdl` the launch may start before its predecessor
    ends.
    Raises ValueError if an operand has the wrong shape, dtype or device.
    """
    operands.check_operands(
        to.device,
        {
            "count": (count, (1,), torch.int64),
            "blocks": (blocks, (len(to),), torch.int64),
            "to": (to, tuple(to.shape), torch.uint8),
        },
    )
    operands.check_gpu(to.device)
    if to.dim() != 2 or to.shape[1] % operands.ALIGNMENT:
        raise ValueError(f"expected rows of a multiple of 16 bytes, got {list(to.shape)}")
    args = _Args(
        count=count.data_ptr(),
        blocks=blocks.data_ptr(),
        to=to.data_ptr(),
        layer_offset=layer_offset,
        bytes=to.shape[1],
        ctas=CTAS,
    )
    jit.kernel(SOURCE, "copy_blocks", {}).launch(CTAS, ELEMENTWISE_THREADS, args, pdl=pdl)
    return to


@compiled_ahead(SOURCE)
def _variants(needs: Needs) -> list[Macros]:
    return [{}]
