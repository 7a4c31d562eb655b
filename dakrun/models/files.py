"""The weight files of a checkpoint: their names and their safetensors headers. Also JSON files.

Knows neither models nor torch.
"""

import json
import stat
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from dakrun.config import Dtype
from dakrun.errors import CannotRun, UsageError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
HEAD = "lm_head.weight"
RESERVED = "__metadata__"  # key of a safetensors header that is not a tensor
HEADER_SIZE_BYTES = 8
# Supported dtypes by their names in safetensors.
_DTYPES: dict[str, Dtype] = {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}


def safetensors_files(directory: Path) -> list[Path]:
    """The safetensors files of a checkpoint; empty if there are none.

    As in transformers: model.safetensors, else the files that the index names. Without an index,
    all safetensors files. Raises UsageError if the index is malformed.
    """
    if (directory / SINGLE).is_file():
        return [directory / SINGLE]
    if (directory / INDEX).is_file():
        return [directory / name for name in sorted(set(indexed(directory / INDEX).values()))]
    return sorted(directory.glob("*.safetensors"))


def check_shards(directory: Path) -> int:
    """The number of files that the index names where all of them are missing, else 0.

    Raises CannotRun if only some are missing, and UsageError if the index is malformed.
    """
    files = safetensors_files(directory)
    missing = [path for path in files if not path.exists()]
    if missing and len(missing) < len(files):
        raise _no_shard(missing[0])
    return len(missing)


def indexed(index: Path) -> dict[str, str]:
    """The file name, beside `index`, of each tensor; raises UsageError if it is malformed."""
    shards = read_json_object(index).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise UsageError(f"{index}: has no weight_map", hint="copy the index again")
    for name in shards.values():
        if not isinstance(name, str) or Path(name).name != name:
            raise UsageError(
                f"{index}: names {name!r}, not a file beside it", hint="copy the index again"
            )
    return shards


def read_header(path: Path) -> tuple[int, dict[str, Any]]:
    """The offset in bytes of a safetensors file's tensor data, and its header entries by name.

    Raises CannotRun if it is not a complete safetensors file.
    """
    try:
        check_is_file(path)
        with safe_open(path, framework="np"):  # checks the whole header
            pass
        with path.open("rb") as file:
            size = int.from_bytes(file.read(HEADER_SIZE_BYTES), "little")
            entries = json.loads(file.read(size))
    except FileNotFoundError:
        raise _no_shard(path) from None
    except (SafetensorError, OSError) as problem:
        if is_lfs_pointer(path):
            raise CannotRun(
                f"{path}: a git-lfs pointer, not the weights", hint="run git lfs pull in its folder"
            ) from None
        raise CannotRun(
            f"{path}: not a complete safetensors file ({problem})", hint="copy the file again"
        ) from None
    entries.pop(RESERVED, None)
    return HEADER_SIZE_BYTES + size, entries


def _no_shard(path: Path) -> CannotRun:
    return CannotRun(
        f"{path}: no such file", hint="copy the shard that the index names, or repair the link"
    )


def is_lfs_pointer(path: Path) -> bool:
    """Whether the file `path` is what git keeps instead of a file of git-lfs."""
    with path.open("rb") as file:
        return file.read(64).startswith(b"version https://git-lfs")


def check_is_file(path: Path) -> None:
    """Raise CannotRun if `path` is no regular file: reading a FIFO or a device might never end.

    Raises OSError if there is nothing.
    """
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode):
        kinds = {stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFDIR: "a folder"}
        raise CannotRun(
            f"{path}: {kinds.get(stat.S_IFMT(mode), 'a device')}, not a file",
            hint="copy the checkpoint's files into a folder",
        )


def stored_dtype(directory: Path) -> Dtype | None:
    """The dtype of the first file's first float tensor by name, as with transformers' "auto".

    None if there is no file, or no tensor in it of a supported dtype.
    """
    files = safetensors_files(directory)
    if not files or not files[0].is_file():
        return None
    _, entries = read_header(files[0])
    found = (_DTYPES.get(entries[name]["dtype"]) for name in sorted(entries))
    return next(filter(None, found), None)


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in the file `path`; raises UsageError if there is none."""
    try:
        check_is_file(path)
        value = json.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise UsageError(
            f"{path}: no such file", hint="give a Hugging Face model directory"
        ) from None
    except CannotRun as problem:
        raise UsageError(str(problem), hint=problem.hint) from None
    except (OSError, ValueError, RecursionError) as problem:
        if isinstance(problem, ValueError) and is_lfs_pointer(path):
            raise UsageError(
                f"{path}: a git-lfs pointer, not the file", hint="run git lfs pull in its folder"
            ) from None
        raise UsageError(f"{path}: cannot be read ({problem})", hint="copy it again") from None
    if not isinstance(value, dict):
        raise UsageError(f"{path}: not a JSON object", hint="copy it again")
    return value
