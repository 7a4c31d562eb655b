"""`dakrun validate`: every row checked before a run, its tokens counted and its run predicted."""

import gzip
import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from dakrun.cli import main
from dakrun.demo import MODEL, task
from dakrun.models import tokenizer_directory

ROWS = [
    {"id": "a", "prompt": "some text"},
    {"id": "a", "prompt": "y"},
    "{bad",
    {"id": 7, "prompt": "z", "top_p": 2},
    {"id": "b", "prompt_token_ids": [3, 4, 99999], "max_tokens": 7},
    {"messages": [{"role": "user", "content": "hello"}]},
    {"id": "c\ud800", "prompt_token_ids": [3, -4]},
]
TEXT = "".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in ROWS)
FOR_OPT = ("--model", "opt-125m", "--profile", "h100-sxm")
FOR_DEMO = ("--model", str(MODEL), "--profile", "h100-sxm")


def validate(source: Path | str, *more: str, text: str | bytes | None = None) -> Result:
    command = ["validate", "-i", str(source), *more]
    return CliRunner(env={"DAKRUN_DEBUG": ""}).invoke(main, command, input=text)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text(TEXT, encoding="utf-8")
    return path


def batch_row(number: int, **body: object) -> str:
    row = {"custom_id": f"q{number}", "method": "POST", "url": "/v1/completions", "body": body}
    return json.dumps(row) + "\n"


def test_errors_are_counted_and_shown_with_id_and_line(source: Path) -> None:
    checked = validate(source)
    assert checked.exit_code == 1 and checked.stderr == ""
    assert checked.stdout.splitlines() == [
        "4 of 7 rows cannot run:",
        *("  1 duplicate_id", "  1 invalid_json", "  1 invalid_field", "  1 invalid_prompt"),
        "line 2, id \"line-2\": duplicate_id: an earlier row has the id 'a'",
        'line 3, id "line-3": invalid_json: not JSON: '
        "Expecting property name enclosed in double quotes at column 2",
        "line 4, id 7: invalid_field: top_p is 2; top_p must be a number from 0 to 1",
        'line 7, id "c\\ud800": invalid_prompt: token id -4 is negative',
        "8 tokens in prompts, estimated; at most 263 new tokens",
    ]


def test_a_model_knows_its_vocabulary_and_predicts_the_others(source: Path) -> None:
    shown = json.loads(validate(source, *FOR_OPT, "--json").stdout)
    assert shown["estimated"] and shown["run"]["requests"] == 2
    rows = shown["rows"]
    assert (rows["checked"], rows["whole_file"], rows["cannot_run"]) == (7, True, 5)
    assert (rows["prompt_tokens"], rows["max_new_tokens"]) == (5, 256)
    assert rows["first_errors"][3] == {
        "id": "b",
        "error": {
            "code": "invalid_prompt",
            "message": "token id 99999 is not in the model's vocabulary of 50272",
            "line": 5,
        },
    }
    planned = CliRunner().invoke(
        main, ["plan", *FOR_OPT, "--max-tokens", "128", "-i", str(source), "--json"]
    )
    foretold = json.loads(planned.stdout)
    assert foretold["run"]["requests"] == 2 and foretold["rows"] == rows
    assert "\npredicted " in validate(source, *FOR_OPT).stdout


@pytest.mark.parametrize("model", [FOR_OPT, FOR_DEMO])
def test_tokens_of_options_are_in_the_vocabulary(source: Path, model: tuple[str, ...]) -> None:
    options = [{"stop_token_ids": [5, 99999]}, {"logit_bias": {"99999": 1}}]
    options += [{"bad_words": [[5, 99999]]}, {"bad_words": ["five"], "stop_token_ids": [5]}]
    rows = [json.dumps({"prompt": "five plus six", **option}) for option in options]
    source.write_text("\n".join(rows), encoding="utf-8")
    shown = json.loads(validate(source, *model, "--json").stdout)["rows"]
    said = [one["error"]["message"] for one in shown["first_errors"]]
    assert len(said) == 3 and all("has token id 99999, not in the model's" in one for one in said)


def test_a_tokenizer_judges_as_generate_does(source: Path, tmp_path: Path) -> None:
    shown = json.loads(validate(source, *FOR_DEMO, "--json").stdout)
    output = tmp_path / "out.jsonl"
    command = ["generate", "--model", str(MODEL), "-i", str(source), "-o", str(output)]
    CliRunner().invoke(main, [*command, "--device", "cpu", "--max-tokens", "2"])
    rows = map(json.loads, output.read_text(encoding="utf-8").splitlines())
    errors = sorted((row for row in rows if "error" in row), key=lambda row: row["error"]["line"])
    assert shown["rows"]["first_errors"] == errors
    assert {row["error"]["code"] for row in errors} >= {"no_chat_template", "duplicate_id"}
    assert not shown["estimated"]


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_standard_input_has_batch_rows_whose_choices_count(pack: type[bytes]) -> None:
    prompts = [task.prompt(3, 4), task.prompt(5, 6)]
    text = batch_row(1, prompt=prompts, n=3, max_tokens=2) + batch_row(2, prompt=prompts[0])
    checked = validate("-", *FOR_DEMO, "--max-tokens", "4", "--json", text=pack(text.encode()))
    assert checked.exit_code == 0, checked.stderr
    shown = json.loads(checked.stdout)
    single = validate("-", *FOR_DEMO, "--json", text=f"{prompts[0]}\n{prompts[1]}\n{prompts[0]}\n")
    assert shown["rows"]["prompt_tokens"] == json.loads(single.stdout)["rows"]["prompt_tokens"]
    assert shown["rows"]["max_new_tokens"] == 2 * 3 * 2 + 4
    assert shown["run"]["requests"] == 7


def test_all_rows_are_checked_and_ten_errors_shown(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dakrun.requests.look_ahead.LOOK_AHEAD", 4)
    source.write_text('{"prompt": "fine"}\n' * 5 + "{}\n" * 12, encoding="utf-8")
    said = validate(source).stdout.splitlines()
    assert said[:2] == ["12 of 17 rows cannot run:", "  12 invalid_prompt"]
    assert said[2].startswith('line 6, id "line-6"') and said[11].startswith("line 15, ")
    assert said[12] == "and 2 more" and len(said) == 14


def test_lengths_without_a_model_are_those_of_its_option(source: Path) -> None:
    source.write_text('{"prompt_token_ids": [1, 2, 3]}\n', encoding="utf-8")
    assert validate(source).stdout.startswith("all of 1 row can run\n3 tokens in prompts")
    short = validate(source, "--max-model-len", "3")
    assert short.exit_code == 1 and "prompt_too_long: the prompt has 3 tokens" in short.stdout
    assert validate(source, "--max-model-len", "4").stdout.endswith("at most 1 new tokens\n")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--profile", "h100-sxm"), "--profile needs --model"),
        (("--chat-template", __file__), "--chat-template needs --model"),
        (("--top-p", "2"), "top_p is 2.0"),
        (("--model", "opt-31b"), "'opt-31b': no such model directory or known name"),
        (("--model", "opt-125m", "--profile", "nowhere"), "nowhere"),
    ],
)
def test_wrong_command_lines(source: Path, more: tuple[str, ...], said: str) -> None:
    refused = validate(source, *more)
    assert refused.exit_code == 2 and refused.stdout == "" and said in refused.stderr


def test_wrong_files(tmp_path: Path) -> None:
    assert validate(tmp_path / "none.jsonl").exit_code == 2
    array = validate("-", text="[\n")
    assert array.exit_code == 2 and "error: standard input: a JSON array" in array.stderr


def test_rows_are_checked_even_if_no_run_can_be_planned(source: Path) -> None:
    """A model that the machine cannot hold: the rows' errors are shown all the same."""
    source.write_text("a prompt\n", encoding="utf-8")
    small = validate(source.rename(source.with_suffix(".txt")), *FOR_OPT, "--hbm-budget", "1MiB",
                     "--host-budget", "1MiB")  # fmt: skip
    assert small.exit_code == 0 and small.stdout.startswith("all of 1 row can run\n")
    assert small.stderr.startswith("the run is not predicted: ")
    assert len(small.stdout.splitlines()) == 2


@pytest.mark.parametrize("missing", ["absent", "broken link"])
def test_a_missing_shard_is_the_error_of_generate(
    source: Path, tmp_path: Path, missing: str
) -> None:
    """Of a folder without any weights the rows are checked all the same."""
    folder, gone = tmp_path / "model", tmp_path / "model/gone.safetensors"
    shutil.copytree(MODEL, folder)
    shard = (folder / "model.safetensors").rename(folder / "part.safetensors")
    index = {"weight_map": {"a": shard.name, "b": gone.name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    if missing == "broken link":
        gone.symlink_to("nowhere")
    output = str(tmp_path / "out.jsonl")
    command = ["--model", str(folder), "-i", str(source)]
    wanted = CliRunner().invoke(main, ["generate", *command, "-o", output, "--device", "cpu"])
    checked = CliRunner().invoke(main, ["validate", *command])
    assert wanted.exit_code == checked.exit_code == 3 and checked.stdout == ""
    assert checked.stderr == "".join(wanted.stderr.splitlines(keepends=True)[-2:])
    assert checked.stderr.startswith(f"error: {gone}: no such file\nhint: ")
    shard.unlink()
    checked = CliRunner().invoke(main, ["validate", *command])
    assert checked.exit_code == 1 and checked.stdout.splitlines()[0].endswith("cannot run:")
    assert checked.stderr.splitlines()[0] == (
        f"{folder}: weights are missing (2 weight files), and were not looked at"
    )


def test_whose_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder's own; a hub id's without its weights; none for a name or a config.json."""
    asked = []

    def download(name: str, *, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.setattr("dakrun.models.hub._no_answer", lambda name: None)
    assert tokenizer_directory(str(MODEL)) == Path(MODEL)
    assert tokenizer_directory("opt-30b") is None
    assert tokenizer_directory(str(MODEL / "config.json")) is None
    assert asked == [] and tokenizer_directory("org/name") == tmp_path
    ((name, patterns),) = asked
    assert name == "org/name" and "*.json" in patterns and "*.safetensors" not in patterns


def test_a_model_that_cannot_run_is_refused_as_by_generate(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(MODEL, folder)
    path = folder / "config.json"
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 48}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": settings}))
    refusals = []
    for command in (
        ["generate", "-i", str(source), "-o", str(tmp_path / "o.jsonl"), "--device", "cpu"],
        ["plan", "--profile", "cpu"],
        ["validate", "-i", str(source), "--profile", "cpu"],
    ):
        refused = CliRunner().invoke(main, [*command, "--model", str(folder)])
        assert refused.exit_code == 3 and "groups of 48 do not divide" in refused.stderr
        refusals.append(refused.stderr)
    assert len(set(refusals)) == 1
