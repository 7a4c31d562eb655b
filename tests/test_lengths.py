"""Lengths of a file's requests before it is run: every row format, long files, bad rows."""

import gzip
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prompt_files import open_reader

from dakrun.plan import ExpectedRun
from dakrun.requests import RowLengths
from dakrun.requests.lengths import NOTHING, PromptStarts, json_lengths, text_lengths

CHAT = [
    {"role": "system", "content": "x" * 10},
    {"role": "user", "content": [{"type": "text", "text": "y" * 31}]},
]


def batch(**body: Any) -> dict[str, Any]:
    return {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt_token_ids": [5] * 9}, RowLengths(9, 5)),
        ({"prompt": "x" * 37, "prompt_token_ids": None}, RowLengths(10, 5)),
        ({"prompt": "x", "max_tokens": 3}, RowLengths(1, 3)),
        ({"prompt": "x", "max_tokens": None}, RowLengths(1, 5)),
        ({"prompt_token_ids": [5] * 9, "max_tokens": 10**9}, RowLengths(9, 91)),
        ({"prompt_token_ids": [5] * 999}, RowLengths(99, 1)),
        ({"prompt": "x" * 999}, RowLengths(99, 1)),
        (batch(prompt="x" * 37, max_tokens=2, n=3), RowLengths(10, 2, 3)),
        (batch(prompt=[5] * 8), RowLengths(8, 5)),
        (batch(prompt=["x" * 9, [5, 6], "x" * 40], n=2), RowLengths(10, 5, 6)),
        (batch(messages=CHAT, max_completion_tokens=4), RowLengths(11, 4)),
        (batch(messages=[{"role": "user", "content": ""}]), RowLengths(1, 5)),
        (batch(messages="what"), NOTHING),
        (batch(messages=[{"role": "user", "content": 5}]), NOTHING),
        ({"prompt": ""}, RowLengths(1, 5)),
        ({"prompt": None}, NOTHING),
        ({"prompt": {}}, NOTHING),
        ({"prompt_token_ids": []}, NOTHING),
        ({"prompt": "x", "max_tokens": 0, "prompt_logprobs": 0}, RowLengths(1, 1)),
        ({"prompt": "x", "max_tokens": -1}, NOTHING),
        ({"prompt": "x", "max_tokens": "9"}, NOTHING),
        ({"prompt": "x", "max_tokens": 3.0, "n": 2.0}, RowLengths(1, 3, 2)),
        ({"prompt": "x", "max_tokens": 2.5}, NOTHING),
        ({"prompt": "x", "max_tokens": True}, NOTHING),
        (batch(prompt="x", n=0), NOTHING),
        (batch(prompt="x", n="2"), NOTHING),
        (batch(prompt="x", n=8), RowLengths(1, 5, 8)),
        (batch(prompt="x", n=9), NOTHING),
        (batch(prompt="x", n=10**400), NOTHING),
        (batch(prompt=["x"] * 1025), NOTHING),
        ({"body": 5}, NOTHING),
    ],
)
def test_a_row(row: dict[str, Any], expected: RowLengths) -> None:
    assert json_lengths(row, 5, 100, PromptStarts()) == expected


def test_text() -> None:
    assert text_lengths("é" * 5, 5, 100, PromptStarts()) == RowLengths(2, 5)


def test_means_are_over_choices() -> None:
    run = ExpectedRun([RowLengths(10, 2, 3), NOTHING, RowLengths(2, 30)], share=0.5)
    assert (run.requests, run.mean_prompt, run.mean_new) == (8, 8, 9)
    assert ExpectedRun([NOTHING]).requests == ExpectedRun([]).mean_new == 0


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_a_file(make: Callable[..., Path], pack: Callable[[bytes], bytes]) -> None:
    lines = ['{"prompt_token_ids": [1, 2, 3, 4]}', "", "{bad", '{"prompt": "x", "max_tokens": 9}']
    reader = open_reader(make(pack("\n".join(lines).encode())))
    found = reader.expected_run(20)
    assert found and sorted(found.rows) == [NOTHING, RowLengths(1, 9), RowLengths(4, 5)]
    text = open_reader(make(pack(b"abcde\n\xff\nab"), "p.txt")).expected_run(20)
    assert text and sorted(text.rows) == [*[RowLengths(1, 5)] * 2, RowLengths(2, 5)]
    empty = open_reader(make(pack(b""))).expected_run(20)
    assert empty and empty.requests == 0


def test_a_long_file_goes_on_like_its_start(make: Callable[..., Path]) -> None:
    rows = 150_000
    found = open_reader(make(b'{"prompt_token_ids": [1, 2, 3]}\n' * rows)).expected_run(20)
    assert found and found.requests == rows
    assert (found.mean_prompt, found.mean_new) == (3, 5)


def test_a_pipe_has_no_lengths(make: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(json.dumps({}).encode())))
    assert open_reader("-").expected_run(20) is None


def test_prompts_that_begin_alike_share_blocks() -> None:
    """Of 64 tokens, or 256 characters; never the last token, and only from the start on."""
    starts, common = PromptStarts(), list(range(200))
    assert starts.shared(common) == 0
    assert starts.shared(common[:129]) == 128 and starts.shared(common[:128]) == 64
    assert starts.shared([7, *common[1:]]) == 0 and starts.shared(common[:64]) == 0
    other = [*common[:64], *range(500, 564), *common[128:]]
    assert starts.shared(other) == 64 and starts.shared(other) == 192
    assert starts.shared("a" * 600) == 0 and starts.shared("a" * 512 + "b" * 100) == 128
    row = {"prompt_token_ids": common}
    assert json_lengths(row, 5, 1000, starts) == RowLengths(200, 5, 1, 192)
