"""Typed fields of a config.json, with one error for those that are missing or malformed.

Knows types, no keys.
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from dakrun.errors import UsageError

_SHOWN = 60  # characters of a malformed value in messages


@dataclass(frozen=True)
class Fields:
    """The fields of `raw`, by key and type; `where` names it in messages. Raises UsageError.

    A field that is absent has the value `default`; without a default it is an error. null counts
    as absent only in `part` and `has`.
    """

    raw: Mapping[str, Any]
    where: str

    def count(self, key: str, default: int | None = None) -> int:
        """A positive integer."""
        value = self._get(key, default)
        if type(value) is not int or value < 1:
            self.refuse(key, value, "a positive integer")
        return value

    def whole(self, key: str) -> int:
        """A positive integer, which may be written as a float."""
        value = self._get(key, None)
        if type(value) is float and value.is_integer() and value >= 1:
            return int(value)
        return self.count(key)

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number."""
        value = self._get(key, default)
        if type(value) not in (int, float) or not 0 < value <= sys.float_info.max:
            self.refuse(key, value, "a positive number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            self.refuse(key, value, "true or false")
        return value

    def part(self, key: str) -> "Fields | None":
        """The fields of an object; None if it is absent, null or empty."""
        value = self.raw.get(key)
        if value is None or value == {}:
            return None
        if not isinstance(value, dict):
            self.refuse(key, value, "an object")
        return Fields(value, f"{self.where}, {key}")

    def has(self, key: str) -> bool:
        """Whether the field is there and not null."""
        return self.raw.get(key) is not None

    def refuse(self, key: str, value: object, expected: str) -> NoReturn:
        """Raise the error for a field that is not as `expected`."""
        shown = json.dumps(value, default=str)
        if len(shown) > _SHOWN:
            shown = f"{shown[:_SHOWN]}..."
        raise UsageError(
            f"{self.where}: {key} is {shown}, not {expected}",
            hint="compare config.json with the published one",
        )

    def _get(self, key: str, default: Any) -> Any:
        if default is None and key not in self.raw:
            raise UsageError(
                f"{self.where}: has no {key!r}",
                hint="copy config.json again from where the model was published",
            )
        return self.raw.get(key, default)
