"""The files of a checkpoint's weights: which they are, and what safetensors headers say.

Knows neither models nor torch.
"""

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from dakrun.config import Dtype
from dakrun.errors import CannotRun, UsageError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
HEAD = "lm_head.weight"
RESERVED = "__metadata__"  # in the header of a safetensors file, beside its tensors
HEADER_SIZE_BYTES = 8
_COMPUTED: dict[str, Dtype] = {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}


def safetensors_files(directory: Path) -> list[Path]:
    """The safetensors files that make up a checkpoint; empty where there are none.

    As in transformers: model.safetensors, or else those that the index names. Without an index,
    all. Raises UsageError where the index is wrong.
    """
    if (directory / SINGLE).is_file():
        return [directory / SINGLE]
    if (directory / INDEX).is_file():
        return [directory / name for name in sorted(set(indexed(directory / INDEX).values()))]
    return sorted(directory.glob("*.safetensors"))


def indexed(index: Path) -> dict[str, str]:
    """The name of the file, beside `index`, of each tensor; UsageError where it says none."""
    shards = read_json_object(index).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise UsageError(f"{index}: has no weight_map", hint="copy the index anew")
    for name in shards.values():
        if not isinstance(name, str) or Path(name).name != name:
            raise UsageError(
                f"{index}: names {name!r}, not a file beside it", hint="copy the index anew"
            )
    return shards


def read_header(path: Path) -> tuple[int, dict[str, Any]]:
    """The byte at which a file's tensors begin, and what it says of each by name.

    CannotRun where it is not a whole safetensors file.
    """
    try:
        with safe_open(path, framework="np"):  # checks all of the header
            pass
        with path.open("rb") as file:
            size = int.from_bytes(file.read(HEADER_SIZE_BYTES), "little")
            entries = json.loads(file.read(size))
    except FileNotFoundError:
        raise CannotRun(
            f"{path}: no such file", hint="copy the shard that the index names, or mend the link"
        ) from None
    except (SafetensorError, OSError) as problem:
        raise CannotRun(
            f"{path}: not a whole safetensors file ({problem})", hint="copy the file anew"
        ) from None
    entries.pop(RESERVED, None)
    return HEADER_SIZE_BYTES + size, entries


def stored_dtype(directory: Path) -> Dtype | None:
    """The type of the first file's first float tensor by name, as transformers' "auto" takes it.

    None where there is no file, or nothing in it that dakrun computes in.
    """
    files = safetensors_files(directory)
    if not files or not files[0].is_file():
        return None
    _, entries = read_header(files[0])
    found = (_COMPUTED.get(entries[name]["dtype"]) for name in sorted(entries))
    return next(filter(None, found), None)


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
