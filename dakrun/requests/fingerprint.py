"""The fingerprint of a run, kept beside its output OUT as OUT.run.json: what its results depend on.

Knows the model's files, the sampling parameters and when the run began, which a chat template may
stamp; knows neither prompts nor results.
"""

import hashlib
import json
import os
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from dakrun.config import ADJUSTING, ModelConfig, SamplingParams
from dakrun.errors import UsageError
from dakrun.models.files import safetensors_files
from dakrun.requests.files import replacement

Fingerprint = dict[str, Any]
_SCHEMA = 1
_ABSENT = "absent"
_STARTED = "started"  # local time; a run that is resumed keeps it, so it never differs
_FILES = ("weights", "input")  # sections with an entry for each file
_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "merges.txt"),
    *("special_tokens_map.json", "added_tokens.json"),
)
_TEMPLATE = "chat template"
_NEWER = (*ADJUSTING, "structured_outputs", "thinking_token_budget")  # than fingerprints
_BY_CONTENT = ("tokenizer", _TEMPLATE, "weights")  # digests, which say nothing to people
_SAMPLES, _SAMPLE_BYTES = 64, 4096  # of a weight file's content


def make_fingerprint(
    config: ModelConfig,
    directory: Path | None,
    row_format: str | None,
    params: SamplingParams,
    *,
    max_model_len: int | None = None,
    tokenizer_directory: Path | None = None,
    chat_template: str | None = None,
    reasoning: str = "auto",
) -> Fingerprint:
    """The fingerprint of a run of the checkpoint in `directory`; of random weights without one.

    `row_format` is RequestReader.row_format(), `params` are the defaults of all rows, and
    `max_model_len` is the length, in tokens, at which their completions end. The model's name and
    its files' dates are left out: a copy of the same files is the same model. Of weight files the
    headers and samples of the content are compared. `chat_template` is what replaces the
    tokenizer's own, `reasoning` says how thoughts are marked. Raises UsageError if the index of the
    weight files is malformed.
    """
    model = asdict(config)
    del model["name"]
    weights = {}
    for path in safetensors_files(directory) if directory else ():
        if path.is_file():  # the loader reports one that is missing
            weights[path.name] = {"bytes": path.stat().st_size, "content": _sampled(path)}
    fingerprint = {
        "dakrun_run": _SCHEMA,
        "dtype": model.pop("dtype"),
        "format": row_format,
        "model": model,
        "weights": weights or "random",
        "sampling": _sampling(params),
        "max_model_len": max_model_len,
        "reasoning": reasoning,
        _STARTED: datetime.now().isoformat(timespec="seconds"),
        **_texts(tokenizer_directory or directory, chat_template),
    }
    return dict(json.loads(json.dumps(fingerprint)))  # lists for tuples, as when read


def _sampling(params: SamplingParams) -> dict[str, Any]:
    """The parameters but `n`, of which rows have their own, and options that change nothing."""
    neutral = {"n": params.n, **_neutral()}
    return {k: v for k, v in asdict(params).items() if k not in neutral or v != neutral[k]}


def _neutral() -> dict[str, Any]:
    """The defaults of options that a fingerprint leaves out at their defaults."""
    return {name: getattr(SamplingParams(), name) for name in _NEWER}


def _texts(directory: Path | None, chat_template: str | None) -> dict[str, Any]:
    """Digests of a tokenizer's files and of its chat template; nothing without a tokenizer."""
    if directory is None:
        return {}
    files, template = {}, hashlib.sha256()
    for name in _TOKENIZER_FILES:
        path = directory / name
        if not path.is_file():
            continue
        data = path.read_bytes()
        if name == "tokenizer_config.json":
            try:
                fields = json.loads(data.decode("utf-8-sig"))
                template.update(json.dumps(fields.pop("chat_template", None)).encode())
                data = json.dumps(fields, sort_keys=True).encode()
            except (ValueError, AttributeError, RecursionError):
                pass  # the tokenizer's loader reports it
        files[name] = hashlib.sha256(data).hexdigest()
    for path in sorted([*directory.glob("chat_template.*"), *directory.glob("*templates/*.jinja")]):
        if path.is_file():
            template.update(path.name.encode() + b"\0" + path.read_bytes())
    if chat_template is not None:
        template = hashlib.sha256(b"--chat-template\0" + chat_template.encode())
    return {"tokenizer": files, _TEMPLATE: {"sha256": template.hexdigest()}} if files else {}


def _sampled(path: Path) -> str:
    """A digest of a weight file's start (its header) and of pieces that are evenly spaced."""
    sample = hashlib.sha256()
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        sample.update(file.read(1 << 20))
        for number in range(_SAMPLES + 1):
            file.seek(max(0, size - _SAMPLE_BYTES) * number // _SAMPLES)
            sample.update(file.read(_SAMPLE_BYTES))
    return sample.hexdigest()


def fingerprint_path(output: str) -> Path:
    """OUT.run.json beside the file that `output` names or links to."""
    return Path(os.path.realpath(output) + ".run.json")


def read_fingerprint(path: Path) -> Fingerprint | None:
    """The fingerprint in `path`; None if there is no such file.

    Raises UsageError for a file that is not one, OSError if it cannot be read.
    """
    try:
        fingerprint = json.loads(path.read_bytes())
        if isinstance(fingerprint, dict) and "dakrun_run" in fingerprint:
            if _STARTED in fingerprint:
                start_of(fingerprint)
            return fingerprint
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, RecursionError):
        pass
    raise UsageError(
        f"{path}: not the fingerprint of a run, although it is named like one",
        hint="move it away, or give -o another file",
    )


def not_compared(output: str | Path, path: Path) -> str:
    """The note for people who resume `output`, whose run has left no fingerprint in `path`."""
    return (
        f"{output}: the settings of the run that wrote its rows are not known ({path.name} is "
        "missing) and were not compared; if they may differ, --overwrite starts afresh"
    )


def start_of(fingerprint: Fingerprint) -> datetime:
    """When the run of a fingerprint began. Raises TypeError or ValueError if that is malformed."""
    return datetime.fromisoformat(fingerprint[_STARTED])


def resumed(fingerprint: Fingerprint, before: Fingerprint | None) -> Fingerprint:
    """`fingerprint` with the start of the run `before`, which it goes on, if that is known."""
    if before is None or _STARTED not in before:
        return fingerprint
    return {**fingerprint, _STARTED: before[_STARTED]}


def write_fingerprint(fingerprint: Fingerprint, path: Path) -> None:
    """Write the file in one step: a kill leaves the old one or the new one. Raises OSError."""
    with replacement(path) as file:
        file.write(json.dumps(fingerprint, indent=1).encode() + b"\n")


def differences(
    before: Fingerprint, now: Fingerprint, *, lengths_may_differ: bool = False
) -> list[str]:
    """Each entry that differs, with both values; empty if one run may continue the other.

    An entry that only one of them has is not compared, unless it is a file; nor is a format
    that is null, nor, with `lengths_may_differ`, the lengths at which completions end.
    """
    if lengths_may_differ:
        rest = {name: v for name, v in now["sampling"].items() if name != "max_tokens"}
        now = {**now, "sampling": rest, "max_model_len": None}
    different = []
    for section in (
        *("dtype", "format", "model", "weights", "tokenizer", _TEMPLATE),
        *("sampling", "max_model_len", "reasoning", "input"),
    ):
        old, new = before.get(section), now.get(section)
        if old is None or new is None:
            continue
        if not isinstance(old, dict) or not isinstance(new, dict):
            different += _difference(section, old, new)
            continue
        if section == "sampling":
            old, new = _with_neutral(old, new), _with_neutral(new, old)
        combine = set.union if section in _FILES else set.intersection
        for key in sorted(combine(set(old), set(new))):
            if section in _BY_CONTENT:
                if not _same_content(old.get(key), new.get(key)):
                    different.append(f"{section if section == _TEMPLATE else key} differs")
                continue
            different += _difference(
                f"{section}.{key}", old.get(key, _ABSENT), new.get(key, _ABSENT)
            )
    return different


def _with_neutral(sampling: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """`sampling`, with defaults for the options that only `other` has."""
    return {**{name: value for name, value in _neutral().items() if name in other}, **sampling}


def _same_content(old: Any, new: Any) -> bool:
    """Whether two entries of a file agree; older versions kept the date instead of a digest."""
    if isinstance(old, dict) and isinstance(new, dict):
        return all(old[key] == new[key] for key in old.keys() & new.keys())
    return bool(old == new)


def _difference(name: str, old: object, new: object) -> list[str]:
    if old == new:
        return []
    was, now = (v if isinstance(v, str) else json.dumps(v) for v in (old, new))
    return [f"{name} was {was}, now {now}"]
