"""Lengths of rows before they are tokenized: what a run will need, and which rows take longest.

Knows the fields of rows that set lengths, no files. A prompt's tokens are exact where the row has
token ids; otherwise they are estimated from the characters.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeGuard

CHARACTERS_PER_TOKEN = 4  # of English text in the vocabularies of OPT and Llama


class RowLengths(NamedTuple):
    """Lengths of a row's choices in tokens; a row that cannot be run has 0 `choices`.

    `prompt` is that of its longest prompt, estimated unless there are token ids. `new` is the
    maximum of new tokens.
    """

    prompt: int
    new: int
    choices: int = 1


NOTHING = RowLengths(0, 0, 0)


@dataclass(frozen=True, kw_only=True)
class WorkloadLengths:
    """Lengths of a file's requests, in tokens, before it is run.

    `requests` counts the choices of all rows; the means are over them. Prompts are estimated where
    the file has text. New tokens are those that a request may have at most: `max_tokens`, or what
    the maximum length leaves. `total` is a prompt and its new tokens. With 0 requests all is 0.
    """

    requests: int
    mean_prompt: float
    max_prompt: int
    mean_new: float
    max_new: int
    mean_total: float
    max_total: int

    @classmethod
    def of(cls, rows: Iterable[RowLengths], share: float = 1.0) -> "WorkloadLengths":
        """The lengths of a file of which `rows` are a `share`, above 0 to 1, from its start."""
        seen = [row for row in rows if row.choices]
        count = sum(row.choices for row in seen)

        def mean(lengths: Iterable[int]) -> float:
            weighted = (n * row.choices for n, row in zip(lengths, seen, strict=True))
            return sum(weighted) / count if count else 0.0

        prompts, new = [row.prompt for row in seen], [row.new for row in seen]
        totals = [row.prompt + row.new for row in seen]
        return cls(
            requests=round(count / share),
            mean_prompt=mean(prompts),
            max_prompt=max(prompts, default=0),
            mean_new=mean(new),
            max_new=max(new, default=0),
            mean_total=mean(totals),
            max_total=max(totals, default=0),
        )


def text_lengths(text: str, max_tokens: int, max_model_len: int) -> RowLengths:
    """Lengths of a text prompt."""
    return _limited(_tokens(text), max_tokens, max_model_len)


def json_lengths(row: Mapping[str, Any], max_tokens: int, max_model_len: int) -> RowLengths:
    """Lengths of a native or OpenAI Batch row; `max_tokens` is for rows without their own.

    NOTHING for most rows that are errors; the row formats tell which are.
    """
    fields = row.get("body", row)
    if not isinstance(fields, dict):
        return NOTHING
    prompt = fields.get("prompt_token_ids")
    if prompt is None:
        prompt = fields.get("prompt")
    n = fields.get("n")
    prompts = [prompt]
    if (messages := fields.get("messages")) is not None:
        prompts = [_chat_text(messages)]
    elif isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        prompts = prompt
    own = (fields.get(name) for name in ("max_tokens", "max_completion_tokens"))
    new = next((value for value in own if value is not None), max_tokens)
    if type(new) is not int or new < 1 or not (n is None or (type(n) is int and n > 0)):
        return NOTHING
    longest = max(map(_tokens, prompts))
    return _limited(longest, new, max_model_len, len(prompts) * (n or 1))


def _limited(prompt: int, new: int, max_model_len: int, choices: int = 1) -> RowLengths:
    if not prompt:
        return NOTHING
    prompt = max(1, min(prompt, max_model_len - 1))
    return RowLengths(prompt, max(1, min(new, max_model_len - prompt)), choices)


def _tokens(prompt: object) -> int:
    """Tokens of a text or an array of token ids; 0 for anything else."""
    if isinstance(prompt, str):
        return -(-len(prompt) // CHARACTERS_PER_TOKEN)
    return len(prompt) if isinstance(prompt, list) else 0


def _chat_text(messages: object) -> str:
    """All text of a chat's messages."""
    contents = [one.get("content") for one in messages] if _are_objects(messages) else []
    parts = [content for content in contents if isinstance(content, str)]
    for content in contents:
        if _are_objects(content):
            parts += [text for part in content if isinstance(text := part.get("text"), str)]
    return "".join(parts)


def _are_objects(values: object) -> TypeGuard[list[dict[str, Any]]]:
    return isinstance(values, list) and all(isinstance(value, dict) for value in values)
