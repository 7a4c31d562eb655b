"""Choosing the next token of every row from its logits, in torch.

Knows temperature, top-k, top-p, min-p and noise by (seed, position, token); keeps no state, so a
row's token depends on its own logits, history, parameters, seed and position alone. adjustments.py
has what changes logits before. native/select_token.cu is the same for a GPU's steps.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from dakrun.config import SamplingParams
from dakrun.engine.adjustments import History, adjusted
from dakrun.geometry import NO_TOKEN, NONE_ALLOWED

_MASS = 2.0**31  # the largest logit's probability, as an integer: sums of integers are exact
LOWEST_TEMPERATURE = 1e-30  # float32 divides by it; lower ones count as this one
_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


def request_seed(seed: int, request_id: str) -> int:
    """A stable 63-bit seed of a request, so that equal prompts in different rows differ."""
    key = f"{seed}:{request_id}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1


def sample(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    seeds: Sequence[int],
    positions: Sequence[int],
    histories: Sequence[History] | None = None,
    allowed: Mapping[int, torch.Tensor] | None = None,
) -> torch.Tensor:
    """The token of each row for its position: int64 [n] on the device of `logits`.

    logits: [n, vocabulary], any floating dtype and device. Temperature 0 takes the first of the
    largest logits. Other rows take the argmax of logit / temperature + noise(seed, position) over
    the kept tokens, which draws a token with its probability among these (the Gumbel-max trick).
    Kept are the top_k largest logits, then the fewest of the largest of them whose probabilities
    sum to top_p, and all that equal the smallest kept logit; of these, the tokens that have at
    least min_p of the likeliest one's probability. `seeds` are the requests' (see request_seed).

    Logits of rows whose parameters ask for it are `adjusted` first, by their `histories`; so are
    those of the rows in `allowed`, bool [vocabulary] by the row's number, for their grammars.
    A row whose largest logit is NaN or infinite gets NO_TOKEN, one that may have no token
    NONE_ALLOWED.
    """
    n = len(logits)
    assert logits.is_floating_point(), f"expected floating point logits, got {logits.dtype}"
    lengths = (len(params), len(seeds), len(positions))
    assert lengths == (n, n, n), f"expected {n} parameters, seeds and positions, got {lengths}"
    tokens = logits.argmax(dim=-1)
    best = logits.gather(1, tokens[:, None])[:, 0]
    finite = best.isfinite()
    for i, own in enumerate(params):
        mask = allowed.get(i) if allowed else None
        adjusts = own.adjusts or mask is not None
        if not (adjusts or own.temperature > 0) or not finite[i]:
            continue
        row = logits[i].float()
        if adjusts:
            row = adjusted(row, own, histories[i] if histories else History(), mask)
            tokens[i], best = row.argmax(), row.max()
            if not best.isfinite():
                tokens[i] = NONE_ALLOWED if best < 0 else NO_TOKEN
                continue
        if own.temperature > 0:
            tokens[i] = _draw(row, own, noise(seeds[i], positions[i], logits.shape[1]))
    return tokens.where(finite, NO_TOKEN)


def noise(seed: int, position: int, vocabulary: int) -> np.ndarray:
    """Gumbel noise of every token: float32 [vocabulary].

    -log(-log(1 - v)) with v uniform in (0, 1), in steps of 2^-32: the upper half of the output
    number `token` of a splitmix64 generator (Steele, Lea and Flood 2014) whose state begins at the
    hash of seed and position.
    """
    start = _mix64(np.array([(seed + _GOLDEN) & _MASK], dtype=np.uint64))
    state = _mix64(start + np.uint64((position + 1) * _GOLDEN & _MASK))
    steps = np.arange(1, vocabulary + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    bits = (_mix64(state + steps) >> np.uint64(32)).astype(np.float32)
    with np.errstate(divide="ignore"):  # v may round up to 1, whose noise is the lowest
        found = -np.log(-np.log1p(-(bits + np.float32(0.5)) * np.float32(2.0**-32)))
    return np.maximum(found, np.finfo(np.float32).min)  # above that of tokens that are not kept


def _mix64(z: np.ndarray) -> np.ndarray:
    """splitmix64's finaliser on uint64, modulo 2^64."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def kept_tokens(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Which tokens of a row of logits, float32 [V], top-k, top-p and min-p keep: bool [V]."""
    below_best = logits - logits.max()
    temperature = max(params.temperature, LOWEST_TEMPERATURE)
    ordered = below_best.sort(descending=True).values
    least = ordered[-1]
    if 0 < params.top_k < len(logits):
        least = ordered[params.top_k - 1]
    if params.top_p < 1:
        some = ordered[ordered >= least]
        sums = (some.double() / temperature).exp().mul(_MASS).long().cumsum(0)
        target = np.ceil(np.float32(params.top_p) * np.float64(sums[-1].item()))
        least = some[int(torch.searchsorted(sums, int(target)))]
    kept = below_best >= least
    if params.min_p > 0:
        kept &= below_best / temperature >= log_min_p(params)
    return kept


def log_min_p(params: SamplingParams) -> float:
    """The least logarithm of a kept token's probability relative to the likeliest one's."""
    return math.log(params.min_p) if params.min_p > 0 else -math.inf


def _draw(logits: torch.Tensor, params: SamplingParams, gumbel: np.ndarray) -> torch.Tensor:
    """The token of a row of logits, float32 [V]: int64 []."""
    scores = (logits - logits.max()) / max(params.temperature, LOWEST_TEMPERATURE)
    scores += torch.from_numpy(gumbel).to(logits.device)
    return scores.masked_fill(~kept_tokens(logits, params), -torch.inf).argmax()
