"""Prompt files in, result rows out: formats, bad rows, resume, outputs that cannot be written."""

import errno
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dakrun.config import SamplingParams
from dakrun.engine import batch
from dakrun.engine import rows as rows_module
from dakrun.engine.batch import RequestReader
from dakrun.engine.request import Completion, Request, RowError
from dakrun.engine.results import ResultWriter
from dakrun.engine.rows import PromptRules
from dakrun.errors import CannotRun, UsageError

VOCAB, MAX_LEN, POSITIONS = 300, 20, 64
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class ByteTokenizer:
    """A begin token (1), then one token for each byte; "<oov>" becomes an id beyond the model."""

    def encode(self, text: str) -> tuple[int, ...]:
        if text == "<none>":
            return ()
        return (1, VOCAB) if text == "<oov>" else (1, *text.encode())


RULES = PromptRules(
    vocab_size=VOCAB,
    max_model_len=MAX_LEN,
    max_positions=POSITIONS,
    tokenizer=ByteTokenizer(),  # type: ignore[arg-type]
)
NO_TOKENIZER = replace(RULES, tokenizer=None)


def read(
    source: str | Path, rules: PromptRules = RULES, **changes: Any
) -> list[Request | RowError]:
    return list(open_reader(source, **changes).rows(rules))


def open_reader(source: str | Path, **changes: Any) -> RequestReader:
    return RequestReader(source, **{"defaults": SamplingParams(max_tokens=5)} | changes)


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Path]:
    """Writes a file of the given content."""

    def write(content: str | bytes, name: str = "prompts.jsonl") -> Path:
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


@pytest.fixture
def stdin(monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], None]:
    def set_stdin(data: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))

    return set_stdin


def summary(rows: list[Request | RowError]) -> list[tuple[str, int, object]]:
    return [(r.id, r.line, r.prompt_ids if isinstance(r, Request) else r.code) for r in rows]


def completion(id: str = "a", text: str | None = "so", ids: tuple[int, ...] = (5, 6)) -> Completion:
    return Completion(
        id=id,
        text=text,
        token_ids=ids,
        finish_reason="stop",
        prompt_tokens=3,
        ttft_s=0.1,
        tpot_s=0.01,
    )


ERROR = RowError(id="line-4", line=4, code="invalid_json", message="not JSON")
COMPLETION_LINE = (
    '{"id":"a","text":"so","token_ids":[5,6],"finish_reason":"stop",'
    '"usage":{"prompt_tokens":3,"completion_tokens":2}}\n'
)
ERROR_LINE = '{"id":"line-4","error":{"code":"invalid_json","message":"not JSON","line":4}}\n'


# --- reading: text


@pytest.mark.parametrize(
    "content",
    [b"ab\n\n c \n", b"ab\r\n\r\n c \r\n", b"ab\n  \t\n c ", BYTE_ORDER_MARK + b"ab\n\n c \n"],
    ids=["plain", "crlf", "no-last-newline", "bom"],
)
def test_text_rows(make: Callable[..., Path], content: bytes) -> None:
    rows = read(make(content, "p.txt"))
    assert summary(rows) == [("line-1", 1, (1, 97, 98)), ("line-3", 3, (1, 32, 99, 32))]
    assert all(isinstance(r, Request) and r.params == SamplingParams(max_tokens=5) for r in rows)


def test_text_lines_are_never_json(make: Callable[..., Path]) -> None:
    assert summary(read(make('{"a":1}\n', "p.txt"))) == [("line-1", 1, (1, *b'{"a":1}'))]


def test_lines_end_at_newlines_only(make: Callable[..., Path]) -> None:
    prompt = "a\u2028b\x0bc\x85"
    assert summary(read(make(prompt + "\nd", "p.txt"))) == [
        ("line-1", 1, (1, *prompt.encode())),
        ("line-2", 2, (1, 100)),
    ]


@pytest.mark.parametrize("content", [b"", b"\n\n", b"  \r\n", BYTE_ORDER_MARK, b"\xef\xbb\xbf\n"])
@pytest.mark.parametrize("name", ["p.txt", "p.jsonl", "p"])
def test_no_rows(make: Callable[..., Path], content: bytes, name: str) -> None:
    reader = open_reader(make(content, name))
    assert not reader.needs_tokenizer()
    assert list(reader.rows(RULES)) == []


# --- reading: JSON Lines


def test_native_row_with_every_field(make: Callable[..., Path]) -> None:
    row = {
        "id": "x",
        "prompt": "é",
        "max_tokens": 9,
        "temperature": 1,
        "top_k": 4,
        "top_p": 0.5,
        "seed": 11,
        "stop": ["\n", "end"],
        "ignore_eos": True,
    }
    expected = SamplingParams(
        max_tokens=9,
        temperature=1,
        top_k=4,
        top_p=0.5,
        seed=11,
        stop=("\n", "end"),
        ignore_eos=True,
    )
    request = Request(id="x", line=1, prompt_ids=(1, 0xC3, 0xA9), params=expected)
    assert read(make(json.dumps(row))) == [request]
    assert read(make(json.dumps(row, ensure_ascii=False))) == [request]


def test_absent_and_null_fields_take_the_defaults(make: Callable[..., Path]) -> None:
    defaults = SamplingParams(max_tokens=3, temperature=0.5, stop=("x",), ignore_eos=True)
    nulls = dict.fromkeys(rows_module._NATIVE_FIELDS)
    content = "\n".join(json.dumps(row) for row in ({"prompt": "a"}, {**nulls, "prompt": "a"}))
    rows = read(make(content), defaults=defaults)
    assert summary(rows) == [("line-1", 1, (1, 97)), ("line-2", 2, (1, 97))]
    assert all(isinstance(r, Request) and r.params == defaults for r in rows)


def test_one_stop_string(make: Callable[..., Path]) -> None:
    (row,) = read(make('{"prompt": "a", "stop": "END"}'))
    assert isinstance(row, Request) and row.params.stop == ("END",)


@pytest.mark.parametrize(
    ("value", "expected"), [('"7"', "7"), ("7", "7"), ("-3", "-3"), ('"é"', "é"), ("0", "0")]
)
def test_ids_are_strings_or_integers(make: Callable[..., Path], value: str, expected: str) -> None:
    (row,) = read(make(f'{{"id": {value}, "prompt_token_ids": [3]}}'))
    assert row == Request(id=expected, line=1, prompt_ids=(3,), params=SamplingParams(max_tokens=5))


BAD_ROWS = [
    (b"{", "line-2", "invalid_json", "not JSON: Expecting property name"),
    (b'{"id": "x", "prompt": "a"', "line-2", "invalid_json", "at column 26"),
    (b'{"id": "x"} {}', "line-2", "invalid_json", "Extra data at column 13"),
    (b'["a"]', "line-2", "invalid_json", "the row is an array, not an object"),
    (b'"a"', "line-2", "invalid_json", "a string, not"),
    (b"12", "line-2", "invalid_json", "a number, not"),
    (b"null", "line-2", "invalid_json", "null, not"),
    (b"true", "line-2", "invalid_json", "a boolean, not"),
    (b"plain text", "line-2", "invalid_json", "Expecting value at column 1"),
    (b"[" * 100_000, "line-2", "invalid_json", "too deep"),
    (b'{"seed": ' + b"9" * 5000 + b"}", "line-2", "invalid_json", "too long"),
    (b'{"id": "x", "prompt": "\xff"}', "line-2", "invalid_utf8", "byte 0xff at 24"),
    (b'{"id": "x", "prompt": "\xc3', "line-2", "invalid_utf8", "byte 0xc3"),
    (b'{"id": 1.5, "prompt": "a"}', "line-2", "invalid_field", "id is not a string"),
    (b'{"id": true, "prompt": "a"}', "line-2", "invalid_field", "id is not a string"),
    (b'{"id": ["x"], "prompt": "a"}', "line-2", "invalid_field", "id is not a string"),
    (b'{"id": "", "prompt": "a"}', "line-2", "invalid_field", "is empty"),
    (b'{"id": "x"}', "x", "invalid_prompt", "exactly one of prompt and prompt_token_ids"),
    (b'{"id": "x", "prompt": "a", "prompt_token_ids": [1]}', "x", "invalid_prompt", "exactly one"),
    (b'{"id": 5, "prompt": null}', "5", "invalid_prompt", "exactly one"),
    (b'{"id": "x", "prompt": ["a"]}', "x", "invalid_prompt", "prompt is an array, not a string"),
    (b'{"id": "x", "prompt": 3}', "x", "invalid_prompt", "prompt is a number, not a string"),
    (b'{"id": "x", "prompt": "a\\ud800"}', "x", "invalid_prompt", "surrogate pair at character 2"),
    (b'{"id": "x", "prompt": "<none>"}', "x", "invalid_prompt", "no tokens"),
    (b'{"id": "x", "prompt": "<oov>"}', "x", "invalid_prompt", "300 is not in the model's"),
    (b'{"id": "x", "prompt_token_ids": []}', "x", "invalid_prompt", "the prompt has no tokens"),
    (b'{"id": "x", "prompt_token_ids": [0, 300]}', "x", "invalid_prompt", "vocabulary of 300"),
    (b'{"id": "x", "prompt_token_ids": [-1]}', "x", "invalid_prompt", "token id -1 is not"),
    (b'{"id": "x", "prompt_token_ids": [1.0]}', "x", "invalid_prompt", "array of integers"),
    (b'{"id": "x", "prompt_token_ids": [true]}', "x", "invalid_prompt", "array of integers"),
    (b'{"id": "x", "prompt_token_ids": "12"}', "x", "invalid_prompt", "array of integers"),
    (b'{"id": "x", "prompt_token_ids": [[1]]}', "x", "invalid_prompt", "array of integers"),
    (b'{"id": "x", "prompt": "a", "n": 2}', "x", "unsupported_field", "unsupported 'n'"),
    (b'{"id": "x", "promt": "a", "N": 1}', "x", "unsupported_field", "'promt', 'N'; the fields"),
    (b'{"id": "x", "prompt": "a", "max_tokens": 0}', "x", "invalid_field", "max_tokens is 0;"),
    (b'{"id": "x", "prompt": "a", "max_tokens": "9"}', "x", "invalid_field", "an integer of at"),
    (b'{"id": "x", "prompt": "a", "max_tokens": 2.5}', "x", "invalid_field", "max_tokens is 2.5"),
    (b'{"id": "x", "prompt": "a", "temperature": -1}', "x", "invalid_field", "from 0 to 100"),
    (b'{"id": "x", "prompt": "a", "temperature": NaN}', "x", "invalid_field", "temperature is nan"),
    (b'{"id": "x", "prompt": "a", "top_p": 0}', "x", "invalid_field", "top_p must be above 0"),
    (b'{"id": "x", "prompt": "a", "top_k": true}', "x", "invalid_field", "top_k is True"),
    (b'{"id": "x", "prompt": "a", "seed": -1}', "x", "invalid_field", "seed is -1"),
    (b'{"id": "x", "prompt": "a", "stop": 3}', "x", "invalid_field", "stop is a number, not a"),
    (b'{"id": "x", "prompt": "a", "stop": {"a": 1}}', "x", "invalid_field", "stop is an object"),
    (b'{"id": "x", "prompt": "a", "stop": ["a", 1]}', "x", "invalid_field", "non-empty strings"),
    (b'{"id": "x", "prompt": "a", "stop": ""}', "x", "invalid_field", "non-empty strings"),
    (b'{"id": "x", "prompt": "a", "ignore_eos": 1}', "x", "invalid_field", "a number, not true"),
]


@pytest.mark.parametrize(("line", "id", "code", "message"), BAD_ROWS)
def test_a_bad_row_stops_nothing(
    make: Callable[..., Path], line: bytes, id: str, code: str, message: str
) -> None:
    good = b'{"prompt_token_ids": [3]}\n'
    before, bad, after = read(make(good + line + b"\n" + good))
    assert (before.id, before.line, after.id, after.line) == ("line-1", 1, "line-3", 3)
    assert isinstance(before, Request) and isinstance(after, Request)
    assert isinstance(bad, RowError)
    assert (bad.id, bad.line, bad.code) == (id, 2, code)
    assert message in bad.message and "\n" not in bad.message


def test_bad_text_rows(make: Callable[..., Path]) -> None:
    rows = read(make(b"ok\n\xffbad\n<none>\n", "p.txt"))
    assert [(r.line, r.code) for r in rows if isinstance(r, RowError)] == [
        (2, "invalid_utf8"),
        (3, "invalid_prompt"),
    ]


@pytest.mark.parametrize(
    ("max_len", "remedy"), [(MAX_LEN, "raise --max-model-len, at most to 64"), (64, "no more")]
)
@pytest.mark.parametrize("kind", ["text", "ids"])
def test_prompt_length(make: Callable[..., Path], max_len: int, remedy: str, kind: str) -> None:
    def row(tokens: int) -> dict[str, object]:
        if kind == "text":
            return {"prompt": "x" * (tokens - 1)}
        return {"prompt_token_ids": [7] * tokens}

    content = "\n".join(json.dumps(row(n)) for n in (max_len - 1, max_len))
    fits, too_long = read(make(content), replace(RULES, max_model_len=max_len))
    assert isinstance(fits, Request) and len(fits.prompt_ids) == max_len - 1
    assert isinstance(too_long, RowError) and too_long.code == "prompt_too_long"
    assert f"has {max_len} tokens, but only {max_len - 1} fit" in too_long.message
    assert f"a length of {max_len}" in too_long.message and remedy in too_long.message


def test_very_long_lines(make: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [b"ab", b"x" * 10_000_000, b"cd", b"y" * 1000, b"z" * 1001]
    for end in (b"\n", b""):
        with monkeypatch.context() as patch:
            patch.setattr(batch, "MAX_LINE_BYTES", 1001)
            reader = open_reader(make(b"\n".join(lines) + end, "p.txt"))
            rows = list(reader.rows(replace(RULES, max_model_len=10**9)))
        assert [(r.line, isinstance(r, Request)) for r in rows[:4]] == [
            (1, True),
            (2, False),
            (3, True),
            (4, True),
        ]
        assert isinstance(rows[1], RowError) and rows[1].code == "line_too_long"
        assert "more than 1001 bytes" in rows[1].message
        assert isinstance(rows[4], RowError) is (end == b"\n")  # the line end counts
        assert reader.bytes_read == reader.bytes_total


def test_a_long_prompt_is_one_row(make: Callable[..., Path]) -> None:
    rows = read(make(json.dumps({"prompt": "x" * 5_000_000}) + "\n" + '{"prompt": "a"}'))
    assert [(r.line, isinstance(r, Request)) for r in rows] == [(1, False), (2, True)]
    assert isinstance(rows[0], RowError) and "has 5000001 tokens" in rows[0].message


# --- reading: tokenizer, sources


def test_without_tokenizer_only_text_fails(make: Callable[..., Path]) -> None:
    content = '{"prompt": "a"}\n{"prompt_token_ids": [2]}\n{"prompt_token_ids": [2], "stop": "a"}'
    text, ids, stop = read(make(content), NO_TOKENIZER)
    assert isinstance(ids, Request)
    for row, message in ((text, "give prompt_token_ids"), (stop, "stop strings need")):
        assert isinstance(row, RowError) and row.code == "no_tokenizer"
        assert message in row.message


@pytest.mark.parametrize(
    ("name", "content", "needed"),
    [
        ("p.txt", b"\n\nhello", True),
        ("p.jsonl", b'\n{"prompt": "a"}', True),
        ("p.jsonl", b'{"prompt_token_ids": [1]}\n{"prompt": "a"}', False),
        ("p.jsonl", b'{"prompt": null, "prompt_token_ids": [1]}', False),
        ("p.jsonl", b"{malformed", False),
        ("p.jsonl", b'{"id": "no prompt"}\n{"prompt": "a"}', False),
        ("p", b'{"prompt_token_ids": [1]}', False),
        ("p", b"text", True),
    ],
)
def test_needs_tokenizer(
    make: Callable[..., Path], name: str, content: bytes, needed: bool
) -> None:
    reader = open_reader(make(content, name))
    assert reader.needs_tokenizer() is needed
    assert reader.needs_tokenizer() is needed
    assert len(list(reader.rows(RULES))) == sum(map(bool, content.splitlines()))
    assert reader.bytes_read == reader.bytes_total == len(content)


@pytest.mark.parametrize(
    ("data", "format", "expected"),
    [
        (b"ab\n{}\n", None, [("line-1", 1, (1, 97, 98)), ("line-2", 2, (1, *b"{}"))]),
        (b'\n  {"prompt": "a"}\nb', None, [("line-2", 2, (1, 97)), ("line-3", 3, "invalid_json")]),
        (BYTE_ORDER_MARK + b'{"prompt": "a"}', None, [("line-1", 1, (1, 97))]),
        (b"{}", "text", [("line-1", 1, (1, *b"{}"))]),
        (b"ab", "jsonl", [("line-1", 1, "invalid_json")]),
        (b"", None, []),
    ],
)
def test_standard_input(
    stdin: Callable[[bytes], None], data: bytes, format: str | None, expected: list[object]
) -> None:
    stdin(data)
    reader = open_reader("-", format=format)
    assert reader.bytes_total is None
    assert summary(list(reader.rows(RULES))) == expected
    assert reader.bytes_read == len(data) and not sys.stdin.closed


def test_format_overrules_the_suffix(make: Callable[..., Path]) -> None:
    path = make('{"prompt": "a"}', "p.data")
    assert summary(read(path, format="jsonl")) == [("line-1", 1, (1, 97))]
    assert len(summary(read(path, format="text"))[0][2]) == 16  # type: ignore[arg-type]


def test_sources_that_cannot_be_read(tmp_path: Path, make: Callable[..., Path]) -> None:
    cases = [
        (tmp_path / "none.txt", "No such file"),
        (tmp_path, "Is a directory"),
        (make("[]", "p.json"), "end in .txt or .jsonl"),
    ]
    for path, message in cases:
        with pytest.raises(UsageError, match=message) as raised:
            open_reader(path)
        assert str(path) in str(raised.value) and ".jsonl" in raised.value.hint


def test_a_source_that_breaks(make: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    class Breaking(io.BytesIO):
        def readline(self, size: int | None = -1, /) -> bytes:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    reader = open_reader(make("a", "p.txt"))
    monkeypatch.setattr(reader, "_file", Breaking())
    with pytest.raises(CannotRun, match="cannot be read any further"):
        list(reader.rows(RULES))


def test_rows_are_read_when_they_are_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_bytes(b"some prompt\n" * 100_000)
    reader = open_reader(path)
    rows = reader.rows(RULES)
    assert reader.bytes_read == 0
    assert next(rows).line == 1 and reader.bytes_read == 12
    assert next(rows).line == 2 and reader.bytes_read == 24
    reader.close()


# --- writing


def test_native_rows(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with ResultWriter(path) as writer:
        writer.write(completion())
        writer.write_error(ERROR)
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
        writer.write_error(ERROR)
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
        writer.write_error(ERROR)
    assert empty.read_text() == ERROR_LINE


def test_overwrite_truncates_on_entering(make: Callable[..., Path]) -> None:
    path = make(COMPLETION_LINE, "out.jsonl")
    writer = ResultWriter(path, overwrite=True)
    assert path.read_text() == COMPLETION_LINE
    with writer:
        assert path.read_text() == "" and not writer.is_done("a")
        writer.write_error(ERROR)
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
        writer.write_error(ERROR)
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
from dakrun.engine.request import RowError
from dakrun.engine.results import ResultWriter
from dakrun.errors import DakrunError
try:
    with ResultWriter({arguments}) as writer:
        writer.write_error(RowError(id="line-4", line=4, code="invalid_json", message="not JSON"))
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
        writer.write_error(ERROR)
    assert out.getvalue() == COMPLETION_LINE + ERROR_LINE


def fail_write(kind: str, real: Callable[[int, bytes], int]) -> Callable[[int, bytes], int]:
    def write(fd: int, data: bytes) -> int:
        if kind == "short":
            return real(fd, data[: len(data) // 2])
        code = {"full": errno.ENOSPC, "quota": errno.EDQUOT, "broken": errno.EIO}[kind]
        raise OSError(code, os.strerror(code))

    return write


@pytest.mark.parametrize(
    ("kind", "message", "hint"),
    [
        ("short", "No space left on device", "free some space"),
        ("full", "No space left on device", "free some space"),
        ("quota", "quota exceeded", "free some space"),
        ("broken", "Input/output error", "--resume"),
    ],
)
def test_a_failed_write_leaves_whole_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, message: str, hint: str
) -> None:
    path = tmp_path / "out.jsonl"
    with ResultWriter(path) as writer:
        writer.write(completion())
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", fail_write(kind, os.write))
            with pytest.raises(CannotRun, match=message) as raised:
                writer.write(completion(id="b"))
        assert str(path) in str(raised.value) and hint in raised.value.hint
        assert path.read_text() == COMPLETION_LINE
        writer.write_error(ERROR)
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
    with pytest.raises(UsageError, match="no result row"):
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
    with pytest.raises(UsageError, match=f"line {line} is no result row"):
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
                if isinstance(row, Request):
                    writer.write(completion(id=row.id))
                else:
                    writer.write_error(row)
        with out.open("a") as file:
            file.write('{"id":"half')
    assert taken == [21, 14, 9]
    ids = [json.loads(line)["id"] for line in out.read_text().splitlines()[:-1]]
    assert ids == [*map(str, range(20)), "line-21"]


def test_done_ids_take_a_few_bytes_each(make: Callable[..., Path]) -> None:
    n = 5000
    path = make("".join(f'{{"id":"row {i}","error":{{}}}}\n' for i in range(n)), "out.jsonl")
    with ResultWriter(path, resume=True) as writer:
        assert len(writer._ids) == writer.failed_before == n
        assert 12 * n <= writer._ids.nbytes <= 24 * n
        assert all(writer.is_done(f"row {i}") for i in range(n))
        assert not any(writer.is_done(f"row {i}") for i in range(n, 2 * n))


def test_many_rows_are_never_held(
    make: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows stream through reader and writer; what stays are a few bytes for each id."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    rows = 40_000
    row = '{{"id":"request number {}","prompt_token_ids":[3,4,5,6],"max_tokens":2}}\n'
    source = make("".join(map(row.format, range(rows))))
    out = tmp_path / "out.jsonl"

    def stream(last: int) -> None:
        reader = open_reader(source)
        with ResultWriter(out, source=source, resume=True) as writer:
            before, most = sys.getallocatedblocks(), 0
            for row in reader.rows(RULES):
                if not writer.is_done(row.id):
                    writer.write(completion(id=row.id))
                if row.line % 1000 == 0:
                    most = max(most, sys.getallocatedblocks() - before)
                if row.line == last:
                    break
            assert most < rows / 20, "held objects grow with the number of rows"
            assert max(reader._ids.nbytes, writer._ids.nbytes) <= 24 * rows

    stream(rows // 2)
    stream(rows)
    with ResultWriter(out, resume=True) as writer:
        assert len(writer._ids) == rows and not writer.failed_before
