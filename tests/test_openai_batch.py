"""OpenAI Batch rows: what their bodies may ask for, how results read, and duplicate ids."""

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prompt_files import RULES, ByteTokenizer, read
from result_rows import COMPLETION_LINE, completion

from dakrun.config import SamplingParams
from dakrun.engine.unfinished import Unfinished
from dakrun.errors import UsageError
from dakrun.requests import (
    Completion,
    Logprobs,
    Reply,
    Request,
    RequestReader,
    ResultWriter,
    RowError,
    TokenLogprob,
    result_line,
)
from dakrun.requests.chat_template import TemplateOptions
from dakrun.requests.chats import string_of

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"


class ChatTokenizer(ByteTokenizer):
    """A token for the role's first letter, then the content's bytes; ends with 2."""

    has_chat_template = True

    def markers(self, tools: object) -> None:
        """None: answers have no thoughts."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        return super().encode(text) if add_special_tokens else tuple(text.encode())

    def chat_text(self, messages: list[dict[str, Any]], options: TemplateOptions) -> str:
        if messages[-1]["role"] == "assistant":
            raise UsageError("the last message is the assistant's", hint="end with a user's")
        return "".join(m["role"] + string_of(m["content"]) for m in messages) + "\x02"


CHAT_RULES = replace(RULES, tokenizer=ChatTokenizer(), max_model_len=40)
HI = [{"role": "user", "content": "hi"}]


def row(body: object, url: object = TEXT, **changes: object) -> str:
    fields = {"custom_id": "x", "method": "POST", "url": url, "body": body, **changes}
    return json.dumps({name: value for name, value in fields.items() if value != "absent"})


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Path]:
    def write(*lines: str) -> Path:
        path = tmp_path / "batch.jsonl"
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        return path

    return write


def test_completion_rows(make: Callable[..., Path]) -> None:
    body = {
        "model": "any", "prompt": "ab", "max_tokens": 9, "temperature": 0.5, "top_p": 0.9,
        "top_k": 4, "seed": 3, "stop": "\n", "ignore_eos": True, "n": 1, "stream": False,
        "echo": False, "logprobs": None, "presence_penalty": 0.0, "logit_bias": {},
        "suffix": "", "store": False, "service_tier": "auto", "best_of": None,
        "user": "me", "metadata": {"a": "b"},
    }  # fmt: skip
    text, ids = read(make(row(body), row({"prompt": [5, 6]}, custom_id="y")))
    assert text == Request(
        id="x",
        line=1,
        prompt_ids=(1, 97, 98),
        params=SamplingParams(
            max_tokens=9, temperature=0.5, top_p=0.9, top_k=4, seed=3, stop=("\n",), ignore_eos=True
        ),
        reply=Reply("completion", "any"),
    )
    assert isinstance(ids, Request)
    assert (ids.prompt_ids, ids.params, ids.reply) == (
        (5, 6),
        SamplingParams(max_tokens=5),
        Reply("completion", None),
    )


def test_several_choices(make: Callable[..., Path]) -> None:
    """Of each prompt together; the first choice of each has the same seed with every n."""
    body = {"prompt": ["a", [5, 6], "b"], "seed": 3, "temperature": 1}
    one, two = read(make(row(body), row({**body, "n": 2}, custom_id="y")))
    assert isinstance(one, Request) and isinstance(two, Request)
    rows = [(request, *request.further) for request in (one, two)]
    assert [r.prompt_ids for r in rows[0]] == [(1, 97), (5, 6), (1, 98)]
    assert [r.prompt_ids for r in rows[1]] == [(1, 97)] * 2 + [(5, 6)] * 2 + [(1, 98)] * 2
    for requests, n in zip(rows, (1, 2), strict=True):
        choices = [Reply("completion", None, i, 3 * n, n) for i in range(3 * n)]
        assert [r.reply for r in requests] == choices
        assert {r.id for r in requests} == {requests[0].id}
        assert len({r.params.seed for r in requests}) == 3 * n and requests[0].params.seed == 3
    assert [r.params for r in rows[1][::2]] == [r.params for r in rows[0]]


def test_choices_of_a_chat(make: Callable[..., Path]) -> None:
    (request,) = read(make(row({"messages": HI, "n": 8}, CHAT)), CHAT_RULES)
    assert isinstance(request, Request) and len(request.further) == 7
    assert {r.prompt_ids for r in request.further} == {request.prompt_ids}


def test_chat_rows(make: Callable[..., Path]) -> None:
    parts = [{"type": "text", "text": "hi"}]
    bodies = [
        {"model": "m", "messages": HI, "max_completion_tokens": 7, "logprobs": False},
        {"messages": [{"role": "user", "content": parts, "name": None}], "max_tokens": 7},
        {"messages": HI, "max_tokens": 7, "max_completion_tokens": 7, "tools": [], "store": None},
    ]
    lines = [row(body, CHAT, custom_id=i) for i, body in enumerate(bodies)]
    for request in read(make(*lines), CHAT_RULES):
        assert isinstance(request, Request)
        assert request.prompt_ids == (*b"userhi", 2) and request.params.max_tokens == 7
        assert request.reply.kind == "chat"


BAD = [
    (row({"prompt": "a"}, custom_id="absent"), "invalid_field", "custom_id is missing"),
    (row({"prompt": "a"}, custom_id=""), "invalid_field", "custom_id is not a string"),
    (row({"prompt": "a"}, method="GET"), "invalid_field", "method is 'GET', not 'POST'"),
    (row({"prompt": "a"}, method="absent"), "invalid_field", "method is missing"),
    (row({"prompt": "a"}, url="/v1/embeddings"), "unsupported_url", "'/v1/embeddings', not /v1/c"),
    (row({"prompt": "a"}, url=["/v1"]), "unsupported_url", "url is an array"),
    (row("absent"), "invalid_field", "body is null, not an object"),
    (row([]), "invalid_field", "body is an array"),
    (row({"prompt": "a"}, prompt="b"), "unsupported_field", "'prompt' outside"),
    (row({}), "invalid_prompt", "prompt is missing"),
    (row({"prompt": 3}), "invalid_prompt", "prompt is a number"),
    (row({"prompt": ["a", ""], "n": 9}), "invalid_field", "n is 9, not an integer from 1 to 8"),
    (row({"prompt": ["a", [300]]}), "invalid_prompt", "prompt 2 of the array: token id 300"),
    (row({"prompt": [[1], [[2]]]}), "invalid_prompt", "prompt 2 of the array: prompt is an array"),
    (row({"prompt": [1, "a"]}), "invalid_prompt", "prompt 1 of the array: prompt is a number"),
    (row({"prompt": ["a"] * 1025}), "invalid_prompt", "prompt has 1025 prompts, above 1024"),
    (row({"prompt": []}), "invalid_prompt", "no tokens"),
    (row({"prompt": [300]}), "invalid_prompt", "vocabulary of 300"),
    (row({"prompt": "a" * 50}), "prompt_too_long", "51 tokens"),
    (row({"prompt": "a\ud800"}), "invalid_prompt", "surrogate pair at character 2"),
    (row({"prompt": "a", "model": 3}), "invalid_field", "model is a number"),
    (row({"prompt": "a", "n": 0}), "invalid_field", "n is 0, not an integer"),
    (row({"prompt": "a", "n": True}), "invalid_field", "n is a boolean"),
    (row({"prompt": "a", "n": 2.5}), "invalid_field", "n is a number"),
    (row({"messages": HI, "n": 9}, CHAT), "invalid_field", "n is 9"),
    (row({"prompt": "a", "stream": True}), "unsupported_field", "'stream'"),
    (row({"prompt": "a", "logprobs": 6}), "invalid_field", "logprobs is 6, not an integer from 0"),
    (row({"prompt": "a", "logprobs": True}), "invalid_field", "logprobs is a boolean"),
    (row({"prompt": "a", "top_logprobs": 2}), "unsupported_field", "'top_logprobs'"),
    (row({"messages": HI, "logprobs": 2}, CHAT), "invalid_field", "not true or false"),
    (row({"messages": HI, "top_logprobs": 2}, CHAT), "invalid_field", "needs logprobs to be true"),
    (row({"messages": HI, "logprobs": True, "top_logprobs": 21}, CHAT), "invalid_field",
     "top_logprobs is 21, not an integer from 0 to 20"),
    (row({"prompt": "a", "best_of": 2, "suffix": "b"}), "unsupported_field", "'best_of', 'suffix'"),
    (row({"prompt": "a", "logit_bias": {"500": 1}}), "invalid_field", "has token id 500, not in"),
    (row({"prompt": "a", "logit_bias": {"x": 1}}), "invalid_field", "numbers by token id"),
    (row({"prompt": "a", "presence_penalty": 3}), "invalid_field", "presence_penalty is 3"),
    (row({"prompt": "a", "bad_words": [[500]]}), "invalid_field", "bad_words has token id 500"),
    (row({"prompt": "a", "stop_token_ids": [5, 500]}), "invalid_field",
     "stop_token_ids has token id 500, not in the model's vocabulary of 300"),
    (row({"prompt": "a", "stop_token_ids": [-5]}), "invalid_field", "stop_token_ids is [-5]"),
    (row({"prompt": "a", "bad_words": "a"}), "invalid_field", "bad_words is 'a'"),
    (row({"prompt": "a", "bad_words": [""]}), "invalid_field", "strings that are not blank"),
    (row({"prompt": "a", "min_p": 2}), "invalid_field", "min_p is 2; min_p must be a number"),
    (row({"prompt": "a", "store": True}), "unsupported_field", "'store'"),
    (row({"prompt": "a", "service_tier": "flex"}), "unsupported_field", "'service_tier'"),
    (row({"prompt": "a", "messages": HI}), "unsupported_field", "'messages'"),
    (row({"prompt": "a", "max_completion_tokens": 3}), "unsupported_field", "max_completion"),
    (row({"prompt": "a", "max_tokens": 0}), "invalid_field", "max_tokens is 0"),
    (row({"prompt": "a", "temperature": "hot"}), "invalid_field", "temperature is 'hot'"),
    (row({"prompt": "a", "stop": 1}), "invalid_field", "stop is a number"),
    (row({"prompt": "a"}, CHAT), "unsupported_field", "'prompt'"),
    (row({}, CHAT), "invalid_prompt", "messages is not an array"),
    (row({"messages": []}, CHAT), "invalid_prompt", "at least one message"),
    (row({"messages": ["hi"]}, CHAT), "invalid_prompt", "message 1 is a string"),
    (row({"messages": [{"role": "user"}]}, CHAT), "invalid_prompt", "content of message 1 is null"),
    (row({"messages": [{"content": "a"}]}, CHAT), "invalid_prompt", "role of message 1 is missing"),
    (row({"messages": [{"role": "robot", "content": "a"}]}, CHAT), "invalid_prompt", "'robot'"),
    (row({"messages": [{**HI[0], "tool_calls": [1]}]}, CHAT), "invalid_prompt", "'tool_calls'"),
    (
        row({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, CHAT),
        "unsupported_field",
        "message 1 has a part",
    ),
    (
        row({"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]}, CHAT),
        "invalid_prompt",
        "not a string",
    ),
    (
        row({"messages": [{"role": "user", "content": "a\ud800"}]}, CHAT),
        "invalid_prompt",
        "message 1 has half a surrogate pair",
    ),
    (
        row({"messages": [{"role": "assistant", "content": "a"}]}, CHAT),
        "invalid_prompt",
        "the last message is the assistant's",
    ),
    (row({"messages": HI, "tools": [{}]}, CHAT), "invalid_field", "tool 1 is not"),
    (row({"prompt": "a", "tools": [{}]}), "unsupported_field", "'tools'"),
    (row({"messages": HI, "response_format": {"type": "json_object"}}, CHAT), "no_tokenizer",
     "the form of answers needs the model's tokenizer"),
    (row({"messages": HI, "max_tokens": 2, "max_completion_tokens": 3}, CHAT), "invalid_field",
     "exclude each other"),
    ('{"id": "x", "prompt": "a"}', "mixed_formats", "is native, the rows before it are OpenAI"),
    ('{"custom_id": "x"', "invalid_json", "not JSON"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "code", "message"), BAD)
def test_a_bad_row_stops_nothing(
    make: Callable[..., Path], line: str, code: str, message: str
) -> None:
    before, bad, after = read(
        make(row({"prompt": "a"}, custom_id="1"), line, row({"prompt": "a"}, custom_id="3")),
        CHAT_RULES,
    )
    assert isinstance(before, Request) and isinstance(after, Request)
    assert isinstance(bad, RowError) and (bad.line, bad.code) == (2, code), bad
    assert message in bad.message and "\n" not in bad.message
    assert bad.reply.kind == "completion"


def test_a_native_row_may_be_a_chat(make: Callable[..., Path]) -> None:
    (batch,) = read(make(row({"messages": HI}, CHAT)), CHAT_RULES)
    chat, both = read(
        make(
            json.dumps({"id": "x", "messages": HI}),
            json.dumps({"prompt": "a", "messages": HI}),
        ),
        CHAT_RULES,
    )
    assert isinstance(batch, Request) and isinstance(chat, Request)
    assert chat.prompt_ids == batch.prompt_ids and chat.reply == Reply(of_messages=True)
    assert isinstance(both, RowError) and both.code == "invalid_prompt"


def test_chats_need_a_tokenizer_and_its_template(make: Callable[..., Path]) -> None:
    class Plain(ByteTokenizer):
        has_chat_template = False

    for tokenizer, code in ((None, "no_tokenizer"), (Plain(), "no_chat_template")):
        (bad,) = read(make(row({"messages": HI}, CHAT)), replace(RULES, tokenizer=tokenizer))
        assert isinstance(bad, RowError) and bad.code == code


def test_the_first_json_object_decides_for_the_file(make: Callable[..., Path]) -> None:
    broken, no_row, batch, native = read(
        make("{", "[]", row({"prompt": "a"}), '{"id": "n", "prompt": "a"}')
    )
    assert (broken.id, no_row.id) == ("line-1", "line-2")
    assert broken.reply.kind == no_row.reply.kind == "completion"
    assert isinstance(broken, RowError)
    assert json.loads(result_line(broken))["custom_id"] == "line-1"
    assert isinstance(batch, Request)
    assert isinstance(native, RowError) and (native.id, native.code) == ("n", "mixed_formats")
    native, batch = read(make('{"id": "n", "prompt": "a"}', row({"prompt": "a"})))
    assert isinstance(native, Request)
    assert isinstance(batch, RowError) and (batch.id, batch.code) == ("x", "mixed_formats")
    assert batch.reply.kind == "native"
    assert [row.reply.kind for row in read(make("{", "["))] == ["native"] * 2
    many = read(make(*["{"] * 3000, row({"prompt": "a"})))
    assert [row.line for row in many] == [*range(1, 3002)] and isinstance(many[-1], Request)
    assert many[-2].reply.kind == "completion"


@pytest.mark.parametrize(
    ("line", "needed"),
    [
        (row({"prompt": [1]}), False),
        (row({"prompt": "a"}), True),
        (row({"prompt": [[1], "a"]}), True),
        (row({"prompt": [[1], [2]]}), False),
        (row({"messages": HI}, CHAT), True),
        (row(3), False),
        (row({"prompt": 3}), False),
    ],
)
def test_needs_tokenizer(make: Callable[..., Path], line: str, needed: bool) -> None:
    with RequestReader(make(line), defaults=SamplingParams()) as reader:
        assert reader.needs_tokenizer() is needed


# --- duplicate ids


def test_every_id_is_there_once(make: Callable[..., Path]) -> None:
    first = make(
        '{"id": "a", "prompt": "a"}',
        '{"id": "a", "prompt": "b"}',
        '{"id": "line-4", "prompt": "a"}',
        '{"prompt": "a"}',
        "{broken",
        '{"id": "line-5", "prompt": "a"}',
        '{"id": "line-8", "prompt": "a"}',
        '{"id": "a", "prompt": "a"}',
    )
    rows = read(first)
    names = ["a", "line-2", "line-4", "line-4-duplicate", "line-5", "line-6", "line-8"]
    assert [r.id for r in rows] == [*names, "line-8-duplicate"]
    failed = {r.line: r for r in rows if isinstance(r, RowError)}
    assert [r.line for r in rows] == list(range(1, 9)) and set(failed) == {2, 4, 5, 6, 8}
    assert failed[5].code == "invalid_json"
    assert failed[2].code == "duplicate_id" and "has the id 'a'" in failed[2].message


def test_duplicate_custom_ids(make: Callable[..., Path]) -> None:
    first, again = read(make(row({"prompt": "a"}), row({"prompt": "a"})))
    assert isinstance(first, Request) and isinstance(again, RowError)
    assert (again.id, again.code, again.reply.kind) == ("line-2", "duplicate_id", "completion")


# --- writing


def test_output_rows(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    error = RowError(id="e", line=4, code="c", message="why", reply=Reply("completion"))
    before = int(time.time())
    with ResultWriter(path) as writer:
        writer.write(replace(completion("t"), reply=Reply("completion", "m")))
        writer.write(replace(completion("c"), reply=Reply("chat", "m")))
        writer.write(error)
        writer.write(replace(completion("n", text=None), reply=Reply("completion")))
    text, chat, failed, bare = map(json.loads, path.read_text().splitlines())
    assert before <= text["response"]["body"].pop("created") <= time.time()
    key = text["id"].removeprefix("batch_req_")
    assert len(key) == 32
    assert text == {
        "id": f"batch_req_{key}",
        "custom_id": "t",
        "response": {
            "status_code": 200,
            "request_id": f"req_{key}",
            "body": {
                "id": f"cmpl-{key}",
                "object": "text_completion",
                "model": "m",
                "choices": [{"index": 0, "text": "so", "finish_reason": "stop", "logprobs": None}],
                "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
            },
        },
        "error": None,
    }
    body = chat["response"]["body"]
    assert body["object"] == "chat.completion" and body["id"].startswith("chatcmpl-")
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "so"}
    assert failed["response"] is None and failed["custom_id"] == "e"
    assert failed["error"] == {"code": "c", "message": "why", "line": 4}
    assert bare["response"]["body"]["choices"][0]["token_ids"] == [5, 6]
    assert len({row["id"] for row in (text, chat, failed, bare)}) == 4


@pytest.mark.parametrize(
    ("body", "url", "asked"),
    [
        ({"prompt": "a", "logprobs": 5}, TEXT, 5),
        ({"prompt": "a", "logprobs": 0}, TEXT, 0),
        ({"prompt": "a", "logprobs": False}, TEXT, None),
        ({"messages": HI, "logprobs": True, "top_logprobs": 20}, CHAT, 20),
        ({"messages": HI, "logprobs": True}, CHAT, 0),
        ({"messages": HI, "logprobs": False, "top_logprobs": 0}, CHAT, None),
    ],
)
def test_log_probabilities_that_rows_ask_for(
    make: Callable[..., Path], body: object, url: str, asked: int | None
) -> None:
    (request,) = read(make(row(body, url)), CHAT_RULES)
    assert isinstance(request, Request) and request.params.logprobs == asked


def test_log_probabilities_in_results(tmp_path: Path) -> None:
    """In the shapes of both endpoints. A token may be part of a character, and there may be none
    that the choice is among. Tokens with one text count once."""
    half = "\N{REPLACEMENT CHARACTER}"
    likely = [TokenLogprob(i, -0.5 * i, text) for i, text in enumerate(("a", " é", half, half))]
    logprobs = (Logprobs(likely[1], tuple(likely[:1])), Logprobs(likely[3], tuple(likely[2:])))
    bare = tuple(
        Logprobs(c._replace(text=None), tuple(t._replace(text=None) for t in top))
        for c, top in logprobs
    )
    result = replace(completion("t"), reply=Reply("completion"), logprobs=logprobs)
    with ResultWriter(tmp_path / "out.jsonl") as writer:
        writer.write(result)
        writer.write(replace(result, reply=Reply("chat")))
        writer.write(replace(result, text=None, logprobs=bare))
        writer.write(replace(result, reply=Reply(), logprobs=logprobs[:1]))
    *rows, native = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    text, chat, bare_text = (r["response"]["body"]["choices"][0]["logprobs"] for r in rows)
    assert text == {
        "tokens": [" é", half],
        "token_logprobs": [-0.5, -1.5],
        "top_logprobs": [{"a": 0.0, " é": -0.5}, {half: -1.0}],
        "text_offset": [0, 2],
    }
    first = {"token": "a", "logprob": 0.0, "bytes": [97]}
    assert chat["content"][0] == {
        "token": " é", "logprob": -0.5, "bytes": [32, 195, 169], "top_logprobs": [first]
    }  # fmt: skip
    assert chat["content"][1]["bytes"] is None and chat["refusal"] is None
    assert len(chat["content"][1]["top_logprobs"]) == 2
    assert bare_text["tokens"] == ["token_id:1", "token_id:3"]
    assert native["logprobs"] == [
        {"token_id": 1, "text": " é", "logprob": -0.5,
         "top": [{"token_id": 0, "text": "a", "logprob": 0.0}]}
    ]  # fmt: skip


def test_a_row_is_written_with_its_last_choice(tmp_path: Path) -> None:
    """Prompts count once in `usage`, as OpenAI has it; an error of a choice is the row's.

    The requests of choices that have not finished begin again.
    """
    replies = [Reply("completion", "m", choice, 4, 2) for choice in range(4)]
    results = [
        replace(completion("x", text=f"{i}"), reply=reply, prompt_tokens=10 + i // 2)
        for i, reply in enumerate(replies)
    ]
    error = RowError(id="y", line=2, code="c", message="m", reply=replies[2])
    rows = []
    for id in "xy":
        first, *further = (
            Request(id=id, line=1, prompt_ids=(5,), params=SamplingParams(), reply=reply)
            for reply in replies
        )
        rows.append(replace(first, further=tuple(further)))
    unfinished = Unfinished(rows)
    assert [(r and r.id, r and r.reply) for r in unfinished] == [
        (i, r) for i in "xy" for r in replies
    ]
    other = [unfinished.finish(replace(r, id="y")) for r in results[3:] + results[:2]]
    found = [unfinished.finish(results[i]) for i in (2, 0, 3)]
    assert other == [None] * 3 and found == [None] * 3
    assert [(r and r.id, r and r.reply.choice) for r in unfinished] == [("x", 1), ("y", 2)]
    assert unfinished.finish(error) == replace(error, message="choice 2: m")
    whole = unfinished.finish(results[1])
    assert isinstance(whole, Completion)
    assert whole == replace(results[0], further=tuple(results[1:]))
    assert list(unfinished) == []
    with ResultWriter(tmp_path / "out.jsonl") as writer:
        writer.write(whole)
    body = json.loads((tmp_path / "out.jsonl").read_text())["response"]["body"]
    assert [(c["index"], c["text"]) for c in body["choices"]] == [(i, f"{i}") for i in range(4)]
    assert body["usage"] == {"prompt_tokens": 21, "completion_tokens": 8, "total_tokens": 29}


def test_ids_follow_from_the_custom_id(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = []
    for name in ("a", "b"):
        with ResultWriter(tmp_path / name) as writer:
            writer.write(replace(completion("x"), reply=Reply("chat")))
        lines.append(json.loads((tmp_path / name).read_text()))
        lines[-1]["response"]["body"].pop("created")
    assert lines[0] == lines[1]


@pytest.mark.parametrize("cut", ["", '{"id":"batch_req_12', "\0\0"])
def test_resume_goes_by_custom_id(tmp_path: Path, cut: str) -> None:
    path = tmp_path / "out.jsonl"
    reply = Reply("chat")
    with ResultWriter(path) as writer:
        writer.write(replace(completion("a"), reply=reply))
        writer.write(RowError(id="b", line=2, code="c", message="m", reply=reply))
    whole = path.read_text()
    path.write_text(whole + cut)
    with ResultWriter(path, resume=True) as writer:
        assert path.read_text() == whole and writer.failed_before == 1
        assert [writer.is_done(i) for i in "abc"] == [True, True, False]


def test_a_batch_input_is_no_output(make: Callable[..., Path]) -> None:
    path = make(COMPLETION_LINE.strip(), row({"prompt": "a"}))
    with pytest.raises(UsageError, match="line 2 is not a result row"):
        ResultWriter(path, resume=True).__enter__()
