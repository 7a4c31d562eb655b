"""Tables as TOML text: what profiles are kept in."""

import json
import re
from collections.abc import Iterable, Mapping


def toml_text(
    head: Mapping[str, object], tables: Iterable[tuple[str, Mapping[str, object]]]
) -> str:
    """The values of `head`, then each table under its heading, such as "[device]".

    Lists of more than four lists have a line for each.
    """
    parts = [("", head), *((f"{heading}\n", values) for heading, values in tables)]
    return "\n".join(
        heading + "".join(f"{key(name)} = {_value(value)}\n" for name, value in values.items())
        for heading, values in parts
    )


def key(name: str) -> str:
    """`name` as a TOML key: bare where TOML allows it."""
    return name if re.fullmatch("[A-Za-z0-9_-]+", name) else _value(name)


def _value(value: object) -> str:
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list):
        texts = [_value(item) for item in value]
        if value and all(isinstance(item, list) for item in value) and len(value) > 4:
            return "[\n" + "".join(f"  {text},\n" for text in texts) + "]"
        return "[" + ", ".join(texts) + "]"
    return repr(value)
