"""Gzip files: prompts read as they are unpacked, and the members of an output that was cut off.

A gzip file is a sequence of members, each compressed alone. Knows bytes, no rows.
"""

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import suppress
from typing import BinaryIO

_MAGIC = b"\x1f\x8b"
_BLOCK_BYTES = 1 << 14  # unpacks to 17 MB at most
_TRAILER_BYTES = 8  # of a member: a checksum and a size, whose last bytes are often zero
GZIP_ERRORS = (gzip.BadGzipFile, EOFError, zlib.error)  # raised while a damaged file is read


class CutOff(Exception):
    """The last member of a file is incomplete, or zeros follow it, as a kill or a crash leaves."""


def is_gzip(start: bytes) -> bool:
    """Whether a file that starts with these bytes is gzip; a file of one byte may be the start."""
    return start != b"" and _MAGIC.startswith(start[: len(_MAGIC)])


def without_gz(name: str) -> str:
    """`name` without the suffix .gz, if it has it."""
    return name[:-3] if name.lower().endswith(".gz") else name


def unpacked(file: BinaryIO) -> BinaryIO:
    """`file`, or its content if it is gzip. Reading the content may raise GZIP_ERRORS."""
    if isinstance(file, io.BufferedReader) and is_gzip(file.peek(len(_MAGIC))):
        return gzip.GzipFile(fileobj=_Arriving(file))  # type: ignore[call-overload, no-any-return]
    return file


class _Arriving:
    """A file whose reads return what has arrived; of a pipe, others wait until they are full."""

    def __init__(self, file: io.BufferedReader) -> None:
        self.read = file.read1


def pack(data: bytes) -> bytes:
    """`data` as one member."""
    return gzip.compress(data, mtime=0)


def members(file: BinaryIO) -> Iterator[tuple[bytes, int | None]]:
    """(unpacked block, end) of a gzip file; `end` is the offset behind a member, at its last block.

    Raises CutOff, or zlib.error if the file is damaged in another way.
    """
    size = file.seek(0, io.SEEK_END)
    end = _end_without_zeros(file, size)
    zeros = bytes(min(size - end, _TRAILER_BYTES))
    file.seek(0)
    data, done = file.read(min(_BLOCK_BYTES, end)), 0
    while data:
        member = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
        while not member.eof:
            if not data:
                block = _with_zeros(member, zeros)
                done += len(zeros) - len(member.unused_data)
            else:
                block = member.decompress(data)
                done += len(data) - len(member.unused_data)
                data = member.unused_data or file.read(min(_BLOCK_BYTES, end - done))
            yield block, done if member.eof else None
    if done < size:
        raise CutOff


def _with_zeros(member: "zlib._Decompress", zeros: bytes) -> bytes:
    """The end of a member whose last bytes are zeros; raises CutOff if they do not complete it.

    Zeros instead of packed data would be unpacked as text.
    """
    with suppress(zlib.error):
        block = member.decompress(zeros)
        if member.eof:
            return block
    raise CutOff


def _end_without_zeros(file: BinaryIO, size: int) -> int:
    """The size of a file without the zeros at its end."""
    while size:
        start = max(0, size - _BLOCK_BYTES)
        file.seek(start)
        if rest := file.read(size - start).rstrip(b"\0"):
            return start + len(rest)
        size = start
    return 0
