"""The prompts of the Python API as requests: text, token ids, messages, and dicts of these.

Knows Python's values; knows neither files nor row formats.
"""

from collections.abc import Iterable, Mapping, Set, Sized
from dataclasses import replace
from itertools import islice
from operator import index
from typing import Any

from dakrun.config import SEED_BITS, SamplingParams
from dakrun.errors import UsageError, is_neutral
from dakrun.requests.json_rows import names
from dakrun.requests.messages import CHAT_FIELDS, checked_chat, with_calls
from dakrun.requests.native_rows import refuse_chat_fields
from dakrun.requests.prompts import BadRow, PromptRules
from dakrun.requests.request import Reply, Request

# A text, token ids, messages (each a mapping with a role), or a mapping with one of these.
Prompt = str | Mapping[str, Any] | Iterable[int] | Iterable[Mapping[str, Any]]

_Params = SamplingParams | Iterable[SamplingParams] | None
_KINDS = ("prompt", "prompt_token_ids", "messages")
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "multi_modal_data": ({},),
    "mm_processor_kwargs": ({},),
}  # of vLLM's prompts
_WANTED = "text, a list of token ids, a list of messages, or a dict with one of these"


def as_requests(
    prompts: Prompt | Iterable[Prompt],
    params: SamplingParams | Iterable[SamplingParams] | None,
    rules: PromptRules,
    *,
    chats: bool = False,
    **chat_fields: Any,
) -> list[Request]:
    """A Request for the first choice of each prompt, the others being its `further`.

    Its id is the prompt's index in `prompts`, which may also be a single prompt. `params` holds
    for all prompts, or is one SamplingParams for each. With `chats`, which `chat_fields` hold
    for, all prompts are messages. Raises UsageError, which names the prompt that cannot be run.
    """
    given = _several(prompts)
    if chats:
        given = [{"messages": prompt, **chat_fields} for prompt in given]
    each = _params_of_each(params, len(given))
    pairs = zip(given, each, strict=True)
    return [_request(number, prompt, own, rules) for number, (prompt, own) in enumerate(pairs)]


def requests_in(given: object) -> Iterable[Request | None] | None:
    """`given` if it is a list of Requests, of which some may be None; otherwise None."""
    if isinstance(given, list | tuple) and any(isinstance(one, Request) for one in given):
        return given
    return None


def one_of(params: _Params, sampling_params: _Params) -> _Params:
    """The one of two arguments, of the same meaning, that is given. Raises UsageError."""
    if params is not None and sampling_params is not None:
        raise UsageError("params and sampling_params are the same", hint="give one of them")
    return sampling_params if params is None else params


def refuse_params(params: _Params) -> None:
    """Raise UsageError if there are parameters besides those that Requests have."""
    if params is not None:
        raise UsageError("Requests have their own params", hint="leave params out")


def _several(prompts: object) -> list[Any]:
    """The prompts in a list; that of a single one has one element."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if isinstance(prompts, bytes | Set) or not isinstance(prompts, Iterable):
        raise UsageError(
            f"prompts is of type {type(prompts).__name__}",
            hint=f"give a prompt or a list of prompts, each of which is {_WANTED}",
        )
    given = list(prompts)
    are_messages = all(isinstance(one, Mapping) and "role" in one for one in given)
    if given and (are_messages or all(_is_integer(one) for one in given)):
        return [given]
    return given


def _params_of_each(params: object, count: int) -> list[SamplingParams]:
    if not isinstance(params, Iterable):
        params = [SamplingParams() if params is None else params] * count
    given = f"{len(params)}" if isinstance(params, Sized) else ""
    each = list(islice(params, count + 1))
    if not all(isinstance(own, SamplingParams) for own in each):
        raise UsageError(
            "params are not SamplingParams", hint="give one for all prompts or a list of them"
        )
    if len(each) != count:
        given = given or (f"more than {count}" if len(each) > count else f"{len(each)}")
        raise UsageError(
            f"there are {given} SamplingParams for {count} prompts",
            hint="give one SamplingParams for all or one for each",
        )
    return each


def _request(number: int, prompt: object, params: SamplingParams, rules: PromptRules) -> Request:
    try:
        text, ids, reply = _parsed(prompt, rules)
        params = rules.checked_params(with_calls(params, reply))
    except BadRow as bad:
        raise UsageError(f"prompt {number}: {bad}", hint="nothing was generated") from None
    # As of a Batch row: the seed of the first choice does not depend on n.
    first, *further = (
        Request(
            id=str(number),
            line=number + 1,
            prompt_ids=ids,
            prompt=text,
            params=replace(params, n=1, seed=params.seed + (choice << SEED_BITS)),
            reply=replace(reply, choice=choice, choices=params.n, n=params.n),
        )
        for choice in range(params.n)
    )
    return replace(first, further=tuple(further))


def _parsed(prompt: object, rules: PromptRules) -> tuple[str | None, tuple[int, ...], Reply]:
    """Text, if it is known, and token ids of a prompt, and how to reply. Raises BadRow."""
    if isinstance(prompt, str):
        return prompt, rules.encode(prompt), Reply()
    if isinstance(prompt, Mapping):
        return _of_dict(prompt, rules)
    values = _values(prompt)
    if values and all(isinstance(one, Mapping) for one in values):
        return _of_dict({"messages": values}, rules)
    return None, rules.check(_token_ids(values)), Reply()


def _of_dict(
    prompt: Mapping[str, Any], rules: PromptRules
) -> tuple[str | None, tuple[int, ...], Reply]:
    given = {key: value for key, value in prompt.items() if value is not None}
    unknown = [
        str(key)
        for key, value in given.items()
        if key not in (*_KINDS, *CHAT_FIELDS) and not is_neutral(key, value, _NEUTRAL)
    ]
    if unknown:
        raise BadRow("unsupported_field", f"{names(unknown)} not supported in a prompt's dict")
    kinds = [name for name in _KINDS if name in given]
    text = given.get("prompt")
    if kinds == ["messages"]:
        if isinstance(given["messages"], str | Mapping):
            raise BadRow("invalid_prompt", "messages are not a list of messages")
        chat = _values(given["messages"])
        chat = [dict(one) if isinstance(one, Mapping) else one for one in chat]
        checked = checked_chat({**given, "messages": chat})
        return checked.prompt(rules, Reply(of_messages=True))
    if kinds not in (["prompt"], ["prompt_token_ids"], ["prompt", "prompt_token_ids"]):
        raise BadRow("invalid_prompt", f"its dict needs one of {', '.join(_KINDS)}")
    refuse_chat_fields(given)
    if "prompt" in given and not isinstance(text, str):
        raise BadRow("invalid_prompt", "the value of 'prompt' in its dict is not text")
    if "prompt_token_ids" in given:  # vLLM's may also have their text
        return text, rules.check(_token_ids(_values(given["prompt_token_ids"]))), Reply()
    return text, rules.encode(str(text)), Reply()


def _values(prompt: object) -> list[Any]:
    """The elements of a list, an array or a tensor; raises BadRow."""
    if isinstance(prompt, str | bytes | Mapping | Set):
        raise BadRow("invalid_prompt", f"not {_WANTED}")
    try:
        return list(prompt)  # type: ignore[call-overload]
    except TypeError:
        raise BadRow("invalid_prompt", f"not {_WANTED}") from None


def _token_ids(values: list[Any]) -> tuple[int, ...]:
    if not all(_is_integer(token) for token in values):
        raise BadRow("invalid_prompt", f"not {_WANTED}")
    return tuple(map(index, values))


def _is_integer(value: object) -> bool:
    """Whether it is an integer, also NumPy's or a tensor's, and no bool."""
    if isinstance(value, bool):
        return False
    try:
        index(value)  # type: ignore[arg-type]
    except TypeError:
        return False
    return True
