"""Two runs of the same requests compared token by token on the same histories (teacher-forced).

Runs differ for good reason only where two scores nearly tie, and behind that they have other texts.
So what counts is where they differ first, not how many texts are equal.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedModel

from dakrun.config import SamplingParams
from dakrun.engine.adjustments import History, adjusted
from dakrun.engine.sampler import noise, request_seed
from dakrun.requests import Completion, Request

ROUNDS = 40  # restarts of a request, at most
TOP = 20  # likeliest tokens whose log-probabilities tell scores


@dataclass(frozen=True)
class Divergence:
    """Where two runs chose differently behind the same `history`.

    `gap` is the difference of the two tokens' logits, with their noise.
    """

    history: tuple[int, ...]
    gap: float


def divergences(
    run: Callable[[Sequence[Request]], Mapping[str, Completion]],
    requests: Sequence[Request],
    found: Mapping[str, Completion],
) -> tuple[int, list[Divergence]]:
    """The positions that were compared, and where `run` chooses otherwise than in `found`.

    Behind a token that differs, `run` goes on from the history of `found`. The requests ask for TOP
    log-probabilities, which tell the gaps, and have no penalties.
    """
    positions, differ, left = 0, list[Divergence](), list(requests)
    done = dict.fromkeys((request.id for request in requests), 0)
    for _ in range(ROUNDS):
        if not left:
            return positions, differ
        again, results = list[Request](), run(left)
        for request in left:
            own, start = results[request.id], done[request.id]
            wanted = found[request.id].token_ids[start:]
            pairs = zip(own.token_ids, wanted, strict=True)
            first = next((i for i, (a, b) in enumerate(pairs) if a != b), len(wanted))
            positions += min(first + 1, len(wanted))
            if first == len(wanted):
                continue
            history = (*request.prompt_ids, *wanted[:first])
            whole = found[request.id]
            assert whole.logprobs is not None
            other = wanted[first], whole.logprobs[start + first].chosen.logprob
            differ.append(Divergence(history, gap_of(request, own, first, other)))
            rest = len(wanted) - first - 1
            if rest:
                done[request.id] = start + first + 1
                params = replace(request.params, max_tokens=rest)
                prompt = (*history, wanted[first])
                again.append(replace(request, prompt_ids=prompt, params=params))
        left = again
    raise AssertionError(f"more than {ROUNDS} differences in a request")


@torch.no_grad()
def first_divergences(
    model: PreTrainedModel,
    params: Sequence[SamplingParams],
    one: Sequence[Completion],
    other: Sequence[Completion],
) -> tuple[int, list[Divergence]]:
    """The positions up to the first difference of each request's two results, and where it is.

    The `model` tells the gaps, by its logits with the penalties and the noise of the request. With
    top-k a token may also be near to being left out: the gap is then that to the last one kept.
    """
    positions, differ = 0, list[Divergence]()
    for own, a, b in zip(params, one, other, strict=True):
        pairs = zip(a.token_ids, b.token_ids, strict=False)
        first = next((i for i, (x, y) in enumerate(pairs) if x != y), None)
        if first is None:
            assert a.token_ids == b.token_ids, "a result ends before the other does"
            positions += len(a.token_ids)
            continue
        positions += first + 1
        history = (*a.prompt_token_ids, *a.token_ids[:first])
        (logits,) = model(torch.tensor([history], device=model.device)).logits[:, -1].float()
        scores = adjusted(logits, own, History(a.prompt_token_ids, a.token_ids[:first], ())).cpu()
        drawn = torch.from_numpy(noise(request_seed(own.seed, a.id), len(history), len(scores)))
        tokens = [a.token_ids[first], b.token_ids[first]]
        x, y = (scores + own.temperature * drawn)[tokens].tolist()
        gap = abs(x - y)
        if own.top_k:
            last = scores.topk(own.top_k).values[-1]
            gap = min(gap, float((scores[tokens] - last).abs().min()))
        differ.append(Divergence(history, gap))
    return positions, differ


def units_apart(model: PreTrainedModel, one: Divergence, dtype: torch.dtype) -> float:
    """The gap in units in the last place of the logits there, which the float32 `model` tells."""
    with torch.no_grad():
        logits = model(torch.tensor([one.history], device=model.device)).logits[0, -1].float()
    return one.gap / unit_in_last_place(logits, dtype)


def gap_of(request: Request, own: Completion, place: int, found: tuple[int, float]) -> float:
    """The score of the token chosen at `place` less that of the one `found`, in units of logits.

    The latter's log-probability is the first run's too, where it is among the likeliest.
    """
    assert own.logprobs is not None
    other, logprob = found
    entry = own.logprobs[place]
    known = {one.token_id: one.logprob for one in (entry.chosen, *entry.top)}
    token = own.token_ids[place]
    gap, params = known[token] - known.get(other, logprob), request.params
    if params.temperature > 0:
        seed = request_seed(params.seed, request.id)
        drawn = noise(seed, len(request.prompt_ids) + place, 1 + max(token, other))
        gap += params.temperature * float(drawn[token] - drawn[other])
    return abs(gap)


def unit_in_last_place(logits: torch.Tensor, dtype: torch.dtype) -> float:
    """Of the larger of the two largest logits, which are float32 [V], in `dtype`."""
    largest = float(logits.abs().topk(2).values[0])
    return torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(largest))
