"""Chats in a row: messages checked, and put through the model's chat template."""

from collections.abc import Mapping
from typing import Any

from dakrun.errors import is_neutral
from dakrun.requests.json_rows import flag, json_kind, names, shown
from dakrun.requests.neutral import OF_MESSAGES
from dakrun.requests.prompts import BadRow, PromptRules

_ROLES = ("system", "developer", "user", "assistant")


def chat_prompt(given: Mapping[str, Any], rules: PromptRules) -> tuple[int, ...]:
    """Token ids of a row's chat. Raises BadRow; see checked_chat."""
    chat, continues = checked_chat(given)
    return rules.chat(chat, continues=continues)


def checked_chat(given: Mapping[str, Any]) -> tuple[list[dict[str, Any]], bool]:
    """A row's chat, an array `messages` of messages with a role and text; whether it continues.

    With `continue_final_message` its tokens end within the last message. Raises BadRow.
    """
    messages = given.get("messages")
    continues = flag(given, "continue_final_message", False)
    if flag(given, "add_generation_prompt", not continues) is continues:
        raise BadRow(
            "invalid_field", "add_generation_prompt is not the opposite of continue_final_message"
        )
    if flag(given, "add_special_tokens", False):
        raise BadRow("invalid_field", "add_special_tokens is true: a chat template adds its own")
    if not isinstance(messages, list) or not messages:
        raise BadRow("invalid_prompt", "messages is not an array of at least one message")
    chat = [_message(n, message) for n, message in enumerate(messages, 1)]
    if continues and chat[-1]["role"] != "assistant":
        raise BadRow(
            "invalid_prompt", "continue_final_message needs a last message of the assistant"
        )
    return chat, continues


def _message(number: int, message: object) -> dict[str, Any]:
    """A message's role, and its content: a string, or an array of text parts."""
    if not isinstance(message, dict):
        raise BadRow("invalid_prompt", f"message {number} is {json_kind(message)}, not an object")
    given = {name: value for name, value in message.items() if value is not None}
    unknown = [
        name
        for name, value in given.items()
        if name not in ("role", "content") and not is_neutral(name, value, OF_MESSAGES)
    ]
    if unknown:
        raise BadRow("unsupported_field", f"message {number} has unsupported {names(unknown)}")
    if given.get("role") not in _ROLES:
        role = shown(given.get("role"))
        raise BadRow(
            "invalid_prompt", f"the role of message {number} is {role}, not {', '.join(_ROLES)}"
        )
    content = given.get("content")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list) or not parts:
        raise BadRow(
            "invalid_prompt", f"the content of message {number} is {json_kind(content)}, not text"
        )
    for part in parts:
        if not isinstance(part, dict) or set(part) != {"type", "text"} or part["type"] != "text":
            raise BadRow("unsupported_field", f"message {number} has a part that is not text")
        if not isinstance(part["text"], str):
            raise BadRow("invalid_prompt", f"message {number} has text that is not a string")
    return {"role": given["role"], "content": content}
