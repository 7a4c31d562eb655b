"""Prompts and parameters in every form that LLM.generate, LLM.chat and LLM.stream take."""

import json
import os
import pty
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dakrun import LLM, Completion, SamplingParams
from dakrun.demo import MODEL
from dakrun.errors import CannotRun, UsageError
from dakrun.requests import Request, RowError

ROOT = Path(__file__).resolve().parent.parent
TEMPLATE = (
    "{{ bos_token }}{% if tools %}{{ tools[0].function.name }} {% endif %}"
    "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %} {{ verb | default('equals') }}{% endif %}"
)
SUM, OTHER = "seven plus eighteen", "eleven plus twenty six"
TEXT, MORE = f"{SUM} equals", f"{OTHER} equals"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's model, with a chat template: the contents, then "equals"."""
    folder = tmp_path_factory.mktemp("models") / "sums"
    shutil.copytree(MODEL, folder)
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps({**settings, "chat_template": TEMPLATE}), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(model, device="cpu", batch_size=4) as loaded:
        yield loaded


def ids_of(llm: LLM, text: str) -> list[int]:
    assert llm.rules.tokenizer is not None
    return list(llm.rules.encode(text))


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def texts(found: list[Completion]) -> list[str | None]:
    return [one.text for one in found]


def test_a_prompt_and_prompts_in_every_form(llm: LLM) -> None:
    params = SamplingParams(max_tokens=8)
    text, more = texts(llm.generate([TEXT, MORE], params))
    assert text == "twenty five" and more == "thirty seven"
    ids, others = ids_of(llm, TEXT), ids_of(llm, MORE)
    chat = user(SUM)
    single: list[Any] = [
        *(TEXT, {"prompt": TEXT}, ids, tuple(ids), iter(ids), {"prompt_token_ids": ids}),
        {"prompt_token_ids": tuple(ids), "prompt": "said otherwise", "multi_modal_data": None},
    ]
    for prompt in single:
        assert texts(llm.generate(prompt, params)) == [text]
    mixed: list[Any] = [MORE, {"prompt": TEXT}, ids, {"prompt_token_ids": others}]
    assert texts(llm.generate(mixed, params)) == [more, text, text, more]
    assert texts(llm.generate(iter(mixed), params)) == [more, text, text, more]
    answer = texts(llm.chat(chat, params))
    assert answer == [text]
    chats: list[Any] = [chat, {"messages": chat}, [chat], ({"messages": chat},)]
    for prompt in chats:
        assert texts(llm.generate(prompt, params)) == answer
    assert texts(llm.chat([chat, chat], params)) == answer * 2
    assert texts(llm.generate([chat, MORE], params)) == [*answer, more]
    assert llm.generate([], params) == llm.chat([], params) == []


def test_results_repeat_their_prompts(llm: LLM) -> None:
    ids = ids_of(llm, TEXT)
    chat = user(SUM)
    params = SamplingParams(max_tokens=2)
    text, tokens, said = llm.generate([TEXT, ids, chat], params)  # type: ignore[list-item]
    assert (text.prompt, tokens.prompt, said.prompt) == (TEXT, None, f"<s>{TEXT}")
    assert text.prompt_token_ids == tokens.prompt_token_ids == tuple(ids)
    assert said.prompt_token_ids == tuple(ids), "the template has a begin token"
    assert [one.request_id for one in (text, tokens, said)] == ["0", "1", "2"]
    assert text.outputs[0].text == text.text and text.outputs[0].index == 0 and text.finished


def test_tools_and_keywords_reach_the_template(llm: LLM) -> None:
    function = {"name": "seven", "parameters": {"type": "object"}}
    given: dict[str, Any] = {
        "tools": [{"type": "function", "function": function}],
        "chat_template_kwargs": {"verb": "equals"},
    }
    messages, params = user("plus eighteen"), SamplingParams(max_tokens=8)
    (found,) = llm.chat(messages, params, **given)
    assert (found.prompt, found.text) == (f"<s>{TEXT}", "twenty five")
    (again,) = llm.generate({"messages": messages, **given}, params)
    assert (again.prompt, again.text) == (found.prompt, found.text)
    (other,) = llm.chat(user(SUM), params, chat_template_kwargs={"verb": "is"})
    assert other.prompt == f"<s>{SUM} is"
    with pytest.raises(UsageError, match=r"prompt 0: .* set is not JSON serializable"):
        llm.chat(user(SUM), params, chat_template_kwargs={"verb": {1}})


def test_the_last_message_may_be_continued(llm: LLM) -> None:
    messages = [*user(TEXT), {"role": "assistant", "content": " twenty"}]
    (found,) = llm.chat(messages, SamplingParams(max_tokens=1), continue_final_message=True)
    assert found.prompt == f"<s>{TEXT} twenty" and found.text.strip() == "five"  # type: ignore[union-attr]


def test_params_are_one_for_all_or_one_for_each(llm: LLM) -> None:
    lengths = [1, 3, 2]
    each = [SamplingParams(max_tokens=n, ignore_eos=True) for n in lengths]
    for found in (
        llm.generate([TEXT] * 3, each),
        llm.generate([TEXT] * 3, sampling_params=iter(each)),
        llm.generate([TEXT] * 3, each, use_tqdm=False),
        llm.chat([user(TEXT)] * 3, each, progress=False),
    ):
        assert [len(one.token_ids) for one in found] == lengths
    (found_one,) = llm.generate(TEXT, [each[1]])
    assert len(found_one.token_ids) == 3
    for count, said in ((2, "2"), (4, "4")):
        with pytest.raises(UsageError, match=f"there are {said} SamplingParams for 3 prompts"):
            llm.generate([TEXT] * 3, [each[0]] * count)
    with pytest.raises(UsageError, match="there are more than 3 SamplingParams for 3 prompts"):
        llm.generate([TEXT] * 3, iter([each[0]] * 5))
    with pytest.raises(UsageError, match="there are 3 SamplingParams for 1 prompts"):
        llm.generate(TEXT, each)
    with pytest.raises(UsageError, match="params and sampling_params are the same"):
        llm.generate(TEXT, each[0], sampling_params=each[0])


def test_without_max_tokens_a_completion_fills_the_positions(llm: LLM, model: Path) -> None:
    params = SamplingParams(max_tokens=None, ignore_eos=True)
    before = llm.report()["requests"]["capped"]
    found, other = llm.generate([TEXT, "one"], params)
    for one in (found, other):
        assert one.prompt_tokens + len(one.token_ids) == llm.config.max_positions
        assert one.finish_reason == "length"
    assert llm.report()["requests"]["capped"] == before, "nobody asked for more"
    with LLM(model, device="cpu", batch_size=1, max_model_len=20) as short:
        (found,) = short.generate(TEXT, params)
    assert found.prompt_tokens + len(found.token_ids) == 20


def test_one_stop_string(llm: LLM) -> None:
    (found,) = llm.generate(TEXT, SamplingParams(max_tokens=8, stop=" five"))
    assert (found.text, found.finish_reason) == ("twenty", "stop")


def test_n_completions_of_a_prompt(llm: LLM) -> None:
    options: dict[str, Any] = {"max_tokens": 8, "temperature": 20.0, "seed": 7, "ignore_eos": True}
    several, single = llm.generate(
        [TEXT, TEXT], [SamplingParams(n=4, **options), SamplingParams(max_tokens=3)]
    )
    assert [one.index for one in several.choices] == [0, 1, 2, 3]
    assert several.outputs == several.choices and len(single.choices) == 1
    assert several.choices[0].text == several.text
    assert len({one.token_ids for one in several.choices}) == 4, "each has a seed of its own"
    (first,) = llm.generate(TEXT, SamplingParams(**options))
    assert first.token_ids == several.token_ids, "the first does not depend on n"
    (streamed,) = llm.stream(TEXT, SamplingParams(n=4, **options))
    assert isinstance(streamed, Completion)
    assert [c.token_ids for c in streamed.choices] == [c.token_ids for c in several.choices]


def test_no_seed_is_seed_0(llm: LLM) -> None:
    options: dict[str, Any] = {"max_tokens": 8, "temperature": 3.0, "ignore_eos": True}
    found = [
        llm.generate(TEXT, SamplingParams(seed=seed, **options))[0].token_ids
        for seed in (None, 0, 1)
    ]
    assert found[0] == found[1] != found[2]


def test_streams_of_prompts(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (9, 1, 5)]
    for prompts in ([TEXT] * 3, iter([TEXT] * 3)):
        found = list(llm.stream(prompts, params))
        assert [one.id for one in found] == ["1", "2", "0"], "as they finish"
    (found,) = [list(llm.stream(ids_of(llm, TEXT), params[0]))]
    assert len(found) == 1
    with pytest.raises(UsageError, match="prompt 1: the prompt has no tokens"):
        llm.stream([[5], []])  # before the stream begins
    assert list(llm.stream([])) == list(llm.stream(iter([]))) == []


def test_requests_have_their_own_params(llm: LLM) -> None:
    request = Request(id="x", line=1, prompt_ids=(5, 6), params=SamplingParams(max_tokens=1))
    assert [one.id for one in llm.stream([request])] == ["x"]
    with pytest.raises(UsageError, match="Requests have their own params"):
        llm.stream([request], SamplingParams())
    with pytest.raises(UsageError, match="Requests have their own params"):
        list(llm.stream(iter([request]), SamplingParams()))


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ({}, "its dict needs one of prompt, prompt_token_ids, messages"),
        ({"prompt": TEXT, "messages": user(TEXT)}, "its dict needs one of"),
        ({"prompt": [5]}, "the value of 'prompt' in its dict is not text"),
        ({"prompt_token_ids": "5"}, "not text, a list of token ids"),
        ({"prompt_token_ids": []}, "the prompt has no tokens"),
        ({"prompt": TEXT, "multi_modal_data": {"image": 1}}, "'multi_modal_data' not supported"),
        ({"prompt": TEXT, "continue_final_message": True}, "need messages"),
        ([*user(TEXT), {"role": "oracle", "content": "x"}], "the role of message 2 is 'oracle'"),
        ([*user(TEXT), TEXT], "not text, a list of token ids"),
        ([{"role": "user", "content": TEXT, "tool_calls": [1]}], "role 'user', has 'tool_calls'"),
        ([5, "six"], "not text, a list of token ids"),
        ([10**9], "token id 1000000000 is not in the model's vocabulary"),
    ],
)
def test_wrong_prompts_are_named_before_anything_runs(llm: LLM, prompt: object, said: str) -> None:
    before = llm.engine.stats.prefill_steps
    with pytest.raises(UsageError, match=f"^prompt 1: .*{re.escape(said)}") as caught:
        llm.generate([TEXT, prompt])  # type: ignore[list-item]
    assert caught.value.hint == "nothing was generated"
    assert llm.engine.stats.prefill_steps == before


def test_a_request_of_unknown_tokens_is_its_own_error(llm: LLM) -> None:
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    requests = [
        Request(id=str(i), line=i + 1, prompt_ids=(5, token), params=params)
        for i, token in enumerate((6, 99999, -1, 7))
    ]
    found = {result.id: result for result in llm.stream(requests)}
    errors = [found.pop(name) for name in "12"]
    for error, said in zip(errors, ("99999 is not in the model's", "-1 is negative"), strict=True):
        assert isinstance(error, RowError) and error.code == "invalid_prompt"
        assert error.message.startswith(f"token id {said}")
    assert [len(result.token_ids) for result in found.values()] == [2, 2]


@pytest.mark.parametrize(
    "options",
    [{"stop_token_ids": [5, 99999]}, {"logit_bias": {99999: 1}}, {"bad_words": [[5, 99999]]}],
)
def test_tokens_of_options_are_in_the_vocabulary(llm: LLM, options: dict[str, Any]) -> None:
    (name,) = options
    size = llm.config.vocab_size
    said = f"^prompt 1: {name} has token id 99999, not in the model's vocabulary of {size}$"
    for call in (llm.generate, llm.stream):
        with pytest.raises(UsageError, match=said):
            call([TEXT] * 2, [SamplingParams(), SamplingParams(**options)])
    every = [SamplingParams(max_tokens=2, ignore_eos=True, **row) for row in ({}, options, {})]
    requests = [
        Request(id=str(i), line=i + 1, prompt_ids=(5, 6, 7), params=params)
        for i, params in enumerate(every)
    ]
    for given in (requests, iter(requests)):  # such a Request is its own error, the others go on
        found = {result.id: result for result in llm.stream(given)}
        error = found.pop("1")
        assert isinstance(error, RowError) and f"prompt 1: {error.message}" == said[1:-1]
        assert (error.code, error.line) == ("invalid_field", 2)
        assert [len(result.token_ids) for result in found.values()] == [2, 2]


def test_a_prompt_without_room_is_named_before_anything_runs(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = llm.engine.stats.prefill_steps
    monkeypatch.setattr(type(llm.engine.admission), "most_positions", 30)
    params = [SamplingParams(max_tokens=n) for n in (5, 31 - len(ids_of(llm, TEXT)), 40)]
    with pytest.raises(CannotRun, match=r"^prompt 2: .*there is room for 30 tokens"):
        llm.generate([TEXT] * 3, params)
    assert llm.engine.stats.prefill_steps == before
    assert len(llm.generate([TEXT] * 2, params[:2])) == 2, "the second one just fits"


@pytest.mark.parametrize("name", ["lora_request", "priority", "prompt_token_ids"])
def test_arguments_of_vllm_are_named(llm: LLM, name: str) -> None:
    assert len(llm.generate(TEXT, SamplingParams(max_tokens=1), **{name: None})) == 1
    with pytest.raises(UsageError, match=f"^{name} is not supported$"):
        llm.generate(TEXT, **{name: [1]})
    with pytest.raises(UsageError, match=f"^{name} is not supported$"):
        llm.chat(user(TEXT), **{name: [1]})


def test_tools_of_a_chat_are_checked(llm: LLM) -> None:
    for empty in (None, []):
        assert len(llm.chat(user(TEXT), SamplingParams(max_tokens=1), tools=empty)) == 1
    with pytest.raises(UsageError, match="prompt 0: tool 1 is not"):
        llm.chat(user(TEXT), tools=[{"type": "function"}])
    with pytest.raises(UsageError, match="prompt 0: messages are not a list of messages"):
        llm.chat([TEXT])  # type: ignore[list-item]


# vllm-project/vllm's examples/offline_inference/basic/basic.py and chat.py, shortened; with prompt
# dicts and parameters for each prompt.
VLLM_SCRIPT = """
import sys
from vllm import LLM, SamplingParams

prompts = ["seven plus eighteen equals", "eleven plus twenty six equals"]
sampling_params = SamplingParams(
    n=1, temperature=0.0, top_p=0.95, top_k=-1, max_tokens=8, stop=None, seed=None,
    presence_penalty=0.0, frequency_penalty=0.0, repetition_penalty=1.0,
)

def show(outputs):
    for output in outputs:
        assert output.finished
        for one in output.outputs:
            print([output.request_id, output.prompt, len(output.prompt_token_ids), one.index,
                   one.text, len(one.token_ids), one.finish_reason])

llm = LLM(model=sys.argv[1], tensor_parallel_size=1, dtype="float32", max_model_len=64)
outputs = llm.generate(prompts, sampling_params)
show(outputs)
show(llm.generate({"prompt": prompts[0]}, sampling_params=sampling_params, use_tqdm=False))
ids = [list(output.prompt_token_ids) for output in outputs]
show(llm.generate([{"prompt_token_ids": each} for each in ids], sampling_params))
show(llm.generate(ids[1], sampling_params))
show(llm.generate(prompts, [sampling_params, SamplingParams(max_tokens=1, n=2, stop="x")]))
conversation = [{"role": "user", "content": "seven plus eighteen"}]
show(llm.chat(conversation, sampling_params, use_tqdm=False))
show(llm.chat([conversation] * 2, sampling_params=sampling_params))
try:
    SamplingParams(allowed_token_ids=[5])
except Exception as problem:
    print(problem)
"""


def test_a_script_for_vllm_runs_after_changing_the_import(model: Path) -> None:
    script = VLLM_SCRIPT.replace("from vllm import", "from dakrun import")
    command = [sys.executable, "-c", script, str(model)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", "no bar where stderr is no terminal"
    text, more = [TEXT, 5, 0, "twenty five", 3, "stop"], [MORE, 6, 0, "thirty seven", 3, "stop"]
    wanted: list[list[object]] = [
        *(["0", *text], ["1", *more], ["0", *text]),
        *(["0", None, *text[1:]], ["1", None, *more[1:]], ["0", None, *more[1:]]),
        *(["0", *text], *(["1", MORE, 6, n, "thirty", 1, "length"] for n in (0, 1))),
        *([n, f"<s>{TEXT}", *text[1:]] for n in ("0", "0", "1")),
    ]
    *found, refused = done.stdout.splitlines()
    assert found == [str(one) for one in wanted]
    assert refused == "allowed_token_ids is not supported"


BAR_SCRIPT = """
import sys
from dakrun import LLM, SamplingParams
with LLM(sys.argv[1], device="cpu", batch_size=4) as llm:
    prompts = ["seven plus eighteen equals"] * 40
    for shown in ({"use_tqdm": False}, {}, {"progress": False}):
        print(len(llm.generate(prompts, SamplingParams(max_tokens=8), **shown)))
        print("|end|", end="", file=sys.stderr, flush=True)
"""


def test_a_request_has_one_completion() -> None:
    with pytest.raises(UsageError, match=r"request 'a': n is 2, and a Request has one") as refusal:
        Request(id="a", line=1, prompt_ids=(3,), params=SamplingParams(n=2))
    assert refusal.value.hint and "LLM.generate" in refusal.value.hint


def test_a_bar_in_a_terminal_counts_prompts(model: Path) -> None:
    """And there is none where it is not wanted, before and behind one that is."""
    screen, terminal = pty.openpty()
    command = [sys.executable, "-c", BAR_SCRIPT, str(model)]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=terminal, env=environment, text=True
    ) as process:
        os.close(terminal)
        seen = b""
        try:
            while part := os.read(screen, 65536):
                seen += part
        except OSError:  # the terminal's end
            pass
        assert process.stdout is not None and process.stdout.read() == "40\n" * 3
    os.close(screen)
    assert process.returncode == 0
    silent, shown, silent_again, rest = seen.split(b"|end|")
    assert b"40/40" in shown
    assert silent == silent_again == rest == b""
