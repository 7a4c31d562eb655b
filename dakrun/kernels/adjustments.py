"""A request's options that change logits, as select_token reads them: native/adjusted_logits.cuh.

Knows the layout of the kernel's struct Adjustments and of the arrays behind it.
"""

import struct
from collections import Counter
from collections.abc import Collection, Sequence
from itertools import accumulate, chain

import numpy as np
import torch

from dakrun.config import SamplingParams

_IN_PROMPT = 1 << 30
_HEADER_WORDS = 12


def adjustments(
    params: SamplingParams,
    prompt: Sequence[int],
    tokens: Sequence[int],
    ends: Collection[int],
    *,
    limit: int,
    vocabulary: int,
) -> torch.Tensor:
    """The struct Adjustments of a request before its next token: int32 [words] on the CPU.

    `tokens` are its new tokens so far, `limit` the most that it may have, `ends` the model's
    end-of-sequence tokens. The kernel reads a copy on the GPU, where it counts the tokens that it
    chooses. There are at most 12 + 4 * vocabulary words besides `ends` and bad words.
    """
    words = [word for word in params.bad_words if not isinstance(word, str)]
    assert len(words) == len(params.bad_words), f"expected token ids, got {params.bad_words}"
    stops = [*ends, *params.stop_token_ids] if params.min_tokens else []
    biases = dict(params.logit_bias)
    counts = dict.fromkeys(biases, 0)
    room = 0
    if params.penalizes:
        if params.repetition_penalty != 1:
            counts |= dict.fromkeys(prompt, _IN_PROMPT)
        for token, times in Counter(tokens).items():
            counts[token] = counts.get(token, 0) + times
        room = min(limit - len(tokens), vocabulary - len(counts))
    recent = max((len(word) - 1 for word in words), default=0)
    last = [*prompt[-recent:], *tokens[-recent:]] if recent else []
    end = len(prompt) + len(tokens)
    ring = [-1] * recent
    for position in range(max(0, end - recent), end):
        ring[position % recent] = last[position - end]
    capacity = len(counts) + room
    header = struct.pack(
        "<9i3f", len(prompt) + params.min_tokens, len(stops), len(words), sum(map(len, words)),
        recent, len(biases), capacity, len(counts), params.penalizes,
        params.repetition_penalty, params.frequency_penalty, params.presence_penalty,
    )  # fmt: skip
    lists = [*stops, *accumulate(map(len, words)), *chain.from_iterable(words), *ring]
    biased = np.fromiter(biases.values(), np.float32, len(biases)).view(np.int32)
    parts = (
        (np.frombuffer(header, np.int32), _HEADER_WORDS),
        (lists, len(lists)),
        (list(counts), capacity),
        (list(counts.values()), capacity),
        (biased, len(biased) + capacity),
    )
    packed, first = np.zeros(sum(size for _, size in parts), np.int32), 0
    for values, size in parts:
        packed[first : first + len(values)] = values
        first += size
    return torch.from_numpy(packed)
