"""The fields of a row that say which form its answer must have, in OpenAI's and vLLM's names."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from dakrun.errors import UsageError
from dakrun.grammars import MAX_COMPILED, Grammars, StructuredOutputsParams
from dakrun.requests.json_rows import json_kind, names, shown
from dakrun.requests.prompts import BadRow

_ALIASES = {  # of older versions of vLLM
    "guided_json": "json",
    "guided_json_object": "json_object",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
FORM_FIELDS = ("response_format", "structured_outputs", *_ALIASES)


def answer_form(given: Mapping[str, Any]) -> StructuredOutputsParams | None:
    """The form in a row's FORM_FIELDS; None for any text. Raises BadRow or UsageError."""
    asked = [name for name in FORM_FIELDS if given.get(name) is not None]
    if given.get("response_format") == {"type": "text"}:
        asked.remove("response_format")
    if len(asked) > 1:
        raise BadRow("invalid_field", f"{names(asked)} exclude each other")
    if not asked:
        return None
    (name,) = asked
    if name == "response_format":
        return _of_response_format(given[name])
    if name in _ALIASES:
        return StructuredOutputsParams(**{_ALIASES[name]: given[name]})
    if not isinstance(given[name], dict):
        raise BadRow("invalid_field", f"{name} is {json_kind(given[name])}, not an object")
    return StructuredOutputsParams.of(given[name])


class FormsAhead:
    """The forms that rows ask for, compiled beside other work while the rows wait for their turn.

    Until the model is known they are noted, as many as are kept compiled.
    """

    def __init__(self) -> None:
        self._noted: dict[StructuredOutputsParams, None] = {}
        self._grammars: Grammars | None = None

    def note(self, row: Mapping[str, Any]) -> None:
        """Note or compile the form that a row of any format asks for, if it has a valid one."""
        body = row.get("body", row)
        if not isinstance(body, dict) or not any(name in body for name in FORM_FIELDS):
            return
        with suppress(BadRow, UsageError, TypeError):
            if (form := answer_form(body)) is None:
                return
            if self._grammars is not None:
                self._grammars.prepare([form])
            elif len(self._noted) < MAX_COMPILED:
                self._noted[form] = None

    def compile(self, grammars: Grammars | None) -> None:
        """Compile the forms of rows so far, and those to come, by the model's `grammars`."""
        self._grammars = grammars
        if grammars is not None:
            grammars.prepare(self._noted)


def _of_response_format(given: object) -> StructuredOutputsParams:
    """{"type": "json_object"}, or {"type": "json_schema", "json_schema": {"schema", "strict"}}."""
    if not isinstance(given, dict):
        raise BadRow("invalid_field", f"response_format is {json_kind(given)}, not an object")
    kind, described = given.get("type"), given.get("json_schema")
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True)
    if kind != "json_schema":
        raise BadRow(
            "invalid_field",
            f"the type of response_format is {shown(kind)}, not text, json_object or json_schema",
        )
    if not isinstance(described, dict) or described.get("schema") is None:
        raise BadRow("invalid_field", "response_format has no json_schema with a schema")
    strict = described.get("strict")
    return StructuredOutputsParams(
        json=described["schema"], strict=True if strict is None else strict
    )
