"""Parquet files as the input and output of a run on this machine."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from result_rows import ERROR, completion

from dakrun.cli import main
from dakrun.demo import MODEL, task
from dakrun.requests import ParquetOutput, ResultWriter

pytest.importorskip("pyarrow")

import pyarrow as pa
import pyarrow.parquet as pq

PROMPTS = [task.prompt(a, b) for a, b in ((3, 4), (5, 6), (17, 25), (8, 9))]
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
COLUMNS = [
    *("id", "text", "token_ids", "finish_reason", "usage", "error"),
    *("logprobs", "tool_calls", "valid", "choices", "prompt_logprobs"),
]


def generate(source: Path, output: Path, *more: str) -> Result:
    model = ("--model", str(MODEL), "--device", "cpu", "--max-tokens", "4", "--batch-size", "2")
    command = ["generate", *model, "-i", str(source), "-o", str(output), *more]
    return CliRunner(env={"DAKRUN_DEBUG": ""}).invoke(main, command)


def write_table(path: Path, **columns: Any) -> Path:
    pq.write_table(pa.table(columns), path, row_group_size=3)
    return path


def results(path: Path) -> dict[str, dict[str, Any]]:
    """The rows of a .jsonl file by id, those of Parquet likewise."""
    if path.suffix == ".parquet":
        rows = pq.read_table(path).to_pylist()
    else:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {str(row["id"]): row for row in rows}


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if ".run." not in path.name}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Four prompts and a row that cannot run, with columns that rows do not have."""
    return write_table(
        tmp_path / "in.parquet",
        rank=pa.array([5, 4, 3, 2, None], pa.int8()),
        prompt=[*PROMPTS, ""],
        id=[1, 2, 3, 4, 2],
        max_tokens=[1, 2, None, 4, 4],
        kind=pa.array(["a", "b", "a", None, "é"]).dictionary_encode(),
        origin=[{"page": n, "tags": ["x"] * n} for n in range(5)],
    )


def test_columns_of_the_input_stand_beside_its_results(source: Path, tmp_path: Path) -> None:
    out, lines = tmp_path / "out.parquet", tmp_path / "out.jsonl"
    ran = generate(source, out)
    assert ran.exit_code == 1 and "4 rows done, 1 failed" in ran.stderr, ran.stderr
    assert names(tmp_path) == {"in.parquet", "out.parquet"}
    found, given = pq.read_table(out), pq.read_table(source)
    assert found.column_names == [*COLUMNS, "rank", "kind", "origin"]
    assert found.select(["rank", "kind", "origin"]) == given.select(["rank", "kind", "origin"])
    assert found["id"].to_pylist() == ["1", "2", "3", "4", "line-5"]
    assert [len(ids or ()) for ids in found["token_ids"].to_pylist()] == [1, 2, 3, 2, 0]

    assert generate(source, lines).exit_code == 1  # the reverse: rows of Parquet as JSON Lines
    for id, row in results(lines).items():
        for name, value in row.items():
            assert results(out)[id][name] == (id if name == "id" else value)


def test_chats_in_parquet_and_jsonl_to_parquet(tmp_path: Path) -> None:
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    table = write_table(tmp_path / "chats.parquet", messages=chats)
    rows, template = tmp_path / "chats.jsonl", tmp_path / "template.jinja"
    rows.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    template.write_text(TEMPLATE)
    answers = []
    for source in (table, rows):
        out = tmp_path / f"{source.suffix[1:]}-out.parquet"
        ran = generate(source, out, "--chat-template", str(template))
        assert ran.exit_code == 0, ran.stderr
        answers.append(pq.read_table(out))
        assert answers[-1].column_names == COLUMNS
    assert answers[0] == answers[1]
    assert answers[0]["id"].to_pylist() == ["line-1", "line-2", "line-3", "line-4"]


@pytest.mark.parametrize(
    ("problem", "code", "said"),
    [
        (
            OSError(28, "No space left on device"),
            3,
            "out.parquet.jsonl, which has all rows ([Errno",
        ),
        (KeyboardInterrupt(), 130, "interrupted: 5 of 5 rows on disk in "),
    ],
)
def test_a_conversion_that_was_stopped_is_made_up_for_by_resume(
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    problem: BaseException,
    code: int,
    said: str,
) -> None:
    out = tmp_path / "out.parquet"

    def stop(*_: object) -> None:
        raise problem

    with monkeypatch.context() as patch:
        patch.setattr(pq.ParquetWriter, "write_table", stop)
        stopped = generate(source, out)
    assert stopped.exit_code == code and said in stopped.stderr
    assert "to go on, run again with --resume" in stopped.stderr
    assert names(tmp_path) == {"in.parquet", "out.parquet.jsonl"}
    again = generate(source, out, "--resume")
    assert again.exit_code == 1 and "0 rows done, 0 failed, 5 skipped" in again.stderr
    assert names(tmp_path) == {"in.parquet", "out.parquet"}
    first = pq.read_table(out)
    assert first["rank"] == pq.read_table(source)["rank"]

    done = generate(source, out, "--resume")  # nothing is left but the Parquet file
    assert done.exit_code == 1 and "0 rows done, 0 failed, 5 skipped" in done.stderr
    assert pq.read_table(out) == first
    retried = generate(source, out, "--resume", "--retry-failed")
    assert "0 rows done, 1 failed, 4 skipped" in retried.stderr
    assert pq.read_table(out) == first
    refused = generate(source, out)
    assert refused.exit_code == 2 and "exists and is not empty" in refused.stderr
    assert generate(source, out, "--overwrite").exit_code == 1
    assert pq.read_table(out) == first


@pytest.mark.parametrize("group_bytes", [1, 1 << 26])
def test_many_batches_make_row_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group_bytes: int
) -> None:
    monkeypatch.setattr("dakrun.requests.parquet_files.ROWS", 2)
    monkeypatch.setattr("dakrun.requests.parquet_files.ROW_GROUP_BYTES", group_bytes)
    ids = [f"q{n}" for n in range(7)]
    source = write_table(tmp_path / "in.parquet", prompt=ids, id=ids, rank=range(7))
    output = ParquetOutput(
        str(tmp_path / "out.parquet"), source=str(source), overwrite=False, resume=False
    )
    with ResultWriter(output.rows, ordered=True) as writer:
        writer.write(ERROR)  # of a row that the input no longer has
        for line, id in enumerate(ids, 1):
            writer.expect(id, line)
        for id in reversed(ids):
            writer.write(completion(id=id, text=id * 9))
        writer.finish()
        output.convert()
    found = pq.read_table(output.name)
    assert found["id"].to_pylist() == [*ids, ERROR.id]
    assert found["rank"].to_pylist() == [*range(7), None]
    assert found["text"].to_pylist() == [*(id * 9 for id in ids), None]
    groups = pq.ParquetFile(output.name).metadata.num_row_groups
    assert groups == 1 if group_bytes > 1 else groups > 3


def test_rows_are_checked_and_counted(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checked = CliRunner().invoke(main, ["validate", "-i", str(source)])
    assert checked.exit_code == 1 and 'line 5, id "line-5": duplicate_id' in checked.stdout
    monkeypatch.setattr("dakrun.requests.look_ahead.LOOK_AHEAD", 2)
    command = ["plan", "--model", "opt-125m", "--profile", "h100-sxm", "-i", str(source), "--json"]
    planned = json.loads(CliRunner().invoke(main, command).stdout)
    assert planned["rows"]["checked"] == 2 and planned["run"]["requests"] == 5


def test_results_of_batch_rows_are_no_table(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    body = {"prompt": PROMPTS[0]}
    row = {"custom_id": "q", "method": "POST", "url": "/v1/completions", "body": body}
    rows.write_text(json.dumps(row) + "\n")
    refused = generate(rows, tmp_path / "out.parquet")
    assert refused.exit_code == 2 and "results of OpenAI Batch rows" in refused.stderr
    assert "hint: give -o out.jsonl" in refused.stderr and names(tmp_path) == {"rows.jsonl"}
    rows.write_text("{bad\n" + json.dumps(row) + "\n")  # the first row does not tell
    late = generate(rows, tmp_path / "out.parquet")
    assert late.exit_code == 2 and "results of OpenAI Batch rows" in late.stderr
    assert f"hint: they are in {tmp_path / 'out.parquet.jsonl'}" in late.stderr
    assert names(tmp_path) == {"rows.jsonl", "out.parquet.jsonl"}


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"text": ["a"], "prompt": ["b"]}, "has the column text, which results have, too"),
        ({"question": ["a"]}, "has no column prompt, prompt_token_ids, messages or body"),
        ({"prompt": [b"\x00"]}, "row 1: Object of type bytes is not JSON serializable"),
    ],
)
def test_columns_that_do_not_go(tmp_path: Path, columns: dict[str, Any], said: str) -> None:
    source = write_table(tmp_path / "in.parquet", **columns)
    refused = generate(source, tmp_path / "out.parquet")
    assert refused.exit_code == 2 and said in refused.stderr
    assert names(tmp_path) == {"in.parquet"}


def test_files_that_do_not_go(source: Path, tmp_path: Path) -> None:
    same = generate(source, source, "--overwrite")
    assert same.exit_code == 2 and "the file that the prompts come from" in same.stderr
    other = write_table(tmp_path / "other.parquet", rank=[1])
    foreign = generate(source, other, "--resume")
    assert foreign.exit_code == 2 and "not the results of a run" in foreign.stderr
    text = tmp_path / "text.parquet"
    text.write_text("no table")
    broken = generate(text, tmp_path / "out.jsonl")
    assert broken.exit_code == 2 and "not a Parquet file" in broken.stderr
    assert names(tmp_path) == {"in.parquet", "other.parquet", "text.parquet"}


def test_without_pyarrow_there_is_a_hint(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    for given, output in ((source, "out.jsonl"), (tmp_path / "rows.jsonl", "out.parquet")):
        refused = generate(given, tmp_path / output)
        assert refused.exit_code == 3
        error, hint = refused.stderr.splitlines()
        assert error.endswith("Parquet files need pyarrow, which is not installed")
        assert hint == "hint: pip install 'dakrun[parquet]'"
