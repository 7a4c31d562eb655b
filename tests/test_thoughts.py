"""Thoughts: whether the prompt opens one, where it ends, and what a result has of it."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers
from click.testing import CliRunner, Result
from tiny_tokenizer import chat_tokenizer, make_tokenizer_files

from dakrun import LLM
from dakrun.cli import main
from dakrun.config import SamplingParams
from dakrun.demo import MODEL
from dakrun.engine.progress import RequestState
from dakrun.engine.results import completion
from dakrun.engine.step import Sampling
from dakrun.errors import UsageError
from dakrun.requests import PromptRules, Request, StopStrings, Tokenizer
from dakrun.requests.openai_rows import parse_batch
from dakrun.requests.thoughts import Markers, Thought, given_markers, markers_of, thought_after
from dakrun.requests.writer import result_line

SHOW = "{% for m in messages %}{{ m.role }}:{{ m.reasoning_content }}{{ m.content }};{% endfor %}"
END = "{{% if add_generation_prompt %}}assistant:{}{{% endif %}}"
OFF = "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
QWEN3 = SHOW + END.format(OFF) + "{# </think> #}"
R1 = SHOW + END.format("<think>\n")
MAGISTRAL = SHOW + END.format("") + "{# [THINK] [/THINK] #}"
TOOLS = [{"type": "function", "function": {"name": "now"}}]
USER = {"role": "user", "content": "Is <think> a word?"}
THINK = Markers("<think>", "</think>")


def rules_of(template: str, special: tuple[str, ...] = ()) -> PromptRules:
    tokenizer = chat_tokenizer(template, special)
    return PromptRules(vocab_size=999, max_model_len=9999, max_positions=9999, tokenizer=tokenizer)


def parsed(rules: PromptRules, *messages: dict[str, Any], **body: Any) -> Any:
    body["messages"] = messages or [USER]
    body["messages"] = list(body["messages"])
    row = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    return parse_batch(row, SamplingParams(), rules)[0]


def answered(rules: PromptRules, text: str, reason: Any = "stop", **body: Any) -> Any:
    """The completion of a Batch row to which the model answers `text`."""
    tokenizer = rules.tokenizer
    assert tokenizer is not None
    row = parsed(rules, **body)
    request = Request(id="q", line=1, prompt_ids=row.prompt_ids, params=row.params, reply=row.reply)
    added = tokenizer.continuation(row.prompt_ids, is_chat=True)
    stop = StopStrings(row.params.stop, added.spelled, row.reply.thought)
    state = RequestState(request, stop, Sampling(), 9, row.prompt_ids)
    for token in tokenizer.encode(text, add_special_tokens=False):
        state.tokens.append(token)
        if stop.hit(state.tokens):
            break
    return completion(state, reason, tokenizer)


def body_of(found: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The message and the usage of a completion's row."""
    body = json.loads(result_line(found))["response"]["body"]
    return body["choices"][0]["message"], body["usage"]


@pytest.mark.parametrize(
    ("template", "body", "thought"),
    [
        (QWEN3, {}, Thought(THINK, begun=False)),
        (QWEN3, {"chat_template_kwargs": {"enable_thinking": True}}, Thought(THINK, begun=False)),
        (QWEN3, {"chat_template_kwargs": {"enable_thinking": False}}, None),
        (R1, {}, Thought(THINK, begun=True)),
        (MAGISTRAL, {}, Thought(Markers("[THINK]", "[/THINK]"), begun=False)),
        (SHOW, {}, None),
    ],
)
def test_the_prompt_and_the_template_tell(
    template: str, body: dict[str, Any], thought: Thought | None
) -> None:
    assert parsed(rules_of(template), **body).reply.thought == thought


@pytest.mark.parametrize(
    ("content", "thought"),
    [("Yes", None), ("<think>Hm", Thought(THINK, True)), ("<think>Hm</think>Yes", None)],
)
def test_a_continued_message_may_be_within_a_thought(content: str, thought: Thought | None) -> None:
    last = {"role": "assistant", "content": content}
    row = parsed(rules_of(R1), USER, last, continue_final_message=True)
    assert row.reply.thought == thought


def test_markers_may_be_given(tmp_path: Path) -> None:
    folder = make_tokenizer_files(tmp_path, chat_template=R1)
    assert Tokenizer.load(folder, reasoning="off").markers() is None
    assert markers_of("", "<a>,<b>") == Markers("<a>", "<b>")
    assert given_markers("auto") is given_markers("off") is None
    for wrong in ("", "<a>", "<a>,", ",<b>", "<a>,<a>", "a,b,c", None):
        with pytest.raises(UsageError, match="reasoning is"):
            given_markers(wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="reasoning is 'on'"):
        LLM(MODEL, reasoning="on")


@pytest.mark.parametrize("special", [(), tuple(THINK)])
@pytest.mark.parametrize(
    ("template", "text", "reasoning", "content"),
    [
        (R1, "Hm.\n</think>\n\nYes.", "Hm.", "Yes."),
        (R1, "<think>Hm.</think>Yes.", "Hm.", "Yes."),
        (R1, "</think>Yes. </think>", "", "Yes. </think>"),
        (QWEN3, "\n<think>\nHm.</think>\n\nYes.", "Hm.", "Yes."),
        (QWEN3, "<think>Hm", "Hm", None),
        (R1, "Hm", "Hm", None),
        (R1, "Hm</think>\n", "Hm", None),
    ],
)
def test_a_thought_is_apart_from_the_content(
    special: Any, template: str, text: str, reasoning: str, content: str | None
) -> None:
    """Whether its markers are texts, or special tokens; the whole text has all but these."""
    rules = rules_of(template, special)
    found = answered(rules, text, "length")
    message, usage = body_of(found)
    assert message == {
        "role": "assistant",
        "content": content,
        "reasoning": reasoning,
        "reasoning_content": reasoning,
    }
    thought = text[: text.index("</think>") + 8] if "</think>" in text else text
    assert rules.tokenizer is not None
    count = len(rules.tokenizer.encode(thought, add_special_tokens=False))
    assert usage["completion_tokens_details"] == {"reasoning_tokens": count}
    assert usage["completion_tokens"] == len(found.token_ids) >= count
    if not special:
        assert found.text == text


def test_answers_without_a_thought_are_as_they_were() -> None:
    rules = rules_of(QWEN3)
    found = answered(rules, "\n Yes, </think> is one.")
    message, usage = body_of(found)
    assert found.answer is None and message == {"role": "assistant", "content": found.text}
    assert "completion_tokens_details" not in usage


def test_stop_strings_are_not_searched_in_a_thought() -> None:
    rules = rules_of(QWEN3)
    text = "<think>one\n\ntwo\n</think>Well\n\nYes"
    found = answered(rules, text, stop=["\n\n", "o"])
    assert found.text == text.removesuffix("\n\nYes")
    assert body_of(found)[0]["content"] == "Well"
    assert answered(rules, " Well\n\nYes", stop="\n\n").text == " Well"
    begun = rules_of(R1)
    assert answered(begun, "a\n\nb</think>\n\nc", stop="\n\n").text == "a\n\nb</think>"
    assert answered(begun, "a\n\nb", stop="\n\n").text == "a\n\nb"


def test_looking_for_a_thought_s_end_does_not_decode_all_of_it() -> None:
    decoded = 0

    def decode(ids: Any) -> str:
        nonlocal decoded
        decoded += len(ids)
        return "\n" * len(ids)

    finder = StopStrings(("\n",), decode, Thought(THINK, begun=True))
    ids = list(range(2000))
    for count in range(1, 2001):
        assert not finder.hit(ids[:count])
    assert decoded < 2000 * 100


def test_calls_of_tools_are_searched_behind_the_thought() -> None:
    rules = rules_of(QWEN3 + "{{ tools | tojson }}<tool_call>")
    call = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    found = answered(rules, f"<think>{call}</think>\n{call}", tools=TOOLS)
    message, _ = body_of(found)
    assert found.finish_reason == "tool_calls" and message["content"] is None
    assert message["reasoning"] == call and len(message["tool_calls"]) == 1
    only = answered(rules, f"<think>{call}", "length", tools=TOOLS)
    assert only.finish_reason == "length" and only.tool_calls == ()
    broken = answered(rules, "<think>a</think><tool_call>{</tool_call>", tools=TOOLS)
    assert body_of(broken)[0]["content"] == "<tool_call>{</tool_call>"


def test_thoughts_of_earlier_answers_reach_the_template(tmp_path: Path) -> None:
    rules = rules_of(QWEN3)
    message, _ = body_of(answered(rules, "<think>Hm</think>Yes"))
    folder = make_tokenizer_files(tmp_path, chat_template=QWEN3)
    auto = transformers.AutoTokenizer.from_pretrained(folder)
    text = auto.apply_chat_template(
        [USER, message, USER], tokenize=False, add_generation_prompt=True
    )
    assert "assistant:HmYes;" in text
    for past in (message, {"role": "assistant", "content": "Yes", "reasoning": "Hm"}):
        assert parsed(rules, USER, past, USER).prompt_ids == tuple(auto.encode(text)[1:])


def test_choices_count_their_thoughts_together() -> None:
    rules = rules_of(QWEN3)
    one, two = (answered(rules, text) for text in ("<think>a</think>b", "b"))
    two = replace(two, reply=replace(two.reply, choice=1))
    usage = json.loads(result_line(replace(one, further=(two,))))["response"]["body"]["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": len("<think>a</think>")}


def test_the_end_of_a_prompt() -> None:
    assert thought_after("a <think> b", THINK) == Thought(THINK, begun=False)
    assert thought_after("a <think>\n", THINK) == Thought(THINK, begun=True)
    assert thought_after("a <think>\n\n</think>\n\n", THINK) is None


SUMS = "{{ bos_token }}{{ messages[0].content }} equals"


def run(*flags: str) -> Result:
    base = ["generate", "--model", "model", "-i", "p.jsonl", "-o", "out.jsonl", "--device", "cpu"]
    return CliRunner().invoke(main, [*base, "--chat-template", "t.jinja", *flags])


def test_a_run_with_markers_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo's model answers "twenty five": a thought that ends with "twenty"."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(MODEL, "model")
    Path("t.jinja").write_text(SUMS)
    body = {"messages": [{"role": "user", "content": "seven plus eighteen"}], "stop": ["t", "v"]}
    row = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    Path("p.jsonl").write_text(json.dumps(row))
    assert run("--reasoning", "equals,twenty").exit_code == 0
    choice = json.loads(Path("out.jsonl").read_text())["response"]["body"]["choices"][0]
    assert choice["message"]["content"] == "fi" and choice["finish_reason"] == "stop"
    assert choice["message"]["reasoning"] == ""
    assert run("--resume", "--reasoning", "equals,twenty").exit_code == 0
    refused = run("--resume")
    assert refused.exit_code == 2
    assert "reasoning was equals,twenty, now auto" in refused.stderr
    wrong = run("--overwrite", "--reasoning", "on")
    assert wrong.exit_code == 2 and "reasoning is 'on'" in wrong.stderr
