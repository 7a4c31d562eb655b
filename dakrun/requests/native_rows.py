"""The native row format: JSON rows with a prompt and sampling parameters, and their result rows.

Knows nothing of files.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from dakrun.config import ADJUSTING, SEED_BITS, SamplingParams
from dakrun.errors import is_neutral
from dakrun.requests.answer_forms import FORM_FIELDS, answer_form
from dakrun.requests.json_rows import flag, json_kind, names
from dakrun.requests.messages import CHAT_FIELDS, chat_prompt, with_calls
from dakrun.requests.neutral import NEUTRAL, supported_fields
from dakrun.requests.prompts import BadRow, PromptRules
from dakrun.requests.request import Completion, Logprobs, Reply, RowError, TokenLogprob

PROMPT_FIELDS = ("prompt", "prompt_token_ids", "messages")
SAMPLING_FIELDS = ("temperature", "top_k", "top_p", "seed", "thinking_token_budget", *ADJUSTING)
NATIVE_FIELDS = (
    *("id", *PROMPT_FIELDS, "max_tokens"),
    *(*SAMPLING_FIELDS, "stop", "stop_token_ids", "ignore_eos", "logprobs", "prompt_logprobs"),
    *("n", "add_special_tokens", *FORM_FIELDS, *CHAT_FIELDS),
)
_COPIED = ("max_tokens", *SAMPLING_FIELDS, "logprobs", "prompt_logprobs")  # into SamplingParams
MAX_N = 8


class ParsedRow(NamedTuple):
    """A choice of a row: its token ids, its sampling parameters, and its Reply."""

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
    """Parse a row {"prompt" | "prompt_token_ids" | "messages", "max_tokens"?, ...}: `n` choices.

    A field that is null counts as absent. Raises BadRow, or UsageError for parameters.
    """
    given, unknown = supported_fields(row, NATIVE_FIELDS)
    if unknown:
        known = ", ".join(NATIVE_FIELDS)
        raise BadRow("unsupported_field", f"unsupported {names(unknown)}; the fields are {known}")
    changes = {name: given[name] for name in _COPIED if name in given}
    form = answer_form(given)
    params = replace(defaults, **changes, **stop_and_eos(given), structured_outputs=form)
    ids, reply = _prompt(given, rules)
    return several_choices([ids], params, reply, count_of(given, "n", 1, MAX_N))


def several_choices(
    prompts: Sequence[tuple[int, ...]], params: SamplingParams, reply: Reply, n: int
) -> list[ParsedRow]:
    """`n` choices for each prompt of a row.

    Each choice has its own seed. That of a prompt's first choice does not depend on n.
    """
    params = with_calls(params, reply)
    reply = replace(reply, choices=n * len(prompts), n=n)
    return [
        ParsedRow(
            ids,
            replace(params, seed=params.seed + (again * len(prompts) + number << SEED_BITS)),
            replace(reply, choice=number * n + again),
        )
        for number, ids in enumerate(prompts)
        for again in range(n)
    ]


def completion_row(first: Completion) -> dict[str, Any]:
    """The native result row of a row with all its choices, of which `first` has the others."""
    choices = first.choices
    row: dict[str, Any] = {"id": _shown_id(first)}
    if len(choices) == 1:
        row |= _text(first)
    else:
        row["choices"] = [{"index": one.index, **_text(one), **_logprobs(one)} for one in choices]
    row["usage"] = {
        "prompt_tokens": first.prompt_tokens,
        "completion_tokens": sum(len(one.token_ids) for one in choices),
    }
    if len(choices) == 1:
        row |= _logprobs(first)
    if first.prompt_logprobs is not None:
        row["prompt_logprobs"] = [one and _with_top(one) for one in first.prompt_logprobs]
    return row


def _text(completion: Completion) -> dict[str, Any]:
    calls = completion.tool_calls
    return {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        **({"tool_calls": [call.as_dict() for call in calls]} if calls else {}),
        **({"valid": completion.valid} if completion.valid is not None else {}),
    }


def _logprobs(completion: Completion) -> dict[str, Any]:
    if completion.logprobs is None:
        return {}
    return {"logprobs": [_with_top(one) for one in completion.logprobs]}


def _with_top(one: Logprobs) -> dict[str, Any]:
    return {**_logprob(one.chosen), "top": [_logprob(other) for other in one.top]}


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


def count_of(given: Mapping[str, Any], name: str, low: int, high: int) -> int:
    """The integer in field `name`, `low` if it is absent; raises BadRow."""
    value = given.get(name, low)
    if type(value) is not int or not low <= value <= high:
        shown = value if type(value) is int else json_kind(value)
        raise BadRow("invalid_field", f"{name} is {shown}, not an integer from {low} to {high}")
    return value


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
