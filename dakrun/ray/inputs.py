"""Prompt files of a run on Ray, as one input: a file, a folder, a glob, or a URL of these.

Files are read through fsspec, as Ray Data reads them. Knows files and lines, no rows.
"""

import io
import json
from collections.abc import Generator
from contextlib import suppress
from glob import has_magic
from pathlib import PurePosixPath
from typing import Any, BinaryIO, NamedTuple

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from dakrun.errors import CannotRun, UsageError
from dakrun.requests.arrow import well_formed
from dakrun.requests.gzip_files import without_gz
from dakrun.requests.input_rows import Format, content_of
from dakrun.requests.lines import Line, Lines, LineSource
from dakrun.requests.parquet_files import parquet_lines
from dakrun.requests.reader import MAX_LINE_BYTES, conversion_hint

SUFFIXES: dict[str, Format] = {".jsonl": "jsonl", ".parquet": "jsonl", ".txt": "text"}


class InputFile(NamedTuple):
    """A file: its path in its file system, and its size in bytes."""

    path: str
    size: int

    @property
    def suffix(self) -> str:
        """Its suffix in lower case, without .gz."""
        return PurePosixPath(without_gz(self.path)).suffix.lower()


class InputFiles(LineSource):
    """The lines of all files at `source`, in the order of their names.

    A folder's files are those with a known suffix, in it and in its folders; a folder that a glob
    matches is read so, too. Names of files and folders that begin with "." or "_" are left out,
    unless `source` has them. Lines are counted on from file to file. A row of
    a .parquet file is a line: its columns that are fields of rows, as JSON. Raises UsageError if
    there is nothing to read, CannotRun if reading fails.
    """

    may_wait = False
    max_line_bytes = MAX_LINE_BYTES

    def __init__(self, source: str, *, well_formed_ids: bool = False) -> None:
        self.name, self._well_formed_ids = source, well_formed_ids
        self._system, path = _file_system(source)
        try:
            self.files = self._find(path)
        except OSError as problem:
            raise UsageError(f"{source}: cannot be read ({problem})", hint="check -i") from None
        kinds = {SUFFIXES[file.suffix] for file in self.files}
        if len(kinds) > 1:
            raise UsageError(
                f"{source}: has files of text beside files of JSON or Parquet rows",
                hint="give files of one kind",
            )
        (self.format,) = kinds
        self.bytes_total: int | None = sum(file.size for file in self.files)
        self.bytes_read = 0
        self._rest = self._reading = self._read()

    def reopened(self) -> "InputFiles":
        """The same files from their first line, beside this one."""
        return InputFiles(self.name, well_formed_ids=self._well_formed_ids)

    def close(self) -> None:
        """Close the file that is open."""
        self._reading.close()

    def _find(self, path: str) -> list[InputFile]:
        """The files at `path`; raises UsageError if there are none, or one of another kind."""
        if self._system.isdir(path):
            names = self._inside(path)
        elif self._system.exists(path):
            names = {path}
        else:
            names = self._matches(path)
        files = [InputFile(name, int(self._system.size(name) or 0)) for name in sorted(names)]
        if not files:
            raise UsageError(
                f"{self.name}: no prompt files there",
                hint="give a file, folder, glob or URL of .jsonl, .parquet or .txt files",
            )
        for file in files:
            if file.suffix not in SUFFIXES:
                raise UsageError(
                    f"{file.path}: prompt files end in .jsonl, .parquet or .txt",
                    hint=conversion_hint(file.path)
                    or ".jsonl and .txt may be packed, as .jsonl.gz",
                )
        return files

    def _inside(self, folder: str) -> set[str]:
        """The prompt files in a folder and in its folders."""
        names = (n for n in self._system.find(folder) if _is_taken(n[len(folder) :]))
        return {name for name in names if InputFile(name, 0).suffix in SUFFIXES}

    def _matches(self, pattern: str) -> set[str]:
        """The files that a glob matches, and the prompt files of the folders that it matches."""
        wanted = PurePosixPath(pattern).parts
        named = {part for part in wanted if not has_magic(part)}
        first = next((n for n, part in enumerate(wanted) if has_magic(part)), len(wanted))
        names = set[str]()
        for name, info in self._system.glob(pattern, detail=True).items():
            matched = PurePosixPath(name).parts[first:]
            if not all(_is_taken(part) for part in matched if part not in named):
                continue
            is_file = info["type"] == "file" or not self._system.isdir(name)
            names |= {name} if is_file else self._inside(name)
        return names

    def _read(self) -> Generator[Line]:
        before = done = 0  # lines, bytes
        for file in self.files:
            number = 0
            try:
                with self._system.open(file.path, "rb") as opened:
                    if file.suffix == ".parquet":
                        lines = parquet_lines(file.path, pq.ParquetFile(opened), MAX_LINE_BYTES)
                    else:
                        lines = iter(Lines(file.path, MAX_LINE_BYTES, io.BufferedReader(opened)))
                    for line in lines:
                        number = line.number
                        at = done + min(file.size, _position(opened, file.size))
                        nbytes, self.bytes_read = max(0, at - self.bytes_read), at
                        if self._well_formed_ids and self.format == "jsonl" and line.data:
                            line = line._replace(data=_with_well_formed_id(line.data))
                        yield line._replace(number=before + number, nbytes=nbytes)
            except (OSError, pa.ArrowException) as problem:
                raise CannotRun(
                    f"{file.path}: reading failed ({problem})",
                    hint="check the file, then run again with --resume",
                ) from None
            before, done = before + number, done + file.size


def _with_well_formed_id(data: bytes) -> bytes:
    """A JSON row whose id has no lone surrogates; the same bytes if it had none, or is no row."""
    if rb"\ud" not in data.lower():  # such characters can only be written as escapes
        return data
    row = content_of(data, "jsonl", MAX_LINE_BYTES)
    row_id = row.get("id") if isinstance(row, dict) else None
    if isinstance(row, dict) and isinstance(row_id, str) and well_formed(row_id) != row_id:
        with suppress(RecursionError):
            return json.dumps(row | {"id": well_formed(row_id)}).encode()
    return data


def _file_system(source: str) -> tuple[Any, str]:
    """The fsspec file system of a path or URL, and the path in it."""
    try:
        return fsspec.core.url_to_fs(source)
    except ImportError as problem:
        raise CannotRun(f"{source}: {problem}", hint="install it beside dakrun") from None
    except (ValueError, OSError) as problem:
        raise UsageError(f"{source}: {problem}", hint="check -i") from None


def _is_taken(path: str) -> bool:
    """Whether a file that a folder or a glob has is taken, though it is not named."""
    return not any(part.startswith((".", "_")) for part in PurePosixPath(path).parts)


def _position(file: BinaryIO, size: int) -> int:
    """How far a file has been read, in bytes; its size where that is not known."""
    with suppress(OSError, ValueError):
        return file.tell()
    return size
