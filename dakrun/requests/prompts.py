"""The rules that a model sets for prompts.

Knows token ids, lengths and the tokenizer; knows neither files nor row formats.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Self

from dakrun.config import ModelConfig, SamplingParams
from dakrun.errors import UsageError
from dakrun.grammars import Grammars, StructuredOutputsParams
from dakrun.requests.chat_template import PLAIN, TemplateOptions
from dakrun.requests.chats import string_of
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
    grammars: Grammars | None = None  # where there is a tokenizer

    @classmethod
    def of(cls, config: ModelConfig, max_model_len: int, tokenizer: Tokenizer | None) -> Self:
        """The limits of a model with that tokenizer."""
        grammars = None
        if tokenizer is not None:
            ends = (*config.eos_token_ids, tokenizer.eos_token_id)
            known = dict.fromkeys(token for token in ends if token is not None)
            grammars = Grammars(tokenizer.as_json, config.vocab_size, known)
        return cls(
            vocab_size=config.vocab_size,
            max_model_len=max_model_len,
            max_positions=config.max_positions,
            tokenizer=tokenizer,
            grammars=grammars,
        )

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Token ids of a text prompt, checked."""
        if self.tokenizer is None:
            raise BadRow("no_tokenizer", "the model has no tokenizer; give prompt_token_ids")
        check_encodable(text, "the prompt")
        if add_special_tokens:
            return self.check(self.tokenizer.encode(text))
        return self.check(self.tokenizer.encode(text, add_special_tokens=False))

    def chat_text(
        self, messages: Sequence[Mapping[str, Any]], options: TemplateOptions = PLAIN
    ) -> str:
        """Text of messages, special tokens included; see Tokenizer.chat_text."""
        if self.tokenizer is None:
            raise BadRow("no_tokenizer", "the model has no tokenizer, which chats need")
        if not self.tokenizer.has_chat_template:
            raise BadRow("no_chat_template", "the model has no chat template; give prompts as text")
        for number, message in enumerate(messages, 1):
            check_encodable(string_of(message.get("content", "")), f"message {number}")
        try:
            return self.tokenizer.chat_text(messages, options)
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
        check_ids(ids, self.vocab_size)
        return ids

    def checked_params(self, params: SamplingParams) -> SamplingParams:
        """`params` with `bad_words` as token ids, if they suit the model.

        A string is forbidden with and without a space before it. Raises BadRow for tokens that are
        not in the vocabulary, for strings without a tokenizer, and for a form of the answer that no
        grammar can follow, and UsageError for too many tokens.
        """
        if params.structured_outputs is not None:
            self._check_form(params.structured_outputs)
        if params.stop and self.tokenizer is None:
            raise BadRow("no_tokenizer", "stop strings need the model's tokenizer")
        if params.bad_words:
            words = (ids for word in params.bad_words for ids in self._spellings(word))
            params = replace(params, bad_words=tuple(dict.fromkeys(words)))
        check_tokens(params, self.vocab_size)
        return params

    def _spellings(self, word: str | tuple[int, ...]) -> list[tuple[int, ...]]:
        """Token ids of a bad word."""
        if not isinstance(word, str):
            return [word]
        if self.tokenizer is None:
            raise BadRow("no_tokenizer", "bad_words as text need the model's tokenizer")
        check_encodable(word, "a bad word")
        text = word.lstrip()
        return [self.tokenizer.encode(t, add_special_tokens=False) for t in (text, f" {text}")]

    def _check_form(self, form: StructuredOutputsParams) -> None:
        if self.grammars is None:
            raise BadRow("no_tokenizer", "the form of answers needs the model's tokenizer")
        try:
            self.grammars.matcher(form)
        except UsageError as problem:
            raise BadRow("invalid_grammar", f"{problem}; {problem.hint}") from None


def check_ids(ids: Sequence[int], vocab_size: int) -> None:
    """Raise BadRow if a token of a prompt is not in the vocabulary; there is at least one."""
    if min(ids) < 0 or max(ids) >= vocab_size:
        bad = next(token for token in ids if not 0 <= token < vocab_size)
        outside = f"not in the model's vocabulary of {vocab_size}"
        raise BadRow("invalid_prompt", f"token id {bad} is {'negative' if bad < 0 else outside}")


def check_tokens(params: SamplingParams, vocab_size: int) -> None:
    """Raise BadRow if `params` name a token that is not in the vocabulary."""
    words = [word for word in params.bad_words if not isinstance(word, str)]
    for option, tokens in (
        ("stop_token_ids", params.stop_token_ids),
        ("logit_bias", (token for token, _ in params.logit_bias)),
        ("bad_words", chain.from_iterable(words)),
    ):
        for token in tokens:
            if token >= vocab_size:
                outside = f"not in the model's vocabulary of {vocab_size}"
                raise BadRow("invalid_field", f"{option} has token id {token}, {outside}")


def check_encodable(text: str, what: str) -> None:
    """Raise BadRow if `text`, which `what` names, has half a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError as problem:
        at = problem.start + 1
        raise BadRow(
            "invalid_prompt", f"{what} has half a surrogate pair at character {at}"
        ) from None
