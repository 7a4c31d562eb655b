"""Fields and options of prompts' texts: continued messages, begin tokens, --chat-template."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import transformers
from click.testing import CliRunner, Result
from prompt_files import longest_first, open_reader
from tiny_tokenizer import make_tokenizer_files

from dakrun.cli import main
from dakrun.config import SamplingParams
from dakrun.demo import MODEL
from dakrun.requests import PromptRules, Request, Tokenizer
from dakrun.requests.native_rows import parse_native
from dakrun.requests.openai_rows import parse_batch
from dakrun.requests.prompts import BadRow

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m['role'] }}>{{ m['content'] | trim }}"
    "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "It is "}]


def rules_of(folder: Path, **config: Any) -> PromptRules:
    tokenizer = Tokenizer.load(make_tokenizer_files(folder, **config))
    return PromptRules(vocab_size=999, max_model_len=99, max_positions=99, tokenizer=tokenizer)


def parsed(rules: PromptRules, **fields: Any) -> Any:
    (row,) = parse_native(fields, SamplingParams(), rules)
    return row


def chat_row(**body: Any) -> dict[str, Any]:
    return {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}


def test_a_message_is_continued_as_in_transformers(tmp_path: Path) -> None:
    rules = rules_of(tmp_path, chat_template=TEMPLATE)
    auto = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = auto.apply_chat_template(CHAT, tokenize=False, continue_final_message=True)
    assert text == "</s><user>hi</s><assistant>It is"
    wanted = tuple(auto.encode(text, add_special_tokens=False))
    flags = {"messages": CHAT, "continue_final_message": True, "add_special_tokens": False}
    row = parsed(rules, **flags, add_generation_prompt=False)
    assert row.prompt_ids == wanted
    assert row.reply.continues and not row.reply.is_chat  # so its first space is kept
    (batch,) = parse_batch(chat_row(**flags), SamplingParams(), rules)
    assert batch.prompt_ids == wanted and batch.reply.continues
    plain = parsed(rules, messages=CHAT, continue_final_message=False, add_generation_prompt=True)
    text = auto.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert plain.prompt_ids == tuple(auto.encode(text, add_special_tokens=False))
    assert plain.reply.is_chat


@pytest.mark.parametrize(
    ("row", "processes"),
    [
        ({"messages": CHAT[:1]}, 1),
        (chat_row(model="m", messages=CHAT[:1]), 1),
        ({"prompt": "a"}, 0),
    ],
)
def test_a_file_of_chats_starts_the_templates_process_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row: dict[str, Any], processes: int
) -> None:
    """It takes a second, in which the model is loaded."""
    started = []

    class Counted(subprocess.Popen[str]):
        def __init__(self, *given: Any, **options: Any) -> None:
            started.append(given)
            super().__init__(*given, **options)

    monkeypatch.setattr(subprocess, "Popen", Counted)
    rules = rules_of(tmp_path, chat_template=TEMPLATE)
    (source := tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    with open_reader(source) as reader:
        reader.prepare(rules)
        assert len(started) == processes
        (request,) = longest_first(reader, rules)
    assert isinstance(request, Request) and request.prompt_ids
    assert len(started) == processes


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": CHAT[:1], "continue_final_message": True}, "a last message of the assistant"),
        ({"messages": CHAT, "continue_final_message": 1}, "is a number, not true or false"),
        ({"messages": CHAT, "add_generation_prompt": False}, "is not the opposite of"),
        (
            {"messages": CHAT, "continue_final_message": True, "add_generation_prompt": True},
            "is not the opposite of",
        ),
        ({"messages": CHAT, "add_special_tokens": True}, "a chat template adds its own"),
        ({"prompt": "a", "continue_final_message": True}, "need messages"),
        ({"prompt": "a", "add_special_tokens": "no"}, "is a string, not true or false"),
    ],
)
def test_fields_that_do_not_fit(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    rules = rules_of(tmp_path, chat_template=TEMPLATE)
    with pytest.raises(BadRow, match=message):
        parsed(rules, **fields)


def test_begin_tokens(tmp_path: Path) -> None:
    """One for each text that has none, none where the row says so; `</s>` is this model's."""
    rules = rules_of(tmp_path)
    tokenizer = rules.tokenizer
    assert tokenizer is not None
    (a,) = parsed(rules, prompt="a", add_special_tokens=False).prompt_ids
    assert parsed(rules, prompt="a").prompt_ids == (2, a) and tokenizer.own_begin == 0
    assert parsed(rules, prompt="</s>a").prompt_ids == (2, a) and tokenizer.own_begin == 1
    assert parsed(rules, prompt="</s></s>a").prompt_ids == (2, 2, a) and tokenizer.own_begin == 2
    assert parsed(rules, prompt="</s>a", add_special_tokens=False).prompt_ids == (2, a)
    assert parsed(rules, prompt="a</s>").prompt_ids == (2, a, 2) and tokenizer.own_begin == 2
    body = {"prompt": ["a", [a]], "add_special_tokens": False}
    row = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    assert [one.prompt_ids for one in parse_batch(row, SamplingParams(), rules)] == [(a,), (a,)]


def run(*flags: str) -> Result:
    base = ["generate", "--model", "model", "-i", "p.jsonl", "-o", "out.jsonl", "--device", "cpu"]
    return CliRunner().invoke(main, [*base, *flags])


def test_a_chat_template_is_a_file_and_part_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(MODEL, "model")
    chat = [{"role": "user", "content": "two plus three"}]
    begin = Tokenizer.load(Path("model")).encode("two plus three =")
    rows = [{"id": 1, "messages": chat}, {"id": 2, "prompt_token_ids": begin}]
    rows.append({"id": 3, "prompt": "<s>two plus three ="})
    Path("p.jsonl").write_text("\n".join(map(json.dumps, rows)))
    Path("t.jinja").write_text("{{ bos_token }}{{ messages[0]['content'] }} =", "utf-8-sig")
    result = run("--chat-template", "t.jinja")
    assert result.exit_code == 0, result.output
    assert "begin token of their own got no second one: 1\n" in result.stderr
    found = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
    assert {row["id"] for row in found} == {1, 2, 3}
    assert {tuple(row["token_ids"]) for row in found} == {tuple(found[0]["token_ids"])}
    assert {row["usage"]["prompt_tokens"] for row in found} == {len(begin)}
    assert run("--resume", "--chat-template", "t.jinja").exit_code == 0
    refused = run("--resume")
    assert refused.exit_code == 2 and "chat template differs" in refused.stderr
    Path("t.jinja").write_text("{{ messages[0]['content'] }} =")
    refused = run("--resume", "--chat-template", "t.jinja")
    assert refused.exit_code == 2 and "chat template differs" in refused.stderr


def test_a_chat_template_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("p.jsonl").write_text("{}\n")
    Path("binary").write_bytes(b"\xff\xfe{")
    for name, reason in (("none", "No such file"), (".", "Is a directory"), ("binary", "UTF-8")):
        result = run("--chat-template", name)
        assert result.exit_code == 2
        error, hint = result.stderr.splitlines()
        assert f"--chat-template {name}: cannot be read" in error and reason in error
        assert hint.startswith("hint: ")
