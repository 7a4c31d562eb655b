"""Gzip prompts in and gzip results out, cut off at every byte."""

import gzip
import io
import json
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from prompt_files import in_order, longest_first, open_reader, read
from result_rows import COMPLETION_LINE, ERROR, ERROR_LINE, completion

from dakrun.errors import CannotRun, UsageError
from dakrun.requests import Request, ResultWriter

ROWS = "".join(f'{{"id": {i}, "prompt": "a"}}\n' for i in range(5))


def ids(path: Path) -> list[str]:
    return [json.loads(line)["id"] for line in gzip.decompress(path.read_bytes()).splitlines()]


# --- reading


@pytest.mark.parametrize("name", ["p.jsonl", "p.jsonl.gz", "p.GZ", "p", "p.JSONL.gz"])
def test_gzip_prompts_are_known_by_their_bytes(make: Callable[..., Path], name: str) -> None:
    half = len(ROWS) // 2  # within a row
    packed = gzip.compress(ROWS[:half].encode()) + gzip.compress(ROWS[half:].encode())
    path = make(packed, name)
    reader = open_reader(path)
    assert reader.needs_tokenizer()
    rows = in_order(reader)
    assert rows == read(make(ROWS, "plain.jsonl"))
    assert len(rows) == 5 and all(isinstance(row, Request) for row in rows)
    assert reader.bytes_read == reader.bytes_total == len(packed)
    run = open_reader(path).expected_run(20)
    assert run and run.requests == 5


def test_gzip_text_and_plain_files_named_gz(make: Callable[..., Path]) -> None:
    text = read(make("ab\ncd\n", "p.txt"))
    assert read(make(gzip.compress(b"ab\ncd\n"), "p.txt.gz")) == text
    assert read(make("ab\ncd\n", "q.txt.gz")) == text
    with pytest.raises(UsageError, match=r"with or without \.gz"):
        open_reader(make(b"", "p.csv.gz"))


def test_gzip_on_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.write(writing, gzip.compress(ROWS.encode()))
    os.close(writing)
    with open(reading, "rb") as pipe:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(pipe))
        assert [row.id for row in read("-")] == list("01234")


@pytest.mark.parametrize("spoil", [lambda d: d[:-30], lambda d: d[:-1], lambda d: d + b"rest"])
def test_rows_before_the_damage_are_read(
    make: Callable[..., Path], spoil: Callable[[bytes], bytes]
) -> None:
    first = gzip.compress(ROWS.encode())
    path = make(spoil(first + gzip.compress(bytes(range(128, 148)) + ROWS.encode())))
    rows = []
    with pytest.raises(CannotRun, match="a damaged gzip file") as raised:
        for row in longest_first(open_reader(path)):
            rows.append(row.id)
    assert rows[:5] == list("01234") and "--resume" in raised.value.hint
    run = open_reader(path).expected_run(20)
    assert run and run.requests >= 5


# --- writing


def write_all(path: Path, names: Iterable[str], **options: bool) -> None:
    with ResultWriter(path, **options) as writer:
        for name in names:
            if not writer.is_done(name):
                writer.write(completion(id=name))


def test_every_row_is_whole_at_once(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl.gz"
    with ResultWriter(path) as writer:
        writer.write(completion())
        assert gzip.decompress(path.read_bytes()).decode() == COMPLETION_LINE
        writer.write(ERROR)
        assert gzip.decompress(path.read_bytes()).decode() == COMPLETION_LINE + ERROR_LINE
    with pytest.raises(UsageError, match="exists and is not empty"):
        ResultWriter(path)
    write_all(path, "b", overwrite=True)
    assert ids(path) == ["b"]


@pytest.mark.parametrize("zeros", [0, 40])
def test_a_file_cut_off_at_any_byte_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, zeros: int
) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    path, names = tmp_path / "out.jsonl.gz", ("a", "é", "c", "d")
    ends = [0]
    with ResultWriter(path) as writer:
        for name in names:
            writer.write(completion(id=name))
            ends.append(path.stat().st_size)
    whole = path.read_bytes()
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut] + bytes(zeros))
        kept = sum(end <= cut for end in ends) - 1
        with ResultWriter(path, resume=True) as writer:
            done = [writer.is_done(name) for name in names]
            # A trailer ends in zeros: those behind the cut may complete it.
            assert done[:kept] == [True] * kept and sum(done) <= kept + (zeros > 0)
            assert sorted(done, reverse=True) == done
            assert path.read_bytes() == whole[: ends[sum(done)]]
        write_all(path, names, resume=True)
        assert ids(path) == list(names)


def test_what_others_packed_goes_on(make: Callable[..., Path]) -> None:
    lines = (COMPLETION_LINE + ERROR_LINE).encode()
    path = make(gzip.compress(lines[:20]) + gzip.compress(lines[20:]), "out.jsonl")
    write_all(path, ["a", "b"], resume=True)
    assert ids(path) == ["a", "line-4", "b"]  # gzip, as it was, whatever its name
    plain = make(COMPLETION_LINE, "out.jsonl.gz")
    write_all(plain, ["a", "b"], resume=True)
    assert [json.loads(line)["id"] for line in plain.read_text().splitlines()] == ["a", "b"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (gzip.compress((COMPLETION_LINE + ERROR_LINE).encode())[:-1], "holds several rows"),
        (gzip.compress(COMPLETION_LINE.encode()) + b"notes" * 9, "incorrect header"),
        (gzip.compress(COMPLETION_LINE.encode()).replace(b"\x1f\x8b\x08", b"\x1f\x8b\x07"), "com"),
        (gzip.compress((COMPLETION_LINE + "notes").encode()), "line 2 is not a result row"),
        (gzip.compress(b"notes\n"), "line 1 is not a result row"),
        (gzip.compress(b"notes, no rows", compresslevel=0)[:-12], "cut off and holds"),
    ],
    ids=range(6),  # not the bytes, which have the time in them
)
def test_other_gzip_files_are_refused_and_kept(
    make: Callable[..., Path], content: bytes, message: str
) -> None:
    path = make(content, "out.jsonl.gz")
    with pytest.raises(UsageError, match=message):
        ResultWriter(path, resume=True).__enter__()
    assert path.read_bytes() == content
