"""Prompt files as a stream of rows: formats, bad rows, sources that break."""

import errno
import io
import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from prompt_files import MAX_LEN, RULES, in_order, open_reader, read

from dakrun.config import SamplingParams
from dakrun.errors import CannotRun, UsageError
from dakrun.requests import Reply, Request, RowError, result_line
from dakrun.requests.look_ahead import LOOK_AHEAD

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
NO_TOKENIZER = replace(RULES, tokenizer=None)


@pytest.fixture
def stdin(monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], None]:
    def set_stdin(data: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))

    return set_stdin


def summary(rows: list[Request | RowError]) -> list[tuple[str, int, object]]:
    return [(r.id, r.line, r.prompt_ids if isinstance(r, Request) else r.code) for r in rows]


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
    assert in_order(reader) == []


# --- reading: JSON Lines


def test_native_row_with_every_field(make: Callable[..., Path]) -> None:
    row = {
        "id": "x", "prompt": "é", "max_tokens": 9, "temperature": 1, "top_k": 4, "top_p": 0.5,
        "seed": 11, "stop": ["\n", "end"], "ignore_eos": True,
    }  # fmt: skip
    expected = SamplingParams(
        max_tokens=9, temperature=1, top_k=4, top_p=0.5, seed=11,
        stop=("\n", "end"), ignore_eos=True,
    )  # fmt: skip
    request = Request(id="x", line=1, prompt_ids=(1, 0xC3, 0xA9), params=expected)
    assert read(make(json.dumps(row))) == [request]
    assert read(make(json.dumps(row, ensure_ascii=False))) == [request]


def test_absent_and_null_fields_take_the_defaults(make: Callable[..., Path]) -> None:
    defaults = SamplingParams(max_tokens=3, temperature=0.5, stop=("x",), ignore_eos=True)
    fields = "id prompt prompt_token_ids max_tokens temperature top_k top_p seed stop ignore_eos"
    nulls = dict.fromkeys(fields.split())
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
    reply = Reply(integer_id=not value.startswith('"'))
    params = SamplingParams(max_tokens=5)
    assert row == Request(id=expected, line=1, prompt_ids=(3,), params=params, reply=reply)


@pytest.mark.parametrize(("first", "second"), [("7", '"7"'), ('"7"', "7"), ("-1", "-1")])
def test_an_integer_id_and_its_digits_are_one_id(
    make: Callable[..., Path], first: str, second: str
) -> None:
    content = "\n".join(f'{{"id": {id}, "prompt_token_ids": [3]}}' for id in (first, second))
    row, again = read(make(content))
    assert isinstance(row, Request) and isinstance(again, RowError)
    assert (again.id, again.code) == ("line-2", "duplicate_id")
    assert json.loads(result_line(again))["id"] == "line-2"


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
    (b'{"id": "x"}', "x", "invalid_prompt", "exactly one of prompt, prompt_token_ids and messages"),
    (b'{"id": "x", "prompt": "a", "prompt_token_ids": [1]}', "x", "invalid_prompt", "exactly one"),
    (b'{"id": 5, "prompt": null}', "5", "invalid_prompt", "exactly one"),
    (b'{"id": "x", "prompt": ["a"]}', "x", "invalid_prompt", "prompt is an array, not a string"),
    (b'{"id": "x", "prompt": 3}', "x", "invalid_prompt", "prompt is a number, not a string"),
    (b'{"id": "x", "prompt": "a\\ud800"}', "x", "invalid_prompt", "surrogate pair at character 2"),
    (b'{"id": "x", "prompt": "<none>"}', "x", "invalid_prompt", "no tokens"),
    (b'{"id": "x", "prompt": "<oov>"}', "x", "invalid_prompt", "300 is not in the model's"),
    (b'{"id": "x", "prompt_token_ids": []}', "x", "invalid_prompt", "the prompt has no tokens"),
    (b'{"id": "x", "prompt_token_ids": [0, 300]}', "x", "invalid_prompt", "vocabulary of 300"),
    (b'{"id": "x", "prompt_token_ids": [-1]}', "x", "invalid_prompt", "token id -1 is negative"),
    (b'{"id": "x", "prompt_token_ids": [1.0]}', "x", "invalid_prompt", "array of integers"),
    (b'{"id": "x", "prompt_token_ids": [true]}', "x", "invalid_prompt", "array of integers"),
    (b'{"id": "x", "prompt_token_ids": "12"}', "x", "invalid_prompt", "array of integers"),
    (b'{"id": "x", "prompt_token_ids": [[1]]}', "x", "invalid_prompt", "array of integers"),
    (b'{"id": "x", "prompt": "a", "n": 9}', "x", "invalid_field", "n is 9, not an integer"),
    (b'{"id": "x", "prompt": "a", "echo": true}', "x", "unsupported_field", "unsupported 'echo'"),
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
    assert f"has {max_len} tokens" in too_long.message and remedy in too_long.message
    assert f"length of {max_len}" in too_long.message


def test_very_long_lines(make: Callable[..., Path]) -> None:
    lines = [b"ab", b"x" * 10_000_000, b"cd", b"y" * 1001, b"z" * 1002]
    for end in (b"\n", b""):
        reader = open_reader(make(b"\n".join(lines) + end, "p.txt"), max_line_bytes=1001)
        rows = in_order(reader, replace(RULES, max_model_len=10**9))
        assert [(r.line, isinstance(r, Request)) for r in rows[:4]] == [
            (1, True),
            (2, False),
            (3, True),
            (4, True),
        ]
        assert isinstance(rows[1], RowError) and rows[1].code == "line_too_long"
        assert "more than 1001 bytes" in rows[1].message
        assert isinstance(rows[4], RowError) and rows[4].code == "line_too_long"
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
    assert len(in_order(reader)) == sum(map(bool, content.splitlines()))
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
    assert summary(in_order(reader)) == expected
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


def test_a_source_that_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    class Breaking(io.BytesIO):
        def readline(self, size: int | None = -1, /) -> bytes:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(Breaking()))
    with pytest.raises(CannotRun, match="Input/output error") as raised:
        read("-")
    assert "--resume" in raised.value.hint


def test_rows_are_read_when_they_are_asked_for(make: Callable[..., Path]) -> None:
    reader = open_reader(make(b"some prompt\n" * 100_000, "p.txt"))
    rows = reader.rows(RULES)
    assert reader.bytes_read == 0
    for line in (1, 2, 3):
        row = next(rows)
        assert row and row.line == line and row.nbytes == 12
        assert reader.bytes_read == 12 * (LOOK_AHEAD + line - 1)
    reader.close()
