"""Text to token ids and back.

Wraps the tokenizer that transformers' AutoTokenizer finds in a model directory, or that of a
tokenizer.model alone (sentencepiece_model.py). Imports transformers late and silences its warnings.
Knows nothing of requests.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from datetime import datetime
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

from dakrun.errors import CannotRun, UsageError
from dakrun.models.files import is_lfs_pointer
from dakrun.requests.chat_template import PLAIN, ChatTemplate, TemplateOptions
from dakrun.requests.chats import Chats
from dakrun.requests.continuation import CONTEXT, Continuation, context_of
from dakrun.requests.sentencepiece_model import (
    SentencePieceTokenizer,
    check_sentencepiece,
    needs_sentencepiece,
)
from dakrun.requests.thoughts import Markers, markers_of
from dakrun.requests.tokenizer_files import without_marks
from dakrun.requests.tool_calls import CallFormat, call_format_of

_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


class Tokenizer:
    """A model's tokenizer; `load` reads it from the model directory.

    `started` is the local time that chat templates may stamp (see ChatTemplate), `reasoning` says
    how thoughts are marked (see markers_of).
    """

    def __init__(
        self, tokenizer: Any, *, started: datetime | None = None, reasoning: str = "auto"
    ) -> None:
        self._started, self._reasoning = started, reasoning
        self._tokenizer = tokenizer
        # The reader checks lengths against the model; the tokenizer's own limit only warns.
        tokenizer.model_max_length = 10**30
        self.own_begin = 0
        self.token_text = cache(self._token_text)
        added = tokenizer.added_tokens_decoder
        self._special = {token: text.content for token, text in added.items() if text.special}
        backend = getattr(tokenizer, "backend_tokenizer", None)
        # Without a decoder, words are joined by spaces that belong to no token.
        self._has_decoder = backend is None or backend.decoder is not None
        self._chats: dict[str, Chats] = {}  # by template

    @staticmethod
    def is_in(directory: Path) -> bool:
        """Whether `directory` holds tokenizer files."""
        return any((directory / name).is_file() for name in _FILES)

    @classmethod
    def load(
        cls,
        directory: Path,
        *,
        chat_template: str | None = None,
        started: datetime | None = None,
        reasoning: str = "auto",
    ) -> "Tokenizer":
        """Load the tokenizer in a model directory; CannotRun if it is missing or broken.

        `chat_template` replaces the tokenizer's own.
        """
        if not cls.is_in(directory):
            raise CannotRun(
                f"{directory}: no tokenizer files",
                hint=f"copy {' or '.join(_FILES)} from where the model was published, "
                "or give prompt_token_ids instead of text",
            )
        check_sentencepiece(directory)
        for name in _FILES:
            if (directory / name).is_file() and is_lfs_pointer(directory / name):
                raise CannotRun(
                    f"{directory / name}: a git-lfs pointer, not the tokenizer",
                    hint="run git lfs pull in its folder",
                )
        try:
            if needs_sentencepiece(directory):
                own = SentencePieceTokenizer(directory)
                own.chat_template = own.chat_template if chat_template is None else chat_template
                return cls(own, started=started, reasoning=reasoning)
            with _quiet(), without_marks(directory) as folder:
                from transformers import AutoTokenizer

                loaded = AutoTokenizer.from_pretrained(
                    folder, local_files_only=True, trust_remote_code=False
                )
                loaded = _of_its_file(loaded, folder)
                if chat_template is not None:
                    loaded.chat_template = chat_template
                return cls(loaded, started=started, reasoning=reasoning)
        except Exception as problem:  # tokenizers raises plain Exception for broken files
            reason = (str(problem).strip() or type(problem).__name__).splitlines()[0]
            raise CannotRun(
                f"{directory}: the tokenizer cannot be loaded ({reason})",
                hint="copy the tokenizer files and config.json, which is read with them, again "
                "from where the model was published",
            ) from problem

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Token ids of `text`, by default with the special tokens that the model expects around it.

        A begin token that the text begins with is not doubled; `own_begin` counts such texts.
        `text` must be encodable in UTF-8 (no lone surrogates).
        """
        ids = tuple(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))
        begin = self._tokenizer.bos_token_id
        if add_special_tokens and begin is not None and ids[:2] == (begin, begin):
            plain = self._tokenizer.encode(text, add_special_tokens=False)
            if plain[:1] == [begin] and ids[: len(plain) + 1] == (begin, *plain):
                self.own_begin += 1
                return ids[1:]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids` without special tokens; incomplete characters become U+FFFD."""
        text = self._tokenizer.decode(
            list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return str(text)

    @property
    def eos_token_id(self) -> int | None:
        """The id of the tokenizer's own end token."""
        token = self._tokenizer.eos_token_id
        return token if isinstance(token, int) else None

    def as_json(self) -> str | None:
        """The tokenizer as a tokenizer.json has it; None if it is SentencePiece's own."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            return None
        plain = copy(backend)
        plain.no_padding()
        plain.no_truncation()
        return str(plain.to_str())

    def continuation(self, prompt_ids: Sequence[int], *, is_chat: bool = False) -> Continuation:
        """The texts of tokens that continue a prompt.

        A completion keeps the space at its start that a SentencePiece tokenizer's decoder drops;
        the answer of a chat loses it.
        """
        context: list[int] = []
        if self._has_decoder and not is_chat:
            plain = (token for token in reversed(prompt_ids) if token not in self._special)
            context = context_of(self.decode, list(islice(plain, CONTEXT + 1))[::-1])
        return Continuation(self.decode, self._special, context)

    def _token_text(self, token: int) -> str:
        """The text of a token within a text, or its name if it is special.

        Decoded behind itself, because decoding drops a leading space.
        """
        once, twice = (
            str(self._tokenizer.decode([token] * n, clean_up_tokenization_spaces=False))
            for n in (1, 2)
        )
        return twice[len(once) :]

    @property
    def has_chat_template(self) -> bool:
        """Whether the tokenizer has a chat template, which `chat` needs."""
        return bool(self._tokenizer.chat_template)

    def start_chats(self) -> None:
        """Make ready, beside other work, for chats without tools, if there is a chat template."""
        with suppress(ValueError):  # of several templates without a default: a chat's error
            if self.has_chat_template:
                self._chats_of(self._tokenizer.get_chat_template()).start()

    def _chats_of(self, template: str) -> Chats:
        if template not in self._chats:
            specials = self._tokenizer.special_tokens_map
            made = ChatTemplate(template, specials, started=self._started)
            self._chats[template] = Chats(made)
        return self._chats[template]

    def call_format(self) -> CallFormat | None:
        """The format in which the chat template writes calls of tools, if it is known."""
        return call_format_of(self._tokenizer.get_chat_template(tools=[]))

    def lark_symbol(self, name: str) -> str:
        """A token in Lark's notation: the id of a special one, the text of another."""
        by_name = {text: token for token, text in self._special.items()}
        return f"<[{by_name[name]}]>" if name in by_name else f'"{name}"'

    def has_call_arguments(self) -> bool:
        """Whether arguments of calls come behind [ARGS] in the chat template."""
        return "[ARGS]" in self._tokenizer.get_chat_template(tools=[])

    def markers(self, tools: Sequence[Mapping[str, Any]] | None = None) -> Markers | None:
        """The markers of thoughts in answers; None if there are no thoughts."""
        return markers_of(self._tokenizer.get_chat_template(tools=tools), self._reasoning)

    def tokens_through(self, ids: Sequence[int], mark: str, added: Continuation) -> int:
        """The number of `ids` up to the first `mark` in their text, all if there is none."""
        if at := next((n for n, one in enumerate(ids, 1) if self.token_text(one) == mark), None):
            return at
        return bisect_left(range(len(ids)), True, key=lambda n: mark in added.spelled(ids[:n]))

    def chat(
        self, messages: Sequence[Mapping[str, Any]], options: TemplateOptions = PLAIN
    ) -> tuple[int, ...]:
        """Token ids of messages; see chat_text."""
        text = self.chat_text(messages, options)
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def chat_text(
        self, messages: Sequence[Mapping[str, Any]], options: TemplateOptions = PLAIN
    ) -> str:
        """Text of `{"role", "content"}` messages and the start of the assistant's answer.

        With `options.continues` it ends within the last message, which the model continues. The
        text has its special tokens: encode it without others.
        Raises UsageError if the tokenizer has no chat template or the template does not accept the
        messages, loses one, or the tools (see chats.py), does not end, or fills the memory
        (chat_template.py).
        """
        if not self.has_chat_template:
            raise UsageError(
                "the model's tokenizer has no chat template",
                hint="use an instruction-tuned model, or give prompts instead of messages",
            )
        try:
            template = self._tokenizer.get_chat_template(tools=options.tools)
            return self._chats_of(template).render(messages, options)
        except ValueError as problem:
            reason = " ".join(str(problem).split())
            raise UsageError(
                f"the chat template cannot render the messages ({reason})",
                hint='messages are {"role", "content"} objects in an order that the model knows',
            ) from problem


def _of_its_file(loaded: Any, directory: Path) -> Any:
    """`loaded`, or the tokenizer of tokenizer.json if its class replaced a part of that pipeline.

    transformers 5 makes the normalizer and pre-tokenizer of a LlamaTokenizer anew, which changes
    ids. The rule for begin tokens and the named tokens stay those of `loaded`.
    """
    path = directory / "tokenizer.json"
    backend = getattr(loaded, "backend_tokenizer", None)
    if backend is None or not path.is_file():
        return loaded
    from tokenizers import Tokenizer as Backend
    from transformers import PreTrainedTokenizerFast

    if _pipeline(Backend.from_file(str(path))) == _pipeline(backend):
        return loaded
    own = PreTrainedTokenizerFast.from_pretrained(directory, local_files_only=True)
    own.backend_tokenizer.post_processor = backend.post_processor
    for name, text in loaded.special_tokens_map.items():
        if isinstance(text, str) and getattr(own, name, None) is None:
            setattr(own, name, text)
    if own.chat_template is None:
        own.chat_template = loaded.chat_template
    return own


def _pipeline(backend: Any) -> list[object]:
    """The parts of a tokenizer that decide on ids and texts, but the vocabulary."""
    parts = (backend.normalizer, backend.pre_tokenizer, backend.decoder)
    flags = ("fuse_unk", "byte_fallback", "ignore_merges", "unk_token")
    return [
        *(part and part.__getstate__() for part in parts),
        *(getattr(backend.model, flag, None) for flag in flags),
    ]


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers' warnings on stderr; restore its verbosity afterwards."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)
