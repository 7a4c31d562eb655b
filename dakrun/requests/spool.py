"""Bytes kept on disk until they are taken, in any order: what rows say that wait for their turn.

The files have no names, so that nothing is left of them, however the process ends.
"""

import os
import tempfile
from dataclasses import dataclass
from typing import BinaryIO

from dakrun.errors import CannotRun

_SEGMENT_BYTES = 1 << 26
_OFFSET_BITS = 40


@dataclass
class _Segment:
    """A temporary file, its bytes, and the number of its items that were not taken yet."""

    file: BinaryIO
    nbytes: int = 0
    items: int = 0


class Spool:
    """Items of bytes in temporary files of `segment_bytes`, the last item of each beyond that.

    A file goes once it is full and all its items were taken.
    """

    def __init__(self, segment_bytes: int = _SEGMENT_BYTES) -> None:
        self._segment_bytes = segment_bytes
        self._segments: dict[int, _Segment] = {}  # by number
        self._newest = -1

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""
        return sum(segment.nbytes for segment in self._segments.values())

    def add(self, data: bytes) -> int:
        """Keep `data`; returns its place, for `take`. Raises CannotRun."""
        try:
            segment = self._segments.get(self._newest)
            if segment is None or segment.nbytes >= self._segment_bytes:
                self._drop(self._newest)
                self._newest += 1
                segment = _Segment(tempfile.TemporaryFile(buffering=0))  # noqa: SIM115 (closed by _drop)
                self._segments[self._newest] = segment
            offset, written = segment.nbytes, 0
            while written < len(data):
                written += segment.file.write(data[written:])
        except OSError as problem:
            raise CannotRun(
                f"{tempfile.gettempdir()}: rows cannot be kept there for their turn "
                f"({problem.strerror})",
                hint="free some space there, or set TMPDIR to another folder, and run again with "
                "--resume",
            ) from problem
        segment.nbytes += len(data)
        segment.items += 1
        return self._newest << _OFFSET_BITS | offset

    def take(self, place: int, length: int) -> bytes:
        """The item of `length` bytes at `place`, which is no longer kept."""
        number, offset = place >> _OFFSET_BITS, place & (1 << _OFFSET_BITS) - 1
        segment = self._segments[number]
        data = os.pread(segment.file.fileno(), length, offset)
        segment.items -= 1
        if segment.nbytes >= self._segment_bytes:
            self._drop(number)
        return data

    def close(self) -> None:
        """Free the disk space."""
        while self._segments:
            self._segments.popitem()[1].file.close()

    def _drop(self, number: int) -> None:
        """Free the space of a segment if none of its items is left."""
        if number in self._segments and not self._segments[number].items:
            self._segments.pop(number).file.close()
