"""Result rows on disk: one write each, resume, outputs that cannot be meant or written."""

import errno
import io
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prompt_files import longest_first, open_reader, read
from result_rows import COMPLETION_LINE, ERROR, ERROR_LINE, completion

from dakrun.errors import CannotRun, UsageError
from dakrun.requests import IdSet, Request, ResultWriter, look_ahead


def test_native_rows(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with ResultWriter(path) as writer:
        writer.write(completion())
        writer.write(ERROR)
        writer.write(completion(id="é\n", text=None, ids=()))
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    assert lines[:2] == [COMPLETION_LINE, ERROR_LINE]
    assert lines[2].startswith('{"id":"é\\n","text":null,"token_ids":[],')


def test_half_a_surrogate_pair_in_an_id(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with ResultWriter(path) as writer:
        writer.write(completion(id="a\ud800"))
    assert json.loads(path.read_bytes())["id"] == "a\ud800"
    with ResultWriter(path, resume=True) as writer:
        assert writer.is_done("a\ud800") and not writer.is_done("a")


def test_each_row_is_one_write_then_one_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    real_write, real_sync = os.write, os.fsync
    with ResultWriter(tmp_path / "out.jsonl") as writer, monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda *a: (calls.append("write"), real_write(*a))[1])
        patch.setattr(os, "fsync", lambda *a: (calls.append("sync"), real_sync(*a))[1])
        writer.write(completion(text="x" * 1_000_000))
        writer.write(ERROR)
    assert calls == ["write", "sync"] * 2


def test_rows_are_visible_to_others_at_once(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    show = [sys.executable, "-c", f"print(open({str(path)!r}).read(), end='')"]
    with ResultWriter(path) as writer:
        expected = ""
        for _ in range(2):
            writer.write(completion())
            expected += COMPLETION_LINE
            assert subprocess.run(show, capture_output=True, text=True).stdout == expected


def test_an_output_that_exists(tmp_path: Path, make: Callable[..., Path]) -> None:
    path = make(COMPLETION_LINE, "out.jsonl")
    with pytest.raises(UsageError, match=r"out.jsonl: exists and is not empty") as raised:
        ResultWriter(path)
    assert "--resume" in raised.value.hint and "--overwrite" in raised.value.hint
    empty = make("", "empty.jsonl")
    with ResultWriter(empty) as writer:
        writer.write(ERROR)
    assert empty.read_text() == ERROR_LINE


def test_overwrite_truncates_on_entering(make: Callable[..., Path]) -> None:
    path = make(COMPLETION_LINE, "out.jsonl")
    writer = ResultWriter(path, overwrite=True)
    assert path.read_text() == COMPLETION_LINE
    with writer:
        assert path.read_text() == "" and not writer.is_done("a")
        writer.write(ERROR)
    assert path.read_text() == ERROR_LINE


def test_destinations_that_make_no_sense(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "none" / "out.jsonl")
    for path, message, hint in (
        (tmp_path / "none" / "out.jsonl", "none: no such directory", "mkdir -p"),
        (link, "none: no such directory", "mkdir -p"),
        (tmp_path, "is a directory", "give -o a file"),
        ("", "has no name", "give -o a file"),
    ):
        with pytest.raises(UsageError, match=message) as raised:
            ResultWriter(path)
        assert hint in raised.value.hint
    with pytest.raises(UsageError, match="exclude each other"):
        ResultWriter(tmp_path / "out.jsonl", overwrite=True, resume=True)
    with pytest.raises(UsageError, match="standard output cannot be resumed"):
        ResultWriter("-", resume=True)
    assert list(tmp_path.iterdir()) == [link]


def test_the_output_in_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with ResultWriter("out.jsonl", source="in.jsonl") as writer:
        writer.write(ERROR)
    assert (tmp_path / "out.jsonl").read_text() == ERROR_LINE


@pytest.mark.parametrize("how", ["same", "dots", "symlink", "hardlink", "folder symlink"])
@pytest.mark.parametrize("flags", [{}, {"overwrite": True}, {"resume": True}], ids=str)
def test_output_is_not_the_input(
    tmp_path: Path, make: Callable[..., Path], how: str, flags: dict[str, bool]
) -> None:
    source = make('{"prompt": "a"}\n')
    out = tmp_path / "out.jsonl"
    if how == "same":
        out = source
    elif how == "dots":
        out = tmp_path / "x" / ".." / source.name
        (tmp_path / "x").mkdir()
    elif how == "symlink":
        out.symlink_to(source)
    elif how == "hardlink":
        out.hardlink_to(source)
    else:
        (tmp_path / "link").symlink_to(tmp_path)
        out = tmp_path / "link" / source.name
    with pytest.raises(UsageError, match="the file that the prompts come from"):
        ResultWriter(out, source=source, **flags)
    assert source.read_text() == '{"prompt": "a"}\n'


def test_output_is_not_an_input_that_does_not_exist_yet(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the file that the prompts come from"):
        ResultWriter(tmp_path / "p.jsonl", source=tmp_path / "." / "p.jsonl")


def run_writer(arguments: str, **streams: Any) -> subprocess.CompletedProcess[str]:
    """Writes one row through ResultWriter(<arguments>) in another process."""
    code = f"""
from dakrun.errors import DakrunError
from dakrun.requests import ResultWriter, RowError
try:
    with ResultWriter({arguments}) as writer:
        writer.write(RowError(id="line-4", line=4, code="invalid_json", message="not JSON"))
except DakrunError as error:
    raise SystemExit(f"{{type(error).__name__}}: {{error}} | {{error.hint}}")
"""
    streams = {"stdout": subprocess.PIPE, **streams}
    return subprocess.run(
        [sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, timeout=60, **streams
    )


def test_redirected_input_is_not_the_output(make: Callable[..., Path]) -> None:
    source = make('{"prompt": "a"}\n')
    with source.open() as prompts:
        run = run_writer(f"{str(source)!r}, source='-', overwrite=True", stdin=prompts)
    assert run.returncode == 1 and "the file that the prompts come from" in run.stderr
    with source.open("a") as appended:
        run = run_writer(f"'-', source={str(source)!r}", stdout=appended)
    assert run.returncode == 1 and "the file that the prompts come from" in run.stderr
    assert source.read_text() == '{"prompt": "a"}\n'


def test_standard_output_as_a_pipe_a_file_and_a_device(tmp_path: Path) -> None:
    run = run_writer("'-', source='-'", stdin=subprocess.DEVNULL)
    assert (run.returncode, run.stdout, run.stderr) == (0, ERROR_LINE, "")
    out = tmp_path / "out"
    out.write_text("before\n")
    with out.open("a") as appended:
        assert run_writer("'-'", stdout=appended).returncode == 0
    assert out.read_text() == "before\n" + ERROR_LINE
    run = run_writer("'/dev/null', source='-'", stdin=subprocess.DEVNULL)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


def test_standard_output_whose_reader_has_gone() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        run = run_writer("'-'", stdout=writing)
    finally:
        os.close(writing)
    assert run.returncode == 1
    assert run.stderr.startswith("CannotRun: standard output: cannot be written (Broken pipe) | ")
    assert run.stderr.count("\n") == 1


def test_standard_output_that_is_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    with ResultWriter("-") as writer:
        writer.write(completion())
        writer.write(ERROR)
    assert out.getvalue() == COMPLETION_LINE + ERROR_LINE


def failing_write(
    code: int, real: Callable[[int, bytes], int], *, halves: int
) -> Callable[[int, bytes], int]:
    """os.write that takes half of the data `halves` times, then fails."""
    left = [halves]

    def write(fd: int, data: bytes) -> int:
        if left[0]:
            left[0] -= 1
            return real(fd, data[: len(data) // 2])
        raise OSError(code, os.strerror(code))

    return write


@pytest.mark.parametrize("halves", [0, 1, 2])
@pytest.mark.parametrize(
    ("code", "message", "hint"),
    [(errno.ENOSPC, "No space", "free some space"), (errno.EIO, "Input/output", "--resume"),
     (errno.EDQUOT, "quota exceeded", "free some space"), (errno.EFBIG, "too large", "ulimit -f")],
)  # fmt: skip
def test_a_failed_write_leaves_whole_rows(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    code: int,
    message: str,
    hint: str,
    halves: int,
) -> None:
    path = tmp_path / "out.jsonl"
    with ResultWriter(path) as writer:
        writer.write(completion())
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", failing_write(code, os.write, halves=halves))
            with pytest.raises(CannotRun, match=message) as raised:
                writer.write(completion(id="b"))
        assert str(path) in str(raised.value) and hint in raised.value.hint
        assert path.read_text() == COMPLETION_LINE
        writer.write(ERROR)
    assert path.read_text() == COMPLETION_LINE + ERROR_LINE


def test_a_failed_sync_takes_the_row_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def sync(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "out.jsonl"
    with ResultWriter(path) as writer:
        writer.write(completion())
        monkeypatch.setattr(os, "fsync", sync)
        with pytest.raises(CannotRun, match="No space left"):
            writer.write(completion(id="b"))
    assert path.read_text() == COMPLETION_LINE


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="has no /dev/full")
def test_a_full_device() -> None:
    with (
        pytest.raises(CannotRun, match="/dev/full: cannot be written") as raised,
        ResultWriter("/dev/full") as writer,
    ):
        writer.write(completion())
    assert "give -o a file to be able to go on" in raised.value.hint


def test_an_output_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(CannotRun, match="File name too long"):
        ResultWriter(tmp_path / ("x" * 300)).__enter__()


# --- resuming


@pytest.mark.parametrize(
    "rest",
    ["", "{", '{"id":"b","text":"ha', COMPLETION_LINE.strip(), "\0" * 40, '{"id":"b"\0\0'],
    ids=["nothing", "brace", "partial", "no newline", "zeros", "partial and zeros"],
)
def test_resume_drops_what_was_cut_off(make: Callable[..., Path], rest: str) -> None:
    whole = COMPLETION_LINE.replace('"a"', '"é"') + ERROR_LINE
    path = make(whole + rest, "out.jsonl")
    writer = ResultWriter(path, resume=True)
    assert path.read_text() == whole + rest
    with writer:
        assert path.read_text() == whole and writer.failed_before == 1
        assert [writer.is_done(i) for i in ("é", "line-4", "a", "b", "")] == [True] * 2 + [
            False
        ] * 3
        writer.write(completion())
    assert path.read_text() == whole + COMPLETION_LINE


@pytest.mark.parametrize("flags", [{}, {"overwrite": True}, {"resume": True}], ids=str)
def test_two_runs_do_not_write_to_one_file(tmp_path: Path, flags: dict[str, bool]) -> None:
    path = tmp_path / "out.jsonl"
    second = ResultWriter(path, **flags)
    with ResultWriter(path) as first:
        first.write(completion())
        with pytest.raises(CannotRun, match="another run is writing to it") as raised:
            second.__enter__()
        assert "-o another file" in raised.value.hint
    assert path.read_text() == COMPLETION_LINE
    if flags:
        with second:
            assert second.is_done("a") is ("resume" in flags)
    else:
        with pytest.raises(UsageError, match="exists and is not empty"):
            second.__enter__()


def test_a_refused_output_is_left_to_others(make: Callable[..., Path]) -> None:
    path = make("notes\n", "out.jsonl")
    with pytest.raises(UsageError, match="not a result row"):
        ResultWriter(path, resume=True).__enter__()
    with ResultWriter(path, overwrite=True) as writer:
        writer.write(completion())
    assert path.read_text() == COMPLETION_LINE


def test_resume_of_nothing(tmp_path: Path, make: Callable[..., Path]) -> None:
    for path in (tmp_path / "new.jsonl", make("", "empty.jsonl"), make('{"id"', "cut.jsonl")):
        with ResultWriter(path, resume=True) as writer:
            assert not writer.failed_before and not writer.is_done("a")
            writer.write(completion())
        assert path.read_text() == COMPLETION_LINE


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("my notes\n", 1),
        ("my notes", 1),
        ('{"precious": 1}', 1),
        (COMPLETION_LINE + '{"id": 1, "prompt": "a"}\n', 2),
        ('{"id": "a", "prompt": "a"}\n', 1),
        (COMPLETION_LINE + "[]\n" + COMPLETION_LINE, 2),
        (COMPLETION_LINE + '{"id":3,"error":null}\n', 2),
        (COMPLETION_LINE + "\n", 2),
        (COMPLETION_LINE + "notes", 2),
    ],
)
def test_resume_refuses_and_keeps_other_files(
    make: Callable[..., Path], content: str, line: int
) -> None:
    path = make(content, "out.jsonl")
    with pytest.raises(UsageError, match=f"line {line} is not a result row"):
        ResultWriter(path, resume=True).__enter__()
    assert path.read_text() == content


def test_a_run_is_resumed_row_by_row(make: Callable[..., Path], tmp_path: Path) -> None:
    source = make("".join(f'{{"id": {i}, "prompt": "a"}}\n' for i in range(20)) + "{bad\n")
    out, taken = tmp_path / "out.jsonl", []
    for stop_after in (7, 5, 100):
        with ResultWriter(out, source=source, resume=True) as writer:
            rows = [row for row in read(source) if not writer.is_done(row.id)]
            taken.append(len(rows))
            for row in rows[:stop_after]:
                writer.write(completion(id=row.id) if isinstance(row, Request) else row)
        with out.open("a") as file:
            file.write('{"id":"half')
    assert taken == [21, 14, 9]
    ids = [json.loads(line)["id"] for line in out.read_text().splitlines()[:-1]]
    assert ids == [*map(str, range(20)), "line-21"]


def test_ids_take_a_few_bytes_each() -> None:
    ids, n = IdSet(), 5000
    assert all(ids.add(f"row {i}") for i in range(n)) and not ids.add("row 7")
    assert len(ids) == n and 12 * n <= ids.nbytes <= 24 * n
    assert all(f"row {i}" in ids for i in range(n))
    assert not any(f"row {i}" in ids for i in range(n, 2 * n))


def test_done_ids_are_read_on_resume(make: Callable[..., Path]) -> None:
    n = 5000
    path = make("".join(f'{{"id":"row {i}","error":{{}}}}\n' for i in range(n)), "out.jsonl")
    with ResultWriter(path, resume=True) as writer:
        assert writer.failed_before == n
        assert all(writer.is_done(f"row {i}") for i in range(n))
        assert not any(writer.is_done(f"row {i}") for i in range(n, 2 * n))


def test_many_rows_are_never_held(
    make: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows stream through reader and writer; what stays are a few bytes for each id."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    monkeypatch.setattr(look_ahead, "LOOK_AHEAD", 100)
    rows = 20_000
    row = '{{"id":"request number {}","prompt_token_ids":[3,4,5,6],"max_tokens":2}}\n'
    source = make("".join(map(row.format, range(rows))))
    out = tmp_path / "out.jsonl"

    def stream(last: int, most_held: float = rows / 20) -> None:
        reader = open_reader(source)
        with ResultWriter(out, source=source, resume=True) as writer:
            before, most = sys.getallocatedblocks(), 0
            for row in longest_first(reader):
                if not writer.is_done(row.id):
                    writer.write(completion(id=row.id))
                if row.line % 1000 == 0:
                    most = max(most, sys.getallocatedblocks() - before)
                if row.line == last:
                    break
            assert most < most_held, "held objects grow with the number of rows"

    stream(1000, math.inf)  # fills the caches of imported modules
    stream(rows // 2)
    stream(rows)
    with ResultWriter(out, resume=True) as writer:
        assert not writer.failed_before
        assert all(writer.is_done(f"request number {i}") for i in range(rows))
    assert out.read_bytes().count(b"\n") == rows
