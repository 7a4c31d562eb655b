"""The native row format: JSON rows with a prompt and sampling parameters, and their result rows.

Knows nothing of files.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from dakrun.config import SamplingParams
from dakrun.errors import is_neutral
from dakrun.requests.json_rows import flag, json_kind, names
from dakrun.requests.messages import CHAT_FIELDS, chat_prompt
from dakrun.requests.neutral import NEUTRAL, supported_fields
from dakrun.requests.prompts import BadRow, PromptRules
from dakrun.requests.request import Completion, Reply, RowError, TokenLogprob

PROMPT_FIELDS = ("prompt", "prompt_token_ids", "messages")
SAMPLING_FIELDS = ("temperature", "top_k", "top_p", "seed")
NATIVE_FIELDS = (
    *("id", *PROMPT_FIELDS, "max_tokens"),
    *(*SAMPLING_FIELDS, "stop", "stop_token_ids", "ignore_eos", "logprobs"),
    *("add_special_tokens", *CHAT_FIELDS),
)
_COPIED = ("max_tokens", *SAMPLING_FIELDS, "logprobs")  # into SamplingParams


class ParsedRow(NamedTuple):
    """A choice of a row: its token ids, its sampling parameters, and its place in the results."""

    prompt_ids: tuple[int, ...]
    params: SamplingParams
    reply: Reply = Reply()


@dataclass(frozen=True)
class RowFormat:
    """One kind of JSON row.

    `id_field` names the field with the row's id. `parse` takes the row, the default parameters and
    the model's rules, and returns the row's choices; it raises BadRow or UsageError.
    `needs_tokenizer` returns whether a row's prompt is text. `reply` is the result format of rows
    that cannot be parsed.
    """

    name: str
    id_field: str
    parse: Callable[[dict[str, Any], SamplingParams, PromptRules], list[ParsedRow]]
    needs_tokenizer: Callable[[Mapping[str, Any]], bool]
    reply: Reply


def parse_native(
    row: dict[str, Any], defaults: SamplingParams, rules: PromptRules
) -> list[ParsedRow]:
    """Parse a row {"prompt" | "prompt_token_ids" | "messages", "max_tokens"?, ...}: one choice.

    A field that is null counts as absent. Raises BadRow, or UsageError for parameters.
    """
    given, unknown = supported_fields(row, NATIVE_FIELDS)
    if unknown:
        known = ", ".join(NATIVE_FIELDS)
        raise BadRow("unsupported_field", f"unsupported {names(unknown)}; the fields are {known}")
    changes = {name: given[name] for name in _COPIED if name in given}
    params = replace(defaults, **changes, **stop_and_eos(given))
    ids, reply = _prompt(given, rules)
    return [ParsedRow(ids, params, reply)]


def completion_row(completion: Completion) -> dict[str, Any]:
    """The native result row of a finished request."""
    calls = completion.tool_calls
    row: dict[str, Any] = {
        "id": _shown_id(completion),
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        **({"tool_calls": [call.as_dict() for call in calls]} if calls else {}),
        "usage": {
            "prompt_tokens": completion.prompt_tokens,
            "completion_tokens": len(completion.token_ids),
        },
    }
    if completion.logprobs is not None:
        row["logprobs"] = [
            {**_logprob(chosen), "top": [_logprob(one) for one in top]}
            for chosen, top in completion.logprobs
        ]
    return row


def _logprob(token: TokenLogprob) -> dict[str, Any]:
    return {"token_id": token.token_id, "text": token.text, "logprob": round(token.logprob, 6)}


def error_row(error: RowError) -> dict[str, Any]:
    """The native result row of a row that could not be run."""
    detail = {"code": error.code, "message": error.message, "line": error.line}
    return {"id": _shown_id(error), "error": detail}


def _shown_id(result: Completion | RowError) -> str | int:
    """The row's id as the row has it, a string or an integer."""
    return int(result.id) if result.reply.integer_id else result.id


def stop_and_eos(given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields `stop`, `stop_token_ids` and `ignore_eos`, where given, for SamplingParams.

    Raises BadRow.
    """
    changes: dict[str, Any] = {}
    if "stop" in given:
        stop = given["stop"]
        if not isinstance(stop, str | list):
            raise BadRow("invalid_field", f"stop is {json_kind(stop)}, not a string or an array")
        changes["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
    if "stop_token_ids" in given:
        ids = given["stop_token_ids"]
        if not isinstance(ids, list) or not all(type(token) is int for token in ids):
            raise BadRow("invalid_field", "stop_token_ids is not an array of integers")
        changes["stop_token_ids"] = tuple(ids)
    if "ignore_eos" in given:
        changes["ignore_eos"] = flag(given, "ignore_eos", False)
    return changes


def refuse_chat_fields(given: Mapping[str, Any]) -> None:
    """Raise BadRow if a row without messages has fields that are about them."""
    asked = [n for n in CHAT_FIELDS if n in given and not is_neutral(n, given[n], NEUTRAL)]
    if asked:
        raise BadRow("invalid_field", f"{names(asked)} need messages")


def _prompt(given: dict[str, Any], rules: PromptRules) -> tuple[tuple[int, ...], Reply]:
    """Token ids, and how to reply."""
    if sum(name in given for name in PROMPT_FIELDS) != 1:
        fields = "prompt, prompt_token_ids and messages"
        raise BadRow("invalid_prompt", f"exactly one of {fields} is needed")
    if "messages" in given:
        return chat_prompt(given, rules, Reply(of_messages=True))
    refuse_chat_fields(given)
    special = flag(given, "add_special_tokens", True)
    if "prompt" in given:
        if not isinstance(given["prompt"], str):
            raise BadRow("invalid_prompt", f"prompt is {json_kind(given['prompt'])}, not a string")
        return rules.encode(given["prompt"], add_special_tokens=special), Reply()
    ids = given["prompt_token_ids"]
    if not isinstance(ids, list) or not all(type(token) is int for token in ids):
        raise BadRow("invalid_prompt", "prompt_token_ids is not an array of integers")
    return rules.check(tuple(ids)), Reply()


NATIVE = RowFormat(
    "native",
    "id",
    parse_native,
    lambda row: isinstance(row.get("prompt"), str) or row.get("messages") is not None,
    Reply(),
)
