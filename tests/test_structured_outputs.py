"""Answers of a given form in whole runs: JSON of a schema, expressions, choices, grammars."""

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import tiny_models
from click.testing import CliRunner, Result
from tiny_tokenizer import make_tokenizer_files

from dakrun import LLM, SamplingParams, StructuredOutputsParams
from dakrun.cli import main
from dakrun.demo import MODEL
from dakrun.engine import Admission, SwapSpace
from dakrun.errors import UsageError
from dakrun.plan import Policy

HALF = ("--offload-ratio", "0.3", "--kv-offload-ratio", "0.5")


def closed(**properties: Any) -> dict[str, Any]:
    """The schema of an object that has these properties alone."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


SCHEMAS = [
    closed(
        a={"type": "integer", "minimum": 3, "maximum": 40}, b={"enum": ["red", "größe", "東京"]}
    ),
    closed(x=closed(y=closed(z={"type": "boolean"})), n={"type": "null"}),
    {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 9}, "maxItems": 4},
    closed(code={"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"}),
    closed(v={"anyOf": [{"type": "integer", "minimum": 0, "maximum": 9}, {"enum": ["x", "é"]}]}),
    {"$defs": {"p": closed(x={"enum": [1, 2]})}, **closed(p={"$ref": "#/$defs/p"})},
    closed(t={"type": "string", "minLength": 1, "maxLength": 3}),
    {"const": {"a": [1, "zwei"]}},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of random weights whose tokens are bytes, as are those of its tokenizer."""
    folder = tmp_path_factory.mktemp("forms")
    path = tiny_models.save("llama-gqa3-tied", folder / "model")
    tokenizer = make_tokenizer_files(folder / "tokenizer", chat_template=CHAT)
    for name in ("vocab.json", "merges.txt", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, path / name)
    return path


CHAT = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}{{ m.reasoning_content }};{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% if enable_thinking is false %}<think></think>"
    "{% elif enable_thinking %}<think>{% endif %}{% endif %}{# </think> #}"
)


def generate(model: Path, rows: Sequence[dict[str, Any]], *flags: str) -> Result:
    Path("rows.jsonl").write_text("".join(json.dumps({"max_tokens": 90, **r}) + "\n" for r in rows))
    base = ["generate", "--model", str(model), "-i", "rows.jsonl", "-o", "out.jsonl"]
    return CliRunner().invoke(
        main, [*base, "--device", "cpu", "--max-model-len", "128", "--batch-size", "4", *flags]
    )


def results() -> list[dict[str, Any]]:
    found = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
    return sorted(found, key=lambda row: int(row["id"].removeprefix("line-")))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def schema_rows(count: int) -> list[dict[str, Any]]:
    return [
        {
            "prompt": f"Row {i}:",
            "temperature": i % 2,
            "structured_outputs": {"json": SCHEMAS[i % len(SCHEMAS)]},
        }
        for i in range(count)
    ]


def test_answers_are_json_of_their_schemas_whatever_runs_beside_them(model: Path) -> None:
    rows = schema_rows(8)
    run = generate(model, rows, *HALF)
    assert run.exit_code == 0, run.stderr
    found = results()
    ended = [(i, row) for i, row in enumerate(found) if row["finish_reason"] == "stop"]
    assert len(ended) > 5
    for i, row in ended:
        jsonschema.validate(json.loads(row["text"]), SCHEMAS[i % len(SCHEMAS)])
    assert [row["valid"] for row in found] == [row["finish_reason"] == "stop" for row in found]
    assert f"; {len(ended)} of 8 answers valid" in " ".join(run.stderr.split())
    # Alone, all in one tier; and after a run that was killed.
    assert generate(model, rows, "--overwrite", "--batch-size", "1").exit_code == 0
    assert results() == found
    lines = Path("out.jsonl").read_bytes().splitlines(keepends=True)
    Path("out.jsonl").write_bytes(b"".join(lines[:3]) + lines[3][:20])
    assert generate(model, rows, "--resume", "--batch-size", "4").exit_code == 0
    assert results() == found


@pytest.mark.parametrize(
    ("asked", "pattern"),
    [
        ({"structured_outputs": {"regex": "[a-c]{2,5}(x|y)"}}, "[a-c]{2,5}(x|y)"),
        ({"structured_outputs": {"choice": ["yes", 'no "1"', "größer"]}}, 'yes|no "1"|größer'),
        ({"structured_outputs": {"grammar": 'start: "a" N+ "!"\nN: /[0-9]/'}}, "a[0-9]+!"),
        ({"structured_outputs": {"grammar": 'root ::= "a" [0-9] "!"?'}}, "a[0-9]!?"),
        ({"guided_regex": "[0-9]{3}", "ignore_eos": True}, "[0-9]{3}"),
        ({"guided_choice": ["on", "off"]}, "on|off"),
        ({"guided_grammar": 'start: "z"'}, "z"),
        ({"guided_json": {"enum": [1, 2]}}, "1|2"),
        ({"guided_json": '{"const": "x"}'}, '"x"'),
        ({"response_format": {"type": "json_object"}, "max_tokens": 100}, r"\s*\{.*\}"),
        ({"response_format": {"type": "text"}, "structured_outputs": {"choice": ["k"]}}, "k"),
    ],
)  # fmt: skip
def test_other_forms(model: Path, asked: dict[str, Any], pattern: str) -> None:
    rows = [{"prompt": f"Row {i}:", "temperature": 1, **asked} for i in range(3)]
    assert generate(model, rows).exit_code == 0
    ended = [row for row in results() if row["finish_reason"] == "stop"]
    assert ended or pattern.startswith(r"\s")
    for row in results():
        assert row["valid"] == (row["finish_reason"] == "stop")
        if row["valid"]:
            assert re.fullmatch(pattern, row["text"], re.DOTALL)


def test_rows_of_openai(model: Path) -> None:
    schema = closed(a={"enum": [1, 2]})
    formats = [
        {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}},
        {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}},
    ]
    messages = [{"role": "user", "content": "Hi"}]
    bodies = [{"messages": messages, "response_format": one, "max_tokens": 90} for one in formats]
    rows = [
        {"custom_id": str(i), "method": "POST", "url": "/v1/chat/completions", "body": body}
        for i, body in enumerate(bodies)
    ]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["generate", "--model", str(model), "-i", "rows.jsonl", "-o", "-", "--device", "cpu"]
    run = CliRunner().invoke(main, [*command, "--reasoning", "off"])
    assert run.exit_code == 0, run.stderr
    for line in run.stdout.splitlines():
        (choice,) = json.loads(line)["response"]["body"]["choices"]
        jsonschema.validate(json.loads(choice["message"]["content"]), schema)
        assert choice["finish_reason"] == "stop"


def test_what_cannot_be_followed_is_the_error_of_its_row_alone(model: Path) -> None:
    asked: list[tuple[dict[str, Any], str]] = [
        ({"structured_outputs": {"json": {"type": "array", "uniqueItems": True}}}, "uniqueItems"),
        ({"structured_outputs": {"json": {"not": {}}}}, 'Unimplemented keys: ["not"]'),
        ({"guided_json": {"$ref": "http://127.0.0.1:9/x"}}, "http://127.0.0.1:9/x"),
        ({"structured_outputs": {"json": {"type": "text"}}}, "Invalid type: text"),
        ({"structured_outputs": {"json": False}}, "no answer can satisfy"),
        ({"structured_outputs": {"json": {"x-guidance": {"lenient": True}}}}, "'x-guidance'"),
        ({"structured_outputs": {"json": "{"}}, "the schema is not JSON"),
        ({"structured_outputs": {"json": [1]}}, "json is [1]; json must be a JSON schema"),
        ({"structured_outputs": {"regex": "a(b"}}, "unclosed group"),
        ({"structured_outputs": {"regex": "(?=a)b"}}, "look-around"),
        ({"structured_outputs": {"choice": []}}, "a list of strings, not empty"),
        ({"structured_outputs": {"grammar": "start: foo"}}, 'unknown name: "foo"'),
        ({"structured_outputs": {"grammar": 'root ::= "a'}}, "read as GBNF: Unexpected end"),
        ({"structured_outputs": {}}, "structured_outputs has nothing"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "has regex and choice"),
        ({"structured_outputs": {"regexp": "a"}}, "regexp is not supported"),
        ({"structured_outputs": "a"}, "structured_outputs is a string, not an object"),
        ({"structured_outputs": {"regex": "a"}, "guided_json": {}}, "exclude each other"),
        ({"response_format": {"type": "xml"}}, "'xml', not text, json_object or json_schema"),
        ({"response_format": {"type": "json_schema"}}, "no json_schema with a schema"),
        ({"thinking_token_budget": -1}, "an integer of at least 0"),
    ]
    rows = [{"prompt": "a", **fields} for fields, _ in asked]
    run = generate(model, [*rows, {"prompt": "a", "structured_outputs": {"choice": ["k"]}}])
    *errors, fine = results()
    assert run.exit_code == 1 and fine["text"] == "k"
    for error, (_, said) in zip(errors, asked, strict=True):
        assert said in error["error"]["message"]
        assert error["error"]["code"] in ("invalid_grammar", "invalid_field")
    for flags in ([], ["--model", str(model)]):
        checked = CliRunner().invoke(main, ["validate", "-i", "rows.jsonl", "--json", *flags])
        rows = json.loads(checked.stdout)["rows"]
        assert checked.exit_code == 1 and rows["cannot_run"] == len(asked)
        same = [error["error"]["message"] for error in rows["first_errors"]]
        assert same == [error["error"]["message"] for error in errors[:10]]


def test_a_tokenizer_that_has_no_bytes_is_an_error_of_the_row() -> None:
    rows = [{"prompt": "seven"}, {"prompt": "seven", "structured_outputs": {"regex": "a"}}]
    assert generate(MODEL, rows, "--max-model-len", "32").exit_code == 1
    plain, error = results()
    assert plain["text"] and "can't determine decoder type" in error["error"]["message"]


def test_a_lenient_schema_is_checked_afterwards(model: Path) -> None:
    items = {"type": "integer", "minimum": 1, "maximum": 2}
    schema = {"type": "array", "items": items, "minItems": 3, "maxItems": 3, "uniqueItems": True}
    loose = {"schema": {"type": "array", "maxItems": 0, "not": {}}, "strict": False}
    rows = [
        {"prompt": "a", "structured_outputs": {"json": schema, "strict": False}},
        {"prompt": "a", "response_format": {"type": "json_schema", "json_schema": loose}},
    ]
    assert generate(model, rows).exit_code == 0
    twice, empty = results()
    assert twice["finish_reason"] == "stop" and len(json.loads(twice["text"])) == 3
    assert twice["valid"] is False
    assert json.loads(empty["text"]) == [] and empty["valid"] is False


def test_what_is_cut_off_says_so_and_is_kept(model: Path) -> None:
    rows = [
        {"prompt": "a", "structured_outputs": {"regex": "b{50}"}, "max_tokens": 7},
        {"prompt": "a", "structured_outputs": {"regex": "ab*"}, "max_tokens": 3, "stop": "a"},
        {"prompt": "a", "structured_outputs": {"regex": "b*c"}, "stop": "b"},
    ]
    assert generate(model, rows).exit_code == 0
    cut, stopped, other = results()
    assert (cut["text"], cut["finish_reason"], cut["valid"]) == ("b" * 7, "length", False)
    assert (stopped["text"], stopped["finish_reason"], stopped["valid"]) == ("", "stop", False)
    assert other["finish_reason"] == "stop" and other["valid"] == other["text"].endswith("c")


@pytest.fixture(scope="module")
def llm(model: Path) -> LLM:
    return load(model)


def load(model: Path, batch_size: int = 6) -> LLM:
    return LLM(
        model, device="cpu", batch_size=batch_size, max_model_len=160, expected_prompt=20,
        expected_tokens=10, policy=Policy(offload_ratio=0.3, kv_offload_ratio=0.5),
    )  # fmt: skip


def test_a_grammar_beats_other_options(llm: LLM) -> None:
    def answer(**options: Any) -> Any:
        form = {"choice": ["hehehe"]}
        params = SamplingParams(max_tokens=9, structured_outputs=form, logprobs=1, **options)
        return llm.generate(["a"], params)[0]

    plain = answer()
    assert plain.text == "hehehe" and plain.valid
    for options in (
        {"min_tokens": 9},
        {"bad_words": ["h", "he", "hehe"]},
        {"logit_bias": {5: 100.0}},
        {"ignore_eos": True},
        {"temperature": 1.0, "top_k": 1},
    ):
        found = answer(**options)
        assert found.text == "hehehe" and found.finish_reason == "stop"
    # Log-probabilities are the model's: the likeliest token is not the one that was forced.
    tokens = zip(plain.token_ids, plain.logprobs, strict=True)
    assert any(own.top[0].token_id != token for token, own in tokens)


def test_forms_in_python(llm: LLM) -> None:
    form = StructuredOutputsParams(regex="[ab]{3}")
    params = [SamplingParams(max_tokens=9, structured_outputs=one) for one in (form, None)]
    guided, free = llm.generate(["a", "a"], params)
    assert re.fullmatch("[ab]{3}", guided.text) and guided.valid is True
    assert free.valid is None
    with pytest.raises(UsageError, match="prompt 0: the regular expression cannot be followed"):
        llm.generate(["a"], SamplingParams(structured_outputs={"regex": "("}))
    with pytest.raises(UsageError, match="structured_outputs is 3"):
        SamplingParams(structured_outputs=3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="whitespace_pattern is not supported"):
        StructuredOutputsParams(regex="a", whitespace_pattern=" ")


def test_a_row_goes_on_in_its_grammar_after_it_gave_up_its_slot(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some go on from copies of their KV blocks, others compute them again."""
    prompts = [[5 + i % 7] * (i * 37 % 100 + 1) for i in range(18)]
    params = [
        SamplingParams(
            max_tokens=55, temperature=1.0, seed=i, ignore_eos=True,
            structured_outputs={"regex": f"([a-{'cdef'[i % 4]}]{{4}},){{10}}"} if i % 3 else None,
        )
        for i in range(18)
    ]  # fmt: skip
    with load(model, 1) as llm:
        alone = llm.generate(prompts, params)
    assert all(re.fullmatch("([a-f]{4},){10}", one.text) for one in alone if one.valid is not None)
    monkeypatch.setattr(Admission, "_has_room", lambda *_: True)
    with load(model) as llm:
        llm.engine.preemption.swap = SwapSpace(llm.engine.runner.cache, 1)
        llm.engine.preemption.swap.open()
        llm.engine.preemption.swap.wait()
        beside = llm.generate(prompts, params)
        assert [one.token_ids for one in beside] == [one.token_ids for one in alone]
        assert 0 < llm.engine.stats.swapped < llm.engine.stats.preempted


def chat(llm: LLM, *, thinking: bool | None, **params: Any) -> Any:
    kwargs = {} if thinking is None else {"enable_thinking": thinking}
    messages = [{"role": "user", "content": "Hi"}]
    params = {"max_tokens": 90, "temperature": 1.0, **params}
    return llm.chat(messages, SamplingParams(**params), chat_template_kwargs=kwargs)[0]


def test_a_grammar_begins_behind_the_thought(llm: LLM) -> None:
    form = {"regex": "[0-9]{3}"}
    found = chat(llm, thinking=True, structured_outputs=form, thinking_token_budget=20)
    thought, closing, answer = found.text.partition("</think>")
    assert thought and closing and re.fullmatch("[0-9]{3}", answer)
    assert found.answer.content == answer and found.valid
    assert 20 <= found.answer.reasoning_tokens <= 20 + len("</think>")
    cut = chat(llm, thinking=True, structured_outputs=form)
    assert cut.finish_reason == "length" and cut.answer.content is None and cut.valid is False
    closed_before = chat(llm, thinking=False, structured_outputs=form, thinking_token_budget=20)
    assert re.fullmatch("[0-9]{3}", closed_before.text)
    # The model may open a thought itself; this one does where a bias makes it.
    biased = {"logit_bias": {llm.rules.tokenizer.encode("<")[-1]: 100.0}}
    opened = chat(llm, thinking=None, structured_outputs=form, thinking_token_budget=9, **biased)
    assert re.fullmatch("<think>.*</think>[0-9]{3}", opened.text, re.DOTALL)
    assert re.fullmatch("[0-9]{3}", chat(llm, thinking=None, structured_outputs=form, seed=3).text)


@pytest.mark.parametrize("budget", [0, 1, 7])
def test_a_thought_is_closed_at_its_budget(llm: LLM, budget: int) -> None:
    found = chat(llm, thinking=True, thinking_token_budget=budget, ignore_eos=True)
    free = chat(llm, thinking=True, ignore_eos=True)
    assert found.token_ids[:budget] == free.token_ids[:budget]
    close = llm.rules.tokenizer.encode("</think>", add_special_tokens=False)[1:]
    assert found.token_ids[budget : budget + 8] == llm.rules.tokenizer.encode("</think>")[-8:]
    assert close and found.answer.reasoning_tokens == budget + 8
    assert len(found.token_ids) == 90
