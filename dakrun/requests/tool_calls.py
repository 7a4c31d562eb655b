"""Calls of tools in an answer's text, in the formats of Hermes and Qwen, Llama 3 and Mistral.

Knows texts and chat templates; knows neither rows nor tokens.
"""

import json
import re
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any, Literal, NamedTuple, NoReturn

CallFormat = Literal["hermes", "llama", "mistral"]

# Names of tokens that a call is made of; some tokenizers have them as special tokens.
CALL_TOKENS: Mapping[CallFormat, tuple[str, ...]] = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "llama": ("<|python_tag|>",),
    "mistral": ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
}
_ID_DIGITS = 9  # as Mistral's templates want them
_MISTRAL_NAME = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*\w*\s*)?\[ARGS\]")


class ToolCall(NamedTuple):
    """A call of a tool: the tool's name, and its arguments, a JSON object as text."""

    id: str
    name: str
    arguments: str

    def as_dict(self) -> dict[str, Any]:
        """The call in OpenAI's format."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


def call_format_of(template: str) -> CallFormat | None:
    """The format in which a chat template writes calls; None if it is not known here."""
    if "<tool_call>" in template:
        return "hermes"
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<|start_header_id|>" in template and '"parameters"' in template:
        return "llama"
    return None


def find_calls(text: str, form: CallFormat, row: str) -> tuple[str, tuple[ToolCall, ...]] | None:
    """An answer's text beside calls, and its calls; None without calls, or if one is malformed.

    `text` has the names of CALL_TOKENS. The ids of the calls, 9 hexadecimal digits, are hashes of
    `row`, which names the row's choice, and of their numbers.
    """
    try:
        content, found = _READERS[form](text)
        pairs = [_call(value) for value in found]
    except (ValueError, RecursionError):
        return None
    calls = (
        ToolCall(_call_id(row, number), name, json.dumps(arguments, ensure_ascii=False))
        for number, (name, arguments) in enumerate(pairs)
    )
    return (content.strip(), tuple(calls)) if pairs else None


def _hermes(text: str) -> tuple[str, list[Any]]:
    """`<tool_call>{"name", "arguments"}</tool_call>`, any number of times, in other text."""
    content, *bodies = text.split("<tool_call>")
    found = []
    for body in bodies:
        value, rest = _json(body)
        found.append(value)
        content += rest.removeprefix("</tool_call>")
    return content, found


def _mistral(text: str) -> tuple[str, list[Any]]:
    """`[TOOL_CALLS]` and an array of `{"name", "arguments"}`, or `name[ARGS]{...}` for each."""
    content, *bodies = text.split("[TOOL_CALLS]")
    found = []
    for body in bodies:
        if named := _MISTRAL_NAME.match(body):
            value, rest = _json(body[named.end() :])
            found.append({"name": named[1], "arguments": value})
        else:
            value, rest = _json(body)
            found += value if isinstance(value, list) else [value]
        content += rest
    return content, found


def _llama(text: str) -> tuple[str, list[Any]]:
    """`{"name", "parameters"}`, alone or behind `<|python_tag|>`; several have `;` between them."""
    content, _, rest = text.rpartition("<|python_tag|>")
    found = []
    while rest.strip():
        value, rest = _json(rest)
        found.append(value)
        rest = rest.removeprefix(";")
    return content, found


_READERS = {"hermes": _hermes, "llama": _llama, "mistral": _mistral}


def _json(text: str) -> tuple[Any, str]:
    """The JSON value that a text begins with, and the text behind it. Raises ValueError."""
    text = text.lstrip()
    value, end = _DECODER.raw_decode(text)
    return value, text[end:].lstrip()


def _not_json(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_not_json)


def _call(value: object) -> tuple[str, dict[str, Any]]:
    """The name and the arguments of a call. Raises ValueError if it is none."""
    if isinstance(value, dict):
        name, arguments = value.get("name"), value.get("arguments", value.get("parameters"))
        if isinstance(name, str) and name and isinstance(arguments, dict):
            return name, arguments
    raise ValueError("not a call")


def _call_id(row: str, number: int) -> str:
    data = f"{row}\0{number}".encode("utf-8", "surrogatepass")
    return blake2b(data).hexdigest()[:_ID_DIGITS]
