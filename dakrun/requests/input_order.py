"""The last step of --ordered: the rows of an output, written anew in the order of the input.

Knows ids and lines; holds about 70 bytes a row.
"""

import gzip
import tempfile
from array import array
from pathlib import Path
from typing import BinaryIO

import numpy as np

from dakrun.requests.files import replacement
from dakrun.requests.request import id_hash
from dakrun.requests.written_rows import WrittenRows


class InputOrder:
    """The lines of the input's rows, by hashes of their ids, of which none occurs twice."""

    def __init__(self) -> None:
        self._hashes, self._lines = array("Q"), array("Q")

    def add(self, id: str, line: int) -> None:
        """Note the line of a row."""
        self._hashes.append(id_hash(id))
        self._lines.append(line)

    def ranks(self, hashes: "array[int]") -> np.ndarray:
        """The lines in the input of the ids with these hashes; behind all others if not in it."""
        own = np.frombuffer(self._hashes, dtype=np.uint64)
        wanted = np.frombuffer(hashes, dtype=np.uint64)
        lines = np.frombuffer(self._lines, dtype=np.uint64)
        if not len(own):
            return np.zeros(len(wanted), dtype=np.uint64)
        by_hash = np.argsort(own)
        nearest = by_hash[np.minimum(np.searchsorted(own, wanted, sorter=by_hash), len(own) - 1)]
        return np.where(own[nearest] == wanted, lines[nearest], lines.max() + 1)


def put_in_order(name: str, order: InputOrder | None) -> None:
    """Replace the output `name`, a path, by the same rows in `order`, if there is one, in one step.

    Of several rows of one id only the last stays. Rows that the input does not have come last. The
    old output stays until the new one is whole, so the disk holds both, and for gzip the unpacked
    rows too. Raises OSError.
    """
    path = Path(name).resolve()
    rows = WrittenRows(name)
    with tempfile.TemporaryFile(dir=path.parent) if rows.is_gzip else path.open("rb") as lines:
        hashes, ends = array("Q"), array("Q", [0])
        for row in rows:
            hashes.append(id_hash(row.id))
            ends.append(ends[-1] + len(row.line))
            if rows.is_gzip:
                lines.write(row.line)
        _, from_end = np.unique(np.frombuffer(hashes, dtype=np.uint64)[::-1], return_index=True)
        kept = np.sort(len(hashes) - 1 - from_end)  # the last row of each id
        ranks = order.ranks(hashes)[kept] if order else kept
        sequence = kept[np.argsort(ranks, kind="stable")]
        if np.array_equal(sequence, np.arange(len(hashes))):
            return
        with replacement(path) as file:
            if rows.is_gzip:
                with gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0) as packed:
                    _copy(lines, ends, sequence, packed)  # type: ignore[arg-type]
            else:
                _copy(lines, ends, sequence, file)


def _copy(lines: BinaryIO, ends: "array[int]", sequence: np.ndarray, file: BinaryIO) -> None:
    for number in sequence:
        lines.seek(ends[number])
        file.write(lines.read(ends[number + 1] - ends[number]))
