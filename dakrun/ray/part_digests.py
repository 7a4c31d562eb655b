"""Digests of input rows, kept in the folder of parts as .digests: which row a result is of.

Knows ids and digests (requests/row_digests.py); knows neither parts nor rows.
"""

from collections.abc import Iterable
from pathlib import Path

from dakrun.errors import UsageError
from dakrun.requests.row_digests import InputRow, RowDigests

_FILE = ".digests"


def part_digests(folder: Path) -> RowDigests:
    """The digests of the results in `folder`. Raises OSError."""
    return RowDigests(folder / _FILE)


def compare(
    folder: Path, written: Iterable[str], rows: Iterable[InputRow], *, force: bool
) -> list[str]:
    """Compare the results in `folder`, with the ids `written`, with the rows of the input.

    Returns notes for people. Raises UsageError if rows have changed since their results were
    written, unless `force` was given, and OSError if the digests cannot be read.
    """
    comparison, notes = part_digests(folder).compare(written, rows), []
    if comparison.first is not None:
        changed = f"{_rows(comparison.changed)} of the input changed since the results were written"
        if not force:
            raise UsageError(
                f"{folder}: {changed}, the first with id {comparison.first.id!r} in line "
                f"{comparison.first.line}",
                hint="--resume --force keeps the old results; give -o another folder, or "
                "--overwrite, to run all rows again",
            )
        notes.append(f"{changed}: they keep the results of the old ones (--force)")
    if comparison.lacking:
        notes.append(f"{_rows(comparison.lacking)} of the output are not in the input: they stay")
    if comparison.unknown:
        notes.append(
            f"{_rows(comparison.unknown)} of the output are taken as results of this input: it is "
            "not known which prompts they are of"
        )
    return notes


def _rows(count: int) -> str:
    return f"{count} row" if count == 1 else f"{count} rows"
