"""--resume: a result belongs to the row that it was made of, and a run to its texts and limits."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from dakrun.cli import main
from dakrun.demo import MODEL
from dakrun.errors import CannotRun
from dakrun.requests import InputRow, ResultWriter, RowError, digests_path
from dakrun.requests.row_digests import Comparison, RowDigests, json_digest


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(MODEL, "model")
    return tmp_path


def run(*flags: str, source: str = "p.txt") -> Result:
    base = ["generate", "--model", "model", "-i", source, "-o", "out.jsonl", "--device", "cpu"]
    return CliRunner().invoke(main, [*base, "--max-tokens", "2", *flags])


def texts() -> dict[str, Any]:
    rows = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
    assert len({row["id"] for row in rows}) == len(rows)
    return {row["id"]: row.get("text") for row in rows}


def written() -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in Path().glob("out.jsonl*")}


@pytest.mark.parametrize("packed", [False, True])
def test_a_line_inserted_at_the_top_is_refused_or_run(packed: bool) -> None:
    Path("p.txt").write_text("one plus two =\nsix plus two =\n")
    assert run().exit_code == 0
    first = texts()
    Path("p.txt").write_text("nine plus nine =\none plus two =\nsix plus two =\n")
    before = written()
    refused = run("--resume")
    assert refused.exit_code == 2 and written() == before
    error, hint = refused.stderr.splitlines()
    assert "2 rows of the input changed" in error and "'line-1' in line 1" in error
    assert "--changed" in hint and "--force" in hint
    again = run("--resume", "--changed")
    assert again.exit_code == 0, again.output
    assert (
        "2 rows of the input changed since the results were written: they are run again"
        in again.stderr
    )
    assert texts() == {
        "line-1": texts()["line-1"],
        "line-2": first["line-1"],
        "line-3": first["line-2"],
    }
    assert run("--resume").exit_code == 0  # nothing has changed since


def test_force_keeps_old_answers_and_appended_rows_always_run() -> None:
    Path("p.txt").write_text("one plus two =\n")
    assert run().exit_code == 0
    old = texts()["line-1"]
    Path("p.txt").write_text("nine plus nine =\nsix plus two =\n")
    result = run("--resume", "--force")
    assert result.exit_code == 0
    assert "the results were written: it keeps the result of the old one (--force)" in result.stderr
    assert texts()["line-1"] == old and set(texts()) == {"line-1", "line-2"}


def test_order_of_keys_and_spaces_are_no_change_and_other_prompts_are() -> None:
    Path("p.jsonl").write_text('{"id": "a", "prompt": "one plus two =", "max_tokens": 2}\n')
    assert run(source="p.jsonl").exit_code == 0
    Path("p.jsonl").write_text('{"max_tokens":2,"prompt":"one plus two =",  "id":"a"}\n')
    assert run("--resume", source="p.jsonl").exit_code == 0
    Path("p.jsonl").write_text('{"id": "a", "prompt": "one plus three =", "max_tokens": 2}\n')
    assert run("--resume", source="p.jsonl").exit_code == 2
    assert json_digest({"id": 1, "n": 2}, "id") == json_digest({"n": 2, "id": 3}, "id")


def test_an_error_that_the_engine_finds_belongs_to_its_row() -> None:
    size = json.loads(Path("model/config.json").read_text())["vocab_size"]
    row = {"id": "a", "prompt": "one plus two =", "bad_words": [[token] for token in range(size)]}
    Path("p.jsonl").write_text(json.dumps(row))
    assert run(source="p.jsonl").exit_code == 1
    assert "no_token_allowed" in Path("out.jsonl").read_text()
    result = run("--resume", source="p.jsonl")
    assert "1 skipped" in result.stderr and "not known" not in result.stderr
    Path("p.jsonl").write_text(json.dumps({**row, "bad_words": []}))
    assert run("--resume", source="p.jsonl").exit_code == 2


def test_integer_ids_stay_integers_and_are_found_again() -> None:
    """In results and in errors, of which no second ones are written; 7 and "7" are one id."""
    rows = ['{"id": 7, "prompt": "one plus two ="}', '{"id": -3, "prompt": "six plus two ="}']
    bad = ['{"id": 9, "max_tokens": 2}', '{"id": 10, "prompt": "one", "temperature": -1}']
    Path("p.jsonl").write_text("\n".join([*rows, *bad, '{"id": "8", "prompt": "one"}']))
    assert run("--ordered", source="p.jsonl").exit_code == 1
    assert [type(id) for id in texts()] == [int, int, int, int, str]
    assert list(texts()) == [7, -3, 9, 10, "8"]
    before = Path("out.jsonl").read_bytes()
    Path("p.jsonl").write_text("\n".join([rows[0].replace("7", '"7"'), rows[1], *bad]))
    result = run("--resume", source="p.jsonl")
    assert result.exit_code == 1 and "4 skipped" in result.stderr, result.output
    assert Path("out.jsonl").read_bytes() == before


def test_a_custom_id_is_a_string() -> None:
    row = {"method": "POST", "url": "/v1/completions", "body": {"prompt": "one plus two ="}}
    Path("p.jsonl").write_text(json.dumps({"custom_id": 7, **row}))
    assert run(source="p.jsonl").exit_code == 0
    assert json.loads(Path("out.jsonl").read_text())["custom_id"] == "7"
    assert "1 skipped" in run("--resume", source="p.jsonl").stderr


def test_a_changed_row_of_a_pipe_is_refused_when_it_arrives() -> None:
    Path("p.txt").write_text("one plus two =\n")
    assert run().exit_code == 0
    flags = ["--model", "model", "-i", "-", "-o", "out.jsonl", "--device", "cpu", "--resume"]
    result = CliRunner().invoke(
        main, ["generate", *flags, "--max-tokens", "2"], input="six plus two =\n"
    )
    assert result.exit_code == 2 and "'line-1' in line 1" in result.stderr


def test_rows_that_the_input_lacks_and_results_without_a_digest_are_counted() -> None:
    Path("p.txt").write_text("one plus two =\nsix plus two =\n")
    assert run().exit_code == 0
    digests_path("out.jsonl").unlink()
    Path("p.txt").write_text("one plus two =\n")
    result = run("--resume")
    assert result.exit_code == 0
    assert "1 row of the output is not in the input: it stays\n" in result.stderr
    assert "2 rows of the output are taken as results of this input" in result.stderr


def test_a_cut_off_record_is_dropped(folder: Path) -> None:
    path = folder / "d"
    digests = RowDigests(path)
    digests.begin(afresh=True)
    digests.add("a", 1)
    digests.add("a", 2)
    digests.add("b", 3)
    digests.close()
    path.write_bytes(path.read_bytes()[:-3])
    digests = RowDigests(path)
    assert (digests.find("a"), digests.find("b")) == (2, None)
    digests.begin(afresh=False)
    digests.add("b", 4)
    digests.close()
    assert RowDigests(path).find("b") == 4
    found = RowDigests(path).compare(
        ["a", "b", "x"], [InputRow("a", 1, 2), InputRow("b", 2, 9), InputRow("c", 3, 1)]
    )
    assert found == (1, InputRow("b", 2, 9), 1, 1, 3, 2)
    one, two = (
        Comparison(n, InputRow("b", 2, 9), n, n, 3, 2).notes(
            "o", changed=True, force=False, hint=""
        )
        for n in (1, 2)
    )
    assert [note[:3] for note in one] == ["1 r"] * 3 and one[0].endswith("it is run again")
    assert [note[:3] for note in two] == ["2 r"] * 3 and two[0].endswith("they are run again")
    assert two[1] == "2 rows of the output are not in the input: they stay"


def test_a_model_is_not_loaded_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("p.jsonl").write_text('{"prompt": "one plus two ="}\n{"prompt": 3}\n')
    first = run(source="p.jsonl")
    assert first.exit_code == 1 and "1 row done, 1 failed, 0 skipped" in first.stderr
    before = written()
    with monkeypatch.context() as patch:
        patch.setattr("dakrun.llm.LLM.__init__", lambda *_, **__: pytest.fail("is loaded"))
        again = run("--resume", source="p.jsonl")
        quiet = run("--resume", "--quiet", source="p.jsonl")
    said = "0 rows done, 0 failed, 2 skipped; 1 failed before, which --retry-failed runs again"
    assert again.exit_code == quiet.exit_code == 1 and written() == before
    assert again.stderr == f"nothing is left to do, so the model is not loaded\n{said}\n"
    assert quiet.stderr == f"{said}\n"
    reported = run("--resume", "--report", "r.json", source="p.jsonl")
    assert reported.exit_code == 1 and Path("r.json").is_file()
    first = Path("r.json").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr("dakrun.llm.LLM.__init__", lambda *_, **__: pytest.fail("is loaded"))
        reported = run("--resume", "--report", "r.json", source="p.jsonl")
    assert "not loaded, and r.json stays as it is\n" in reported.stderr
    assert Path("r.json").read_bytes() == first, "nothing of it is lost"
    for other in ('{"rows": {"done": 9, "failed": 0, "skipped": 0}}', "[]", "no JSON"):
        Path("r.json").write_text(other)
        assert run("--resume", "--report", "r.json", source="p.jsonl").exit_code == 1
        assert json.loads(Path("r.json").read_text())["rows"]["skipped"] == 2, "not another run's"
    retried = run("--resume", "--retry-failed", source="p.jsonl")
    assert "1 failed, 1 skipped" in retried.stderr


def test_digests_of_an_output_that_was_deleted_are_dropped() -> None:
    Path("p.txt").write_text("one plus two =\n")
    assert run().exit_code == 0
    old = digests_path("out.jsonl").read_bytes()
    Path("out.jsonl").unlink()
    Path("p.txt").write_text("six plus two =\n")
    assert run("--resume").exit_code == 0
    assert len(digests_path("out.jsonl").read_bytes()) == len(old) == 16
    assert digests_path("out.jsonl").read_bytes() != old


def test_what_changed_of_the_texts_is_named() -> None:
    Path("p.txt").write_text("one plus two =\n")
    assert run().exit_code == 0
    for name in os.listdir("model"):  # another date is no other model
        os.utime(f"model/{name}", (1, 1))
    assert run("--resume").exit_code == 0
    config = json.loads(Path("model/tokenizer_config.json").read_text())
    Path("model/tokenizer_config.json").write_text(json.dumps({**config, "chat_template": "x"}))
    result = run("--resume")
    assert result.exit_code == 2 and "chat template differs" in result.stderr
    assert "tokenizer_config.json" not in result.stderr
    assert run("--resume", "--force", "--max-model-len", "40").exit_code == 0
    result = run("--resume", "--max-model-len", "50")
    assert result.exit_code == 2 and "max_model_len was 40, now 50" in result.stderr


def test_failed_rows_are_run_again_with_more_room() -> None:
    Path("p.txt").write_text("one plus two =\ntwo plus two plus three =\n")
    assert run("--max-model-len", "6").exit_code == 1
    before = texts()
    assert before["line-2"] is None and before["line-1"] is not None
    plain = run("--resume", "--max-model-len", "6")
    assert "1 failed before, which --retry-failed runs again" in plain.stderr
    Path("q.txt").write_text("one plus two =\n")  # the input lacks the failed row: it stays
    lacking = run("--resume", "--retry-failed", "--max-model-len", "6", source="q.txt")
    assert lacking.exit_code == 1 and "1 failed before" in lacking.stderr
    assert lacking.stderr.endswith("1 skipped; 1 failed before, not in the input\n")
    Path("p.txt").write_text("one plus two =\ntwo plus two plus four =\n")  # corrected meanwhile
    result = run("--resume", "--retry-failed", "--max-model-len", "20")
    assert result.exit_code == 0, result.output
    assert texts()["line-2"] is not None and texts()["line-1"] == before["line-1"]
    assert run("--resume", "--max-model-len", "20").exit_code == 0
    assert run("--resume", "--max-model-len", "6").exit_code == 2


@pytest.mark.parametrize("more", [(), ("--retry-failed",)])
def test_a_failed_row_that_was_corrected_counts_no_more_as_failed(more: tuple[str, ...]) -> None:
    good, bad = '{"id": "a", "prompt": "one plus two ="}\n', '{"id": "b", "prompt": "x", "y": 1}\n'
    Path("p.jsonl").write_text(good + bad)
    assert run(source="p.jsonl").exit_code == 1
    Path("p.jsonl").write_text(good + '{"id": "b", "prompt": "six plus two ="}\n')
    result = run("--resume", "--changed", *more, source="p.jsonl")
    assert "1 row done, 0 failed, 1 skipped\n" in result.stderr
    assert result.exit_code == 0 and None not in texts().values()
    Path("p.jsonl").write_text(good + bad)
    result = run("--resume", "--changed", *more, source="p.jsonl")
    assert "0 rows done, 1 failed, 1 skipped\n" in result.stderr and result.exit_code == 1


def test_the_options_need_resume() -> None:
    Path("p.txt").write_text("one plus two =\n")
    for flags in (["--changed"], ["--retry-failed"], ["--resume", "--changed", "--force"]):
        assert run(*flags).exit_code == 2


@pytest.mark.parametrize("how", ["deleted", "replaced", "truncated"])
def test_an_output_that_another_program_changes_ends_the_run(how: str) -> None:
    out = Path("out.jsonl")
    with ResultWriter(out) as writer:
        writer.write(RowError(id="a", line=1, code="c", message="m"))
        if how == "truncated":
            os.truncate(out, 0)
        else:
            out.unlink()
        if how == "replaced":
            out.write_text("")
        with pytest.raises(CannotRun, match="another program"):
            writer.write(RowError(id="b", line=2, code="c", message="m"))
        with pytest.raises(CannotRun, match="another program") as stopped:
            writer.finish()
    assert "rows may be missing" in stopped.value.hint
    assert stopped.value.exit_code == 3
