"""Prompts of the Python API as requests; a UsageError tells which one cannot be meant."""

from collections.abc import Iterable, Mapping, Set
from itertools import islice
from operator import index

from dakrun.config import SamplingParams
from dakrun.errors import UsageError
from dakrun.requests.native_rows import BadRow, PromptRules
from dakrun.requests.request import Request


def as_requests(
    prompts: Iterable[str | Iterable[int]],
    params: SamplingParams | Iterable[SamplingParams] | None,
    rules: PromptRules,
) -> list[Request]:
    """A request for each text or sequence of token ids; its id is its place in `prompts`."""
    if isinstance(prompts, str | bytes | Mapping) or not isinstance(prompts, Iterable):
        kind = type(prompts).__name__
        raise UsageError(f"prompts is of type {kind}", hint="give a list of prompts")
    prompts = list(prompts)
    if not isinstance(params, Iterable):
        params = [SamplingParams() if params is None else params] * len(prompts)
    each = list(islice(params, len(prompts) + 1))
    if not all(isinstance(own, SamplingParams) for own in each):
        raise UsageError(
            "params are not SamplingParams", hint="give one for all prompts or a list of them"
        )
    if len(each) != len(prompts):
        raise UsageError(
            f"sampling parameters are not as many as the {len(prompts)} prompts",
            hint="give one SamplingParams for all or one for each",
        )
    pairs = zip(prompts, each, strict=True)
    return [_request(number, prompt, own, rules) for number, (prompt, own) in enumerate(pairs)]


def _request(
    number: int, prompt: str | Iterable[int], params: SamplingParams, rules: PromptRules
) -> Request:
    try:
        if params.stop and rules.tokenizer is None:
            raise BadRow("no_tokenizer", "stop strings need the model's tokenizer")
        ids = rules.encode(prompt) if isinstance(prompt, str) else rules.check(_token_ids(prompt))
    except BadRow as bad:
        raise UsageError(f"prompt {number}: {bad}", hint="nothing was generated") from None
    return Request(id=str(number), line=number + 1, prompt_ids=ids, params=params)


def _token_ids(prompt: Iterable[int]) -> tuple[int, ...]:
    """The ids in a list, an array or a tensor; raises BadRow."""
    try:
        ids = list(prompt)
        if isinstance(prompt, bytes | Mapping | Set) or any(isinstance(t, bool) for t in ids):
            raise TypeError
        return tuple(map(index, ids))
    except TypeError:
        raise BadRow("invalid_prompt", "it is neither a text nor a list of token ids") from None
