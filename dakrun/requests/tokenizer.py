"""Text to token ids and back, and the search for stop strings in what was generated.

Wraps the tokenizer that Hugging Face's AutoTokenizer finds in a model directory; imports it late
and keeps it quiet. Knows nothing of requests.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

from dakrun.errors import CannotRun, UsageError

Decode = Callable[[Sequence[int]], str]

_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
# Most bytes of a character. An incomplete one spoils the tokens beside it that are single bytes.
_CHARACTER_BYTES = 4


class Tokenizer:
    """A model's own tokenizer; `load` makes one."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        # The reader checks lengths against the model; the tokenizer's own limit only warns.
        tokenizer.model_max_length = 10**30

    @staticmethod
    def is_in(directory: Path) -> bool:
        """Whether `directory` holds tokenizer files."""
        return any((directory / name).is_file() for name in _FILES)

    @classmethod
    def load(cls, directory: Path) -> "Tokenizer":
        """The tokenizer in a model directory; CannotRun where there is none that works."""
        if not cls.is_in(directory):
            raise CannotRun(
                f"{directory}: no tokenizer files",
                hint=f"copy {' or '.join(_FILES)} from where the model was published, "
                "or give prompt_token_ids instead of text",
            )
        try:
            with _quiet():
                from transformers import AutoTokenizer

                return cls(
                    AutoTokenizer.from_pretrained(
                        directory, local_files_only=True, trust_remote_code=False
                    )
                )
        except Exception as problem:  # tokenizers raises plain Exception for broken files
            reason = (str(problem).strip() or type(problem).__name__).splitlines()[0]
            raise CannotRun(
                f"{directory}: the tokenizer cannot be loaded ({reason})",
                hint="copy the tokenizer files anew from where the model was published, and "
                "config.json, which is read with them",
            ) from problem

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of `text` with the special tokens that the model expects around it.

        `text` must be encodable in UTF-8 (no lone surrogates).
        """
        return tuple(self._tokenizer.encode(text))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids` without special tokens; incomplete characters become U+FFFD."""
        text = self._tokenizer.decode(
            list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return str(text)

    @property
    def has_chat_template(self) -> bool:
        """Whether `chat` can work."""
        return bool(self._tokenizer.chat_template)

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        """Token ids of a conversation up to where the assistant answers, by the chat template.

        `messages` are `{"role", "content"}`. Raises UsageError where the tokenizer has no template
        or the template does not accept the messages.
        """
        if not self.has_chat_template:
            raise UsageError(
                "the model's tokenizer has no chat template",
                hint="use an instruction-tuned model, or give prompts instead of messages",
            )
        try:
            ids = self._tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, tokenize=True, return_dict=False
            )
        except Exception as problem:  # a template is a program that raises what it likes
            reason = " ".join(str(problem).split())
            raise UsageError(
                f"the chat template does not accept the messages ({reason})",
                hint='messages are {"role", "content"} objects in an order that the model knows',
            ) from problem
        return tuple(ids)


class StopStrings:
    """Finds any of `stop` in generated tokens, whose text `decode` gives."""

    def __init__(self, stop: tuple[str, ...], decode: Decode) -> None:
        self._stop, self._decode = stop, decode
        longest = max((len(s.encode("utf-8", "surrogatepass")) for s in stop), default=0)
        self._window = longest + _CHARACTER_BYTES
        # Twice, as decoding drops a space that a text begins with.
        self._has_text = cache(lambda token: decode([token, token]) != "")

    def hit(self, token_ids: Sequence[int]) -> bool:
        """Whether the newest of `token_ids` completes a stop string; to be asked at each token.

        A token that has text, which special ones do not, is at least one byte of it: only the last
        few such tokens need to be looked at, and all of them where a string is found.
        """
        if not self._stop:
            return False
        last = list(islice(filter(self._has_text, reversed(token_ids)), self._window))[::-1]
        for start in range(_CHARACTER_BYTES):  # one of these is no middle of a character
            text = self._decode(last[start:])
            if self._is_in(text):
                return self._is_in(self._decode(token_ids))
            if not text.startswith("\N{REPLACEMENT CHARACTER}"):
                break
        return False

    def _is_in(self, text: str) -> bool:
        return any(s in text for s in self._stop)

    def cut(self, text: str) -> str:
        """`text` up to the first place where a stop string begins, or all of it."""
        return text[: min((at for s in self._stop if (at := text.find(s)) >= 0), default=None)]


@contextmanager
def _quiet() -> Iterator[None]:
    """No advice from transformers on stderr; its verbosity is put back afterwards."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)
