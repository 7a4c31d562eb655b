"""Inputs and outputs of runs on Ray, without Ray: files in one order, parts that are whole."""

import gzip
import json
from datetime import datetime
from pathlib import Path

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("ray")

import fsspec
import pyarrow as pa
import pyarrow.dataset as dataset
import pyarrow.parquet as pq

from dakrun.config import SamplingParams
from dakrun.errors import CannotRun, UsageError
from dakrun.ray import parts as parts_module
from dakrun.ray.inputs import InputFiles
from dakrun.ray.parts import ResultParts
from dakrun.requests import Reply, RequestReader, RowError, result_line
from dakrun.requests.arrow import OPTIONAL

RUN = {"dakrun_run": 1, "format": "native", "model": {"layers": 2}, "input": {"a": 1}}


def lines(source: object) -> list[tuple[int, bytes | None]]:
    return [(line.number, line.data) for line in InputFiles(str(source))]


def result(number: int, *, failed: bool = False) -> bytes:
    row: dict[str, object] = {"id": f"q{number}"}
    if failed:
        row["error"] = {"code": "invalid_json", "message": "not JSON", "line": number}
    else:
        row |= {"text": "so", "token_ids": [number], "finish_reason": "stop"}
        row["usage"] = {"prompt_tokens": 1, "completion_tokens": 1}
    return json.dumps(row).encode() + b"\n"


def rows_of(folder: Path) -> list[str]:
    found = []
    for path in sorted(folder.glob("part-*")):
        if path.suffix == ".parquet":
            found += pq.read_table(path)["id"].to_pylist()
        else:
            found += [json.loads(line)["id"] for line in path.read_text().splitlines()]
    return found


def test_a_folder_is_read_in_the_order_of_its_names(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_bytes(b'{"prompt":"3"}\n')
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"prompt":"1"}\n\n{"prompt":"2"}'))
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "c.JSONL").write_bytes(b'{"prompt":"4"}\n')
    for ignored in ("_temporary.jsonl", ".hidden.jsonl", "notes.md"):
        (tmp_path / ignored).write_bytes(b"no prompt\n")
    wanted = [(number, b'{"prompt":"%d"}' % n) for number, n in ((1, 1), (3, 2), (4, 3), (5, 4))]
    assert lines(tmp_path) == wanted
    assert lines(f"{tmp_path}/*.jsonl*") == wanted[:3]
    source = InputFiles(str(tmp_path))
    with RequestReader(source, defaults=SamplingParams(), format=source.format) as reader:
        taken = list(reader.unparsed_rows(100))
    assert sum(row.nbytes for row in taken if row) == source.bytes_total == reader.bytes_read


def test_parquet_rows_are_native_rows(tmp_path: Path) -> None:
    table = pa.table(
        {
            "id": [7, None],
            "prompt": ["one", None],
            "messages": [None, [{"role": "user", "content": "hi"}]],
            "label": ["left", "out"],
            "url": ["a field of Batch rows", None],
            "max_tokens": [3, None],
        }
    )
    pq.write_table(table, tmp_path / "rows.parquet")
    first, second = (json.loads(data or b"") for _, data in lines(tmp_path / "rows.parquet"))
    assert first == {"id": 7, "prompt": "one", "max_tokens": 3}
    assert second == {"messages": [{"role": "user", "content": "hi"}]}
    pq.write_table(table.select(["label"]), tmp_path / "none.parquet")
    with pytest.raises(UsageError, match=r"none\.parquet: has no column prompt"):
        lines(tmp_path / "none.parquet")


def test_a_url_is_read_through_fsspec() -> None:
    with fsspec.open("memory://bucket/rows.jsonl", "wb") as file:
        file.write(b'{"prompt":"1"}\n')
    assert lines("memory://bucket/rows.jsonl") == [(1, b'{"prompt":"1"}')]
    assert lines("memory://bucket") == [(1, b'{"prompt":"1"}')]


def test_globs_leave_out_hidden_and_unfinished_folders(tmp_path: Path) -> None:
    for number, name in enumerate(
        (
            *("a/1.jsonl", "a/_temporary/0/2.jsonl", "a/.hid/3.jsonl", "_b/4.jsonl"),
            *("c.jsonl/5.jsonl", "c.jsonl/_x/6.jsonl", "c.jsonl/notes.md", "d.jsonl", "_e.jsonl"),
        ),
        1,
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"%d\n" % number)
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "a", target_is_directory=True)

    def found(pattern: str) -> list[bytes | None]:
        return [data for _, data in lines(f"{tmp_path}/{pattern}")]

    assert found("**/*.jsonl") == [b"1", b"5", b"8", b"1"]  # the last by the link
    assert found("*.jsonl") == [b"5", b"8", b"1"]
    assert found("[ac]*") == found("?*")[:2] == [b"1", b"5"]
    assert found("*/*.jsonl") == [b"1", b"5"]  # fsspec follows no links on its way
    assert found("_b/*.jsonl") == [b"4"]
    assert found("*/_temporary/*/*.jsonl") == [b"2"]
    assert found("a/.hid/*") == [b"3"]
    for none in ("_*", "*/_*/*.jsonl", "*/_temporary/nothing*"):
        with pytest.raises(UsageError, match="no prompt files there"):
            found(none)


def test_a_column_that_is_there_twice(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    columns = [pa.array(["one"]), pa.array(["two"]), pa.array([3])]
    pq.write_table(pa.table(columns, names=["prompt", "prompt", "label"]), path)
    with pytest.raises(UsageError, match=r"rows\.parquet: has the column prompt 2 times") as error:
        lines(path)
    assert error.value.exit_code == 2 and error.value.hint
    pq.write_table(pa.table(columns, names=["prompt", "label", "label"]), path)
    assert lines(path) == [(1, b'{"prompt": "one"}')]  # a column that is left out anyway
    roles = [pa.array(["user"]), pa.array(["system"]), pa.array(["hi"])]
    message = pa.StructArray.from_arrays(roles, names=["role", "role", "content"])
    messages = pa.ListArray.from_arrays([0, 1], message)
    pq.write_table(pa.table([messages], names=["messages"]), path)
    with pytest.raises(UsageError, match=r"row 1: .*duplicate field names"):
        lines(path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing", "no prompt files there"),
        ("empty", "no prompt files there"),
        ("mixed", "files of text beside"),
        ("table.csv", "prompt files end in"),
        ("nosuchscheme://x", "nosuchscheme"),
    ],
)
def test_inputs_that_cannot_be_read(tmp_path: Path, name: str, message: str) -> None:
    for folder in ("empty", "mixed"):
        (tmp_path / folder).mkdir()
    (tmp_path / "mixed" / "a.txt").write_text("one\n")
    (tmp_path / "mixed" / "b.jsonl").write_text("{}\n")
    (tmp_path / "table.csv").write_text("prompt\n")
    source = name if "://" in name else str(tmp_path / name)
    with pytest.raises(UsageError, match=message) as found:
        InputFiles(source)
    assert found.value.hint


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    for name, data in (("a.jsonl.gz", gzip.compress(b"{}\n" * 999)[:-9]), ("a.parquet", b"PAR1")):
        path = tmp_path / name
        path.write_bytes(data)
        with pytest.raises(CannotRun, match=rf"{name}: "):
            lines(path)


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_a_part_is_there_when_it_is_whole(
    tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts_module, "ROWS_PER_PART", 4)
    out = tmp_path / "out"
    with ResultParts(str(out), form=form) as parts:
        parts.identify(RUN)
        parts.write([result(n) for n in range(3)])
        assert rows_of(out) == []
        parts.write([result(3, failed=True), result(4)])
        assert rows_of(out) == ["q0", "q1", "q2", "q3", "q4"]
        parts.write([result(5)])
    # Not ended: as after a kill, the last row is in no part, but not lost.
    with pytest.raises(UsageError, match="has results already"):
        ResultParts(str(out), form=form)
    with ResultParts(str(out), form=form, resume=True) as parts:
        assert all(parts.is_done(f"q{n}") for n in range(6)) and not parts.is_done("q6")
        assert parts.failed_before == 1
        parts.write([result(6)])
        parts.end_part()
        parts.end_part()  # nothing is left
    assert rows_of(out) == [f"q{n}" for n in range(7)]
    assert [path.name for path in sorted(out.glob("part-*"))] == [
        f"part-00000.{form}",
        f"part-00001.{form}",
    ]
    with ResultParts(str(out), overwrite=True) as parts:
        assert rows_of(out) == [] and not parts.is_done("q0")


def test_integer_ids_in_a_parquet_part_are_strings(tmp_path: Path) -> None:
    line = result_line(
        RowError(id="7", line=1, code="c", message="m", reply=Reply(integer_id=True))
    )
    assert json.loads(line)["id"] == 7
    with ResultParts(str(tmp_path), form="parquet") as parts:
        parts.write([line, result(1)])
        parts.end_part()
    assert rows_of(tmp_path) == ["7", "q1"]
    with ResultParts(str(tmp_path), form="parquet", resume=True) as parts:
        assert parts.is_done("7")


def test_a_kill_while_a_part_is_made_doubles_no_row(tmp_path: Path) -> None:
    with ResultParts(str(tmp_path), form="parquet") as parts:
        parts.write([result(0), result(1)])
        before = (tmp_path / ".rows.jsonl").read_bytes()
        parts.end_part()
    (tmp_path / ".rows.jsonl").write_bytes(before)  # killed before it was emptied
    with ResultParts(str(tmp_path), form="parquet", resume=True) as parts:
        parts.write([result(2)])
        parts.end_part()
    assert rows_of(tmp_path) == ["q0", "q1", "q2"]


def test_a_row_that_was_cut_off_is_done_again(tmp_path: Path) -> None:
    (tmp_path / ".rows.jsonl").write_bytes(result(0) + result(1)[:-9])
    with ResultParts(str(tmp_path), resume=True) as parts:
        assert parts.is_done("q0") and not parts.is_done("q1")
        parts.write([result(1)])
        parts.end_part()
    assert rows_of(tmp_path) == ["q0", "q1"]


def test_parts_that_are_resumed_keep_the_date_of_their_run(tmp_path: Path) -> None:
    def started(day: int, *, resume: bool = False) -> datetime | None:
        parts = ResultParts(str(tmp_path), resume=resume, overwrite=not resume)
        parts.identify(RUN | {"started": f"2001-02-0{day}T04:05:06"})
        with parts:
            parts.write([result(0)])
        kept = json.loads((tmp_path / "_run.json").read_text())["started"]
        assert parts.started == datetime.fromisoformat(kept)
        return parts.started

    assert started(1) == started(2, resume=True) == datetime(2001, 2, 1, 4, 5, 6)
    assert started(3) == datetime(2001, 2, 3, 4, 5, 6)


def test_parts_of_another_run_are_refused(tmp_path: Path) -> None:
    first = ResultParts(str(tmp_path))
    first.identify(RUN)
    with first:
        first.write([result(0)])
        with (
            pytest.raises(CannotRun, match="another run is writing"),
            ResultParts(str(tmp_path), resume=True),
        ):
            pass
    other = RUN | {"input": {"a": 1, "b": 2}}
    with pytest.raises(UsageError, match=r"another run: input\.b was absent, now 2"):
        ResultParts(str(tmp_path), resume=True).identify(other)
    ResultParts(str(tmp_path), resume=True, force=True).identify(other)
    assert ResultParts(str(tmp_path), resume=True).identify(RUN) is None
    (tmp_path / "_run.json").rename(tmp_path / "moved")
    for force in (False, True):
        note = ResultParts(str(tmp_path), resume=True, force=force).identify(other)
        assert note is not None and "not known (_run.json is missing) and were not compared" in note
    (tmp_path / "moved").rename(tmp_path / "_run.json")
    with pytest.raises(UsageError, match="cannot be Parquet"):
        ResultParts(str(tmp_path), resume=True, form="parquet").identify(
            RUN | {"format": "OpenAI Batch"}
        )
    other_file = tmp_path / "other"
    other_file.touch()
    with pytest.raises(UsageError, match="a folder of part files"):
        ResultParts(str(other_file))


def surrogate(row_id: str) -> bytes:
    return json.dumps({"id": row_id, "error": {"code": "c", "message": row_id, "line": 1}}).encode()


def test_ids_that_parquet_cannot_hold(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    rows = ({"id": "a\ud800", "prompt": "\udc00"}, {"id": "a\udfff"}, {"id": "\U0001f600"})
    source.write_bytes(b"".join(json.dumps(row).encode() + b"\n" for row in rows))
    kept = [json.loads(data or b"") for _, data in lines(source)]
    assert kept == list(rows)
    files = InputFiles(str(source), well_formed_ids=True)
    with RequestReader(files, defaults=SamplingParams(), format="jsonl") as reader:
        found = {row.id: row.content for row in reader.unparsed_rows(9) if row}
    # The second is a duplicate now, so it is called by its line.
    assert set(found) == {"a\ufffd", "line-2", "\U0001f600"}
    assert found["a\ufffd"] == {"id": "a\ufffd", "prompt": "\udc00"}

    out = tmp_path / "out"
    out.mkdir()
    left = [surrogate("a\ud800"), result(0).strip(), surrogate("a\udfff")]  # by an older version
    (out / ".rows.jsonl").write_bytes(b"\n".join(left) + b"\n")
    with ResultParts(str(out), form="parquet", resume=True) as parts:
        assert parts.is_done("q0") and not parts.is_done("a\ufffd") and parts.failed_before == 0
        message = {"code": "c", "message": "of \udc00", "line": 2}
        parts.write([json.dumps({"id": "line-2", "error": message}).encode() + b"\n"])
        parts.end_part()
    assert rows_of(out) == ["q0", "line-2"]
    assert pq.read_table(out / "part-00000.parquet")["error"][1]["message"].as_py() == "of \ufffd"


def test_a_folder_of_parts_is_a_parquet_dataset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts_module, "ROWS_PER_PART", 1)
    parts = ResultParts(str(tmp_path), form="parquet")
    parts.identify(RUN)
    top = {"token_id": 5, "text": "so", "logprob": -0.5}
    with_logprobs = json.loads(result(1)) | {"logprobs": [{**top, "top": [top]}]}
    call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    with_logprobs["tool_calls"] = [call]
    with parts:
        parts.write([result(0)])
        parts.write([json.dumps(with_logprobs).encode() + b"\n"])
        parts.write([result(2, failed=True)])
        parts.write([json.dumps(json.loads(result(3)) | {"id": 3}).encode() + b"\n"])
    paths = sorted(tmp_path.glob("part-*"))
    assert len({pq.read_schema(path) for path in paths}) == 1
    for table in (dataset.dataset(tmp_path).to_table(), pq.read_table(tmp_path)):
        assert table["id"].to_pylist() == ["q0", "q1", "q2", "3"]
        assert table["logprobs"].to_pylist() == [None, with_logprobs["logprobs"], None, None]

    # As an older version left it: the fingerprint's name, and a part without optional columns.
    (tmp_path / "_run.json").rename(tmp_path / "run.json")
    optional = [field.name for field in OPTIONAL]
    pq.write_table(pq.read_table(paths[0]).drop_columns(optional), paths[0])
    other = RUN | {"input": {"a": 2}}
    with pytest.raises(UsageError, match=r"another run: input\.a was 1, now 2"):
        ResultParts(str(tmp_path), form="parquet", resume=True).identify(other)
    parts = ResultParts(str(tmp_path), form="parquet", resume=True)
    parts.identify(RUN)
    with parts:
        assert all(parts.is_done(name) for name in ("q0", "q1", "q2", "3"))
    assert not (tmp_path / "run.json").exists()
    assert json.loads((tmp_path / "_run.json").read_text()) == RUN
    assert len({pq.read_schema(path) for path in paths}) == 1
    table = dataset.dataset(tmp_path).to_table()
    assert table["logprobs"][1].as_py() == with_logprobs["logprobs"]
    assert table["tool_calls"].to_pylist() == [None, [call], None, None]


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_results_belong_to_their_rows(
    tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts_module, "ROWS_PER_PART", 2)
    source, out = tmp_path / "in", tmp_path / "out"
    source.mkdir()

    def reader(*prompts: str) -> RequestReader:
        """Rows in two files of two kinds."""
        rows = [f'{{"id": "q{n}", "prompt": "{text}"}}' for n, text in enumerate(prompts)]
        (source / "a.jsonl").write_text("".join(f"{row}\n" for row in rows[:2]))
        table = pa.table({"prompt": prompts[2:], "id": [f"q{n}" for n in range(2, len(prompts))]})
        pq.write_table(table, source / "b.parquet")
        return RequestReader(InputFiles(str(source)), defaults=SamplingParams(), format="jsonl")

    def compared(*prompts: str, force: bool = False) -> list[str]:
        parts = ResultParts(str(out), form=form, resume=True, force=force)
        return parts.compare(reader(*prompts).input_rows())

    assert compared("zero") == [], "nothing is there yet"
    with reader("zero", "one", "two", "three") as first, ResultParts(str(out), form=form) as parts:
        rows = list(first.input_rows())
        assert [(row.id, row.line) for row in rows] == [("q0", 1), ("q1", 2), ("q2", 3), ("q3", 4)]
        for n in (2, 0, 1):
            parts.write([result(n)], [rows[n]])
    assert rows_of(out) == ["q2", "q0"], "one is in the hidden file"
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    assert compared("zero", "one", "two", "THREE", "four") == []
    with pytest.raises(
        UsageError, match=r"out: 2 rows of the input changed .* with id 'q1' in line 2$"
    ) as refused:
        compared("zero", "ONE", "TWO", "THREE")
    assert refused.value.exit_code == 2 and "--force" in refused.value.hint
    (note,) = compared("zero", "ONE", "TWO", force=True)
    assert "2 rows of the input changed" in note and "keep the results" in note
    assert compared("zero", "one", "two") == []
    assert compared("zero", "one") == ["1 row of the output is not in the input: it stays"]
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before

    with ResultParts(str(out), form=form, resume=True) as parts:
        parts.write([result(3)])  # killed before its digest was written
    assert compared("zero", "one", "two", "three") == [
        "1 row of the output is taken as the result of a row of this input: it is not known which "
        "prompt it is of"
    ]
    with ResultParts(str(out), form=form, overwrite=True) as parts:
        parts.write([result(0)])
    assert "not known" in compared("other")[0], "the old digest went with the old results"
