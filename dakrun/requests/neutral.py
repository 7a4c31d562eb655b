"""Fields that a row may have although they are not supported, with values that change nothing."""

from collections.abc import Collection, Mapping
from typing import Any

from dakrun.config import NEUTRAL_SAMPLING
from dakrun.errors import is_neutral

NEUTRAL: Mapping[str, tuple[object, ...]] = {  # of a row or a Batch row's body
    **NEUTRAL_SAMPLING,
    "stream": (False,),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),  # without tools
    "parallel_tool_calls": (True, False),
    "chat_template_kwargs": ({},),
    "modalities": (["text"],),
    "store": (False,),
    "service_tier": ("auto", "default"),
}
OF_MESSAGES: Mapping[str, tuple[object, ...]] = {"tool_calls": ([],), "annotations": ([],)}
_INTEGERS = (
    *("max_tokens", "max_completion_tokens", "n", "top_k", "seed", "min_tokens"),
    *("logprobs", "top_logprobs", "prompt_logprobs", "thinking_token_budget"),
)


def supported_fields(
    row: Mapping[str, Any], fields: Collection[str]
) -> tuple[dict[str, Any], list[str]]:
    """The supported fields of a row, and the names of those that it may not have.

    A field that is null counts as absent. Whole floats become integers where one is wanted, and a
    `top_k` of -1 becomes 0, both of which keep all tokens.
    """
    given = {name: value for name, value in row.items() if value is not None}
    unknown = [
        n for n, value in given.items() if n not in fields and not is_neutral(n, value, NEUTRAL)
    ]
    supported = {name: value for name, value in given.items() if name in fields}
    for name in _INTEGERS:
        if name in supported:
            supported[name] = integer_of(supported[name])
    if supported.get("top_k") == -1:
        supported["top_k"] = 0
    return supported, unknown


def integer_of(value: Any) -> Any:
    """A whole float as an integer; any other value as it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value
