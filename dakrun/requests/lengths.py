"""Lengths of rows before they are tokenized: what a run will need, and which rows take longest.

Knows the fields of rows that set lengths, no files. A prompt's tokens are exact where the row has
token ids; otherwise they are estimated from the characters.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple, TypeGuard

from dakrun.geometry import KV_BLOCK
from dakrun.requests.native_rows import MAX_N
from dakrun.requests.neutral import integer_of
from dakrun.requests.openai_rows import MAX_PROMPTS

CHARACTERS_PER_TOKEN = 4  # of English text, about, in the vocabularies of these models
MOST_BLOCKS = 1 << 18  # whose hashes are kept: some 20 MB


class RowLengths(NamedTuple):
    """Lengths of a row's choices in tokens; a row that cannot be run has 0 `choices`.

    `prompt` is that of its longest prompt, estimated unless there are token ids. `new` is the
    maximum of new tokens. `shared` are tokens at the prompt's start in full KV blocks that an
    earlier row's prompt begins with, too.
    """

    prompt: int
    new: int
    choices: int = 1
    shared: int = 0


NOTHING = RowLengths(0, 0, 0)


class PromptStarts:
    """The KV blocks that the prompts of a file begin with, by hash: the first MOST_BLOCKS of them.

    Blocks of text have as many characters as a block of tokens has on average.
    """

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def shared(self, prompt: str | list[int]) -> int:
        """Tokens of the leading blocks of `prompt` that an earlier prompt has; remembers its own.

        The last token is not counted: it is computed in any case.
        """
        size = KV_BLOCK * (CHARACTERS_PER_TOKEN if isinstance(prompt, str) else 1)
        number = found = 0
        for start in range(0, len(prompt) - size, size):
            block = prompt[start : start + size]
            number = hash((number, block if isinstance(block, str) else tuple(block)))
            if number in self._seen:
                found += KV_BLOCK * (found == start // size * KV_BLOCK)
            elif len(self._seen) < MOST_BLOCKS:
                self._seen.add(number)
            else:
                break
        return found


def text_lengths(
    text: str, max_tokens: int, max_model_len: int, starts: PromptStarts
) -> RowLengths:
    """Lengths of a text prompt; `starts` are those of earlier rows."""
    return _limited(text, max_tokens, max_model_len, starts)


def json_lengths(
    row: Mapping[str, Any], max_tokens: int, max_model_len: int, starts: PromptStarts
) -> RowLengths:
    """Lengths of a native or OpenAI Batch row; `max_tokens` is for rows without their own.

    NOTHING for most rows that are errors; the row formats tell which are.
    """
    fields = row.get("body", row)
    if not isinstance(fields, dict):
        return NOTHING
    prompt = fields.get("prompt_token_ids")
    if prompt is None:
        prompt = fields.get("prompt")
    n = integer_of(fields.get("n"))
    prompts = [prompt]
    if fields.get("messages") is not None:
        prompts = [chat_text(fields)]
    elif isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        prompts = prompt
    own = (fields.get(name) for name in ("max_tokens", "max_completion_tokens"))
    new = integer_of(next((value for value in own if value is not None), max_tokens))
    scored = fields.get("prompt_logprobs") is not None or fields.get("echo")
    if type(new) is not int or new < (0 if scored else 1) or len(prompts) > MAX_PROMPTS:
        return NOTHING
    if n is not None and (type(n) is not int or not 1 <= n <= MAX_N):
        return NOTHING
    longest = max(prompts, key=tokens_of)
    return _limited(longest, new, max_model_len, starts, len(prompts) * (n or 1))


def _limited(
    prompt: object, new: int, max_model_len: int, starts: PromptStarts, choices: int = 1
) -> RowLengths:
    if not (length := tokens_of(prompt)):
        return NOTHING
    length = max(1, min(length, max_model_len - 1))
    shared = 0
    if isinstance(prompt, str) or (isinstance(prompt, list) and _are_numbers(prompt)):
        shared = min(starts.shared(prompt), (length - 1) // KV_BLOCK * KV_BLOCK)
    return RowLengths(length, max(1, min(new, max_model_len - length)), choices, shared)


def _are_numbers(prompt: list[Any]) -> bool:
    return all(type(token) is int for token in prompt)


def tokens_of(prompt: object) -> int:
    """Tokens of a text, one at least, or of an array of token ids; 0 for anything else."""
    if isinstance(prompt, str):
        # With most tokenizers an empty text has a BOS token.
        return max(1, -(-len(prompt) // CHARACTERS_PER_TOKEN))
    return len(prompt) if isinstance(prompt, list) else 0


def chat_text(row: Mapping[str, Any]) -> str | None:
    """All text of a row's tools and messages; None if these have none, not even an empty one."""
    messages = row["messages"]
    contents = [one.get("content") for one in messages] if _are_objects(messages) else []
    parts = [content for content in contents if isinstance(content, str)]
    for content in contents:
        if _are_objects(content):
            parts += [text for part in content if isinstance(text := part.get("text"), str)]
    if not parts:
        return None
    calls = [one["tool_calls"] for one in messages if one.get("tool_calls")]
    return "".join([_dumped(row.get("tools")), *parts, _dumped(calls)])


def _dumped(value: object) -> str:
    """A value as JSON; nothing of one that is empty, or nested too deep."""
    with suppress(RecursionError):
        return json.dumps(value) if value else ""
    return ""


def _are_objects(values: object) -> TypeGuard[list[dict[str, Any]]]:
    return isinstance(values, list) and all(isinstance(value, dict) for value in values)
