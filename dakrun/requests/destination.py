"""Checks of where results go, before anything is read or written."""

import os
from pathlib import Path

from dakrun.errors import UsageError, check_file_name
from dakrun.requests.files import same_file
from dakrun.requests.gzip_files import without_gz

_SUFFIXES = (".jsonl", "")


def check_output(
    name: str,
    source: str | Path | None,
    *,
    overwrite: bool,
    resume: bool,
    force: bool,
    ordered: bool,
    changed: bool,
    retry_failed: bool,
) -> None:
    """Raise UsageError if the options of an output exclude each other, or `name` cannot be one.

    `source` is the file of the prompts.
    """
    for path in (name, source):
        check_file_name(path)
    if overwrite and resume:
        raise UsageError("--overwrite and --resume exclude each other", hint="give one of them")
    is_file = os.path.isfile(name) or not os.path.exists(name)
    if ordered and (name == "-" or not is_file):
        shown = "standard output" if name == "-" else name
        raise UsageError(
            f"{shown}: rows that are written already cannot be put in order",
            hint="give -o a file, or drop --ordered",
        )
    if force and not resume:
        raise UsageError("--force needs --resume", hint="give both, or --overwrite alone")
    for option, given in (("--changed", changed), ("--retry-failed", retry_failed)):
        if given and not resume:
            raise UsageError(f"{option} needs --resume", hint=f"give both, or drop {option}")
    if changed and force:
        raise UsageError(
            "--changed and --force exclude each other",
            hint="--changed runs changed rows again, --force keeps their results",
        )
    if source is not None and same_file(name, str(source)):
        raise UsageError(
            f"{name}: the output is the file that the prompts come from",
            hint="give another file to -o",
        )
    check_destination(name, overwrite=overwrite, resume=resume)


def check_destination(
    name: str, *, overwrite: bool, resume: bool, suffixes: tuple[str, ...] = _SUFFIXES
) -> None:
    """Raise UsageError if results cannot be written to `name`, a path or "-"."""
    if name == "-":
        if resume:
            raise UsageError(
                "standard output cannot be resumed", hint="give -o a file, or drop --resume"
            )
        return
    if not name:
        raise UsageError("the output has no name", hint="give -o a file that ends in .jsonl")
    if os.path.isdir(name):
        raise UsageError(f"{name}: is a directory", hint="give -o a file that ends in .jsonl")
    folder = os.path.dirname(os.path.realpath(name) if os.path.islink(name) else name) or "."
    if not os.path.isdir(folder):
        raise UsageError(f"{folder}: no such directory", hint=f"create it: mkdir -p '{folder}'")
    plain = Path(without_gz(name))
    is_file = os.path.isfile(name) or not os.path.exists(name)
    if is_file and plain.suffix.lower() not in suffixes:
        raise UsageError(
            f"{name}: result files end in .jsonl, .jsonl.gz or .parquet",
            hint="a result is one JSON object a line: give -o "
            f"{plain.with_suffix('.jsonl').name}, or - for standard output",
        )
    if not os.path.exists(name):
        return
    if resume and not os.path.isfile(name):
        raise UsageError(
            f"{name}: not a regular file, so it cannot be resumed", hint="drop --resume"
        )
    if os.path.getsize(name) and not (overwrite or resume):
        raise UsageError(
            f"{name}: exists and is not empty",
            hint="--resume adds the rows that are missing, --overwrite starts afresh",
        )
