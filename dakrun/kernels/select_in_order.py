"""Tokens of a step with drafts that depend on the token before; wraps select_in_order.cu."""

import ctypes

import torch

from dakrun.geometry import ROW_THREADS
from dakrun.kernels.runtime import jit, operands
from dakrun.kernels.runtime.needs import Macros, Needs, compiled_ahead
from dakrun.kernels.select_token import SAMPLING_WORDS, mask_words

SOURCE = "select_in_order.cu"


class _Args(ctypes.Structure):
    _fields_ = (
        *operands.pointers("logits", "drafts", "tokens", "lengths", "slots", "log", "sampling"),
        *operands.ints("vocabulary", "depth", "width"),
    )


def select_in_order(
    logits: torch.Tensor,
    drafts: torch.Tensor,
    tokens: torch.Tensor,
    lengths: torch.Tensor,
    slots: torch.Tensor,
    log: torch.Tensor,
    sampling: torch.Tensor,
    *,
    width: int,
) -> None:
    """Choose tokens [N] from logits [N, V], of the slots that select_token leaves to this kernel.

    These are slots with a TokenMask or adjustments. Each `width` consecutive rows are of one slot.
    Row i has the logits behind drafts[i], int32 [N]: the slot's newest token in the first row,
    drafts in the others. A slot gets a token in each row, up to the row before the first draft
    that differs from the token chosen before it; later rows are left as they are. The other
    operands are those of select_token.
    Raises ValueError if an operand has the wrong shape, dtype or device.
    """
    n, vocabulary = logits.shape
    depth = log.shape[1]
    if n % width:
        raise ValueError(f"expected rows of {width} tokens, got {n} tokens")
    operands.check_operands(
        logits.device,
        {
            "logits": (logits, (n, vocabulary), logits.dtype),
            "drafts": (drafts, (n,), torch.int32),
            "tokens": (tokens, (n,), torch.int32),
            "lengths": (lengths, (n,), torch.int32),
            "slots": (slots, (n,), torch.int32),
            "sampling": (sampling, (len(log), SAMPLING_WORDS), torch.int32),
        },
    )
    operands.check_gpu(logits.device)
    args = _Args(
        logits=logits.data_ptr(),
        drafts=drafts.data_ptr(),
        tokens=tokens.data_ptr(),
        lengths=lengths.data_ptr(),
        slots=slots.data_ptr(),
        log=log.data_ptr(),
        sampling=sampling.data_ptr(),
        vocabulary=vocabulary,
        depth=depth,
        width=width,
    )
    kernel = jit.kernel(SOURCE, "select_in_order", operands.defines(logits.dtype))
    kernel.launch(n // width, ROW_THREADS, args, shared_bytes=4 * mask_words(vocabulary))


@compiled_ahead(SOURCE, seconds=4)
def _variants(needs: Needs) -> list[Macros]:
    return [operands.defines(needs.dtype)] if needs.every else []
