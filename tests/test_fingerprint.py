"""Resuming with another model, format or sampling: refused with all differences, or forced."""

import json
import os
import shutil
from collections.abc import Callable
from contextlib import chdir, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from result_rows import COMPLETION_LINE, completion

from dakrun.cli import main
from dakrun.config import SamplingParams
from dakrun.demo import MODEL
from dakrun.errors import UsageError
from dakrun.requests import ResultWriter, fingerprint_path, make_fingerprint

NATIVE = '{{"id": "{}", "prompt_token_ids": [1, 5]}}\n'
BATCH = (
    '{"custom_id": "x", "method": "POST", "url": "/v1/completions", "body": {"prompt": [1, 5]}}\n'
)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, and an output of it with its fingerprint."""
    folder = tmp_path_factory.mktemp("done")
    shutil.copytree(MODEL, folder / "model")
    (folder / "p.jsonl").write_text(NATIVE.format("a") + NATIVE.format("b"))
    with chdir(folder):
        assert run().exit_code == 0
    return folder


@pytest.fixture
def folder(done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: a copy of `done`."""
    shutil.copytree(done, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*flags: str) -> Result:
    base = ["generate", "--model", "model", "-i", "p.jsonl", "-o", "out.jsonl", "--device", "cpu"]
    return CliRunner().invoke(main, [*base, "--max-tokens", "2", *flags])


def refused(*flags: str) -> str:
    """The error line of a resume that changes nothing."""
    before = {path: path.read_bytes() for path in Path().glob("out.jsonl*")}
    result = run("--resume", *flags)
    assert result.exit_code == 2, result.output
    assert {path: path.read_bytes() for path in Path().glob("out.jsonl*")} == before
    error, hint = result.stderr.splitlines()
    assert "--resume --force" in hint and "--overwrite" in hint
    return error


def test_what_it_holds(folder: Path) -> None:
    assert sorted(path.name for path in folder.iterdir()) == [
        *("model", "out.jsonl", "out.jsonl.run.json", "out.jsonl.run.rows", "p.jsonl")
    ]
    found = json.loads(Path("out.jsonl.run.json").read_text())
    assert (found["dtype"], found["format"], found["dakrun_run"]) == ("float16", "native", 1)
    assert (
        found["model"]["hidden_size"]
        == json.loads(Path("model/config.json").read_text())["hidden_size"]
    )
    size = Path("model/model.safetensors").stat().st_size
    assert found["weights"]["model.safetensors"]["bytes"] == size
    assert found["sampling"]["max_tokens"] == 2


def test_the_same_run_is_resumed_wherever_its_model_lies(folder: Path) -> None:
    Path("model").rename("moved")
    assert run("--resume", "--model", "./moved").exit_code == 0


def test_all_that_differs_is_named_with_both_values(folder: Path) -> None:
    error = refused("--temperature", "0.5", "--seed", "3", "--dtype", "float32")
    for difference in (
        "dtype was float16, now float32",
        "sampling.seed was 0, now 3",
        "sampling.temperature was 0.0, now 0.5",
    ):
        assert difference in error
    assert error.count(" was ") == 3


def test_a_suggested_penalty_differs_from_none(folder: Path) -> None:
    for name, penalty in (("with", 1.5), ("without", 1.0)):
        Path(name).mkdir()
        path = Path(name) / "generation_config.json"
        path.write_text(json.dumps({"repetition_penalty": penalty}))
    suggested = ("--generation-config", "with")
    assert "sampling.repetition_penalty was 1.0, now 1.5" in refused(*suggested)
    assert run("--overwrite", *suggested).exit_code == 0
    for flags in ((), ("--generation-config", "without")):
        assert "sampling.repetition_penalty was 1.5, now 1.0" in refused(*flags)
    assert run("--resume", *suggested).exit_code == 0


def test_another_model_is_named(folder: Path) -> None:
    path = Path("model/config.json")
    fields = json.loads(path.read_text())
    path.write_text(json.dumps({**fields, "rms_norm_eps": 0.5}))
    with open("model/model.safetensors", "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x01")
    error = refused()
    assert "model.norm_eps was " in error and ", now 0.5" in error
    assert error.endswith("; model.safetensors differs")


def test_random_weights_are_another_model(folder: Path) -> None:
    assert '"bytes": ' in refused("--load-format", "dummy")


@pytest.mark.parametrize("known", [True, False])
def test_openai_rows_do_not_follow_native_rows(folder: Path, known: bool) -> None:
    Path("p.jsonl").write_text(BATCH)
    if not known:  # the rows themselves tell their format
        Path("out.jsonl.run.json").unlink()
    assert "format was native, now OpenAI Batch" in refused()


def test_force_goes_on_and_renews_it(folder: Path) -> None:
    Path("p.jsonl").write_text("".join(map(NATIVE.format, "abc")))
    refused("--seed", "3")
    result = run("--resume", "--force", "--seed", "3")
    assert result.exit_code == 0 and "1 row done, 0 failed, 2 skipped" in result.stderr
    assert json.loads(Path("out.jsonl.run.json").read_text())["sampling"]["seed"] == 3
    assert run("--resume", "--seed", "3").exit_code == 0
    assert "sampling.seed was 3, now 0" in refused()
    alone = run("--force")
    assert alone.exit_code == 2 and "--force needs --resume" in alone.stderr


def test_overwrite_renews_it(folder: Path) -> None:
    assert run("--overwrite", "--seed", "4").exit_code == 0
    assert "sampling.seed was 4, now 0" in refused()
    with ResultWriter("out.jsonl", overwrite=True):  # of a run that does not say what it is
        assert not Path("out.jsonl.run.json").exists()


def test_an_output_without_it_is_resumed_with_a_note(folder: Path) -> None:
    path = Path("out.jsonl.run.json")
    path.unlink()
    result = run("--resume", "--seed", "3")
    assert result.exit_code == 0 and "2 skipped" in result.stderr
    assert result.stderr.startswith(
        "out.jsonl: the settings of the run that wrote its rows are not known (out.jsonl.run.json "
        "is missing) and were not compared; if they may differ, --overwrite starts afresh\n"
    )
    assert json.loads(path.read_text())["sampling"]["seed"] == 3
    assert "not compared" not in run("--resume", "--seed", "3").stderr
    path.unlink()
    forced = run("--resume", "--force")
    assert forced.exit_code == 0 and "were not compared" in forced.stderr
    path.write_text(json.dumps({"dakrun_run": 1, "format": "native"}))  # of an older version
    assert run("--resume").exit_code == 0


def test_without_rows_it_is_not_compared(folder: Path) -> None:
    for flags, content in (((), None), (("--resume",), ""), ((), "")):
        Path("out.jsonl").unlink()
        if content is not None:
            Path("out.jsonl").write_text(content)
        assert run(*flags, "--seed", str(len(flags) + 7)).exit_code == 0


def test_another_file_of_its_name_is_kept(folder: Path) -> None:
    path = Path("out.jsonl.run.json")
    for content in ("notes", "[1]", '{"a": 1}', "[" * 100_000):
        path.write_text(content)
        for flags in (("--resume",), ("--overwrite",), ("--resume", "--force")):
            result = run(*flags)
            assert result.exit_code == 2 and "not the fingerprint of a run" in result.stderr
            assert path.read_text() == content and Path("out.jsonl").stat().st_size


def test_it_is_no_result_and_no_report(folder: Path) -> None:
    before = Path("out.jsonl.run.json").read_bytes()
    result = run("-o", "out.jsonl.run.json", "--resume")
    assert result.exit_code == 2 and "result files end in .jsonl" in result.stderr
    result = run("-i", "out.jsonl.run.json", "-o", "new.jsonl")
    assert result.exit_code == 2 and "prompt files end in" in result.stderr
    shutil.copy("out.jsonl.run.json", "copy.jsonl")
    result = run("-o", "copy.jsonl", "--resume")
    assert result.exit_code == 2 and "line 1 is not a result row" in result.stderr
    os.symlink("out.jsonl.run.json", "link")
    for report in ("out.jsonl.run.json", "./out.jsonl.run.json", "link"):
        result = run("--resume", "--report", report)
        assert result.exit_code == 2 and "overwrite the run's fingerprint" in result.stderr
    assert Path("out.jsonl.run.json").read_bytes() == before


def test_a_link_to_the_output_has_the_fingerprint_of_the_output(folder: Path) -> None:
    os.symlink("out.jsonl", "link.jsonl")
    assert "sampling.seed" in refused("--seed", "9", "-o", "link.jsonl")
    assert run("-o", "/dev/null").exit_code == 0 and not Path("/dev/null.run.json").exists()


# --- the date that chat templates stamp

CHAT = '{{"id": "{}", "messages": [{{"role": "user", "content": "1"}}]}}\n'
STAMP = "{% if strftime_now('%d %B %Y, %H:%M') == '03 February 2001, 04:05' %}forty {% endif %}"
STAMP += "{{ messages[0]['content'] }}"


def prompt_tokens() -> dict[str, int]:
    rows = map(json.loads, Path("out.jsonl").read_text().splitlines())
    return {row["id"]: row["usage"]["prompt_tokens"] for row in rows}


def test_a_resumed_run_keeps_the_date_of_its_start(folder: Path) -> None:
    Path("model/chat_template.jinja").write_text(STAMP)
    path = Path("out.jsonl.run.json")
    Path("p.jsonl").write_text(CHAT.format("a"))
    before = datetime.now().replace(microsecond=0)
    assert run("--overwrite").exit_code == 0
    found = json.loads(path.read_text())
    assert before <= datetime.fromisoformat(found["started"]) <= datetime.now()
    now = prompt_tokens()["a"]

    path.write_text(json.dumps(found | {"started": "2001-02-03T04:05:06"}))
    Path("p.jsonl").write_text("".join(map(CHAT.format, "ab")))
    result = run("--resume")
    assert result.exit_code == 0 and "started" not in result.stderr
    assert prompt_tokens() == {"a": now, "b": now + 1}
    assert json.loads(path.read_text()) == found | {"started": "2001-02-03T04:05:06"}

    del found["started"]  # as in files of older versions
    path.write_text(json.dumps(found))
    Path("p.jsonl").write_text("".join(map(CHAT.format, "abc")))
    assert run("--resume").exit_code == 0
    assert prompt_tokens() == {"a": now, "b": now + 1, "c": now}
    assert datetime.fromisoformat(json.loads(path.read_text())["started"]) >= before

    path.write_text(json.dumps(found | {"started": "2001-02-03T04:05:06"}))
    assert run("--overwrite").exit_code == 0  # another run
    assert prompt_tokens() == {"a": now, "b": now, "c": now}
    for broken in (None, 5, "yesterday"):
        path.write_text(json.dumps(found | {"started": broken}))
        result = run("--resume")
        assert result.exit_code == 2 and "not the fingerprint of a run" in result.stderr


# --- a kill between any two steps


def fingerprint(seed: int) -> dict[str, Any]:
    from dakrun.models import read_model_config

    config = read_model_config(MODEL)
    return make_fingerprint(config, MODEL, "native", SamplingParams(seed=seed))


@pytest.mark.parametrize("killed", ["fsync", "replace", "ftruncate", "write"])
@pytest.mark.parametrize("flags", [{}, {"overwrite": True}, {"resume": True, "force": True}])
def test_a_kill_leaves_no_old_rows_with_a_new_fingerprint(
    make: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, killed: str, flags: dict[str, bool]
) -> None:
    def kill(*arguments: object) -> None:
        raise KeyboardInterrupt

    path = make(COMPLETION_LINE if flags else "", "out.jsonl")
    beside = fingerprint_path(str(path))
    beside.write_text(json.dumps(fingerprint(1)))
    writer = ResultWriter(path, **flags)
    writer.identify(fingerprint(2))
    with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
        patch.setattr(Path if killed == "replace" else os, killed, kill)
        with writer:
            writer.write(completion(id="new"))
    seed = json.loads(beside.read_text())["sampling"]["seed"]
    rows = [json.loads(line)["id"] for line in path.read_text().splitlines()]
    if "force" in flags:
        assert rows[:1] == ["a"], "nothing is lost"
    else:
        assert rows != ["a"] or seed == 1
        assert rows != ["new"] or seed == 2


def test_two_other_runs_do_not_change_it(make: Callable[..., Path]) -> None:
    path = make("", "out.jsonl")
    with ResultWriter(path) as first:
        first.write(completion())
        second = ResultWriter(path, overwrite=True)
        second.identify(fingerprint(2))
        with pytest.raises(Exception, match="another run is writing to it"):
            second.__enter__()
        assert not fingerprint_path(str(path)).exists()
    third = ResultWriter(path, resume=True)
    fingerprint_path(str(path)).write_text(json.dumps(fingerprint(1)))
    with pytest.raises(UsageError, match="seed was 1, now 2"):
        third.identify(fingerprint(2))
