"""--ordered: the rows in the order of the input, whatever finishes first and whatever is killed."""

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from result_rows import ERROR, completion

from dakrun.cli import main
from dakrun.demo import MODEL
from dakrun.errors import CannotRun, UsageError
from dakrun.requests import ResultWriter

IDS = [f"é{i}" for i in range(30)]
SHUFFLED = [IDS[7 * i % 30] for i in range(30)]


def write(path: Path, ids: list[str], **options: bool) -> ResultWriter:
    """Write rows in the order of `ids`; the input's order is that of IDS."""
    with ResultWriter(path, ordered=True, **options) as writer:
        for id in SHUFFLED:
            writer.expect(id, IDS.index(id) + 1)
        for id in ids:
            if not writer.is_done(id):
                writer.write(completion(id=id, text=id * 9))
        writer.finish()
    return writer


def lines(path: Path) -> list[str]:
    data = path.read_bytes()
    return (gzip.decompress(data) if path.suffix == ".gz" else data).decode().splitlines()


def ids(path: Path) -> list[str]:
    return [json.loads(line)["id"] for line in lines(path)]


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.gz"])
def test_rows_in_the_order_of_the_input(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    with ResultWriter(path) as writer:
        for id in SHUFFLED[:20]:
            writer.write(completion(id=id, text=id * 9))
        writer.write(ERROR)  # of another input
    path.chmod(0o640)
    before = set(lines(path))
    write(path, SHUFFLED, resume=True)
    assert ids(path) == [*IDS, "line-4"] and before <= set(lines(path))
    assert path.stat().st_mode & 0o777 == 0o640
    whole, number = path.read_bytes(), path.stat().st_ino
    write(path, [], resume=True)
    assert path.read_bytes() == whole and path.stat().st_ino == number  # in order already
    assert [file.name for file in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.gz"])
@pytest.mark.parametrize("step", ["open", "fsync", "fchmod", "replace"])
@pytest.mark.parametrize("how", [KeyboardInterrupt, OSError])
def test_nothing_is_lost_in_the_last_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, step: str, how: type[Exception]
) -> None:
    path = tmp_path / name
    with ResultWriter(path) as writer:
        for id in SHUFFLED:
            writer.write(completion(id=id, text=id * 9))

    def stop(*arguments: object) -> None:
        raise how(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path if step in ("open", "replace") else os, step, stop)
        with pytest.raises(CannotRun if how is OSError else how) as raised:
            write(path, [], resume=True)
    if how is OSError:
        assert "all rows are in it, but not in order" in str(raised.value)
        assert "--resume" in raised.value.hint
    assert ids(path) == SHUFFLED
    assert [file.name for file in tmp_path.iterdir()] == [name]
    (tmp_path / f".{name}.new").write_text("left by a kill")
    write(path, [], resume=True)
    assert ids(path) == IDS and [file.name for file in tmp_path.iterdir()] == [name]


def test_the_file_behind_a_link_is_put_in_order(tmp_path: Path) -> None:
    link, path = tmp_path / "link.jsonl", tmp_path / "out.jsonl"
    link.symlink_to(path)
    write(link, SHUFFLED)
    assert link.is_symlink() and ids(path) == IDS


def test_a_run_that_opened_the_replaced_file_does_not_write_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out.jsonl"
    real = os.open

    def open_then_replace(name: Any, *more: Any) -> int:
        fd = real(name, *more)
        monkeypatch.setattr(os, "open", real)
        write(path, SHUFFLED)
        return fd

    monkeypatch.setattr(os, "open", open_then_replace)
    with pytest.raises(CannotRun, match="another run is writing to it"):
        ResultWriter(path, resume=True).__enter__()
    assert ids(path) == IDS


def test_what_cannot_be_put_in_order() -> None:
    for name in ("-", "/dev/null"):
        with pytest.raises(UsageError, match="cannot be put in order") as raised:
            ResultWriter(name, ordered=True)
        assert "--ordered" in raised.value.hint


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.gz"])
def test_the_command_line(tmp_path: Path, name: str) -> None:
    source, out = tmp_path / "p.jsonl", tmp_path / name
    rows = [
        {"id": f"r{i}", "prompt_token_ids": [1, 5], "max_tokens": 12 - i, "ignore_eos": True}
        for i in range(12)
    ]
    rows[4]["max_tokens"] = 0
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def run(*flags: str) -> Result:
        base = ["generate", "--model", str(MODEL), "-i", str(source), "-o", str(out)]
        return CliRunner().invoke(main, [*base, "--device", "cpu", "--batch-size", "4", *flags])

    expected = [f"r{i}" for i in range(12)]
    assert run().exit_code == 1 and ids(out) != expected
    assert run("--resume", "--ordered").exit_code == 1 and ids(out) == expected
    assert run("--overwrite", "--ordered").exit_code == 1 and ids(out) == expected
