"""Rows in the order of their lengths: of files, of pipes that stay open, of several windows."""

import errno
import gzip
import io
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prompt_files import RULES, in_order, longest_first, open_reader, read
from result_rows import completion

from dakrun.demo import MODEL
from dakrun.errors import CannotRun
from dakrun.generate import BatchJob
from dakrun.llm import LLM
from dakrun.requests import Completion, Request, RequestReader, ResultWriter, look_ahead
from dakrun.requests.spool import Spool


def lines(*rows: dict[str, Any] | str) -> bytes:
    return "".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows).encode()


def native(prompt: int, new: int, **more: object) -> dict[str, Any]:
    return {"prompt_token_ids": [5] * prompt, "max_tokens": new, **more}


def order(reader: RequestReader) -> list[int]:
    return [row.line for row in longest_first(reader)]


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Puts a pipe in place of standard input; returns its other end."""

    def make() -> int:
        reading, writing = os.pipe()
        monkeypatch.setattr(sys, "stdin", os.fdopen(reading))
        return writing

    return make


ROWS = lines(
    native(3, 2),
    native(2, 9),
    "",
    "{bad",
    native(8, 9),
    native(1, 10**6),  # 19 steps, as MAX_LEN is 20
    native(2, 17, id="x"),
    native(2, 19, id="x"),
    native(3, 0),
)
ORDER = [6, 8, 7, 5, 2, 1, 4, 9]


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_the_longest_rows_begin_first(make: Callable[..., Path], pack: Any) -> None:
    """By decode steps, then by prompts. Row 8 begins before row 7, whose id it repeats."""
    path = make(pack(ROWS))
    assert order(open_reader(path)) == ORDER
    rows = {row.line: row for row in read(path)}
    codes = {line: row.code for line, row in rows.items() if not isinstance(row, Request)}
    assert codes == {4: "invalid_json", 8: "duplicate_id", 9: "invalid_field"}
    assert rows[8].id == "line-8" and rows[7].id == "x"
    assert sum(row.nbytes for row in rows.values()) == path.stat().st_size


def test_text_and_batch_rows(make: Callable[..., Path]) -> None:
    assert order(open_reader(make("a\nbbbbbbbbb\n\xff\ncccccc\n".encode(), "p.txt"))) == [
        2,
        4,
        1,
        3,
    ]
    body = {"url": "/v1/completions", "method": "POST"}
    rows = [
        {**body, "custom_id": str(n), "body": {"prompt": [[5], [5] * n], "max_tokens": n, "n": 2}}
        for n in (2, 4, 3)
    ]
    reader = open_reader(make(lines(*rows)))
    found = [row for row in reader.rows(RULES) if isinstance(row, Request)]
    assert [row.id for row in found] == ["4", "3", "2"]
    assert [row.reply.choice for row in (found[0], *found[0].further)] == [0, 1, 2, 3]


def test_errors_before_the_first_json_row_have_its_format_but_of_a_pipe(
    make: Callable[..., Path], pipe: Callable[[], int]
) -> None:
    row = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "b"}}
    found = read(make(lines("{bad", row, "{bad")))
    assert [row.reply.kind for row in found] == ["completion"] * 3
    writing = pipe()
    os.write(writing, lines("{bad"))
    rows = longest_first(open_reader("-"))
    assert next(rows).reply.kind == "native"  # which does not wait for the next row
    os.write(writing, lines(row, "{bad"))
    assert [next(rows).reply.kind for _ in range(2)] == ["completion"] * 2
    os.close(writing)


def test_none_waits_for_more_than_a_window(
    make: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows of 4 rows begin one after the other, the last two as one."""
    monkeypatch.setattr(look_ahead, "LOOK_AHEAD", 4)
    new = [*(2, 3, 1, 4), *(9, 8, 7, 6), *(5, 12, 13, 11), 14]
    found = order(open_reader(make(lines(*(native(1, n) for n in new)))))
    begun = [new[line - 1] for line in found]
    assert begun == [*(4, 3, 2, 1), *(9, 8, 7, 6), *(13, 12, 14, 11, 5)]
    rows = open_reader(make(lines(*(native(1, n) for n in new)))).unparsed_rows(20)
    groups = [found.group for found in rows if found]
    assert groups == sorted(groups), "whoever holds rows back begins them in this order"
    chance = random.Random(3)
    new = [chance.randint(1, 15) for _ in range(203)]
    found = order(open_reader(make(gzip.compress(lines(*(native(1, n) for n in new))))))
    assert sorted(found) == list(range(1, 204))
    assert all(place < line + 2 * 4 for place, line in enumerate(found[:-8], 1))


def test_rows_of_a_pipe_do_not_wait_for_more(pipe: Callable[[], int]) -> None:
    writing = pipe()
    os.write(writing, lines(native(1, 3)))
    reader = open_reader("-")
    assert not reader.needs_tokenizer() and reader.expected_run(20) is None
    rows = longest_first(reader)
    assert next(rows).line == 1
    assert next(reader.rows(RULES)) is None
    for number in (2, 3):
        os.write(writing, lines(native(1, 3)))
        assert next(rows).line == number
    os.write(writing, lines(native(1, 3))[:5])
    reader.close()  # while a thread waits for the rest of the line
    os.close(writing)
    assert reader._ahead is not None and reader._ahead._thread is not None
    reader._ahead._thread.join()


def test_a_packed_pipe_does_not_wait_for_more(pipe: Callable[[], int]) -> None:
    writing = pipe()
    os.write(writing, gzip.compress(lines(native(1, 3))))
    rows = longest_first(open_reader("-"))
    assert next(rows).line == 1
    os.write(writing, gzip.compress(lines(native(1, 3), native(1, 4))))
    assert {next(rows).line, next(rows).line} == {2, 3}
    os.close(writing)
    assert list(rows) == []


def test_a_pipe_in_the_order_of_lengths(pipe: Callable[[], int]) -> None:
    writing = pipe()
    os.write(writing, ROWS)
    os.close(writing)
    reader = open_reader("-")
    reader.expected_run(20)
    assert reader._ahead is not None and reader._ahead._thread is not None
    reader._ahead._thread.join()
    assert order(reader) == ORDER and not sys.stdin.closed


def test_a_pipe_that_breaks(pipe: Callable[[], int]) -> None:
    writing = pipe()
    os.write(writing, gzip.compress(ROWS)[:-9])
    os.close(writing)
    found = []
    with pytest.raises(CannotRun, match="a damaged gzip file"):
        for row in longest_first(open_reader("-")):
            found.append(row.line)
    assert sorted(found) == sorted(ORDER)


def test_a_pipe_that_is_faster_than_the_model(
    pipe: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread stops reading where the window is full."""
    monkeypatch.setattr(look_ahead, "LOOK_AHEAD", 10)
    writing = pipe()
    os.write(writing, lines(*(native(1, n % 7 + 1) for n in range(200))))
    os.close(writing)
    reader, found = open_reader("-"), []
    for row in longest_first(reader):
        found.append(row.line)
        assert reader._ahead is not None and len(reader._ahead._rows) <= 10
    assert sorted(found) == list(range(1, 201))


def test_results_of_a_pipe_that_stays_open(tmp_path: Path) -> None:
    """A producer that waits for three results before it sends a fourth row."""
    command = [sys.executable, "-m", "dakrun", "generate", "--model", str(MODEL), "--device", "cpu"]
    run = subprocess.Popen(
        [*command, "-i", "-", "-o", "-", "--batch-size", "8", "--ignore-eos"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert run.stdin and run.stdout
    run.stdin.write(lines(*(native(2, n, id=f"r{n}") for n in (3, 1, 2))))
    run.stdin.flush()
    first = [json.loads(run.stdout.readline())["id"] for _ in range(3)]
    run.stdin.write(lines(native(2, 4, id="r4")))
    rest, said = run.communicate()
    assert sorted(first) == ["r1", "r2", "r3"] and json.loads(rest)["id"] == "r4"
    assert run.returncode == 0 and b"4 rows done" in said
    assert not list(tmp_path.glob("tmp*"))


def test_a_signal_while_a_pipe_is_waited_for(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "dakrun", "generate", "--model", str(MODEL), "--device", "cpu"]
    run = subprocess.Popen(
        [*command, "-i", "-", "-o", str(out), "--batch-size", "8"],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert run.stdin and run.stderr
    run.stdin.write(lines(native(2, 1, id="a")))
    run.stdin.flush()
    while not (out.exists() and out.read_bytes().endswith(b"\n")) and run.poll() is None:
        time.sleep(0.01)
    run.terminate()
    said = run.stderr.read()
    assert run.wait() == 143 and said.startswith(b"interrupted: ") and said.count(b"\n") == 1
    assert json.loads(out.read_text())["id"] == "a"


def test_a_job_shows_the_bytes_of_rows_that_are_done(
    make: Callable[..., Path], tmp_path: Path
) -> None:
    path = make(lines("{bad", native(3, 2, id="a"), native(3, 3, id="b"), native(3, 1, id="c")))
    out = tmp_path / "out.jsonl"
    with ResultWriter(out) as writer:
        writer.write(completion(id="c"))

    def run(requests: Iterator[Request], **_: object) -> Iterator[Completion]:
        first, second = next(requests), next(requests)
        assert (first.id, second.id) == ("b", "a")
        assert job._bytes_done == 0 < reader.bytes_read
        yield completion(id="a")
        assert job._bytes_done == second.nbytes > 0 and b'"a"' in out.read_bytes()
        yield completion(id="b")
        assert next(requests, None) is None

    llm: Any = SimpleNamespace(rules=RULES, run=run)
    with (
        open_reader(path) as reader,
        ResultWriter(out, resume=True) as writer,
        BatchJob(llm, reader, writer, None) as job,
    ):
        job.run()
    assert job._bytes_done == path.stat().st_size
    assert (job.counts.done, job.counts.failed, job.counts.skipped) == (2, 1, 1)


def test_the_engine_begins_with_the_longest(make: Callable[..., Path], tmp_path: Path) -> None:
    """One at a time, so that they end in the order in which they began."""
    rows = [native(2, new, id=f"r{new}", ignore_eos=True) for new in (1, 7, 3, 9, 5)]
    out = tmp_path / "out.jsonl"
    with (
        open_reader(make(lines(*rows))) as reader,
        LLM(MODEL, device="cpu", batch_size=1) as llm,
        ResultWriter(out) as writer,
        BatchJob(llm, reader, writer, None) as job,
    ):
        job.run()
    found = [json.loads(line)["id"] for line in out.read_text().splitlines()]
    assert found == ["r9", "r7", "r5", "r3", "r1"]


def test_a_file_that_becomes_shorter(make: Callable[..., Path]) -> None:
    """Rows that were read stay as they were."""
    path = make(lines(native(1, 9), native(1, 5), native(1, 7)))
    rows = longest_first(open_reader(path))
    assert next(rows).line == 1
    os.truncate(path, 0)
    assert [row.line for row in rows] == [3, 2]


def test_json_is_parsed_once(make: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    parsed = list[str]()
    monkeypatch.setattr(
        "dakrun.requests.input_rows.parse_json", lambda text: parsed.append(text) or decode(text)
    )
    decode = json.JSONDecoder().decode
    for pack in (bytes, gzip.compress):
        parsed.clear()
        assert len(read(make(pack(lines(*(native(2, n) for n in range(1, 9))))))) == 8
        # The first line also tells the format, before the model's lengths are known.
        assert len(parsed) == 1 + 8 and len(set(parsed)) == 8


def test_rows_ahead_take_limited_space(
    make: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = lines(*(native(50, n % 7 + 1) for n in range(200)))
    monkeypatch.setattr(look_ahead, "AHEAD_BYTES", len(text) // 10)
    reader = open_reader(make(text))
    rows = longest_first(reader)
    found = [next(rows).line]
    assert max(found) < reader.bytes_read // (len(text) // 200) + 1 < 150
    assert sorted([*found, *(row.line for row in rows)]) == list(range(1, 201))


def test_texts_of_rows_ahead_are_not_held(make: Callable[..., Path]) -> None:
    count, text = 3000, "x" * 4000
    for pack in (bytes, gzip.compress):
        reader = open_reader(make(pack(lines(*({"id": i, "prompt": text} for i in range(count))))))
        tracemalloc.start()
        reader.expected_run(20)
        held = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        assert held < 500 * count + 500_000
        assert len(in_order(reader)) == count


# --- the temporary files


def test_a_spool_keeps_what_was_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dakrun.requests.spool._WRITE_BYTES", 30)
    spool, items = Spool(segment_bytes=100), [bytes([i]) * (i % 40) for i in range(200)]
    places = [(spool.add(item), item) for item in items]
    assert spool.nbytes == sum(map(len, items))
    random.Random(1).shuffle(places)
    for place, item in places:
        assert spool.take(place) == item
    assert spool.nbytes < 140  # that is being filled
    spool.close()
    assert spool.nbytes == 0


def test_no_room_for_temporary_files(
    make: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(io.FileIO):
        def write(self, data: Any) -> int:
            if self.tell() + len(data) > 60:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write(data)

    path = make(gzip.compress(lines(*(native(60_000, n) for n in (1, 3, 2)))))
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda buffering: Full(make(b"", "t"), "r+"))
    rows, found = longest_first(open_reader(path)), []
    with pytest.raises(CannotRun, match="No space left") as raised:
        for row in rows:
            found.append(row.line)
    assert found == [1] and "TMPDIR" in raised.value.hint
