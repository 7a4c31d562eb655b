"""The rules that a model sets for prompts, and the prompts of the Python API as requests.

Knows token ids, lengths and the tokenizer; knows neither files nor row formats.
"""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import islice
from operator import index
from typing import Any

from dakrun.config import SamplingParams
from dakrun.errors import UsageError
from dakrun.requests.chats import string_of
from dakrun.requests.request import Request
from dakrun.requests.tokenizer import Tokenizer


class BadRow(Exception):
    """A prompt or row that cannot be run: `code` is for programs, the message for people."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, kw_only=True)
class PromptRules:
    """The limits that a model sets for prompts. Lengths are in tokens. All methods raise BadRow."""

    vocab_size: int
    max_model_len: int
    max_positions: int
    tokenizer: Tokenizer | None = None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Token ids of a text prompt, checked."""
        if self.tokenizer is None:
            raise BadRow("no_tokenizer", "the model has no tokenizer; give prompt_token_ids")
        _check_encodable(text, "the prompt")
        if add_special_tokens:
            return self.check(self.tokenizer.encode(text))
        return self.check(self.tokenizer.encode(text, add_special_tokens=False))

    def chat(
        self, messages: Sequence[Mapping[str, Any]], *, continues: bool = False
    ) -> tuple[int, ...]:
        """Token ids of `{"role", "content"}` messages, checked; see Tokenizer.chat."""
        if self.tokenizer is None:
            raise BadRow("no_tokenizer", "the model has no tokenizer, which chats need")
        if not self.tokenizer.has_chat_template:
            raise BadRow("no_chat_template", "the model has no chat template; give prompts as text")
        for number, message in enumerate(messages, 1):
            _check_encodable(string_of(message["content"]), f"message {number}")
        try:
            return self.check(self.tokenizer.chat(messages, continues=continues))
        except UsageError as problem:
            raise BadRow("invalid_prompt", str(problem)) from None

    def check(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        """Return `ids` if they are a prompt that fits the model."""
        if not ids:
            raise BadRow("invalid_prompt", "the prompt has no tokens")
        limit = self.max_model_len - 1
        if len(ids) > limit:
            remedy = "the model has no more positions"
            if self.max_model_len < self.max_positions:
                remedy = f"raise --max-model-len, at most to {self.max_positions}"
            raise BadRow(
                "prompt_too_long",
                f"the prompt has {len(ids)} tokens, but only {limit} and a new one fit into the "
                f"maximum length of {self.max_model_len}; {remedy}",
            )
        if min(ids) < 0 or max(ids) >= self.vocab_size:
            bad = next(t for t in ids if not 0 <= t < self.vocab_size)
            raise BadRow(
                "invalid_prompt",
                f"token id {bad} is not in the model's vocabulary of {self.vocab_size}",
            )
        return ids

    def check_stop(self, params: SamplingParams) -> None:
        """Refuse stop strings if there is no tokenizer to find them with."""
        if params.stop and self.tokenizer is None:
            raise BadRow("no_tokenizer", "stop strings need the model's tokenizer")


def as_requests(
    prompts: Iterable[str | Iterable[int]],
    params: SamplingParams | Iterable[SamplingParams] | None,
    rules: PromptRules,
) -> list[Request]:
    """One Request for each text or sequence of token ids; its id is its index in `prompts`.

    `params` holds for all prompts, or is one SamplingParams for each. Raises UsageError, which
    names the prompt that cannot be run.
    """
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
            f"there are more or fewer SamplingParams than the {len(prompts)} prompts",
            hint="give one SamplingParams for all or one for each",
        )
    pairs = zip(prompts, each, strict=True)
    return [_request(number, prompt, own, rules) for number, (prompt, own) in enumerate(pairs)]


def _request(
    number: int, prompt: str | Iterable[int], params: SamplingParams, rules: PromptRules
) -> Request:
    try:
        rules.check_stop(params)
        ids = rules.encode(prompt) if isinstance(prompt, str) else rules.check(_token_ids(prompt))
    except BadRow as bad:
        raise UsageError(f"prompt {number}: {bad}", hint="nothing was generated") from None
    return Request(id=str(number), line=number + 1, prompt_ids=ids, params=params)


def _token_ids(prompt: Iterable[int]) -> tuple[int, ...]:
    """The token ids in a list, an array or a tensor; raises BadRow."""
    try:
        ids = list(prompt)
        if isinstance(prompt, bytes | Mapping | Set) or any(isinstance(t, bool) for t in ids):
            raise TypeError
        return tuple(map(index, ids))
    except TypeError:
        raise BadRow("invalid_prompt", "neither text nor a list of token ids") from None


def _check_encodable(text: str, what: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as problem:
        at = problem.start + 1
        raise BadRow(
            "invalid_prompt", f"{what} has half a surrogate pair at character {at}"
        ) from None
