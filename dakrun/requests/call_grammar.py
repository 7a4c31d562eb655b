"""The grammar of an answer that must call tools, in the format of the model's chat template.

Knows texts and schemas; tool_calls.py finds the calls again.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dakrun.grammars import StructuredOutputsParams, json_options
from dakrun.requests.tool_calls import CallFormat

_NO_PARAMETERS = {"properties": {}, "additionalProperties": False}
_ARGUMENTS = {"hermes": "arguments", "llama": "parameters", "mistral": "arguments"}


def call_grammar(
    tools: Sequence[Mapping[str, Any]],
    form: CallFormat,
    *,
    one_call: bool,
    with_args: bool,
    symbol: Callable[[str], str],
) -> StructuredOutputsParams:
    """The form of an answer that calls one of `tools`, or several unless `one_call`.

    A call of Mistral's is NAME[ARGS]{...} `with_args`. `symbol` is how Lark's notation has the name
    of a token. Keywords of parameters that no grammar can follow are left out, unless a function is
    `strict`.
    """
    functions = [tool["function"] for tool in tools]
    rules, calls = [], []
    for number, function in enumerate(functions):
        own = f"arguments_{number}"
        options = json_options(strict=function.get("strict") is True)
        given = {"type": "object", **function.get("parameters", _NO_PARAMETERS)}
        schema = {**given, "x-guidance": options}
        rules.append(f"{own}: %json {json.dumps(schema, ensure_ascii=False)}")
        name = function["name"]
        if with_args and form == "mistral":
            calls.append(f"{_text(name)} {symbol('[ARGS]')} {own}")
        else:
            start = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{_ARGUMENTS[form]}": '
            calls.append(f'{_text(start)} {own} "}}"')
    rules.append(f"call: {' | '.join(calls)}")
    if form == "llama":
        start = "call"
    elif form == "hermes":
        rules.append(f'one: {symbol("<tool_call>")} "\\n"? call "\\n"? {symbol("</tool_call>")}')
        start = "one" if one_call else 'one ("\\n" one)*'
    elif with_args:
        rules.append(f"one: {symbol('[TOOL_CALLS]')} call")
        start = "one" if one_call else "one+"
    else:
        more = "" if one_call else ' (", " call)*'
        start = f'{symbol("[TOOL_CALLS]")} " "? "[" call{more} "]"'
    return StructuredOutputsParams(grammar="\n".join([f"start: {start}", *rules]))


def _text(text: str) -> str:
    """A literal in Lark's notation."""
    return json.dumps(text, ensure_ascii=False)
