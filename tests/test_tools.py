"""Tools and template switches: prompts as transformers renders them, and calls found in answers."""

import inspect
import json
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import transformers
from click.testing import CliRunner, Result
from result_rows import completion
from tiny_tokenizer import chat_tokenizer, make_tokenizer_files

from dakrun.cli import main
from dakrun.config import SamplingParams
from dakrun.demo import MODEL
from dakrun.engine.progress import RequestState
from dakrun.engine.results import completion as completion_of
from dakrun.engine.step import Sampling
from dakrun.grammars import Grammars
from dakrun.requests import Answer, BadRow, EstimatedRules, PromptRules, Reply, Request, Tokenizer
from dakrun.requests.chat_template import ChatTemplate
from dakrun.requests.lengths import PromptStarts, json_lengths
from dakrun.requests.messages import RESERVED
from dakrun.requests.native_rows import parse_native
from dakrun.requests.openai_rows import parse_batch
from dakrun.requests.tool_calls import CALL_TOKENS, ToolCall, call_format_of, find_calls
from dakrun.requests.writer import result_line

# Written after the templates that these models come with.
QWEN3 = """
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% endif %}# Tools
<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools>
Answer with <tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call><|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}{{ message.content }}
{%- for call in message.tool_calls or [] %}
{%- set call = call.function if call.function else call %}
<tool_call>
{"name": "{{ call.name }}", "arguments": {% if call.arguments is string %}{{ call.arguments }}
{%- else %}{{ call.arguments | tojson }}{% endif %}}
</tool_call>{% endfor %}<|im_end|>
{% elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}
<tool_response>
{{ message.content }}
</tool_response>{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>
{% endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% endif %}{% endif %}"""
HERMES = """{{ bos_token }}
{%- if tools %}<|im_start|>system
You may call functions: <tools> {{ tools | map(attribute='function') | list | tojson }} </tools>
For each call return <tool_call>
{"name": <name>, "arguments": <dict>}
</tool_call><|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' and message.tool_calls is defined %}<|im_start|>assistant
{%- for call in message.tool_calls %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% elif message.role == 'tool' %}<|im_start|>tool
<tool_response>{"name": "{{ message.name }}", "content": {{ message.content }}}</tool_response>
{%- else %}<|im_start|>{{ message.role }}{% if message.name %} name={{ message.name }}{% endif %}
{{ message.content }}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
LLAMA = """{{- bos_token }}
{%- if not date_string is defined %}{% set date_string = '26 Jul 2024' %}{% endif %}
{%- if not tools is defined %}{% set tools = none %}{% endif %}
{%- if messages[0]['role'] == 'system' %}
{%- set system = messages[0]['content'] | trim %}{% set messages = messages[1:] %}
{%- else %}{% set system = '' %}{% endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
{%- if builtin_tools is defined or tools is not none %}Environment: ipython
{% endif %}Today: {{ date_string }}
{% if tools is not none %}{% for t in tools %}{{ t | tojson(indent=4) }}
{% endfor %}Answer {"name": function name, "parameters": dictionary of its arguments}.
{% endif %}{{ system }}<|eot_id|>
{%- for message in messages %}
{%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
{{- message['content'] | trim + '<|eot_id|>' }}
{%- elif 'tool_calls' in message %}
{%- if not message.tool_calls | length == 1 %}{{ raise_exception('one call at a time') }}{% endif %}
{%- set call = message.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{{- '{"name": "' + call.name + '", "parameters": ' }}{{ call.arguments | tojson }}}<|eot_id|>
{%- else %}
{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}
{%- if message.content is mapping or message.content is iterable %}{{ message.content | tojson }}
{%- else %}{{ message.content }}{% endif %}<|eot_id|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}
"""
MISTRAL = """{{ bos_token }}
{%- set users = messages | selectattr('role', 'equalto', 'user') | list %}
{%- for message in messages %}
{%- if message.role == 'user' %}
{%- if tools is not none and message == users[-1] %}[AVAILABLE_TOOLS] [
{%- for tool in tools %}{"type": "function", "function": {
{%- for key, value in tool.function.items() if key != 'return' %}"{{ key }}": {{ value | tojson }}
{%- if not loop.last %}, {% endif %}{% endfor %}}}{% if not loop.last %}, {% endif %}{% endfor %}]
{{- '[/AVAILABLE_TOOLS]' }}{% endif %}
{{- '[INST] ' + message.content + '[/INST]' }}
{%- elif message.tool_calls is defined and message.tool_calls is not none %}[TOOL_CALLS] [
{%- for call in message.tool_calls %}
{%- if not call.id is defined or call.id | length != 9 %}
{{- raise_exception('ids have 9 characters') }}{% endif %}
{{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' }}
{%- if not loop.last %}, {% endif %}{% endfor %}]{{ eos_token }}
{%- elif message.role == 'assistant' %} {{ message.content | trim }}{{ eos_token }}
{%- elif message.role == 'tool' %}[TOOL_RESULTS] {"content": {{ message.content | string }}, {# #}
{{- '"call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- else %}{{ raise_exception('unknown role') }}{% endif %}{% endfor %}"""
TEMPLATES = {"qwen3": QWEN3, "hermes": HERMES, "llama": LLAMA, "mistral": MISTRAL}

PLACE = {"type": "object", "properties": {"place": {"type": "string", "description": "où, <b>"}}}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "?", "parameters": PLACE}},
    {"type": "function", "function": {"name": "now", "parameters": {}, "strict": True}},
]
CALL = {
    "id": "a1b2c3d4e",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"place": "Zürich", "days": [1, null]}'},
}
USER: dict[str, Any] = {"role": "user", "content": "Is it warm?", "name": "ada"}
ASKED = [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
TOLD = [*ASKED, {"role": "tool", "content": '{"t": 21}', "name": "weather", "tool_call_id": "a1b2"}]
CHATS: dict[str, list[dict[str, Any]]] = {
    "user": [USER],
    "told": TOLD,
    "on": [
        *TOLD,
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "And now?"},
    ],
}


@pytest.fixture(scope="module", params=TEMPLATES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer with one of the templates."""
    made = tmp_path_factory.mktemp(request.param)
    return make_tokenizer_files(made, chat_template=TEMPLATES[request.param])


def rules_of(tokenizer: Tokenizer) -> PromptRules:
    return PromptRules(vocab_size=999, max_model_len=9999, max_positions=9999, tokenizer=tokenizer)


def batch(rules: PromptRules, **body: Any) -> Any:
    row = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    return parse_batch(row, SamplingParams(), rules)[0]


def named(name: str) -> dict[str, Any]:
    """The tool_choice that wants a call of this function."""
    return {"type": "function", "function": {"name": name}}


def native(rules: PromptRules, **fields: Any) -> Any:
    return parse_native(fields, SamplingParams(), rules)[0]


def with_dicts(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with arguments as transformers wants them."""
    found = json.loads(json.dumps(messages))
    for message in found:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return list(found)


def test_prompts_are_those_of_transformers(folder: Path) -> None:
    rules = rules_of(Tokenizer.load(folder))
    auto = transformers.AutoTokenizer.from_pretrained(folder)
    texts = set()
    for messages in CHATS.values():
        for tools in (None, TOOLS):
            for kwargs in ({}, {"enable_thinking": False, "date_string": "<1>", "bos_token": "B"}):
                wanted = auto.apply_chat_template(
                    with_dicts(messages),
                    tools=tools,
                    tokenize=False,
                    add_generation_prompt=True,
                    **kwargs,
                )
                given: dict[str, Any] = {"messages": messages, "chat_template_kwargs": kwargs}
                given["tools"] = tools or []
                ids = tuple(auto.encode(wanted, add_special_tokens=False))
                for row in (native(rules, **given), batch(rules, **given)):
                    assert row.prompt_ids == ids
                texts.add(wanted)
    assert len(texts) == 3 * 2 * 2, "each of the arguments reaches the template"


def test_the_template_for_tools(tmp_path: Path) -> None:
    """A tokenizer may have one for chats with tools and one for others."""
    templates = [
        {"name": "default", "template": "{{ messages[0].content }}!"},
        {
            "name": "tool_use",
            "template": "{{ messages[0].content }}{{ tools | tojson }}<tool_call>",
        },
    ]
    rules = rules_of(Tokenizer.load(make_tokenizer_files(tmp_path, chat_template=templates)))
    auto = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for tools in (None, TOOLS):
        wanted = auto.apply_chat_template([USER], tools=tools, tokenize=False)
        row = native(rules, messages=[USER], tools=tools)
        assert row.prompt_ids == tuple(auto.encode(wanted, add_special_tokens=False))
        assert row.reply.call_format == ("hermes" if tools else None)


def test_keywords_that_transformers_takes_for_its_own_are_refused() -> None:
    signature = inspect.signature(transformers.PreTrainedTokenizerBase.apply_chat_template)
    own = set(signature.parameters) - {"self", "documents", "kwargs"}
    assert own <= set(RESERVED)
    rules = rules_of(chat_tokenizer(QWEN3))
    for name in RESERVED:
        with pytest.raises(BadRow, match=f"chat_template_kwargs has '{name}', which it may not"):
            native(rules, messages=[USER], chat_template_kwargs={name: True})


def call_with(arguments: object) -> list[dict[str, Any]]:
    function = {"name": "weather", "arguments": arguments}
    return [USER, {"role": "assistant", "tool_calls": [{**CALL, "function": function}]}]


@pytest.mark.parametrize(
    ("fields", "code", "message"),
    [
        ({"messages": call_with("{place")}, "invalid_prompt", "tool call 1 of message 2 are not J"),
        ({"messages": call_with("[1]")}, "invalid_prompt", "message 2 are an array, not an object"),
        ({"messages": call_with([])}, "invalid_prompt", "message 2 are an array, not an object"),
        ({"messages": call_with(3)}, "invalid_prompt", "message 2 are a number, not an object"),
        ({"messages": [USER, {"role": "assistant"}]}, "invalid_prompt", "content of message 2 is"),
        ({"messages": [{**USER, "name": 3}]}, "invalid_prompt", "name of message 1 is not a"),
        ({"messages": [{**USER, "tool_call_id": "x"}]}, "invalid_prompt", "'user', has 'tool_cal"),
        ({"messages": [USER], "tools": {}}, "invalid_field", "tools is an object, not an array"),
        ({"messages": [USER], "tools": [3]}, "invalid_field", "tool 1 is not"),
        ({"messages": [USER], "tools": [*TOOLS, {**TOOLS[0], "type": "x"}]}, "invalid_field",
         "tool 3 is not"),
        ({"messages": [USER], "tools": [{"type": "function", "function": {"name": ""}}]},
         "invalid_field", "the function of tool 1 has no name"),
        ({"messages": [USER], "tool_choice": "required"}, "invalid_field", "there are no tools"),
        ({"messages": [USER], "tools": TOOLS, "tool_choice": "some"}, "invalid_field",
         "tool_choice is 'some', not 'auto', 'none', 'required' or "),
        ({"messages": [USER], "tools": TOOLS, "tool_choice": {"type": "function"}},
         "invalid_field", "tool_choice is an object, not 'auto'"),
        ({"messages": [USER], "tools": TOOLS, "tool_choice": named("then")}, "invalid_field",
         "tool_choice names 'then', which is not in tools"),
        ({"messages": [USER], "tools": TOOLS, "tool_choice": "required", "guided_regex": "a"},
         "invalid_field", "tool_choice wants a call, and the answer another form"),
        ({"messages": [USER], "tools": TOOLS, "parallel_tool_calls": 1}, "invalid_field",
         "parallel_tool_calls is a number, not true or false"),
        ({"messages": [USER], "chat_template_kwargs": [1]}, "invalid_field", "an array, not an o"),
        ({"prompt": "a", "tools": TOOLS}, "invalid_field", "'tools' need messages"),
        ({"prompt": "a", "chat_template_kwargs": {"a": 1}}, "invalid_field", "need messages"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_the_row_s_error(fields: dict[str, Any], code: str, message: str) -> None:
    rules = rules_of(chat_tokenizer(QWEN3))
    with pytest.raises(BadRow, match=message) as caught:
        native(rules, **fields)
    assert caught.value.code == code


def test_tools_and_messages_of_tools_are_not_lost() -> None:
    plain = "{% for m in messages if m.role != 'tool' %}{{ m.content }}{% endfor %}"
    rules = rules_of(chat_tokenizer(plain))
    named = [{"role": "user", "content": "weather now"}]  # as the tools are
    for _ in range(2):  # the second time by what was found before
        with pytest.raises(BadRow, match="the text has nothing of the tools"):
            native(rules, messages=named, tools=TOOLS)
    with pytest.raises(BadRow, match="nothing of message 3, whose role is 'tool'"):
        native(rules, messages=TOLD)


def test_a_template_is_probed_once_for_chats_of_a_shape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = rules_of(Tokenizer.load(make_tokenizer_files(tmp_path, chat_template=QWEN3)))
    render, rendered = ChatTemplate.render, []

    def count(self: ChatTemplate, *given: Any) -> str:
        rendered.append(given)
        return render(self, *given)

    monkeypatch.setattr(ChatTemplate, "render", count)
    for number in range(5):
        chat = [*call_with({"place": number}), {"role": "tool", "content": f"{number}"}]
        tool = {"type": "function", "function": {"name": f"weather{number}"}}
        native(rules, messages=chat, tools=[tool])
    # Each chat; the form of contents in two ways; a probe with tools and one without.
    assert len(rendered) == 5 + 2 + 2


def test_lengths_count_tools() -> None:
    fields = {"messages": TOLD, "tools": TOOLS}
    with_tools, without = (
        json_lengths(row, 5, 9999, PromptStarts()).prompt for row in (fields, {"messages": [USER]})
    )
    assert with_tools - without > len(json.dumps(TOOLS)) / 4
    rules = EstimatedRules(vocab_size=9, max_model_len=9999, max_positions=9999)
    assert abs(len(native(rules, **fields).prompt_ids) - with_tools) <= 2


# --- answers


W = '{"name": "weather", "arguments": {"place": "Zürich"}}'
N = '{"name": "now", "arguments": {}}'
PAIR = [("weather", {"place": "Zürich"}), ("now", {})]


@pytest.mark.parametrize(
    ("template", "text", "content", "calls"),
    [
        (QWEN3, f"<tool_call>\n{W}\n</tool_call>", "", PAIR[:1]),
        (QWEN3, f"Let me see.\n<tool_call>\n{W}", "Let me see.", PAIR[:1]),
        (HERMES, f"<tool_call>{W}</tool_call>\n<tool_call>\n{N}\n</tool_call>", "", PAIR),
        (HERMES, f"a\n<tool_call>{W}</tool_call>b", "a\nb", PAIR[:1]),
        (LLAMA, W.replace("arguments", "parameters"), "", PAIR[:1]),
        (LLAMA, f"<|python_tag|>{W}; {N}", "", PAIR),
        (MISTRAL, f"[TOOL_CALLS] [{W}, {N}]", "", PAIR),
        (MISTRAL, f"Well[TOOL_CALLS][{W}]", "Well", PAIR[:1]),
        (MISTRAL, '[TOOL_CALLS]weather[ARGS]{"place": "Zürich"}[TOOL_CALLS]now[CALL_ID]3[ARGS]{}',
         "", PAIR),
    ],
)  # fmt: skip
def test_calls_of_known_families(
    template: str, text: str, content: str, calls: list[tuple[str, Any]]
) -> None:
    form = call_format_of(template)
    assert form is not None
    found = find_calls(text, form, "row")
    assert found is not None and found[0] == content
    assert [(call.name, json.loads(call.arguments)) for call in found[1]] == calls
    assert all("Z\\u" not in call.arguments for call in found[1])
    assert found == find_calls(text, form, "row"), "a rerun repeats the ids"
    other = find_calls(text, form, "another row")
    assert other is not None
    ids = [call.id for call in (*found[1], *other[1])]
    assert len(set(ids)) == 2 * len(calls)
    assert all(len(id) == 9 and id.isalnum() for id in ids), "as Mistral's template wants them"


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (QWEN3, "It is warm."),
        (QWEN3, "<tool_call>\n<function=weather>\n</function>\n</tool_call>"),
        (QWEN3, f"<tool_call>{W}</tool_call><tool_call>" + '{"name": "now", "argu'),
        (QWEN3, '<tool_call>{"name": "weather"}</tool_call>'),
        (QWEN3, '<tool_call>{"name": "weather", "arguments": {"t": NaN}}</tool_call>'),
        (QWEN3, "<tool_call>" + "[" * 100_000),
        (LLAMA, f"{W} is what I would call."),
        (LLAMA, '{"answer": 3}'),
        (LLAMA, "3"),
        (LLAMA, ""),
        (LLAMA, '<|python_tag|>brave_search.call(query="weather")'),
        (MISTRAL, "[TOOL_CALLS]"),
        (MISTRAL, "[TOOL_CALLS] []"),
        (MISTRAL, f"[{W}]"),
    ],
)
def test_other_answers_are_left_as_text(template: str, text: str) -> None:
    form = call_format_of(template)
    assert form is not None and find_calls(text, form, "row") is None


def test_a_template_of_another_family_has_no_known_format() -> None:
    for template in (
        "{% for m in messages %}<|start_header_id|>{{ m.content }}{% endfor %}",
        "{% for m in messages %}{{ m.content }}{{ tools | tojson }}{% endfor %}",
    ):
        assert call_format_of(template) is None


@pytest.fixture(scope="module")
def caller() -> PromptRules:
    """A tokenizer to which the tokens of calls are special, as to that of Hermes."""
    return rules_of(chat_tokenizer(HERMES, ("<tool_call>", "</tool_call>")))


def answered(rules: PromptRules, text: str, reason: Any = "stop", **fields: Any) -> Any:
    """The completion of a Batch row to which the model answers `text`."""
    assert rules.tokenizer is not None
    row = batch(rules, messages=[USER], **fields)
    request = Request(id="q", line=1, prompt_ids=row.prompt_ids, params=row.params, reply=row.reply)
    state = RequestState(request, None, Sampling(), 9, row.prompt_ids)
    end = rules.tokenizer.eos_token_id
    state.tokens += [*rules.tokenizer.encode(text, add_special_tokens=False), end or 0]
    return completion_of(state, reason, rules.tokenizer)


def test_calls_in_an_answer(caller: PromptRules) -> None:
    text = f"Well.<tool_call>{W}</tool_call><tool_call>{N}</tool_call>"
    found = answered(caller, text, tools=TOOLS)
    assert found.finish_reason == "tool_calls"
    body = json.loads(result_line(found))["response"]["body"]
    (choice,) = body["choices"]
    message = choice["message"]
    assert (choice["finish_reason"], message["content"]) == ("tool_calls", "Well.")
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "weather", "arguments": '{"place": "Zürich"}'},
        {"name": "now", "arguments": "{}"},
    ]
    assert {call["type"] for call in message["tool_calls"]} == {"function"}
    again = [
        *CHATS["user"],
        message,
        *({**TOLD[2], "tool_call_id": c["id"]} for c in message["tool_calls"]),
    ]
    assert batch(caller, messages=again, tools=TOOLS), "an answer may be sent back"
    assert found.text == f"Well.{W}{N}", "the text is whole, without special tokens"

    alone = answered(caller, text.removeprefix("Well."), tools=TOOLS, parallel_tool_calls=False)
    message = json.loads(result_line(alone))["response"]["body"]["choices"][0]["message"]
    assert message["content"] is None
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["weather"]
    assert answered(caller, text, "length", tools=TOOLS).finish_reason == "length"


ARGS = MISTRAL + "{# [TOOL_CALLS]name[ARGS]{...} #}"


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize(
    ("template", "one", "several"),
    [
        (HERMES, f"<tool_call>\n{W}\n</tool_call>",
         f"<tool_call>{W}</tool_call>\n<tool_call>\n{N}\n</tool_call>"),
        (LLAMA, W.replace("arguments", "parameters"), None),
        (MISTRAL, f"[TOOL_CALLS] [{W}]", f"[TOOL_CALLS][{W}, {N}]"),
        (ARGS, '[TOOL_CALLS]weather[ARGS]{"place": "Zürich"}',
         '[TOOL_CALLS]weather[ARGS]{"place": "a"}[TOOL_CALLS]now[ARGS]{}'),
    ],
)  # fmt: skip
def test_a_call_may_be_required(
    template: str, one: str, several: str | None, special: bool
) -> None:
    marks = (*CALL_TOKENS["hermes"], *CALL_TOKENS["mistral"])
    tokenizer = chat_tokenizer(template, marks if special else ())
    grammars = Grammars(tokenizer.as_json, 999, [2])
    rules = rules_of(tokenizer)

    def allows(text: str | None, choice: Any, **fields: Any) -> bool:
        """Whether the text, which has calls that can be read, may be the whole answer."""
        if text is None:
            return False
        row = native(rules, messages=[USER], tools=TOOLS, tool_choice=choice, **fields)
        form = tokenizer.call_format()
        assert form and (text == "Hi" or find_calls(text, form, "r"))
        matcher = grammars.matcher(row.params.structured_outputs)
        ids = tokenizer.encode(text, add_special_tokens=False)
        return matcher.try_consume_tokens(list(ids)) == len(ids) and matcher.is_accepting()

    assert allows(one, "required") and allows(one, named("weather"))
    assert allows(several, "required") == (several is not None)
    assert not allows(one, named("now")) and not allows("Hi", "required")
    assert not allows(several, "required", parallel_tool_calls=False)
    assert not allows(several, named("weather"))
    wrong = one.replace('"Zürich"', "3")
    assert not allows(wrong, "required"), "the arguments follow the function's schema"


def test_a_call_cannot_be_required_in_an_unknown_format() -> None:
    rules = rules_of(chat_tokenizer("{{ messages[0].content }}{{ tools | tojson }}"))
    with pytest.raises(BadRow, match="whose format in the chat template is not known"):
        native(rules, messages=[USER], tools=TOOLS, tool_choice="required")


@pytest.mark.parametrize("fields", [{}, {"tools": []}, {"tools": TOOLS, "tool_choice": "none"}])
def test_without_tools_to_call_an_answer_is_text(
    caller: PromptRules, fields: dict[str, Any]
) -> None:
    found = answered(caller, f"<tool_call>{W}</tool_call>", **fields)
    assert (found.finish_reason, found.text, found.tool_calls) == ("stop", W, ())


def test_calls_in_a_native_row() -> None:
    calls = (ToolCall("123456789", "now", "{}"),)
    answer = Answer(content="", tool_calls=calls)
    found = replace(completion(), answer=answer, finish_reason="tool_calls", reply=Reply())
    row = json.loads(result_line(found))
    assert row["text"] == "so" and row["tool_calls"] == [
        {"id": "123456789", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    ]


# --- runs

SUMS = """{{ bos_token }}{{ messages[0].content }} {{ 'plus one' if more else '' }}
{%- if tools %}{{ tools[0].function.name }}{% endif %} ="""


def run(*flags: str) -> Result:
    base = ["generate", "--model", "model", "-i", "p.jsonl", "-o", "out.jsonl", "--device", "cpu"]
    return CliRunner().invoke(main, [*base, "--chat-template", "t.jinja", *flags])


def test_resume_sees_other_tools_and_switches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(MODEL, "model")
    Path("t.jinja").write_text(SUMS)
    row = {"id": "a", "messages": [{"role": "user", "content": "two plus three"}]}
    rows = [
        row,
        {**row, "chat_template_kwargs": {"more": True}},
        {**row, "tools": TOOLS[1:]},
        {**row, "tools": TOOLS[1:], "tool_choice": "none"},
    ]
    for before, after in pairwise(rows):
        Path("p.jsonl").write_text(json.dumps(before))
        assert run("--overwrite").exit_code == 0
        assert run("--resume").exit_code == 0
        Path("p.jsonl").write_text(json.dumps(after))
        refused = run("--resume")
        assert refused.exit_code == 2 and "1 row of the input changed" in refused.stderr
