"""The fingerprint of a run, kept beside its output OUT as OUT.run.json: what its results depend on.

Knows the model's files and the sampling parameters; knows neither prompts nor results.
"""

import json
import os
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dakrun.config import ModelConfig, SamplingParams
from dakrun.errors import UsageError
from dakrun.models.files import safetensors_files
from dakrun.requests.files import replacement

Fingerprint = dict[str, Any]
_SCHEMA = 1
_ABSENT = "absent"
_FILES = ("weights", "input")  # sections with an entry for each file


def make_fingerprint(
    config: ModelConfig, directory: Path | None, row_format: str | None, params: SamplingParams
) -> Fingerprint:
    """The fingerprint of a run of the checkpoint in `directory`; of random weights without one.

    `row_format` is RequestReader.row_format(), `params` are the defaults of all rows. The model's
    name is left out: another path to the same files is the same model. Raises UsageError if the
    index of the weight files is malformed.
    """
    model = asdict(config)
    del model["name"]
    weights = {}
    for path in safetensors_files(directory) if directory else ():
        if path.is_file():  # the loader reports one that is missing
            stat = path.stat()
            date = datetime.fromtimestamp(stat.st_mtime, UTC).isoformat()
            weights[path.name] = {"bytes": stat.st_size, "modified": date}
    fingerprint = {
        "dakrun_run": _SCHEMA,
        "dtype": model.pop("dtype"),
        "format": row_format,
        "model": model,
        "weights": weights or "random",
        "sampling": asdict(params),
    }
    return dict(json.loads(json.dumps(fingerprint)))  # lists for tuples, as when read


def fingerprint_path(output: str) -> Path:
    """OUT.run.json beside the file that `output` names or links to."""
    return Path(os.path.realpath(output) + ".run.json")


def read_fingerprint(path: Path) -> Fingerprint | None:
    """The fingerprint in `path`; None if there is no such file.

    Raises UsageError for a file that is not one, OSError if it cannot be read.
    """
    try:
        found = json.loads(path.read_bytes())
        if isinstance(found, dict) and "dakrun_run" in found:
            return found
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError):
        pass
    raise UsageError(
        f"{path}: not the fingerprint of a run, although it is named like one",
        hint="move it away, or give -o another file",
    )


def write_fingerprint(fingerprint: Fingerprint, path: Path) -> None:
    """Write the file in one step: a kill leaves the old one or the new one. Raises OSError."""
    with replacement(path) as file:
        file.write(json.dumps(fingerprint, indent=1).encode() + b"\n")


def differences(before: Fingerprint, now: Fingerprint) -> list[str]:
    """Each entry that differs, with both values; empty if one run may continue the other.

    An entry that only one of them has is not compared, unless it is a file; nor is a format
    that is null.
    """
    found = []
    for section in ("dtype", "format", "model", "weights", "sampling", "input"):
        old, new = before.get(section), now.get(section)
        if old is None or new is None:
            continue
        if not isinstance(old, dict) or not isinstance(new, dict):
            found += _difference(section, old, new)
            continue
        combine = set.union if section in _FILES else set.intersection
        for key in sorted(combine(set(old), set(new))):
            found += _difference(f"{section}.{key}", old.get(key, _ABSENT), new.get(key, _ABSENT))
    return found


def _difference(name: str, old: object, new: object) -> list[str]:
    if old == new:
        return []
    was, now = (v if isinstance(v, str) else json.dumps(v) for v in (old, new))
    return [f"{name} was {was}, now {now}"]
