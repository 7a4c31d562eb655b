"""Rows that cannot run, as `plan -i` counts them: by reason, each with its first line."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from prompt_files import open_reader

from dakrun.cli import main
from dakrun.demo import MODEL
from dakrun.requests import EstimatedRules, RowCheck, check_rows

RULES = EstimatedRules(vocab_size=100, max_model_len=20, max_positions=20)
LINES = [
    {"id": "a", "prompt": "x"},
    {"id": "a", "prompt": "y"},
    "{bad",
    {"prompt_token_ids": [1, 2, 99999]},
    {"id": "a", "prompt": "z"},
    {"prompt": "longer " * 5000},
    {"prompt_token_ids": [3, 4, 5], "max_tokens": 7},
    {"messages": [{"role": "user", "content": "hello"}]},
]
TEXT = "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in LINES)


def plan(source: str, *more: str, model: str = "opt-125m", text: str | None = None) -> Result:
    command = ["plan", "--model", model, "--profile", "h100-sxm", "-i", source, *more]
    return CliRunner(env={"COLUMNS": "1000", "DAKRUN_DEBUG": ""}).invoke(main, command, input=text)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_reasons_are_counted_and_the_first_of_each_is_named(
    make: Callable[..., Path], pack: Callable[[bytes], bytes]
) -> None:
    checked = check_rows(open_reader(make(pack(TEXT.encode()))), RULES)
    assert checked is not None
    run, found = checked
    assert (run.requests, run.share) == (3, 1.0)
    assert (found.rows, found.whole) == (8, True)
    assert found.lines == {2, 3, 4, 5, 6} == {error.line for error in found.errors}
    assert (found.prompt_tokens, found.new_tokens) == (1 + 3 + 2, 5 + 7 + 5)
    assert [(reason.code, reason.rows, reason.line) for reason in found.reasons] == [
        *[("duplicate_id", 2, 2), ("invalid_json", 1, 3)],
        *[("invalid_prompt", 1, 4), ("prompt_too_long", 1, 6)],
    ]
    too_long = found.reasons[-1].message
    assert "about 8750 tokens by its characters, but only 19" in too_long


def test_bad_words_with_half_a_surrogate_pair_are_named(make: Callable[..., Path]) -> None:
    for line in (
        {"prompt": "a", "bad_words": ["fine", "b\ud800"]},
        {"custom_id": "x", "method": "POST", "url": "/v1/completions",
         "body": {"prompt": "a", "bad_words": ["b\ud800"]}},
    ):  # fmt: skip
        checked = check_rows(open_reader(make(json.dumps(line))), EstimatedRules())
        assert checked is not None
        (error,) = checked[1].errors
        assert error.message == "a bad word has half a surrogate pair at character 2"


def test_a_check_in_words() -> None:
    assert str(RowCheck(1, True, (), frozenset(), (), 3, 5)) == "all of 1 row can run"
    assert str(RowCheck(7, False, (), frozenset(), (), 3, 5)) == "all of the first 7 rows can run"


def test_only_the_start_of_a_long_file_is_checked(
    make: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dakrun.requests.look_ahead.LOOK_AHEAD", 4)
    checked = check_rows(open_reader(make(TEXT.encode())), RULES)
    assert checked is not None
    run, found = checked
    assert run.share == len("".join(TEXT.splitlines(keepends=True)[:4])) / len(TEXT)
    assert (found.rows, found.whole) == (4, False)
    assert str(found).startswith("3 of the first 4 rows cannot run: 1 duplicate_id (line 2: ")


def test_plan_counts_them_and_foretells_the_others(source: Path) -> None:
    shown = json.loads(plan(str(source), "--json").stdout)
    assert shown["run"]["requests"] == 3 and shown["rows"]["cannot_run"] == 5
    assert shown["rows"]["reasons"][2] == {
        "code": "invalid_prompt", "rows": 1, "line": 4,
        "message": "token id 99999 is not in the model's vocabulary of 50272",
    }  # fmt: skip
    said = plan(str(source)).stdout.splitlines()[3]
    assert said.startswith(
        "rows           5 of 8 rows cannot run: 2 duplicate_id (line 2: an earlier"
    )
    nodes = ("--nodes", "h100-sxm:2")
    command = ["plan", "--model", "opt-125m", "-i", str(source), *nodes]
    text = CliRunner().invoke(main, command).stdout
    assert f"{source}: 5 of 8 rows cannot run: 2 duplicate_id" in text
    assert json.loads(CliRunner().invoke(main, [*command, "--json"]).stdout)["rows"]["checked"] == 8


def test_standard_input_is_a_file_of_plan(source: Path) -> None:
    piped = plan("-", "--json", text=TEXT)
    assert piped.exit_code == 0, piped.stderr
    assert json.loads(piped.stdout) == json.loads(plan(str(source), "--json").stdout)
    assert "-: predicted " in plan("-", text="a prompt\n").stdout
    array = plan("-", text="[\n")
    assert array.exit_code == 2
    assert array.stderr.startswith("error: standard input: a JSON array, not one JSON object")
    utf16 = plan("-", text="\0a")
    assert utf16.exit_code == 2
    assert utf16.stderr.startswith("error: standard input: not UTF-8, but UTF-16 or binary\n")


def test_a_file_without_rows_changes_no_plan() -> None:
    empty = plan("-", text="\n\n")
    assert empty.exit_code == 0 and "there are no rows" in empty.stdout, empty.output
    shown = json.loads(plan("-", "--json", text="").stdout)
    assert (shown.pop("run"), shown.pop("rows")["checked"]) == (None, 0)
    without = ["plan", "--model", "opt-125m", "--profile", "h100-sxm", "--json"]
    assert shown == json.loads(CliRunner().invoke(main, without).stdout)
    command = ["plan", "--model", "opt-125m", "-i", "-", "--nodes", "h100-sxm:2"]
    nodes = CliRunner().invoke(main, command, input="")
    assert nodes.exit_code == 2 and nodes.stderr.startswith("error: -: has no rows\n")


def test_a_file_without_a_row_that_can_run_is_refused_with_the_reasons(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text("{bad\n{}\n", encoding="utf-8")
    refused = plan(str(path))
    assert refused.exit_code == 2 and refused.stdout == ""
    error, hint = refused.stderr.splitlines()
    assert f"error: {path}: no row can be run: 2 of 2 rows cannot run: 1 invalid_json" in error
    assert "(line 1: " in error and "(line 2: " in error and hint.startswith("hint: ")


def test_a_folder_with_its_tokenizer_judges_as_generate_does(source: Path, tmp_path: Path) -> None:
    """The same rows, codes and messages; the demo model has no chat template."""
    shown = json.loads(plan(str(source), "--json", model=str(MODEL)).stdout)["rows"]
    output = tmp_path / "out.jsonl"
    command = ["generate", "--model", str(MODEL), "-i", str(source), "-o", str(output)]
    CliRunner().invoke(main, [*command, "--device", "cpu", "--max-tokens", "2"])
    errors: dict[str, list[str]] = {}
    for row in map(json.loads, output.read_text(encoding="utf-8").splitlines()):
        if "error" in row:
            errors.setdefault(row["error"]["code"], []).append(row["error"]["message"])
    assert sum(map(len, errors.values())) == shown["cannot_run"] > 4
    assert {reason["code"]: reason["rows"] for reason in shown["reasons"]} == {
        code: len(messages) for code, messages in errors.items()
    }
    for reason in shown["reasons"]:
        assert reason["message"] in errors[reason["code"]]
