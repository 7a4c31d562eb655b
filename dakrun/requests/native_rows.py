"""What a native row of a prompt file may say: its prompt, its sampling parameters, its id.

Knows JSON rows and what the model can take as a prompt; knows nothing of files.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from dakrun.config import SamplingParams
from dakrun.errors import UsageError
from dakrun.requests.request import Reply
from dakrun.requests.tokenizer import Tokenizer

SAMPLING_FIELDS = ("temperature", "top_k", "top_p", "seed")
_NATIVE_FIELDS = (
    *("id", "prompt", "prompt_token_ids", "max_tokens"),
    *(*SAMPLING_FIELDS, "stop", "ignore_eos"),
)
_JSON_NAMES = {dict: "an object", list: "an array", str: "a string", bool: "a boolean"}


class BadRow(Exception):
    """Why a row cannot be run: `code` for programs, the message for people."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, kw_only=True)
class PromptRules:
    """What the model takes as a prompt. Lengths are in tokens."""

    vocab_size: int
    max_model_len: int
    max_positions: int
    tokenizer: Tokenizer | None = None

    def encode(self, text: str) -> tuple[int, ...]:
        """The checked token ids of a text prompt; raises BadRow."""
        if self.tokenizer is None:
            raise BadRow("no_tokenizer", "the model has no tokenizer; give prompt_token_ids")
        _check_encodable(text, "the prompt")
        return self.check(self.tokenizer.encode(text))

    def chat(self, messages: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
        """The checked token ids of `{"role", "content"}` messages; raises BadRow."""
        if self.tokenizer is None:
            raise BadRow("no_tokenizer", "the model has no tokenizer, which chats need")
        if not self.tokenizer.has_chat_template:
            raise BadRow("no_chat_template", "the model has no chat template; use /v1/completions")
        for number, message in enumerate(messages, 1):
            _check_encodable(message["content"], f"message {number}")
        try:
            return self.check(self.tokenizer.chat(messages))
        except UsageError as problem:
            raise BadRow("invalid_prompt", str(problem)) from None

    def check(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        """`ids`, if they are a prompt that fits the model; raises BadRow."""
        if not ids:
            raise BadRow("invalid_prompt", "the prompt has no tokens")
        limit = self.max_model_len - 1
        if len(ids) > limit:
            remedy = "the model has no more positions"
            if self.max_model_len < self.max_positions:
                remedy = f"raise --max-model-len, at most to {self.max_positions}"
            raise BadRow(
                "prompt_too_long",
                f"the prompt has {len(ids)} tokens, but only {limit} fit beside a new one into "
                f"a length of {self.max_model_len}; {remedy}",
            )
        if min(ids) < 0 or max(ids) >= self.vocab_size:
            bad = next(t for t in ids if not 0 <= t < self.vocab_size)
            raise BadRow(
                "invalid_prompt",
                f"token id {bad} is not in the model's vocabulary of {self.vocab_size}",
            )
        return ids


class Prompt(NamedTuple):
    """What a row asks for: token ids, how to continue them, and the format of the result."""

    ids: tuple[int, ...]
    params: SamplingParams
    reply: Reply = Reply()


@dataclass(frozen=True)
class RowFormat:
    """One kind of JSON row: the field with its id, and what turns the row into a prompt.

    `parse` gets the row, the default parameters and the rules; it raises BadRow or UsageError.
    `needs_tokenizer` tells whether a row's prompt is text. Rows that fail are answered as `reply`
    says.
    """

    name: str
    id_field: str
    parse: Callable[[dict[str, Any], SamplingParams, PromptRules], Prompt]
    needs_tokenizer: Callable[[Mapping[str, Any]], bool]
    reply: Reply


def parse_native(row: dict[str, Any], defaults: SamplingParams, rules: PromptRules) -> Prompt:
    """Prompt and parameters of a row {"prompt" | "prompt_token_ids", "max_tokens"?, ...}.

    A field that is null counts as absent. Raises BadRow, or UsageError for parameters.
    """
    unknown = [name for name in row if name not in _NATIVE_FIELDS]
    if unknown:
        names, known = ", ".join(map(repr, unknown)), ", ".join(_NATIVE_FIELDS)
        raise BadRow("unsupported_field", f"unsupported {names}; the fields are {known}")
    given = {name: value for name, value in row.items() if value is not None}
    changes = {name: given[name] for name in ("max_tokens", *SAMPLING_FIELDS) if name in given}
    params = replace(defaults, **changes, **stop_and_eos(given))
    return Prompt(_native_prompt(given, rules), params)


def stop_and_eos(given: Mapping[str, Any]) -> dict[str, Any]:
    """`stop` and `ignore_eos` as SamplingParams has them, where they are given; raises BadRow."""
    changes: dict[str, Any] = {}
    if "stop" in given:
        stop = given["stop"]
        if not isinstance(stop, str | list):
            raise BadRow("invalid_field", f"stop is {json_kind(stop)}, not a string or an array")
        changes["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
    if "ignore_eos" in given:
        flag = given["ignore_eos"]
        if not isinstance(flag, bool):
            raise BadRow("invalid_field", f"ignore_eos is {json_kind(flag)}, not true or false")
        changes["ignore_eos"] = flag
    return changes


def _native_prompt(given: dict[str, Any], rules: PromptRules) -> tuple[int, ...]:
    if ("prompt" in given) == ("prompt_token_ids" in given):
        raise BadRow("invalid_prompt", "exactly one of prompt and prompt_token_ids is needed")
    if "prompt" in given:
        if not isinstance(given["prompt"], str):
            raise BadRow("invalid_prompt", f"prompt is {json_kind(given['prompt'])}, not a string")
        return rules.encode(given["prompt"])
    ids = given["prompt_token_ids"]
    if not isinstance(ids, list) or not all(type(token) is int for token in ids):
        raise BadRow("invalid_prompt", "prompt_token_ids is not an array of integers")
    return rules.check(tuple(ids))


NATIVE = RowFormat(
    "native", "id", parse_native, lambda row: isinstance(row.get("prompt"), str), Reply()
)


def decode_utf8(data: bytes) -> str:
    """`data` as text; raises BadRow."""
    try:
        return data.decode()
    except UnicodeDecodeError as problem:
        raise BadRow(
            "invalid_utf8", f"not UTF-8: byte {data[problem.start]:#04x} at {problem.start + 1}"
        ) from None


def json_object(data: bytes) -> dict[str, Any]:
    """The JSON object in a line; raises BadRow."""
    try:
        row = json.loads(decode_utf8(data))
    except json.JSONDecodeError as problem:
        raise BadRow("invalid_json", f"not JSON: {problem.msg} at column {problem.colno}") from None
    except (ValueError, RecursionError):
        raise BadRow("invalid_json", "not JSON that can be read: too long or too deep") from None
    if not isinstance(row, dict):
        raise BadRow("invalid_json", f"the row is {json_kind(row)}, not an object")
    return row


def id_of(row: dict[str, Any], name: str) -> str | None:
    """The row's id as a string; None where it has none. Raises BadRow."""
    value = row.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise BadRow("invalid_field", f"{name} is not a string or an integer, or is empty")
    return str(value)


def json_kind(value: object) -> str:
    """What a JSON value is, for messages: "an array"."""
    return _JSON_NAMES.get(type(value), "null" if value is None else "a number")


def _check_encodable(text: str, what: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as problem:
        at = problem.start + 1
        raise BadRow(
            "invalid_prompt", f"{what} has half a surrogate pair at character {at}"
        ) from None
