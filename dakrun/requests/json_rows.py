"""JSON rows: checks that the row formats share, and names of what they find, for messages.

Knows nothing of fields or files.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from dakrun.requests.prompts import BadRow

_JSON_NAMES = {dict: "an object", list: "an array", str: "a string", bool: "a boolean"}


def parse_json(text: str) -> Any:
    """What the JSON `text` says. Raises as json.loads, and BadRow for a key that occurs twice."""
    return _DECODER.decode(text)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of `pairs`, without a key twice, of which the last value would count silently."""
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = next(key for key, times in Counter(key for key, _ in pairs).items() if times > 1)
        raise BadRow("invalid_json", f"the key {shown(twice)} occurs twice in an object")
    return found


_DECODER = json.JSONDecoder(object_pairs_hook=_object)


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
