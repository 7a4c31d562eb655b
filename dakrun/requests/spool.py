"""Bytes kept on disk until they are taken, in any order: the content of rows that wait.

The files have no names, so that nothing is left of them, however the process ends.
"""

import os
import tempfile
from dataclasses import dataclass, field
from typing import BinaryIO

from dakrun.errors import CannotRun

_SEGMENT_BYTES = 1 << 26
_WRITE_BYTES = 1 << 18  # at a time
_OFFSET_BITS, _LENGTH_BITS = 40, 32  # in an address


@dataclass
class _Segment:
    """A temporary file: `written` bytes of it, those to be written, and how many items are left."""

    file: BinaryIO
    written: int = 0
    unwritten: bytearray = field(default_factory=bytearray)
    items: int = 0

    @property
    def nbytes(self) -> int:
        return self.written + len(self.unwritten)

    def write(self) -> None:
        """Write all unwritten bytes; if a write fails, the bytes left stay in memory."""
        while self.unwritten:
            count = self.file.write(self.unwritten)
            del self.unwritten[:count]
            self.written += count

    def read(self, offset: int, length: int) -> bytes:
        """Bytes from `offset` on, wherever they are."""
        data = b""
        if offset < self.written:
            data = os.pread(self.file.fileno(), length, offset)
        if missing := length - len(data):
            start = offset + len(data) - self.written
            data += self.unwritten[start : start + missing]
        return data


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
        """Bytes on disk, and those that are to be written there."""
        return sum(segment.nbytes for segment in self._segments.values())

    def add(self, data: bytes) -> int:
        """Keep `data`; returns its address, for `take`. Raises CannotRun."""
        try:
            segment = self._segments.get(self._newest)
            if segment is None or segment.nbytes >= self._segment_bytes:
                self._drop(self._newest)
                self._newest += 1
                segment = _Segment(tempfile.TemporaryFile(buffering=0))  # noqa: SIM115 (closed by _drop)
                self._segments[self._newest] = segment
            if len(segment.unwritten) >= _WRITE_BYTES:
                segment.write()
        except OSError as problem:
            raise CannotRun(
                f"{tempfile.gettempdir()}: rows cannot be kept there for their turn "
                f"({problem.strerror})",
                hint="free some space there, or set TMPDIR to another folder, and run again with "
                "--resume",
            ) from problem
        offset = segment.nbytes
        segment.unwritten += data
        segment.items += 1
        return (self._newest << _OFFSET_BITS | offset) << _LENGTH_BITS | len(data)

    def take(self, address: int) -> bytes:
        """The item at `address`, which is no longer kept."""
        length, start = address & (1 << _LENGTH_BITS) - 1, address >> _LENGTH_BITS
        number, offset = start >> _OFFSET_BITS, start & (1 << _OFFSET_BITS) - 1
        segment = self._segments[number]
        data = segment.read(offset, length)
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
