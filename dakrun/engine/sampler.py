"""Choosing the next token of every row from its logits.

Knows temperature, top-k, top-p and a counter-based random number per (seed, step); keeps no state,
so a row's token depends on its own logits, parameters, seed and step alone.
"""

import hashlib
from collections.abc import Sequence

import numpy as np
import torch

from dakrun.config import SamplingParams
from dakrun.geometry import NO_TOKEN

# Probabilities are integers, the likeliest token's being 2^44, or less where a vocabulary is above
# 2^18: their sums fit in int64 and are exact, so neither the order of addition (batch, device) nor
# rounding can move a boundary.
_SUM_BITS = 62
_MAX_BITS = 44
# Rows are handled in groups of this many logits: about 200 MiB of scratch, whatever the batch.
_GROUP_LOGITS = 2**22

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
    steps: Sequence[int],
) -> torch.Tensor:
    """The next token of each row: int64 [n] on the device of `logits`.

    logits: [n, vocabulary], any floating dtype and device. Temperature 0 takes the first of the
    largest logits. Other rows apply temperature, top-k and top-p (in this order, as in
    transformers), then take the token at the quantile uniform(seed, step); `seeds` are the
    requests' (see request_seed), `steps` count their tokens. A row whose largest logit is NaN or
    infinite gets NO_TOKEN.
    """
    n, vocab = logits.shape
    assert logits.is_floating_point(), f"expected floating point logits, got {logits.dtype}"
    lengths = (len(params), len(seeds), len(steps))
    assert lengths == (n, n, n), f"expected {n} parameters, seeds and steps, got {lengths}"
    rows = [i for i, p in enumerate(params) if p.temperature > 0]
    tokens = logits.argmax(dim=-1)
    best = logits.gather(1, tokens[:, None])
    group = max(1, _GROUP_LOGITS // vocab)
    for start in range(0, len(rows), group):
        part = rows[start : start + group]
        places = torch.tensor(part, device=logits.device)
        tokens[places] = _draw(
            logits[places],
            best[places],
            [params[i] for i in part],
            uniform([seeds[i] for i in part], [steps[i] for i in part]),
        )
    return tokens.where(best[:, 0].isfinite(), NO_TOKEN)


def uniform(seeds: Sequence[int], steps: Sequence[int]) -> np.ndarray:
    """One number of [0, 1) for each (seed, step): float64 [n], a multiple of 2^-53.

    Output `step` of a splitmix64 generator (Steele, Lea and Flood 2014) whose state begins at the
    hash of the seed, so that streams of neighbouring seeds do not overlap.
    """
    state = _mix64(np.array([(s + _GOLDEN) & _MASK for s in seeds], dtype=np.uint64))
    counter = np.array([((t + 1) * _GOLDEN) & _MASK for t in steps], dtype=np.uint64)
    return (_mix64(state + counter) >> np.uint64(11)) * 2.0**-53


def _mix64(z: np.ndarray) -> np.ndarray:
    """splitmix64's finaliser on uint64, modulo 2^64."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _draw(
    logits: torch.Tensor, best: torch.Tensor, params: Sequence[SamplingParams], u: np.ndarray
) -> torch.Tensor:
    """A token of each row of logits [n, vocabulary] at the quantiles u [n]: int64 [n]."""
    probabilities = _probabilities(logits, best, params)
    cumulative = probabilities.cumsum(dim=-1)
    total = cumulative[:, -1:]
    # u * total may round up to total, which no token reaches.
    target = (torch.from_numpy(u).to(logits.device)[:, None] * total).long().minimum(total - 1)
    tokens = torch.searchsorted(cumulative, target, right=True)[:, 0]
    return tokens.clamp(max=logits.shape[1] - 1)  # only rows that get NO_TOKEN have no total


def _probabilities(
    logits: torch.Tensor, best: torch.Tensor, params: Sequence[SamplingParams]
) -> torch.Tensor:
    """Each row's probabilities up to a factor: int64 [n, V]; 0 if removed by top-k or top-p.

    `best` [n, 1] are the largest logits.
    """
    vocab = logits.shape[1]
    one = _one(vocab)
    temperature = torch.tensor([p.temperature for p in params], dtype=torch.float64)
    below_best = logits.double() - best.double()
    probabilities = (
        (below_best / temperature.to(logits.device)[:, None]).exp().mul(one).round().long()
    )
    del below_best

    cut = [i for i, p in enumerate(params) if 0 < p.top_k < vocab]
    if cut:
        rows = torch.tensor(cut, device=logits.device)
        top_k = torch.tensor([params[i].top_k for i in cut], device=logits.device)
        largest = logits[rows].topk(max(params[i].top_k for i in cut), dim=-1).values
        least = largest.gather(1, top_k[:, None] - 1)
        probabilities[rows] = probabilities[rows].masked_fill(logits[rows] < least, 0)

    cut = [i for i, p in enumerate(params) if p.top_p < 1]
    if cut:
        rows = torch.tensor(cut, device=logits.device)
        top_p = torch.tensor([params[i].top_p for i in cut], dtype=torch.float64)
        probabilities[rows] = _keep_top_p(probabilities[rows], top_p.to(logits.device))
    return probabilities


def _one(vocab: int) -> int:
    """The integer for the probability of the likeliest of `vocab` tokens."""
    return 2 ** min(_MAX_BITS, _SUM_BITS - (vocab - 1).bit_length())


def _keep_top_p(probabilities: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Zero `probabilities` [n, V] outside each row's smallest set that sums to top_p [n].

    Of equal ones, the first stay.
    """
    ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(dim=-1) - ordered
    limit = top_p[:, None] * ordered.sum(dim=-1, keepdim=True)
    return torch.zeros_like(probabilities).scatter_(
        1, order, ordered.masked_fill(before >= limit, 0)
    )
