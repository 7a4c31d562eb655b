"""JSON objects in the files of a model's folder."""

import json
from pathlib import Path
from typing import Any

from dakrun.errors import UsageError


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; UsageError where there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(
            f"{path}: no such file", hint="a Hugging Face model directory is needed"
        ) from None
    except (OSError, ValueError, RecursionError) as problem:
        raise UsageError(f"{path}: cannot be read ({problem})", hint="copy it anew") from None
    if not isinstance(value, dict):
        raise UsageError(f"{path}: holds no JSON object", hint="copy it anew")
    return value
