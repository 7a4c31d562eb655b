"""The next token of each row of logits, and what follows from it; wraps native/select_greedy.cu."""

import ctypes

import torch

from dakrun.geometry import ROW_THREADS
from dakrun.kernels.gemm.packing import DTYPES
from dakrun.kernels.runtime import jit, operands

SOURCE = "select_greedy.cu"


class _Args(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("logits", "tokens", "lengths", "slots", "log")),
        *((name, ctypes.c_int) for name in ("vocabulary", "depth")),
    )


def select_greedy(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    lengths: torch.Tensor,
    slots: torch.Tensor,
    log: torch.Tensor,
    *,
    pdl: bool = False,
) -> torch.Tensor:
    """tokens [N] = the first of the largest of logits [N, V], as torch.argmax has it; NaN is.

    Logits are of a 16-bit dtype, all else is int32: `tokens`, `lengths` and `slots` [N] on the GPU,
    `log` [slots, depth] there or in page-locked memory. A row's token also becomes
    log[slot, length % depth], and its length one more. Rows of negative lengths, without a request,
    are left as they are. The caller sees to it that slots are the log's, each in one row: they are
    on the device. With `pdl` the launch may start while the kernel before it ends.
    Raises ValueError where an operand does not fit the others.
    """
    if logits.dtype not in DTYPES or logits.dim() != 2 or not logits.numel():
        raise ValueError(
            f"expected logits as [N, V] in 16 bits, got {list(logits.shape)} of {logits.dtype}"
        )
    n, vocabulary = logits.shape
    if log.dim() != 2 or log.dtype != torch.int32 or not log.numel() or not log.is_contiguous():
        raise ValueError(
            f"expected a contiguous log as [slots, depth] of torch.int32, got {list(log.shape)} of "
            f"{log.dtype}"
        )
    operands.check_operands(
        logits.device,
        {
            "logits": (logits, (n, vocabulary), logits.dtype),
            "tokens": (tokens, (n,), torch.int32),
            "lengths": (lengths, (n,), torch.int32),
            "slots": (slots, (n,), torch.int32),
        },
    )
    operands.check_gpu(logits.device)
    args = _Args(
        logits=logits.data_ptr(),
        tokens=tokens.data_ptr(),
        lengths=lengths.data_ptr(),
        slots=slots.data_ptr(),
        log=log.data_ptr(),
        vocabulary=vocabulary,
        depth=log.shape[1],
    )
    kernel = jit.kernel(SOURCE, "select_greedy", operands.defines(logits.dtype))
    kernel.launch(n, ROW_THREADS, args, pdl=pdl)
    return tokens
