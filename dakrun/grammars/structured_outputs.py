"""The form that an answer must have, as a row or the Python API asks for it.

Checks what is asked for as far as that needs neither llguidance nor a tokenizer.
"""

import json as json_module
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dakrun.errors import UsageError, invalid_value, refuse_unsupported

Kind = Literal["json", "json_object", "regex", "choice", "grammar"]
KINDS: tuple[Kind, ...] = ("json", "json_object", "regex", "choice", "grammar")
_NEUTRAL: Mapping[str, tuple[object, ...]] = {  # other options of vLLM
    "disable_any_whitespace": (False,),
    "disable_additional_properties": (False,),
    "disable_fallback": (True, False),
}
_OWN_OPTIONS = "x-guidance"  # in a schema: options of llguidance, which would undo ours


@dataclass(frozen=True, init=False)
class StructuredOutputsParams:
    """The form of an answer: exactly one of `json`, `json_object`, `regex`, `choice`, `grammar`.

    `json` is a JSON schema, as an object or its text; `json_object` is True for any JSON object.
    `regex` is a regular expression that the whole answer matches, `choice` a list of strings of
    which it is one, `grammar` a grammar in Lark's notation or in llama.cpp's (GBNF). If `strict` is
    False, keywords of a schema that cannot be followed are no error, and the finished answer is
    checked with them. The kind is kept as `kind`, the text of what was given as `source`.

    The names are those of vLLM. Raises UsageError for anything else.
    """

    kind: Kind
    source: str
    strict: bool

    def __init__(
        self,
        *,
        json: Mapping[str, Any] | bool | str | None = None,
        json_object: bool | None = None,
        regex: str | None = None,
        choice: Sequence[str] | None = None,
        grammar: str | None = None,
        strict: bool = True,
        **other: Any,
    ) -> None:
        refuse_unsupported(other, _NEUTRAL, (*KINDS, "strict"))
        given: dict[Kind, Any] = {"json": json, "json_object": json_object or None}
        given |= {"regex": regex, "choice": choice, "grammar": grammar}
        asked = [kind for kind in KINDS if given[kind] is not None]
        if len(asked) != 1:
            raise UsageError(
                f"structured_outputs has {' and '.join(asked) or 'nothing'}",
                hint=f"give exactly one of {', '.join(KINDS)}",
            )
        if not isinstance(strict, bool):
            raise invalid_value("strict", strict, "a bool")
        object.__setattr__(self, "kind", asked[0])
        object.__setattr__(self, "source", _source(asked[0], given[asked[0]]))
        object.__setattr__(self, "strict", strict)

    @classmethod
    def of(cls, given: object) -> "StructuredOutputsParams":
        """`given` itself, or made of a mapping's keywords. Raises UsageError."""
        if isinstance(given, cls):
            return given
        if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
            raise invalid_value("structured_outputs", given, f"an object with {' or '.join(KINDS)}")
        return cls(**given)

    @property
    def schema(self) -> Any:
        """The JSON schema of an answer; None if it need not be JSON."""
        if self.kind == "json_object":
            return {"type": "object"}
        return json_module.loads(self.source) if self.kind == "json" else None


def _source(kind: Kind, given: Any) -> str:
    if kind == "json":
        return _schema_text(given)
    if kind == "json_object":
        if given is not True:
            raise invalid_value("json_object", given, "true")
        return ""
    if kind == "choice":
        texts = list(given) if isinstance(given, list | tuple) else []
        if not texts or not all(isinstance(one, str) for one in texts):
            raise invalid_value("choice", given, "a list of strings, not empty")
        _check_text("choice", "".join(texts))
        return json_module.dumps(texts, ensure_ascii=False)
    if not isinstance(given, str) or not given:
        raise invalid_value(kind, given, "a string, not empty")
    return _check_text(kind, given)


def _schema_text(given: Any) -> str:
    """A JSON schema as text, in the order of its keys."""
    try:
        schema = json_module.loads(given) if isinstance(given, str) else given
        text = json_module.dumps(schema, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as problem:
        raise UsageError(f"the schema is not JSON: {problem}", hint="give a JSON schema") from None
    if not isinstance(schema, Mapping | bool):
        raise invalid_value("json", given, "a JSON schema, which is an object")
    if schema is True:
        return "{}"
    if isinstance(schema, Mapping) and _OWN_OPTIONS in schema:
        raise UsageError(
            f"the schema has {_OWN_OPTIONS!r}, options of llguidance", hint="leave it out"
        )
    return _check_text("schema", text)


def _check_text(name: str, text: str) -> str:
    """Return `text` if it can be encoded."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{name} has half a surrogate pair", hint="take it out") from None
    return text
