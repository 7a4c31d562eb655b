"""Chats as text: each message's content in the form that the chat template uses, and none lost.

Knows templates by what they render; chat_template.py runs them.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from hashlib import sha256
from typing import Any, NamedTuple

from dakrun.requests.chat_template import PLAIN, ChatTemplate, TemplateOptions

_PROBE = "7318250946"  # no template changes the case of digits, or escapes them
_MUST_SURVIVE = ("system", "developer", "user", "tool")
_SHAPES = 4096  # of chats whose probes are kept

Message = Mapping[str, Any]


class _Shown(NamedTuple):
    """The messages of a chat that its template shows, by number, and whether it shows its tools."""

    messages: frozenset[int]
    tools: bool


class Chats:
    """Renders messages `{"role", "content"}` whose content is a string or an array of text parts.

    Other fields reach the template as they are. A message with calls of tools may lack a content.

    All methods raise ValueError with the template's reason, as ChatTemplate does.
    """

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._probed: dict[bytes, _Shown] = {}

    def start(self) -> None:
        """Start the template's process beside other work, so that the first chat need not wait."""
        self._template.start()

    def render(self, messages: Sequence[Message], options: TemplateOptions = PLAIN) -> str:
        """The text of `messages`; see TemplateOptions.

        Raises ValueError for a message, unless it is the assistant's, or for tools of which nothing
        is in that text.
        """
        text = self._rendered(messages, options)
        shown = self._shown(messages, options)
        if not shown.tools:
            raise ValueError("the text has nothing of the tools")
        for number, message in enumerate(messages):
            if _may_be_lost(message, number in shown.messages, text) and any(
                self._tried(with_content(messages, number, other), options) == text
                for other in _others(string_of(message["content"]))
            ):
                raise ValueError(
                    f"the text has nothing of message {number + 1}, whose role is "
                    f"{message['role']!r}"
                )
        return text

    @cached_property
    def takes_parts(self) -> bool:
        """Whether the template wants arrays of parts: it shows no text of a string."""
        as_string, as_parts = (
            self._shows([{"role": "user", "content": content}])
            for content in (_PROBE, parts_of(_PROBE))
        )
        return as_parts and not as_string

    def _rendered(self, messages: Sequence[Message], options: TemplateOptions) -> str:
        if not messages:
            raise ValueError("there are no messages")
        if not all(isinstance(one, Mapping) and _is_message(one) for one in messages):
            raise ValueError("a message has no role or no content")
        form = parts_of if self.takes_parts else string_of
        return self._template.render(
            [
                {**one, "content": form(one["content"])} if "content" in one else one
                for one in messages
            ],
            options,
        )

    def _shown(self, messages: Sequence[Message], options: TemplateOptions) -> _Shown:
        """What the template shows of a chat like this one: it has the same roles and fields."""
        shapes = [
            {name: _shape(name, value) for name, value in message.items()} for message in messages
        ]
        shape = json.dumps([shapes, bool(options.tools), dict(options.kwargs)])
        key = sha256(shape.encode()).digest()
        if key not in self._probed:
            if len(self._probed) == _SHAPES:
                self._probed.clear()
            self._probed[key] = self._probe(messages, replace(options, continues=False))
        return self._probed[key]

    def _probe(self, messages: Sequence[Message], options: TemplateOptions) -> _Shown:
        probes = [f"{_PROBE}{number:06}" for number in range(len(messages))]
        chat = messages
        for number, probe in enumerate(probes):
            if "content" in messages[number]:
                chat = with_content(chat, number, probe)
        text = self._tried(chat, options)
        lost = options.tools and text is not None
        lost = lost and text == self._tried(chat, replace(options, tools=None))
        shown = (n for n, probe in enumerate(probes) if probe in (text or ""))
        return _Shown(frozenset(shown), tools=not lost)

    def _tried(self, messages: Sequence[Message], options: TemplateOptions) -> str | None:
        """The text of messages made here; None if the template does not accept them."""
        try:
            return self._rendered(messages, options)
        except ValueError:
            return None

    def _shows(self, messages: Sequence[Message]) -> bool:
        try:
            return _PROBE in self._template.render(messages)
        except ValueError:
            return False


def _shape(name: str, value: Any) -> object:
    """What templates decide by of a message's field: the role, and the number of calls of tools."""
    return value if name == "role" else len(value) if name == "tool_calls" else None


def _is_message(given: Message) -> bool:
    return "role" in given and ("content" in given or "tool_calls" in given)


def _may_be_lost(message: Message, probe_is_shown: bool, text: str) -> bool:
    """Whether the text may lack all of a message: a probe was lost, or all of its words."""
    if message["role"] not in _MUST_SURVIVE:
        return False
    words = string_of(message.get("content", "")).split()
    return bool(words) and not (probe_is_shown and any(word in text for word in words))


def string_of(content: str | Sequence[Mapping[str, str]]) -> str:
    """Content as a string: text parts joined by newlines."""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def parts_of(content: str | Sequence[Mapping[str, str]]) -> list[Mapping[str, str]]:
    """Content as an array of text parts."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)


def with_content(messages: Sequence[Message], number: int, content: str) -> list[Message]:
    """The messages, with other content in one of them."""
    return [
        {**message, "content": content} if n == number else message
        for n, message in enumerate(messages)
    ]


def _others(content: str) -> Iterator[str]:
    """Contents instead of `content` that show whether a text has anything of it.

    None; and one that differs from it in the first and the last character.
    """
    ends = content.strip()[0] + content.strip()[-1]
    yield ""
    yield next(digit for digit in "123" if digit not in ends) * 8
