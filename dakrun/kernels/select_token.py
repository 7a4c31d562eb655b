"""The choice of each row's next token, with its bookkeeping; wraps native/select_token.cu."""

import ctypes
import math
import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch

from dakrun.config import SamplingParams
from dakrun.geometry import ROW_THREADS
from dakrun.kernels.runtime import jit, operands
from dakrun.kernels.runtime.needs import Macros, Needs, compiled_ahead
from dakrun.units import ceil_div

SOURCE = "select_token.cu"


class _Args(ctypes.Structure):
    _fields_ = (
        *operands.pointers("logits", "tokens", "lengths", "slots", "log", "newest", "sampling"),
        *operands.ints("vocabulary", "depth", "adjusts"),
    )


SAMPLING_WORDS = 14  # int32 words of a slot's sampling parameters


class TokenMask(NamedTuple):
    """Where the kernel finds which tokens a slot's grammar allows; both addresses are page-locked.

    bits: address of int32 [mask_words(V)]: bit t % 32 of word t // 32 is set if token t is allowed.
    ready: address of an int32, the slot's counter. The bits are those of position p (0 is the first
    token of the prompt) from when the counter is at least `base` + p; until then the kernel waits.
    Write the bits first. As `base` may differ between requests, the counter need not go back, so
    that steps of an ended request which are still in flight never wait; -1 ends every wait.
    """

    bits: int
    ready: int
    base: int = 0


def mask_words(vocabulary: int) -> int:
    """int32 words of a mask of tokens."""
    return ceil_div(vocabulary, 32)


def sampling_words(
    params: SamplingParams,
    seed: int,
    mask: TokenMask | None = None,
    adjustments: torch.Tensor | None = None,
) -> tuple[int, ...]:
    """Sampling of native/sampling.cuh: how tokens of a request with a 64-bit `seed` are chosen.

    They are int32, all 0 for a greedy one without a `mask` or `adjustments`, which are on the GPU.
    """
    bits, ready, base = mask or (0, 0, 0)
    drawn = (0.0, 0, 0.0, base, 0)
    log_min_p = 0.0
    if params.temperature > 0:
        top_k = min(params.top_k, 2**31 - 1)
        drawn = (params.temperature, top_k, params.top_p, base, seed)
        log_min_p = math.log(params.min_p) if params.min_p > 0 else -math.inf
    address = operands.address(adjustments)
    packed = struct.pack("<fifiQQQQfi", *drawn, bits, ready, address, log_min_p, 0)
    return struct.unpack(f"<{SAMPLING_WORDS}i", packed)


def without_options(words: Sequence[int]) -> tuple[int, ...]:
    """sampling_words without a mask and adjustments, whose memory may have been freed."""
    return (*words[:6], *[0] * 6, *words[12:])


def select_token(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    lengths: torch.Tensor,
    slots: torch.Tensor,
    log: torch.Tensor,
    sampling: torch.Tensor | None = None,
    newest: torch.Tensor | None = None,
    *,
    adjusts: bool = True,
    pdl: bool = False,
) -> torch.Tensor:
    """tokens [N] = argmax(logits [N, V]): the first of equal maxima; NaN is the largest.

    A slot s whose sampling[s] has a temperature gets a token drawn for position length + 1 instead,
    as by engine.sampler.sample; `sampling` is int32 [slots, SAMPLING_WORDS] (sampling_words). One
    with a TokenMask gets one of the tokens that are allowed, once the mask is there; one with
    `adjustments` gets one by these.
    Logits have a 16-bit dtype; `tokens`, `lengths` and `slots` are int32 [N] on the GPU, `log` is
    int32 [slots, depth] on the GPU or in page-locked memory. A row's token is also written to
    log[slot, length % depth], or NO_TOKEN if its largest logit is NaN or infinite, or NONE_ALLOWED;
    its length grows by 1. `newest`, int32 [slots] on the GPU, also gets the slots' tokens.
    Rows with a negative length, without a request, are left as they are. `slots` must be valid and
    distinct; they are not checked, as they are on the device. Without `adjusts`, rows with a
    TokenMask or adjustments are left as they are, and `slots` need not be distinct (see
    select_in_order). With `pdl` the launch may start before its predecessor ends.
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
    if sampling is not None:
        words: operands.Wanted = (sampling, (len(log), SAMPLING_WORDS), torch.int32)
        operands.check_operands(logits.device, {"sampling": words})
    if newest is not None:
        by_slot: operands.Wanted = (newest, (len(log),), torch.int32)
        operands.check_operands(logits.device, {"newest": by_slot})
    operands.check_gpu(logits.device)
    args = _Args(
        logits=logits.data_ptr(),
        tokens=tokens.data_ptr(),
        lengths=lengths.data_ptr(),
        slots=slots.data_ptr(),
        log=log.data_ptr(),
        newest=operands.address(newest),
        sampling=operands.address(sampling),
        vocabulary=vocabulary,
        depth=log.shape[1],
        adjusts=adjusts,
    )
    kernel = jit.kernel(SOURCE, "select_token", operands.defines(logits.dtype))
    mask_bytes = 4 * mask_words(vocabulary) if sampling is not None else 0
    kernel.launch(n, ROW_THREADS, args, shared_bytes=mask_bytes, pdl=pdl)
    return tokens


@compiled_ahead(SOURCE, seconds=7)
def _variants(needs: Needs) -> list[Macros]:
    return [operands.defines(needs.dtype)]
