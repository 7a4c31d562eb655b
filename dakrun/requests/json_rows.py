"""JSON rows: checks that the row formats share, and names of what they find, for messages.

Knows nothing of fields or files.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from dakrun.requests.prompts import BadRow

_JSON_NAMES = {dict: "an object", list: "an array", str: "a string", bool: "a boolean"}


def id_of(row: dict[str, Any], name: str) -> str | None:
    """The row's id, in field `name`, as a string; None if it has none. Raises BadRow."""
    value = row.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise BadRow("invalid_field", f"{name} is not a string or an integer, or is empty")
    return str(value)


def flag(row: Mapping[str, Any], name: str, default: bool) -> bool:
    """The boolean in a field of a row; raises BadRow."""
    value = row.get(name, default)
    if not isinstance(value, bool):
        raise BadRow("invalid_field", f"{name} is {json_kind(value)}, not true or false")
    return value


def json_kind(value: object) -> str:
    """The JSON type of a value, for messages: "an array"."""
    return _JSON_NAMES.get(type(value), "null" if value is None else "a number")


def names(fields: Sequence[str]) -> str:
    """Fields in a message."""
    return ", ".join(map(repr, fields))


def shown(value: object) -> str:
    """A value in a message: a short string itself, otherwise its JSON type."""
    if value is None:
        return "missing"
    return repr(value) if isinstance(value, str) and len(value) <= 100 else json_kind(value)
