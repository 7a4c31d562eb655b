"""Tokens of a step with drafts whose choice follows from those before; wraps select_in_order.cu."""

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
    """Choose tokens [N] after logits [N, V] as select_token does, of slots that it leaves out.

    Each `width` rows are of one slot: their logits follow `drafts`, int32 [N], its newest token and
    tokens that may come next. Slots with a TokenMask or adjustments get a token after each of
    these up to the first draft that was not chosen; rows behind it are left as they are. The other
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


@compiled_ahead(SOURCE)
def _variants(needs: Needs) -> list[Macros]:
    return [operands.defines(needs.dtype)] if needs.every else []
