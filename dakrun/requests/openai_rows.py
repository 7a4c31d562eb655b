"""The OpenAI Batch row format: requests to /v1/completions and /v1/chat/completions.

Knows neither files nor the engine; openai_results.py has the results.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dakrun.config import MAX_LOGPROBS, SamplingParams
from dakrun.requests.answer_forms import FORM_FIELDS, answer_form
from dakrun.requests.json_rows import flag, json_kind, names, shown
from dakrun.requests.messages import CHAT_FIELDS, chat_prompt
from dakrun.requests.native_rows import (
    MAX_N,
    SAMPLING_FIELDS,
    ParsedRow,
    RowFormat,
    count_of,
    several_choices,
    stop_and_eos,
)
from dakrun.requests.neutral import supported_fields
from dakrun.requests.prompts import BadRow, PromptRules
from dakrun.requests.request import Reply

_URLS = ("/v1/completions", "/v1/chat/completions")
ROW_FIELDS = ("custom_id", "method", "url", "body")
_COMMON_FIELDS = (
    *("model", "n", "logprobs", "max_tokens", *SAMPLING_FIELDS),
    *("stop", "stop_token_ids", "ignore_eos", "add_special_tokens"),
    *FORM_FIELDS,
)
_COMPLETION_FIELDS = ("prompt", "echo", *_COMMON_FIELDS)
_CHAT_FIELDS = ("messages", "max_completion_tokens", "top_logprobs", *CHAT_FIELDS, *_COMMON_FIELDS)
_IGNORED = ("user", "metadata", "safety_identifier", "prompt_cache_key")
_MAX_LOGPROBS = 5  # of /v1/completions
MAX_PROMPTS = 1024


def is_batch_row(row: Mapping[str, Any]) -> bool:
    """Whether a JSON row has a field that only Batch rows have."""
    return "custom_id" in row or "body" in row


def parse_batch(
    row: dict[str, Any], defaults: SamplingParams, rules: PromptRules
) -> list[ParsedRow]:
    """Parse a row {"custom_id", "method": "POST", "url", "body": {...}} into its choices.

    Parameters that the body lacks are taken from `defaults`, not from OpenAI's defaults. A field
    that is null counts as absent, and so does an unsupported field with its neutral value, like
    "stream": false. Raises BadRow, or UsageError for parameters.
    """
    unknown = [name for name in row if name not in ROW_FIELDS]
    if unknown:
        raise BadRow("unsupported_field", f"unsupported {names(unknown)} outside the body")
    if row.get("custom_id") is None:
        raise BadRow("invalid_field", "custom_id is missing")
    if row.get("method") != "POST":
        raise BadRow("invalid_field", f"method is {shown(row.get('method'))}, not 'POST'")
    url, body = row.get("url"), row.get("body")
    if isinstance(url, str) and f"/v1{url}" in _URLS:  # as Azure has them
        url = f"/v1{url}"
    if url not in _URLS:
        raise BadRow("unsupported_url", f"url is {shown(url)}, not {' or '.join(_URLS)}")
    if not isinstance(body, dict):
        raise BadRow("invalid_field", f"body is {json_kind(body)}, not an object")
    is_chat = url == _URLS[1]
    given = _supported(body, _CHAT_FIELDS if is_chat else _COMPLETION_FIELDS)
    model = given.get("model")
    if not isinstance(model, str | None):
        raise BadRow("invalid_field", f"model is {json_kind(model)}, not a string")
    echo, logprobs = flag(given, "echo", False), _logprobs(given, is_chat=is_chat)
    prompt_logprobs = logprobs
    if not echo:
        prompt_logprobs = None
    elif given.get("max_tokens") == 0:  # that only prompts with log-probabilities may have
        prompt_logprobs = logprobs or 0
    params = _parameters(given, defaults, logprobs=logprobs, prompt_logprobs=prompt_logprobs)
    reply = Reply("chat" if is_chat else "completion", model, echo=echo)
    if is_chat:
        ids, reply = chat_prompt(given, rules, reply)
        prompts = [ids]
    else:
        prompts = _text_prompts(given, rules)
    return several_choices(prompts, params, reply, count_of(given, "n", 1, MAX_N))


def needs_tokenizer(row: Mapping[str, Any]) -> bool:
    """Whether a prompt of a Batch row is text or a chat."""
    body = row.get("body")
    if not isinstance(body, dict):
        return False
    prompt = body.get("prompt")
    prompts = prompt if isinstance(prompt, list) else [prompt]
    return "messages" in body or any(isinstance(one, str) for one in prompts)


BATCH = RowFormat("OpenAI Batch", "custom_id", parse_batch, needs_tokenizer, Reply("completion"))


def _supported(body: dict[str, Any], fields: tuple[str, ...]) -> dict[str, Any]:
    """The supported fields of `body`; raises BadRow, which names fields that are not supported."""
    body = {name: value for name, value in body.items() if name not in _IGNORED}
    given, unknown = supported_fields(body, fields)
    if unknown:
        raise BadRow(
            "unsupported_field",
            f"unsupported {names(unknown)}; the fields of the body are {', '.join(fields)}",
        )
    return given


def _parameters(given: dict[str, Any], defaults: SamplingParams, **changes: Any) -> SamplingParams:
    changes |= {name: given[name] for name in SAMPLING_FIELDS if name in given}
    limits = [given[k] for k in ("max_completion_tokens", "max_tokens") if k in given]
    if len(limits) == 2 and limits[0] != limits[1]:
        raise BadRow("invalid_field", "max_tokens and max_completion_tokens exclude each other")
    if limits:
        changes["max_tokens"] = limits[0]
    form = answer_form(given)
    return replace(defaults, **changes, **stop_and_eos(given), structured_outputs=form)


def _logprobs(given: dict[str, Any], *, is_chat: bool) -> int | None:
    """The likeliest tokens that the row asks for with each new one; None if it has no logprobs."""
    asked = given.get("logprobs", False)
    if not is_chat:
        return None if asked is False else count_of(given, "logprobs", 0, _MAX_LOGPROBS)
    if not isinstance(asked, bool):
        raise BadRow("invalid_field", f"logprobs is {json_kind(asked)}, not true or false")
    if asked:
        return count_of(given, "top_logprobs", 0, MAX_LOGPROBS)
    if given.get("top_logprobs", 0) != 0:
        raise BadRow("invalid_field", "top_logprobs needs logprobs to be true")
    return None


def _text_prompts(given: dict[str, Any], rules: PromptRules) -> list[tuple[int, ...]]:
    """Token ids of each prompt: a single one (text or token ids), or all in an array of these."""
    prompt, special = given.get("prompt"), flag(given, "add_special_tokens", True)
    several = isinstance(prompt, list) and any(isinstance(one, str | list) for one in prompt)
    if not isinstance(prompt, list) or not several:
        return [_text_prompt(prompt, rules, special)]
    if len(prompt) > MAX_PROMPTS:
        raise BadRow("invalid_prompt", f"prompt has {len(prompt)} prompts, above {MAX_PROMPTS}")
    ids = []
    for number, one in enumerate(prompt, 1):
        try:
            ids.append(_text_prompt(one, rules, special))
        except BadRow as bad:
            raise BadRow(bad.code, f"prompt {number} of the array: {bad}") from None
    return ids


def _text_prompt(prompt: object, rules: PromptRules, special: bool) -> tuple[int, ...]:
    if isinstance(prompt, str):
        return rules.encode(prompt, add_special_tokens=special)
    if isinstance(prompt, list) and all(type(token) is int for token in prompt):
        return rules.check(tuple(prompt))
    kind = "missing" if prompt is None else json_kind(prompt)
    raise BadRow("invalid_prompt", f"prompt is {kind}, not a string or an array of token ids")
