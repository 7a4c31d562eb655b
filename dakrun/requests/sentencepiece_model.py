"""A tokenizer.model without tokenizer.json: SentencePiece itself gives the ids and texts.

Reads the folder's tokenizer_config.json, special_tokens_map.json, added_tokens.json and
chat_template.jinja as transformers does for a LlamaTokenizer. The class has that part of a
transformers tokenizer's interface which tokenizer.py uses. Imports sentencepiece late.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any

from dakrun.errors import CannotRun

_MODEL = "tokenizer.model"
# Classes whose rules this file knows; a folder that names none is taken as one of them.
_CLASSES = re.compile(
    r"((Code)?Llama|Mistral)Tokenizer(Fast)?|PreTrainedTokenizer(Fast)?"
    r"|TokenizersBackend|SentencePieceBackend"
)
_NAMES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")  # in the order of transformers
_LISTS = ("additional_special_tokens", "extra_special_tokens")
# Appended to a serialized model, as protobuf merges messages: normalizer_spec (field 3) with
# add_dummy_prefix (field 3) false, and with remove_extra_whitespaces (field 4) false too.
_NO_PREFIX = b"\x1a\x02\x18\x00"
_ALL_SPACES = b"\x1a\x04\x18\x00\x20\x00"


def needs_sentencepiece(directory: Path) -> bool:
    """Whether the tokenizer in `directory` is a tokenizer.model alone."""
    others = ("tokenizer.json", "vocab.json")
    return (directory / _MODEL).is_file() and not any((directory / n).is_file() for n in others)


def check_sentencepiece(directory: Path) -> None:
    """Raise CannotRun if the tokenizer in `directory` needs sentencepiece, which is missing."""
    if needs_sentencepiece(directory) and find_spec("sentencepiece") is None:
        raise CannotRun(
            f"{directory}: {_MODEL} without tokenizer.json needs sentencepiece, which is not "
            "installed",
            hint="pip install 'dakrun[sentencepiece]'",
        )


@dataclass(frozen=True, kw_only=True)
class AddedToken:
    """A token that is found in a text as it is; `lstrip` and `rstrip` take the spaces beside it."""

    content: str
    special: bool = True
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False


class SentencePieceTokenizer:
    """The tokenizer of a folder's tokenizer.model; see needs_sentencepiece."""

    def __init__(self, directory: Path) -> None:
        """Load it. Raises ValueError if a file is broken, or the class is not known."""
        from sentencepiece import SentencePieceProcessor

        data = (directory / _MODEL).read_bytes()
        try:
            self._model = SentencePieceProcessor(model_proto=data)
            self._inner = SentencePieceProcessor(model_proto=data + _NO_PREFIX)
            self._behind = SentencePieceProcessor(model_proto=data + _ALL_SPACES)
        except RuntimeError:
            raise ValueError(
                f"{_MODEL} is not a SentencePiece model; tiktoken's need tokenizer.json"
            ) from None
        self._size = self._model.get_piece_size()
        config = _read(directory, "tokenizer_config.json")
        kind = config.get("tokenizer_class")
        if kind is not None and not _CLASSES.fullmatch(str(kind)):
            raise ValueError(f"the rules of {kind} with {_MODEL} alone are not known")
        if "added_tokens_decoder" not in config:
            config |= _read(directory, "special_tokens_map.json")
        self.added_tokens_decoder: dict[int, AddedToken] = {}
        self.special_tokens_map: dict[str, Any] = {}
        self._add_tokens(config, _read(directory, "added_tokens.json"))
        self.bos_token_id = self._named("bos_token")
        self.eos_token_id = self._named("eos_token")
        self._begin = _tokens(config.get("add_bos_token"), True, self.bos_token_id)
        self._end = _tokens(config.get("add_eos_token"), False, self.eos_token_id)
        self._has_prefix = config.get("add_prefix_space") is not False
        # Old tokenizers, which say nothing, put the space before each text between special tokens.
        self._prefix_once = config.get("legacy") is False
        self.model_max_length = 10**30
        self.chat_template: str | dict[str, str] | None = _template(directory, config)
        by_text = {token.content: i for i, token in self.added_tokens_decoder.items()}
        self._by_text = by_text
        self._splits = re.compile(
            "|".join(
                rf"(?<!\w){re.escape(text)}(?!\w)"
                if self.added_tokens_decoder[by_text[text]].single_word
                else re.escape(text)
                for text in sorted(by_text, key=len, reverse=True)
                if text
            )
            or "(?!)"
        )

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of `text`, with begin and end tokens if the configuration wants them."""
        ids, at, strips = list[int](), 0, False
        for match in self._splits.finditer(text):
            token = self.added_tokens_decoder[self._by_text[match[0]]]
            ids += self._plain(text, at, match.start(), strips, token.lstrip)
            ids.append(self._by_text[match[0]])
            at, strips = match.end(), token.rstrip
        ids += self._plain(text, at, len(text), strips, False)
        return [*self._begin, *ids, *self._end] if add_special_tokens else ids

    def decode(
        self,
        ids: Sequence[int],
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool = False,
    ) -> str:
        """The text of `ids`; those that are not in the vocabulary have none."""
        assert not clean_up_tokenization_spaces, "texts are not cleaned up"
        added = self.added_tokens_decoder
        kept = [
            i
            for i in ids
            if (not (skip_special_tokens and added[i].special) if i in added else i < self._size)
        ]
        texts, model = [], self._model if self._has_prefix else self._behind
        for is_added, run in groupby(kept, added.__contains__):
            if is_added:
                texts += [added[i].content for i in run]
            else:
                texts.append(model.decode(list(run)))
            model = self._behind  # only the text's first space is left out
        return "".join(texts)

    def get_chat_template(self, tools: object = None) -> str:
        """The chat template, of several the one called default, or tool_use where there are tools.

        Raises ValueError without one.
        """
        if isinstance(self.chat_template, str):
            return self.chat_template
        templates = self.chat_template or {}
        if tools is not None and "tool_use" in templates:
            return templates["tool_use"]
        if "default" not in templates:
            raise ValueError(f"none of the chat templates {sorted(templates)} is the default")
        return templates["default"]

    def _plain(self, text: str, start: int, stop: int, lstrip: bool, rstrip: bool) -> list[int]:
        """The ids of the part of `text` between two added tokens, stripped as they ask."""
        part = text[start:stop]
        part = part.lstrip() if lstrip else part
        part = part.rstrip() if rstrip else part
        if not part:
            return []
        has_prefix = self._has_prefix and (start == 0 or not self._prefix_once)
        return list((self._model if has_prefix else self._inner).encode(part))

    def _add_tokens(self, config: Mapping[str, Any], added: Mapping[str, Any]) -> None:
        """Fill added_tokens_decoder and special_tokens_map.

        The model's own control tokens are special too.
        """
        model, by_id = self._model, self.added_tokens_decoder
        for i in range(self._size):
            if model.is_control(i) or model.is_unknown(i):
                by_id[i] = AddedToken(content=model.id_to_piece(i))
        named: dict[str, AddedToken] = {}
        for name in _NAMES:
            own = getattr(model, f"{name}_id", lambda: -1)()
            default = model.id_to_piece(own) if own >= 0 and name in _NAMES[:3] else None
            value = config.get(f"{name}_token", default)
            if value is not None:
                named[f"{name}_token"] = _added(value, special=True)
        further = {
            name: [_added(value, special=True) for value in config[name]]
            for name in _LISTS
            if isinstance(config.get(name), list)
        }
        special = [*named.values(), *(token for tokens in further.values() for token in tokens)]
        names = {token.content for token in special}
        for i, value in (config.get("added_tokens_decoder") or {}).items():
            by_id[int(i)] = _added(value, special=False)
        if "added_tokens_decoder" not in config:
            for text, i in added.items():
                by_id[int(i)] = _added(text, special=text in names)
        for token in special:
            if not any(token.content == other.content for other in by_id.values()):
                i = model.piece_to_id(token.content)
                if model.id_to_piece(i) != token.content:
                    i = max(self._size, max(by_id, default=0) + 1)
                by_id[i] = token
        # A named token is special, whatever its entry says.
        for i, token in by_id.items():
            if token.content in names and not token.special:
                by_id[i] = _added(vars(token) | {"special": True}, special=True)
        self.special_tokens_map = {name: token.content for name, token in named.items()}
        for name, tokens in further.items():
            self.special_tokens_map[name] = [token.content for token in tokens]

    def _named(self, name: str) -> int | None:
        """The id of a named token; None if there is none."""
        text = self.special_tokens_map.get(name)
        tokens: Iterator[int] = (
            i for i, token in self.added_tokens_decoder.items() if token.content == text
        )
        return next(tokens, None)


def _read(directory: Path, name: str) -> dict[str, Any]:
    """A JSON object of the folder, empty if the file is missing; ValueError if it is broken."""
    path = directory / name
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as problem:
        raise ValueError(f"{name}: {problem}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{name} is not a JSON object")
    return data


def _added(value: Any, *, special: bool) -> AddedToken:
    """The token that a configuration gives as its text or as an object."""
    if isinstance(value, str):
        return AddedToken(content=value, special=special)
    if not isinstance(value, Mapping) or not isinstance(value.get("content"), str):
        raise ValueError(f"{value!r} is not a token")
    flags = {
        name: bool(value[name])
        for name in ("special", "lstrip", "rstrip", "single_word")
        if name in value
    }
    return AddedToken(content=value["content"], **{"special": special, **flags})


def _tokens(asked: Any, default: bool, token: int | None) -> list[int]:
    """The tokens at an end of a text."""
    return [token] if token is not None and (default if asked is None else asked) else []


def _template(directory: Path, config: Mapping[str, Any]) -> str | dict[str, str] | None:
    """The chat template or templates, those of files before those of tokenizer_config.json."""
    paths = {path.stem: path for path in directory.glob("additional_chat_templates/*.jinja")}
    if (alone := directory / "chat_template.jinja").is_file():
        paths["default"] = alone
    if paths:
        templates = {name: path.read_text(encoding="utf-8") for name, path in paths.items()}
        return templates["default"] if list(templates) == ["default"] else templates
    template = config.get("chat_template")
    if isinstance(template, list):
        return {str(one["name"]): str(one["template"]) for one in template}
    if template is not None and not isinstance(template, str | dict):
        raise ValueError("the chat_template of tokenizer_config.json is not a template")
    return template
