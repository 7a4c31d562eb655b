"""Tokens that a request may get next: those of its grammar, behind its thought.

Knows tokens and masks; knows neither rows nor devices.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from dakrun.grammars.compiling import Grammars
from dakrun.grammars.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    import numpy as np

ALL = -1  # a word of a mask that allows its 32 tokens


@dataclass(frozen=True)
class Guidance:
    """What a request's tokens must be: the `form` of its answer, and the length of its thought.

    `markers` are the texts before and after a thought that the answer may begin with, None if it
    has none; `begun`: the prompt has opened it. With a `budget`, a number of tokens, a thought that
    has so many is closed. Within a thought all tokens are allowed, but for the end tokens if the
    answer has a form.
    """

    grammars: Grammars
    form: StructuredOutputsParams | None = None
    markers: tuple[str, str] | None = None
    begun: bool = False
    budget: int | None = None

    def guide(self, tokens: Iterable[int] = ()) -> "Guide":
        """The guide of a request that has `tokens` already. Raises UsageError."""
        made = Guide(self)
        for token in tokens:
            made.accept(token)
        return made


class Guide:
    """Where a request is in its thought and its grammar.

    `state` is "opening" before the first token if the answer may begin with a thought, then
    "thought" or "answer". Masks are int32 [ceil(vocabulary / 32)], a bit for each token.
    """

    def __init__(self, guidance: Guidance) -> None:
        grammars, form = guidance.grammars, guidance.form
        self._tokenizer = grammars.tokenizer
        self._budget = guidance.budget
        self._answer = None if form is None else grammars.matcher(form)
        self.state: Literal["opening", "thought", "answer"] = "answer"
        self._forced: list[int] = []
        self._tail = b""
        self._thought_tokens = 0
        if guidance.markers is not None:
            self._open, self._close = (
                self._tokenizer.tokenize_str(mark, parse_special=True) for mark in guidance.markers
            )
            self._open_text, self._close_text = (mark.encode() for mark in guidance.markers)
            self.state = "thought" if guidance.begun else "opening"
            self._check_budget()

    @property
    def matcher(self) -> Any:
        """The LLMatcher that alone says what is allowed next; None if `fill` has to."""
        return self._answer if self.state == "answer" else None

    @property
    def is_free(self) -> bool:
        """Whether all tokens are allowed from now on."""
        return self.state == "answer" and self._answer is None

    def forced(self) -> list[int]:
        """Tokens that come next if the grammar's only way is spelled as the tokenizer does it."""
        if self.state != "answer" or self._answer is None:
            return list(self._forced)
        return list(self._answer.compute_ff_tokens())

    def accept(self, token: int) -> None:
        """Go on behind the next token."""
        if self.state == "answer":
            if self._answer is not None:
                self._answer.consume_token(token)
        elif self._forced:
            assert token == self._forced[0], f"token {self._forced[0]} was forced, got {token}"
            self._forced.pop(0)
            if not self._forced:
                self.state = "thought" if self.state == "opening" else "answer"
                self._check_budget()
        elif self.state == "opening":
            self._begin(token)
        else:
            self._think(token)

    def fill(self, mask: "np.ndarray") -> None:
        """Write which tokens are allowed next."""
        if self._forced:
            mask[:] = 0
            _set(mask, self._forced[0])
            return
        mask[:] = ALL
        if self.state == "thought":
            if self._answer is not None:
                for token in self._tokenizer.eos_tokens:
                    _clear(mask, token)
        elif self._answer is not None:
            self._answer.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            if self._answer.is_error():
                mask[:] = 0
            if self.state == "opening":
                _set(mask, self._open[0])

    def _begin(self, token: int) -> None:
        """Take a first token, which may open a thought; a grammar takes what it can."""
        if self._answer is not None:
            if token == self._open[0] and not self._answer.validate_tokens([token]):
                self._forced = self._open[1:]
                self.state = "opening" if self._forced else "thought"
                self._check_budget()
            else:
                self.state = "answer"
                self._answer.consume_token(token)
            return
        self._tail += self._tokenizer.decode_bytes([token])
        text = self._tail.lstrip()
        if [token] == self._open or text.startswith(self._open_text):
            self.state, self._tail = "thought", b""
            self._check_budget()
        elif not self._open_text.startswith(text):
            self.state = "answer"

    def _think(self, token: int) -> None:
        self._thought_tokens += 1
        kept = len(self._close_text) - 1
        text = self._tail + self._tokenizer.decode_bytes([token])
        self._tail = text[-kept:]
        if [token] == self._close or self._close_text in text:
            self.state = "answer"
        else:
            self._check_budget()

    def _check_budget(self) -> None:
        """Close a thought that has as many tokens as it may have."""
        is_full = self._budget is not None and self._thought_tokens >= self._budget
        if self.state == "thought" and is_full:
            self._forced = list(self._close)


def _set(mask: "np.ndarray", token: int) -> None:
    mask.view("uint32")[token // 32] |= 1 << token % 32


def _clear(mask: "np.ndarray", token: int) -> None:
    mask.view("uint32")[token // 32] &= 2**32 - 1 - (1 << token % 32)
