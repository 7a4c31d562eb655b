"""Digests of input rows, kept beside the output OUT as OUT.run.rows: which row a result is of.

A record is 16 bytes: the hashes of a row's id and of its content. It is written behind the result,
so after a kill the last result may have none; such a result, and one of an older version, is
accepted. Knows ids and bytes; knows neither prompts nor results.
"""

import hashlib
import json
import os
from array import array
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dakrun.errors import UsageError
from dakrun.requests.request import id_hash
from dakrun.units import counted

_RECORD_BYTES = 16
_CHUNK = 65_536  # rows compared at a time
_CHANGED = "of the input changed since the results were written"


class InputRow(NamedTuple):
    """A row's id, its 1-based line in the input, and its digest."""

    id: str
    line: int
    digest: int


class Comparison(NamedTuple):
    """The rows of an output against those of an input.

    `changed` rows of the input have a result of another row; `first` is the first of them.
    `unknown` results have no digest; `lacking` results have ids that the input does not have.
    Of the input's `rows`, `done` have a result, be it of another row.
    """

    changed: int
    first: InputRow | None
    unknown: int
    lacking: int
    rows: int
    done: int

    def notes(self, output: str | Path, *, changed: bool, force: bool, hint: str) -> list[str]:
        """What people should know before a run resumes `output`.

        Changed rows are run again with `changed`, and keep the old results with `force`. Raises
        UsageError, with the `hint`, if there are any without either.
        """
        notes = []
        if self.first is not None:
            if not (changed or force):
                raise rows_changed(output, self.changed, self.first, hint)
            again, keep = (
                ("it is run again", "it keeps the result of the old one")
                if self.changed == 1
                else ("they are run again", "they keep the results of the old ones")
            )
            what = again if changed else f"{keep} (--force)"
            notes.append(f"{counted(self.changed, 'row')} {_CHANGED}: {what}")
        if self.lacking == 1:
            notes.append("1 row of the output is not in the input: it stays")
        elif self.lacking:
            notes.append(f"{self.lacking:,} rows of the output are not in the input: they stay")
        if self.unknown == 1:
            notes.append(
                "1 row of the output is taken as the result of a row of this input: it is not "
                "known which prompt it is of"
            )
        elif self.unknown:
            notes.append(
                f"{self.unknown:,} rows of the output are taken as results of this input: it is "
                "not known which prompts they are of"
            )
        return notes


def rows_changed(output: str | Path, count: int, first: InputRow, hint: str) -> UsageError:
    """The error for `count` rows of the input that are not those that their results are of."""
    return UsageError(
        f"{output}: {counted(count, 'row')} {_CHANGED}, the first with id {first.id!r} in line "
        f"{first.line}",
        hint=hint,
    )


def json_digest(row: dict[str, Any], id_field: str) -> int:
    """The digest of a JSON row without its id; neither order of keys nor spaces count."""
    rest = {name: value for name, value in row.items() if name != id_field}
    return bytes_digest(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode())


def bytes_digest(data: bytes) -> int:
    """The digest of a line of text, or of one that is no JSON row."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def digests_path(output: str) -> Path:
    """OUT.run.rows beside the file that `output` names or links to."""
    return Path(os.path.realpath(output) + ".run.rows")


class RowDigests:
    """The records of one file, by hashes of ids; of several for one id the last holds.

    All methods raise OSError.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: int | None = None
        try:
            with open(path, "rb") as file:
                data = file.read()
        except FileNotFoundError:
            data = b""
        records = np.frombuffer(data[: len(data) // _RECORD_BYTES * _RECORD_BYTES], dtype="<u8")
        self._size = records.nbytes
        records = records.reshape(-1, 2)[::-1]  # np.unique keeps the first of equal ones
        self._hashes, rows = np.unique(records[:, 0], return_index=True)
        self._digests = records[rows, 1]

    def find(self, id: str) -> int | None:
        """The digest of the row that the result of `id` is of; None if it is not known."""
        known, digests = self._find(np.array([id_hash(id)], dtype=np.uint64))
        return int(digests[0]) if known[0] else None

    def begin(self, *, afresh: bool) -> None:
        """Drop what was cut off at the end of the file or, `afresh`, the file."""
        if afresh:
            self._path.unlink(missing_ok=True)
        elif self._path.exists():
            os.truncate(self._path, self._size)

    def add(self, id: str, digest: int) -> None:
        """Append a record; `begin` came first."""
        if self._file is None:
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.write(self._file, array("Q", [id_hash(id), digest]).tobytes())

    def close(self) -> None:
        """Close the file."""
        file, self._file = self._file, None
        if file is not None:
            os.close(file)

    def compare(self, written: Iterable[str], rows: Iterable[InputRow]) -> Comparison:
        """The results with the ids `written` against the rows of an input."""
        done = np.unique(np.fromiter(map(id_hash, written), dtype=np.uint64))
        known, _ = self._find(done)
        changed, first, in_input = 0, None, np.zeros(len(done), dtype=bool)
        count, found = 0, 0
        for chunk in _chunks(rows):
            hashes = np.fromiter((id_hash(row.id) for row in chunk), dtype=np.uint64)
            digests = np.array([row.digest for row in chunk], dtype=np.uint64)
            at = np.minimum(np.searchsorted(done, hashes), max(0, len(done) - 1))
            is_done = done[at] == hashes if len(done) else np.zeros(len(hashes), dtype=bool)
            in_input[at[is_done]] = True
            count, found = count + len(chunk), found + int(is_done.sum())
            has_digest, before = self._find(hashes)
            (differing,) = np.nonzero(is_done & has_digest & (before != digests))
            changed += len(differing)
            if first is None and len(differing):
                first = chunk[differing[0]]
        unknown, lacking = int((~known).sum()), int((~in_input).sum())
        return Comparison(changed, first, unknown, lacking, count, found)

    def _find(self, hashes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """For each of `hashes`, whether it has a record, and the digest there."""
        if not len(self._hashes):
            return np.zeros(len(hashes), dtype=bool), np.zeros(len(hashes), dtype=np.uint64)
        at = np.minimum(np.searchsorted(self._hashes, hashes), len(self._hashes) - 1)
        return self._hashes[at] == hashes, self._digests[at]


def _chunks(rows: Iterable[InputRow]) -> Iterator[list[InputRow]]:
    source = iter(rows)
    while chunk := list(islice(source, _CHUNK)):
        yield chunk
