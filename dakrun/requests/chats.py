"""Chats as text: each message's content in the form that the chat template uses, and none lost.

Knows templates by what they render; chat_template.py runs them.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any

from dakrun.requests.chat_template import ChatTemplate

_PROBE = "7318250946"  # no template changes the case of digits, or escapes them
_MUST_SURVIVE = ("system", "developer", "user")
_SHAPES = 4096  # sequences of roles whose probes are kept

Message = Mapping[str, Any]


class Chats:
    """Renders messages `{"role", "content"}` whose content is a string or an array of text parts.

    All methods raise ValueError with the template's reason, as ChatTemplate does.
    """

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._survivors = lru_cache(_SHAPES)(self._find_survivors)

    def render(self, messages: Sequence[Message], *, continues: bool = False) -> str:
        """The text of `messages`; with `continues` it ends within the last one.

        Raises ValueError for a system or user message of which nothing is in that text.
        """
        text = self._rendered(messages, continues)
        for number, message in enumerate(messages):
            if self._may_be_lost(messages, number, text) and any(
                self._tried(with_content(messages, number, other), continues) == text
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

    def _rendered(self, messages: Sequence[Message], continues: bool) -> str:
        if not messages:
            raise ValueError("there are no messages")
        if not all(isinstance(m, Mapping) and {"role", "content"} <= m.keys() for m in messages):
            raise ValueError("a message has no role or no content")
        form = parts_of if self.takes_parts else string_of
        return self._template.render(
            [{**message, "content": form(message["content"])} for message in messages],
            continues=continues,
        )

    def _may_be_lost(self, messages: Sequence[Message], number: int, text: str) -> bool:
        """Whether the text may lack all of a message: a probe was lost, or all of its words."""
        if messages[number]["role"] not in _MUST_SURVIVE:
            return False
        words = string_of(messages[number]["content"]).split()
        if not words:
            return False
        roles = tuple(message["role"] for message in messages)
        return number not in self._survivors(roles) or not any(word in text for word in words)

    def _find_survivors(self, roles: tuple[str, ...]) -> frozenset[int]:
        """The messages of which a probe is in the text of a chat with these roles."""
        probes = [f"{_PROBE}{number:06}" for number in range(len(roles))]
        text = self._tried(
            [{"role": r, "content": probe} for r, probe in zip(roles, probes, strict=True)], False
        )
        return frozenset(n for n, probe in enumerate(probes) if probe in (text or ""))

    def _tried(self, messages: Sequence[Message], continues: bool) -> str | None:
        """The text of messages made here; None if the template does not accept them."""
        try:
            return self._rendered(messages, continues)
        except ValueError:
            return None

    def _shows(self, messages: Sequence[Message]) -> bool:
        try:
            return _PROBE in self._template.render(messages, continues=False)
        except ValueError:
            return False


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
    """Contents in place of `content` that show whether a text has anything of it.

    None; and one that differs from it in the first and the last character.
    """
    ends = content.strip()[0] + content.strip()[-1]
    yield ""
    yield next(digit for digit in "123" if digit not in ends) * 8
