"""Greedy sampling of each row's next token, with its bookkeeping; wraps native/select_greedy.cu."""

import ctypes

import torch

from dakrun.geometry import ROW_THREADS
from dakrun.kernels.runtime import jit, operands

SOURCE = "select_greedy.cu"


class _Args(ctypes.Structure):
    _fields_ = (
        *operands.pointers("logits", "tokens", "lengths", "slots", "log"),
        *operands.ints("vocabulary", "depth"),
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
    """tokens [N] = argmax(logits [N, V]): the first of equal maxima; NaN is the largest.

    Logits have a 16-bit dtype; `tokens`, `lengths` and `slots` are int32 [N] on the GPU, `log` is
    int32 [slots, depth] on the GPU or in page-locked memory. A row's token is also written to
    log[slot, length % depth], or NO_TOKEN if its largest logit is NaN or infinite; its length grows
    by 1. Rows with a negative length, without a request, are left as they are. `slots` must be
    valid and distinct; they are not checked, as they are on the device. With `pdl` the launch may
    start before its predecessor ends.
    Raises ValueError if an operand has the wrong shape, dtype, device or alignment.
    """
    if logits.dtype not in operands.DTYPES or logits.dim() != 2 or not logits.numel():
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
