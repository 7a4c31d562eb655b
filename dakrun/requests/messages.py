"""Chats in a row: messages and tools checked, and put through the model's chat template."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dakrun.config import SamplingParams
from dakrun.errors import is_neutral
from dakrun.grammars import StructuredOutputsParams
from dakrun.requests.call_grammar import call_grammar
from dakrun.requests.chat_template import TemplateOptions
from dakrun.requests.chats import string_of
from dakrun.requests.json_rows import flag, json_kind, names, shown
from dakrun.requests.neutral import OF_MESSAGES
from dakrun.requests.prompts import BadRow, PromptRules
from dakrun.requests.request import Reply
from dakrun.requests.thoughts import Markers, Thought, thought_after, thought_within
from dakrun.requests.tokenizer import Tokenizer

CHAT_FIELDS = (
    *("continue_final_message", "add_generation_prompt", "chat_template_kwargs"),
    *("tools", "tool_choice", "parallel_tool_calls"),
)  # of rows with messages alone
_ROLES = ("system", "developer", "user", "assistant", "tool")
_FIELDS = {
    **dict.fromkeys(("role", "content", "name"), _ROLES),
    **dict.fromkeys(("tool_calls", "reasoning", "reasoning_content"), ("assistant",)),
    "tool_call_id": ("tool",),
}  # of a message, and the roles that have them
# transformers' apply_chat_template takes these for its own.
RESERVED = (
    *("add_generation_prompt", "chat_template", "continue_final_message", "conversation"),
    *("conversations", "max_length", "messages", "padding", "return_assistant_tokens_mask"),
    *("return_dict", "return_tensors", "sanitize_control_tokens", "tokenize", "tokenizer_kwargs"),
    *("tools", "truncation"),
)


@dataclass(frozen=True)
class Chat:
    """Messages, and the other arguments of their template.

    `takes_calls`: calls of tools are looked for in the answer; all of them, or with `one_call` the
    first. The answer must call one of the tools `must_call`, if there are any.
    """

    messages: list[dict[str, Any]]
    options: TemplateOptions
    takes_calls: bool
    one_call: bool
    must_call: Sequence[dict[str, Any]] = ()

    def prompt(self, rules: PromptRules, reply: Reply) -> tuple[str, tuple[int, ...], Reply]:
        """Its text and token ids, and `reply` as one to it. Raises BadRow."""
        text = rules.chat_text(self.messages, self.options)
        ids = rules.encode(text, add_special_tokens=False)
        reply = replace(reply, continues=self.options.continues, one_call=self.one_call)
        if (tokenizer := rules.tokenizer) is None:
            return text, ids, reply
        return (
            text,
            ids,
            replace(
                reply,
                call_format=tokenizer.call_format() if self.takes_calls else None,
                must_call=self._calls(tokenizer) if self.must_call else None,
                thought=self._thought(text, tokenizer.markers(self.options.tools)),
            ),
        )

    def _calls(self, tokenizer: Tokenizer) -> StructuredOutputsParams:
        """The form of an answer that must call a tool."""
        if (form := tokenizer.call_format()) is None:
            raise BadRow(
                "unsupported_field",
                "tool_choice wants a call, whose format in the chat template is not known",
            )
        return call_grammar(
            self.must_call,
            form,
            one_call=self.one_call,
            with_args=tokenizer.has_call_arguments(),
            symbol=tokenizer.lark_symbol,
        )

    def _thought(self, text: str, markers: Markers | None) -> Thought | None:
        """The thought that an answer may begin with."""
        if markers is None:
            return None
        if self.options.continues:
            return thought_within(string_of(self.messages[-1]["content"]), markers)
        return thought_after(text, markers)


def chat_prompt(
    given: Mapping[str, Any], rules: PromptRules, reply: Reply
) -> tuple[tuple[int, ...], Reply]:
    """Token ids of a row's chat, and `reply` as one to it. Raises BadRow; see checked_chat."""
    _, ids, reply = checked_chat(given).prompt(rules, reply)
    return ids, reply


def with_calls(params: SamplingParams, reply: Reply) -> SamplingParams:
    """`params` for an answer that must call a tool, if `reply` says so. Raises BadRow."""
    if reply.must_call is None:
        return params
    if params.structured_outputs is not None:
        raise BadRow("invalid_field", "tool_choice wants a call, and the answer another form")
    return replace(params, structured_outputs=reply.must_call)


def checked_chat(given: Mapping[str, Any]) -> Chat:
    """A row's chat: an array `messages`, and the fields in CHAT_FIELDS. Raises BadRow.

    With `continue_final_message` its tokens end within the last message.
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
    tools, choice = _tools(given.get("tools")), given.get("tool_choice")
    must_call = _must_call(choice, tools or [])
    one_call = not flag(given, "parallel_tool_calls", True) or isinstance(choice, dict)
    options = TemplateOptions(continues, tools, _kwargs(given.get("chat_template_kwargs", {})))
    takes_calls = tools is not None and choice != "none"
    return Chat(chat, options, takes_calls, one_call, must_call)


def _kwargs(given: object) -> Mapping[str, Any]:
    """Variables for the template."""
    if not isinstance(given, dict) or not all(isinstance(name, str) for name in given):
        raise BadRow("invalid_field", f"chat_template_kwargs is {json_kind(given)}, not an object")
    if reserved := [name for name in given if name in RESERVED]:
        raise BadRow(
            "unsupported_field", f"chat_template_kwargs has {names(reserved)}, which it may not set"
        )
    return given


def _tools(given: object) -> list[dict[str, Any]] | None:
    """Schemas of functions; None without any."""
    if given is None or given == []:
        return None
    if not isinstance(given, list):
        raise BadRow("invalid_field", f"tools is {json_kind(given)}, not an array")
    for number, tool in enumerate(given, 1):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or tool.get("type") != "function":
            wanted = '{"type": "function", "function": {...}}'
            raise BadRow("invalid_field", f"tool {number} is not {wanted}")
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise BadRow("invalid_field", f"the function of tool {number} has no name")
        if not isinstance(parameters := function.get("parameters", {}), dict):
            found = json_kind(parameters)
            raise BadRow(
                "invalid_field", f"the parameters of tool {number} are {found}, not an object"
            )
    return given


def _must_call(choice: object, tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The tools of which `tool_choice` wants one called; none if the model is free."""
    if choice in (None, "auto", "none"):
        return []
    if choice == "required":
        if not tools:
            raise BadRow("invalid_field", "tool_choice is 'required', and there are no tools")
        return tools
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if name is None:
        wanted = (
            '\'auto\', \'none\', \'required\' or {"type": "function", "function": {"name": ...}}'
        )
        raise BadRow("invalid_field", f"tool_choice is {shown(choice)}, not {wanted}")
    if not (named := [tool for tool in tools if tool["function"]["name"] == name]):
        raise BadRow("invalid_field", f"tool_choice names {shown(name)}, which is not in tools")
    return named


def _message(number: int, message: object) -> dict[str, Any]:
    """A message: its role, a string or an array of text parts, and what tools are about."""
    if not isinstance(message, dict):
        raise BadRow("invalid_prompt", f"message {number} is {json_kind(message)}, not an object")
    given = {
        name: value
        for name, value in message.items()
        if value is not None and not is_neutral(name, value, OF_MESSAGES)
    }
    if unknown := [name for name in given if name not in _FIELDS]:
        raise BadRow("unsupported_field", f"message {number} has unsupported {names(unknown)}")
    if (role := given.get("role")) not in _ROLES:
        raise BadRow(
            "invalid_prompt",
            f"the role of message {number} is {shown(role)}, not {', '.join(_ROLES)}",
        )
    if others := [name for name in given if role not in _FIELDS[name]]:
        raise BadRow("invalid_prompt", f"message {number}, of role {role!r}, has {names(others)}")
    for name in ("name", "tool_call_id", "reasoning", "reasoning_content"):
        if not isinstance(given.get(name, ""), str):
            raise BadRow("invalid_prompt", f"{name} of message {number} is not a string")
    if "reasoning" in given:  # templates read reasoning_content, which some transformers fill in
        given.setdefault("reasoning_content", given["reasoning"])
    if "tool_calls" in given:
        given["tool_calls"] = _past_calls(number, given["tool_calls"])
        if "content" not in given:
            return given
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
    return given


def _past_calls(number: int, calls: object) -> list[dict[str, Any]]:
    """Calls of an earlier answer, their arguments as objects, as templates want them."""
    if not isinstance(calls, list):
        raise BadRow(
            "invalid_prompt", f"tool_calls of message {number} is {json_kind(calls)}, not an array"
        )
    found = []
    for index, call in enumerate(calls, 1):
        what = f"tool call {index} of message {number}"
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRow("invalid_prompt", f"{what} has no function with a name")
        arguments = function.get("arguments")
        if arguments is None or arguments == "":
            arguments = {}
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError) as problem:
                raise BadRow(
                    "invalid_prompt", f"the arguments of {what} are not JSON: {problem}"
                ) from None
        if not isinstance(arguments, dict):
            kind = json_kind(arguments)
            raise BadRow("invalid_prompt", f"the arguments of {what} are {kind}, not an object")
        found.append({**call, "function": {**function, "arguments": arguments}})
    return found
