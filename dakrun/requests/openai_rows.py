"""The OpenAI Batch row format: requests to /v1/completions and /v1/chat/completions, and results.

Knows neither files nor the engine.
"""

import hashlib
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dakrun.config import SamplingParams
from dakrun.requests.native_rows import (
    SAMPLING_FIELDS,
    ParsedRow,
    RowFormat,
    json_kind,
    stop_and_eos,
)
from dakrun.requests.prompts import BadRow, PromptRules
from dakrun.requests.request import Completion, Reply, RowError

_URLS = ("/v1/completions", "/v1/chat/completions")
_ROW_FIELDS = ("custom_id", "method", "url", "body")
_COMMON_FIELDS = ("model", "max_tokens", *SAMPLING_FIELDS, "stop", "ignore_eos")
_COMPLETION_FIELDS = ("prompt", *_COMMON_FIELDS)
_CHAT_FIELDS = ("messages", "max_completion_tokens", *_COMMON_FIELDS)
_IGNORED = ("user", "metadata")
_ROLES = ("system", "developer", "user", "assistant")
# Unsupported fields and the neutral value of each, which changes nothing and is accepted.
_NEUTRAL: Mapping[str, object] = {
    "n": 1,
    "best_of": 1,
    "stream": False,
    "echo": False,
    "logprobs": False,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "logit_bias": {},
    "suffix": "",
    "tools": [],
    "store": False,
    "service_tier": "auto",
    "response_format": {"type": "text"},
}


def is_batch_row(row: Mapping[str, Any]) -> bool:
    """Whether a JSON row has a field that only Batch rows have."""
    return "custom_id" in row or "body" in row


def parse_batch(row: dict[str, Any], defaults: SamplingParams, rules: PromptRules) -> ParsedRow:
    """Parse a row {"custom_id", "method": "POST", "url", "body": {...}}.

    Parameters that the body lacks are taken from `defaults`, not from OpenAI's defaults. A field
    that is null counts as absent, and so does an unsupported field with its neutral value, like
    "n": 1. Raises BadRow, or UsageError for parameters.
    """
    unknown = [name for name in row if name not in _ROW_FIELDS]
    if unknown:
        raise BadRow("unsupported_field", f"unsupported {_names(unknown)} outside the body")
    if row.get("custom_id") is None:
        raise BadRow("invalid_field", "custom_id is missing")
    if row.get("method") != "POST":
        raise BadRow("invalid_field", f"method is {_shown(row.get('method'))}, not 'POST'")
    url, body = row.get("url"), row.get("body")
    if url not in _URLS:
        raise BadRow("unsupported_url", f"url is {_shown(url)}, not {' or '.join(_URLS)}")
    if not isinstance(body, dict):
        raise BadRow("invalid_field", f"body is {json_kind(body)}, not an object")
    is_chat = url == _URLS[1]
    given = _supported(body, _CHAT_FIELDS if is_chat else _COMPLETION_FIELDS)
    model = given.get("model")
    if not isinstance(model, str | None):
        raise BadRow("invalid_field", f"model is {json_kind(model)}, not a string")
    params = _parameters(given, defaults)
    ids = _chat_prompt(given, rules) if is_chat else _text_prompt(given, rules)
    return ParsedRow(ids, params, Reply("chat" if is_chat else "completion", model))


def needs_tokenizer(row: Mapping[str, Any]) -> bool:
    """Whether the prompt of a Batch row is text or a chat."""
    body = row.get("body")
    return isinstance(body, dict) and (isinstance(body.get("prompt"), str) or "messages" in body)


BATCH = RowFormat("OpenAI Batch", "custom_id", parse_batch, needs_tokenizer, Reply("completion"))


def _supported(body: dict[str, Any], fields: tuple[str, ...]) -> dict[str, Any]:
    """The supported fields of `body`; raises BadRow, which names fields that are not supported."""
    given = {k: v for k, v in body.items() if v is not None and k not in _IGNORED}
    unknown = [k for k, v in given.items() if k not in fields and not _is_neutral(k, v)]
    if unknown:
        raise BadRow(
            "unsupported_field",
            f"unsupported {_names(unknown)}; the fields of the body are {', '.join(fields)}",
        )
    return {k: v for k, v in given.items() if k in fields}


def _is_neutral(name: str, value: object) -> bool:
    neutral = _NEUTRAL.get(name)
    same_kind = isinstance(value, bool) == isinstance(neutral, bool)
    return name in _NEUTRAL and same_kind and value == neutral


def _parameters(given: dict[str, Any], defaults: SamplingParams) -> SamplingParams:
    changes = {name: given[name] for name in SAMPLING_FIELDS if name in given}
    limits = [given[k] for k in ("max_completion_tokens", "max_tokens") if k in given]
    if len(limits) == 2 and limits[0] != limits[1]:
        raise BadRow("invalid_field", "max_tokens and max_completion_tokens exclude each other")
    if limits:
        changes["max_tokens"] = limits[0]
    return replace(defaults, **changes, **stop_and_eos(given))


def _text_prompt(given: dict[str, Any], rules: PromptRules) -> tuple[int, ...]:
    prompt = given.get("prompt")
    if isinstance(prompt, str):
        return rules.encode(prompt)
    if isinstance(prompt, list):
        if all(type(token) is int for token in prompt):
            return rules.check(tuple(prompt))
        if all(isinstance(part, str | list) for part in prompt):
            raise BadRow("invalid_prompt", "prompt is a list of prompts; give each its own row")
    kind = "missing" if prompt is None else json_kind(prompt)
    raise BadRow("invalid_prompt", f"prompt is {kind}, not a string or an array of token ids")


def _chat_prompt(given: dict[str, Any], rules: PromptRules) -> tuple[int, ...]:
    messages = given.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRow("invalid_prompt", "messages is not an array of at least one message")
    return rules.chat([_message(n, message) for n, message in enumerate(messages, 1)])


def _message(number: int, message: object) -> dict[str, str]:
    """A message as chat templates take it: its role, and all its text in one string."""
    if not isinstance(message, dict):
        raise BadRow("invalid_prompt", f"message {number} is {json_kind(message)}, not an object")
    given = {name: value for name, value in message.items() if value is not None}
    unknown = [name for name in given if name not in ("role", "content")]
    if unknown:
        raise BadRow("unsupported_field", f"message {number} has unsupported {_names(unknown)}")
    if given.get("role") not in _ROLES:
        found = _shown(given.get("role"))
        raise BadRow(
            "invalid_prompt", f"the role of message {number} is {found}, not {', '.join(_ROLES)}"
        )
    content = given.get("content")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list) or not parts:
        raise BadRow(
            "invalid_prompt", f"the content of message {number} is {json_kind(content)}, not text"
        )
    for part in parts:
        if not isinstance(part, dict) or set(part) != {"type", "text"} or part["type"] != "text":
            raise BadRow("unsupported_field", f"message {number} has a part that is not text")
        if not isinstance(part["text"], str):
            raise BadRow("invalid_prompt", f"message {number} has text that is not a string")
    return {"role": given["role"], "content": "".join(part["text"] for part in parts)}


def completion_row(completion: Completion) -> dict[str, Any]:
    """The result row of a finished Batch request; its ids are hashes of custom_id alone.

    Without a tokenizer the choice has `token_ids`, which OpenAI's format lacks, and no text.
    """
    key, is_chat = _key(completion.id), completion.reply.kind == "chat"
    choice: dict[str, Any] = {"index": 0}
    if is_chat:
        choice["message"] = {"role": "assistant", "content": completion.text}
    else:
        choice["text"] = completion.text
    if completion.text is None:
        choice["token_ids"] = completion.token_ids
    choice |= {"finish_reason": completion.finish_reason, "logprobs": None}
    new = len(completion.token_ids)
    body = {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{key}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": int(time.time()),
        "model": completion.reply.model,
        "choices": [choice],
        "usage": {
            "prompt_tokens": completion.prompt_tokens,
            "completion_tokens": new,
            "total_tokens": completion.prompt_tokens + new,
        },
    }
    return {
        "id": f"batch_req_{key}",
        "custom_id": completion.id,
        "response": {"status_code": 200, "request_id": f"req_{key}", "body": body},
        "error": None,
    }


def error_row(error: RowError) -> dict[str, Any]:
    """The result row of a Batch row that could not be run; `line` is not in OpenAI's format."""
    return {
        "id": f"batch_req_{_key(error.id)}",
        "custom_id": error.id,
        "response": None,
        "error": {"code": error.code, "message": error.message, "line": error.line},
    }


def _key(custom_id: str) -> str:
    data = custom_id.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _names(fields: list[str]) -> str:
    return ", ".join(map(repr, fields))


def _shown(value: object) -> str:
    """A value in a message: a short string itself, otherwise its JSON type."""
    if value is None:
        return "missing"
    return repr(value) if isinstance(value, str) and len(value) <= 100 else json_kind(value)
