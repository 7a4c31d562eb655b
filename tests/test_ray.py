"""Runs on a Ray cluster of this machine: the same results, whoever is killed; Ray Data's pipelines.

The cluster is started once. Runs of the command are in this process, which is connected to it.
"""

import asyncio
import gzip
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest

ray = pytest.importorskip("ray")

from click.testing import CliRunner, Result
from rich.console import Console

from dakrun import LLM, Policy, SamplingParams
from dakrun.cli.main import main
from dakrun.demo import MODEL
from dakrun.errors import CannotRun, UsageError
from dakrun.ray import DakrunProcessor
from dakrun.ray import run as ray_run
from dakrun.ray.cluster import connected, resources
from dakrun.ray.dispatch import Dispatcher, _Untaken
from dakrun.ray.worker import NONE_YET, Finished, Loaded, Reply
from dakrun.requests import AheadRow

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # actors cannot import tests

OPTIONS = ("--model", str(MODEL), "--device", "cpu", "--dtype", "float32", "--batch-size", "8")


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    with connected("local", cpus=4):
        yield ray.get_runtime_context().gcs_address


@pytest.fixture
def inside(cluster: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs take this process's connection."""
    monkeypatch.setattr(ray_run, "connected", lambda *_, **__: nullcontext())


def generate(source: Path, output: Path, *options: str) -> Result:
    command = ["generate", *OPTIONS, "-i", str(source), "-o", str(output), *options]
    return CliRunner().invoke(main, command)


def sums(count: int, tokens: int = 12) -> list[bytes]:
    rows = (
        {"id": f"q{n}", "prompt": f"{n % 100}+{n * 7 % 100}=", "max_tokens": 1 + n % tokens}
        for n in range(count)
    )
    return [json.dumps(row).encode() for row in rows]


def by_id(*files: Path) -> dict[str, bytes]:
    lines = [line for path in files for line in path.read_bytes().splitlines()]
    found = {json.loads(line)["id"]: line for line in lines}
    assert len(found) == len(lines), "an id is there twice"
    return found


def parent(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def worker_processes() -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            process = int(entry.name)
            is_worker = (entry / "cmdline").read_bytes().startswith(b"ray::Worker")
            if is_worker and parent(parent(process)) == os.getpid():  # of this process's raylet
                found.append(process)
    return found


@pytest.mark.full
@pytest.mark.usefixtures("inside")
def test_workers_draft(tmp_path: Path) -> None:
    """Each from its own answers: results are those without drafts."""
    source, plain, out = (tmp_path / name for name in ("in.jsonl", "plain.jsonl", "out"))
    source.write_bytes(b"\n".join(sums(40)) + b"\n")
    assert generate(source, plain).exit_code == 0
    report = tmp_path / "report.json"
    flags = ("--ray", "auto", "--workers", "2", "--speculate", "suffix:3", "--report", str(report))
    run = generate(source, out, *flags)
    assert run.exit_code == 0, run.output
    assert by_id(*out.glob("part-*.jsonl")) == by_id(plain)
    workers = [worker["report"] for worker in json.loads(report.read_text())["workers"]]
    worked = [worker["drafts"] for worker in workers if worker["drafts"]]
    assert worked, "one may have loaded when the other had served all rows, or nearly all"
    assert all(drafts["tokens_per_step_and_row"] >= 1 for drafts in worked)
    assert sum(drafts["accepted_tokens"] for drafts in worked) > 0


@pytest.mark.usefixtures("inside")
def test_results_are_those_of_a_run_without_ray(tmp_path: Path) -> None:
    rows = sums(70)
    rows[30:30] = [b"not JSON", b"", rows[7], b'{"id":"c","prompt":"1+1=","temperature":-1}']
    rows.append(b'{"prompt":"2+2=","temperature":1.0,"seed":3}')
    plain, folder, out = tmp_path / "plain.jsonl", tmp_path / "in", tmp_path / "out"
    whole = tmp_path / "whole.jsonl"
    whole.write_bytes(b"\n".join(rows) + b"\n")
    folder.mkdir()
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(b"\n".join(rows[:40]) + b"\n"))
    (folder / "b.jsonl").write_bytes(b"\n".join(rows[40:]) + b"\n")
    assert generate(whole, plain).exit_code == 1
    report = tmp_path / "report.json"
    run = generate(folder, out, "--ray", "auto", "--workers", "2", "--report", str(report))
    assert run.exit_code == 1, run.output
    assert by_id(*out.glob("part-*.jsonl")) == by_id(plain)
    assert "71 rows done, 3 failed, 0 skipped" in run.stderr

    found = json.loads(report.read_text())
    assert found["rows"]["done"] == found["requests"]["finished"] == 71
    assert sum(worker["rows"] for worker in found["workers"]) == 74
    assert all(worker["report"]["plan"]["tiers"] for worker in found["workers"])

    again = generate(folder, out, "--ray", "auto", "--resume", "--part-format", "parquet")
    assert again.exit_code == 1 and "0 rows done, 0 failed, 74 skipped; 3 failed" in again.stderr
    assert "--retry-failed" not in again.stderr, "which does not go with --ray"
    kept = (folder / "b.jsonl").read_bytes()
    (folder / "b.jsonl").write_bytes(kept.replace(b"2+2=", b"3+2="))
    refused = generate(folder, out, "--ray", "auto", "--resume")
    changed = "1 row of the input changed since the results were written, the first with id"
    assert refused.exit_code == 2 and f"{changed} 'line-75'" in refused.stderr
    (folder / "b.jsonl").write_bytes(kept)
    (folder / "c.jsonl").write_bytes(b'{"id":"new","prompt":"3+3="}\n')
    refused = generate(folder, out, "--ray", "auto", "--resume")
    assert refused.exit_code == 2 and "was absent, now" in refused.stderr


def test_whoever_is_killed_no_row_is_lost_or_done_twice(cluster: str, tmp_path: Path) -> None:
    prompts, plain, out = (tmp_path / name for name in ("in.jsonl", "plain.jsonl", "out"))
    prompts.write_bytes(b"\n".join(sums(120, 20)) + b"\n")
    command = ["generate", *OPTIONS, "--ignore-eos", "-i", str(prompts)]
    assert CliRunner().invoke(main, [*command, "-o", str(plain)]).exit_code == 0
    wanted = by_id(plain)
    command = [sys.executable, "-m", "dakrun", *command, "-o", str(out), "--ray", cluster]
    command += ["--workers", "1", "--threads", "1"]
    hidden = out / ".rows.jsonl"

    def wait_for(rows: int, run: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + 120
        while run.poll() is None and not (
            hidden.exists() and hidden.read_bytes().count(b"\n") >= rows
        ):
            assert time.monotonic() < deadline
            time.sleep(0.02)

    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as first:
        wait_for(20, first)
        first.kill()
    kept = hidden.read_bytes()
    before = kept.count(b"\n")
    assert 20 <= before < 60
    report = tmp_path / "report.json"
    command += ["--resume", "--report", str(report)]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as second:
        wait_for(60, second)
        (victim,) = worker_processes()
        os.kill(victim, signal.SIGKILL)
        _, stderr = second.communicate()
    assert second.returncode == 0, stderr
    assert f"{120 - before} rows done, 0 failed, {before} skipped" in stderr.decode()
    assert by_id(*out.glob("part-*.jsonl")) == wanted

    found = json.loads(report.read_text())
    dead, alive = found["workers"]
    assert dead["report"] is None and alive["report"]["plan"]["tiers"]
    assert dead["rows"] > 0 and dead["rows"] + alive["rows"] == 120 - before
    assert found["requests"]["finished"] == 120 - before
    done = [json.loads(line)["usage"]["completion_tokens"] for line in wanted.values()]
    had = [json.loads(line)["usage"]["completion_tokens"] for line in kept.splitlines()[:before]]
    assert found["requests"]["new_tokens"] == sum(done) - sum(had)


def test_a_worker_on_plain_torch_is_named() -> None:
    of_worker = {
        "eb_bytes_per_s": 1e9,
        "time": {"wall_s": 2.0, "bound_s": 1.0},
        "predictions_comparable": False,
        "requests": {"new_tokens": 8},
        "tokens_per_s": 4.0,
    }
    workers = [
        {"worker": name, "node": "n", "rows": 1, "report": {**of_worker, "fallback": why}}
        for name, why in (("worker 1", None), ("worker 2", "card X lacks shared memory"))
    ]
    ended = {"worker": "worker 3", "node": "n", "rows": 0, "report": None}
    sink = io.StringIO()
    console = Console(file=sink, width=120)
    report = {"workers": [*workers, ended], "requests": {"new_tokens": 16}}
    ray_run.render({**report, "time": {"wall_s": 2.0}, "tokens_per_s": 8.0}, console)
    shown = sink.getvalue().splitlines()
    why = "card X lacks shared memory"
    assert [line for line in shown if "plain torch" in line] == [
        f"worker 2 ran on plain torch, slower than the kernels: {why}"
    ]


@pytest.mark.usefixtures("inside")
def test_one_line_and_a_hint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, out = tmp_path / "in.jsonl", tmp_path / "out"
    prompts.write_bytes(b"\n".join(sums(5)))
    for options, code, message in (
        (("--workers", "2"), 2, "--workers needs --ray"),
        (("--part-format", "parquet"), 2, "--part-format needs --ray"),
        (("--ray", "--ordered"), 2, "--ordered does not go with --ray"),
        (("--ray", "--device", "cuda"), 3, "the Ray cluster has no GPU"),
        (("--ray", "--host-budget", "1KiB", "--hbm-budget", "1KiB"), 3, "no worker can run"),
        (("--ray", "--resume", "--overwrite"), 2, "exclude each other"),
        (("--ray", "--report", str(out / "r.json")), 2, "lies in the folder of the results"),
    ):
        run = generate(prompts, out, *options)
        *_, error, hint = run.stderr.splitlines()
        assert run.exit_code == code and message in error, run.stderr
        assert error.startswith("error: ") and hint.startswith("hint: ")
        assert not list(out.glob("part-*"))
        out.mkdir(exist_ok=True)
    run = generate(prompts, tmp_path, "--ray")
    assert run.exit_code == 2 and "give -o another folder" in run.stderr
    monkeypatch.setattr("dakrun.cli.ray.find_spec", lambda _: None)
    run = generate(prompts, out, "--ray")
    assert run.exit_code == 3 and "pip install 'dakrun[ray]'" in run.stderr


def test_without_a_cluster() -> None:
    with pytest.raises(CannotRun) as found, connected("127.0.0.1:1"):
        pass
    assert str(found.value).startswith("no Ray cluster at 127.0.0.1:1 (")
    assert "ray start --head" in found.value.hint


def test_workers_by_what_the_cluster_has(cluster: str) -> None:
    each, workers = resources("auto", None, None)
    assert (each.cpus, each.gpus, workers) == (4, 0, 1)
    assert resources("cpu", None, 2)[0].cpus == 2
    assert resources("cpu", 1, 3) == (type(each)(1, 0), 3)
    with pytest.raises(CannotRun, match="no GPU"):
        resources("cuda", None, None)


class Dying:
    """A worker that ends whenever it gets rows."""

    async def node(self) -> str:
        return "here"

    async def load(self) -> Loaded:
        return Loaded(4, 1.0)

    async def exchange(self, rows: list[Any]) -> None:
        os._exit(1)


class Numbered:
    """Rows 0 to `count`, each shorter than the one before; only every `step`-th is to be done."""

    def __init__(self, count: int, step: int = 1) -> None:
        self._rows = [
            AheadRow(0, n - count, 0, n, f"line-{n}", 1, 0, 1, None) for n in range(count)
        ]
        self._step = step

    def __iter__(self) -> Iterator[Any]:
        while self._rows:
            row = self._rows.pop(0)
            if row.number % self._step == 0:
                yield row

    def left(self) -> int | None:
        return len(self._rows)


def test_workers_that_keep_dying_end_the_run(cluster: str) -> None:
    notes: list[str] = []
    actor = ray.remote(Dying).options(num_cpus=1)
    dispatcher = Dispatcher(
        lambda _: actor.remote(),
        1,
        on_finished=lambda _: None,
        on_progress=lambda _: None,
        note=notes.append,
    )
    with pytest.raises(CannotRun, match="has ended 3 times with no row finished between"):
        dispatcher.run(Numbered(10))
    dispatcher.close()
    assert [("done again" in note, "left out" in note) for note in notes] == [
        *[(True, False)] * 2,
        (False, True),
    ]
    assert all("died unexpectedly" in note for note in notes), notes


def test_rows_that_are_done_are_not_counted_as_left() -> None:
    left = _Untaken(Numbered(1000, step=25))
    assert left and left.count() == 40
    first = [row.number for row in left.take(10, 1 / 4)]
    assert first == list(range(0, 1000, 100)) and left.count() == 30


class InTurn:
    """A worker with room for all rows. It loads once `after` have rows, and replies once all have.

    Files of `folder` say which workers have been handed rows. It waits no longer than a minute.
    """

    def __init__(self, name: str, after: list[str], folder: Path) -> None:
        self._name, self._after, self._folder = name, after, folder

    async def node(self) -> str:
        return "here"

    async def load(self) -> Loaded:
        await self._wait(self._after)
        return Loaded(100, 1.0)

    async def exchange(self, rows: list[Any]) -> Reply:
        (self._folder / self._name).touch()
        await self._wait(["early", "late"])
        done = [Finished(row.number, 1, 1, -row.minus_new, self._name.encode()) for row in rows]
        return Reply(done, NONE_YET, None)

    async def _wait(self, names: list[str]) -> None:
        end = time.monotonic() + 60
        while time.monotonic() < end and not all((self._folder / name).exists() for name in names):
            await asyncio.sleep(0.02)


def test_the_first_to_load_does_not_get_all_long_rows(
    cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dakrun.ray.dispatch.WAITING_S", 3600.0)  # a slow start is no lack of room
    actor = ray.remote(InTurn).options(num_cpus=1)
    to_start = iter([("late", ["early"], tmp_path), ("early", [], tmp_path)])
    tokens: Counter[bytes] = Counter()
    dispatcher = Dispatcher(
        lambda _: actor.remote(*next(to_start)),
        2,
        on_finished=lambda rows: [tokens.update({one.line: one.new_tokens}) for _, one in rows],
        on_progress=lambda _: None,
        note=lambda _: None,
    )
    dispatcher.run(Numbered(60))
    dispatcher.close()
    assert tokens[b"early"] + tokens[b"late"] == sum(range(61))
    assert tokens[b"early"] - tokens[b"late"] == 30  # rows 0, 2, ... and 1, 3, ...


@pytest.mark.full
def test_a_pipeline_of_ray_data(cluster: str) -> None:
    params = SamplingParams(max_tokens=8)
    rows: list[dict[str, Any]] = [
        {"id": f"q{n}", "prompt": f"{n}+{n}=", "max_tokens": 1 + n % 8, "label": n}
        for n in range(40)
    ]
    rows[5]["max_tokens"] = 0
    rows[6]["max_tokens"] = None
    data = ray.data.from_items(rows, override_num_blocks=2).map_batches(
        DakrunProcessor,
        fn_constructor_kwargs={
            "model": str(MODEL),
            "params": params,
            "dtype": "float32",
            "batch_size": 4,
            "policy": Policy(offload_ratio=0.5),
        },
        compute=ray.data.ActorPoolStrategy(size=1, max_concurrent_calls_per_actor=2),
        batch_size=6,
        batch_format="pyarrow",
    )
    found = {row["id"]: row for row in data.take_all()}
    assert len(found) == 40 and all(found[row["id"]]["label"] == row["label"] for row in rows)
    bad = found.pop("q5")
    assert bad["error"]["code"] == "invalid_field" and bad["text"] is None
    good = [row for row in rows if row["id"] in found]
    with LLM(MODEL, dtype="float32", batch_size=4) as llm:
        each = [SamplingParams(max_tokens=row["max_tokens"] or 8) for row in good]
        for row, wanted in zip(good, llm.generate([r["prompt"] for r in good], each), strict=True):
            result = found[row["id"]]
            assert result["error"] is None and result["finish_reason"] == wanted.finish_reason
            assert result["text"] == wanted.text
            assert list(result["token_ids"]) == list(wanted.token_ids)
            assert result["usage"]["completion_tokens"] == len(wanted.token_ids)


def test_a_processor_gives_one_completion_a_row() -> None:
    with pytest.raises(UsageError, match="n is 2"):
        DakrunProcessor(str(MODEL), params=SamplingParams(n=2))


@pytest.mark.full
def test_a_processor_scores_prompts(cluster: str) -> None:
    """Its params may ask for no new token; a column of rows for several choices."""
    rows = [{"prompt": "one plus two", "n": 1}, {"prompt": "three", "n": 2, "max_tokens": 3}]
    params = SamplingParams(max_tokens=0, prompt_logprobs=1)
    data = ray.data.from_items(rows).map_batches(
        DakrunProcessor,
        fn_constructor_kwargs={"model": str(MODEL), "params": params, "dtype": "float32"},
        compute=ray.data.ActorPoolStrategy(size=1),
        batch_format="pyarrow",
    )
    one, several = sorted(data.take_all(), key=lambda row: row["n"])
    assert (list(one["token_ids"]), one["finish_reason"], one["choices"]) == ([], "length", None)
    assert one["prompt_logprobs"][0] is None and len(one["prompt_logprobs"][1]["top"]) == 1
    assert len(one["prompt_logprobs"]) == one["usage"]["prompt_tokens"]
    assert [choice["index"] for choice in several["choices"]] == [0, 1]
    assert len(several["choices"][0]["token_ids"]) > 0
