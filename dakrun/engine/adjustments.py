"""Logits as a request's options have them: biases, penalties, forbidden tokens; in torch.

native/adjusted_logits.cuh is the same for a GPU's steps. Knows neither temperature nor noise.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch

from dakrun.config import SamplingParams


class History(NamedTuple):
    """The tokens that a request's options look at.

    `tokens` are the new ones so far, a list that the engine extends; `ends` are the model's
    end-of-sequence tokens.
    """

    prompt: Sequence[int] = ()
    tokens: Sequence[int] = ()
    ends: Collection[int] = ()

    def last(self, count: int) -> tuple[int, ...]:
        """The last `count` tokens of prompt and completion, or all where there are fewer."""
        new = tuple(self.tokens[max(0, len(self.tokens) - count) :])
        more = count - len(new)
        return (*self.prompt[max(0, len(self.prompt) - more) :], *new) if more > 0 else new


def adjusted(
    logits: torch.Tensor,
    params: SamplingParams,
    history: History,
    allowed: torch.Tensor | None = None,
) -> torch.Tensor:
    """A row of logits, float32 [V], as `params` have them; forbidden tokens have -infinity.

    A bias is added. Then repetition_penalty divides a positive logit of a token in the prompt or
    the completion, and multiplies another (Keskar et al. 2019, as in transformers). Then
    frequency_penalty is subtracted for each time that the token is in the completion, and
    presence_penalty once (as in vLLM). Tokens are forbidden too that a grammar's `allowed`, bool
    [V], lacks; where it has none but forbidden ones, it beats the other options.
    """
    found = logits.clone()
    if params.logit_bias:
        tokens, biases = zip(*params.logit_bias, strict=True)
        found[list(tokens)] += torch.tensor(biases, dtype=torch.float32, device=logits.device)
    if params.penalizes:
        found = _penalized(found, params, history)
    free = torch.ones_like(found, dtype=torch.bool)
    free[[token for token in forbidden(params, history) if token < len(free)]] = False
    if allowed is not None:
        both = free & allowed
        free = both if both.any() else allowed
    return found.masked_fill(~free, -torch.inf)


def _penalized(logits: torch.Tensor, params: SamplingParams, history: History) -> torch.Tensor:
    counts = Counter({**dict.fromkeys(history.prompt, 0), **Counter(history.tokens)})
    seen = torch.tensor(list(counts), dtype=torch.int64, device=logits.device)
    # Tensors, since a GPU multiplies by the reciprocal of a number instead of dividing by it.
    times, repetition, frequency, presence = (
        torch.tensor(values, dtype=torch.float32, device=logits.device)
        for values in (
            list(counts.values()),
            [params.repetition_penalty],
            [params.frequency_penalty],
            [params.presence_penalty],
        )
    )
    found, changed = logits.clone(), logits[seen]
    changed = torch.where(changed > 0, changed / repetition, changed * repetition)
    changed = changed - times * frequency - (times > 0) * presence
    found[seen] = changed
    return found


def forbidden(params: SamplingParams, history: History) -> list[int]:
    """The tokens that may not come next: those of min_tokens, and the last of bad words."""
    found = list[int]()
    if len(history.tokens) < params.min_tokens:
        found += [*history.ends, *params.stop_token_ids]
    for word in params.bad_words:
        assert not isinstance(word, str), f"expected token ids, got the bad word {word!r}"
        if history.last(len(word) - 1) == word[:-1]:
            found.append(word[-1])
    return found
