"""Runs that are killed, interrupted or run out of disk: what had finished is whole, and goes on.

Every run is a process of its own; most are forked from one that has imported everything already.
"""

import gzip
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from cases import cases

from dakrun.demo import MODEL, task
from dakrun.interrupt import HungUp, Terminated, exit_code, raise_on_signals
from dakrun.requests import ResultWriter, RowError

COUNT = 200
SAMPLED = ("--temperature", "1.2", "--seed", "7", "--max-tokens", "6", "--ignore-eos")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "NO_COLOR": "1"}

# Forks a run for each request line and answers with its pid, then with its exit status. Nothing
# uses torch's threads before the fork.
SERVER = """
import json, os, resource, signal, sys
import torch
from dakrun import generate, llm, report
from dakrun.cli import main
from dakrun.demo import MODEL
from dakrun.requests import Tokenizer
torch.set_num_threads(1)
Tokenizer.load(MODEL)
for line in sys.stdin:
    request = json.loads(line)
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in background jobs
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(os.open(request["stderr"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
        if request["file_bytes"]:
            resource.setrlimit(resource.RLIMIT_FSIZE, (request["file_bytes"],) * 2)
        code = 1
        try:
            main(request["arguments"])
        except SystemExit as end:
            code = end.code or 0
        finally:
            os._exit(code)
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


class Server:
    """Starts runs of the command line without paying for their imports each time."""

    def __init__(self, stderr: Path) -> None:
        self._stderr = stderr
        self._process = subprocess.Popen(
            [sys.executable, "-c", SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=ENVIRONMENT,
        )

    def run(
        self,
        arguments: list[str],
        *,
        file_bytes: int = 0,
        meanwhile: Callable[[int], None] = lambda pid: None,
    ) -> tuple[int, str]:
        """Exit code (negative for a signal) and stderr; `meanwhile` gets the pid."""
        request = {"arguments": arguments, "stderr": str(self._stderr), "file_bytes": file_bytes}
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        meanwhile(int(self._process.stdout.readline()))
        code = int(self._process.stdout.readline())
        return code, self._stderr.read_text(encoding="utf-8")

    def close(self) -> None:
        self._process.communicate(timeout=60)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("server") / "stderr")
    yield server
    server.close()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    rows = [{"id": f"sum {a}+{b}", "prompt": task.prompt(a, b)} for a, b in task.held_out()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def undisturbed(
    server: Server, source: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """The rows of a run that nothing disturbed, by id."""
    out = tmp_path_factory.mktemp("undisturbed") / "out.jsonl"
    assert server.run(arguments(source, out))[0] == 0
    rows = read(out)
    assert len(rows) == COUNT
    texts = [row["text"] for row in rows.values()]
    assert len(set(texts)) > COUNT / 2
    return rows


def arguments(source: Path, out: Path | str, *more: str) -> list[str]:
    base = ["generate", "--model", str(MODEL), "-i", str(source), "-o", str(out)]
    return [*base, "--device", "cpu", "--batch-size", "8", *SAMPLED, *more]


def read(out: Path) -> dict[str, Any]:
    """The rows by id; each must be whole and there once."""
    text = out.read_text(encoding="utf-8")
    assert text.endswith("\n")
    rows = [json.loads(line) for line in text.splitlines()]
    assert len({row["id"] for row in rows}) == len(rows)
    return {row["id"]: row for row in rows}


def wait_for_rows(out: Path, count: int, is_running: Callable[[], bool]) -> None:
    """Return once `out` has `count` rows or the run has ended."""
    while is_running() and not (out.exists() and out.read_bytes().count(b"\n") >= count):
        time.sleep(0.001)


def alive(pid: int) -> Callable[[], bool]:
    deadline = time.monotonic() + 120

    def is_alive() -> bool:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        return time.monotonic() < deadline

    return is_alive


def test_ten_kills_change_nothing(
    server: Server, source: Path, undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    out, chance = tmp_path / "out.jsonl", random.Random(20261121)
    lines = 0
    for _ in range(10):
        target, pause = lines + chance.randint(0, 9), chance.uniform(0, 0.005)

        def kill(pid: int, target: int = target, pause: float = pause) -> None:
            wait_for_rows(out, target, alive(pid))
            time.sleep(pause)
            os.kill(pid, signal.SIGKILL)

        assert server.run(arguments(source, out, "--resume"), meanwhile=kill)[0] == -signal.SIGKILL
        lines = out.read_bytes().count(b"\n") if out.exists() else 0
        if lines:  # a kill never parts rows from the fingerprint of their run
            code, said = server.run(arguments(source, out, "--resume", "--seed", "8"))
            assert code == 2 and "sampling.seed was 7, now 8" in said
    assert 0 < lines < COUNT
    code, said = server.run(arguments(source, out, "--resume"))
    assert code == 0 and f"{COUNT - lines} rows done, 0 failed, {lines} skipped" in said
    assert read(out) == undisturbed


def test_kills_of_a_run_with_drafts(
    server: Server, source: Path, undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    """Other drafts after each: results are those of a run without."""
    out = tmp_path / "out.jsonl"
    for drafts, target in ((5, 20), (2, 70), (7, 130)):

        def kill(pid: int, target: int = target) -> None:
            wait_for_rows(out, target, alive(pid))
            os.kill(pid, signal.SIGKILL)

        command = arguments(source, out, "--resume", "--speculate", f"suffix:{drafts}")
        assert server.run(command, meanwhile=kill)[0] == -signal.SIGKILL
    assert out.read_bytes().count(b"\n") < COUNT
    code, said = server.run(arguments(source, out, "--resume", "--speculate", "suffix"))
    assert code == 0 and "tokens a step and row" in said, said
    assert read(out) == undisturbed


def test_kills_of_a_packed_and_ordered_run(
    server: Server, source: Path, undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    out, command = tmp_path / "out.jsonl.gz", ("--resume", "--ordered")
    for size in (1, 4_000, 12_000):

        def kill(pid: int, size: int = size) -> None:
            is_running = alive(pid)
            while is_running() and not (out.exists() and out.stat().st_size >= size):
                time.sleep(0.001)
            with suppress(ProcessLookupError):  # on a busy machine the run may have ended
                os.kill(pid, signal.SIGKILL)

        assert server.run(arguments(source, out, *command), meanwhile=kill)[0] in (0, -9)
    assert server.run(arguments(source, out, *command))[0] == 0
    rows = [json.loads(line) for line in gzip.decompress(out.read_bytes()).splitlines()]
    assert [row["id"] for row in rows] == [
        json.loads(line)["id"] for line in source.read_text(encoding="utf-8").splitlines()
    ]
    assert {row["id"]: row for row in rows} == undisturbed


STOPS = [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]


@pytest.mark.parametrize(("number", "code"), STOPS)
def test_a_signal_stops_between_rows(
    server: Server,
    source: Path,
    undisturbed: dict[str, Any],
    tmp_path: Path,
    number: signal.Signals,
    code: int,
) -> None:
    out = tmp_path / "out.jsonl"

    def stop(pid: int) -> None:
        wait_for_rows(out, 20, alive(pid))
        os.kill(pid, number)

    ended, said = server.run(arguments(source, out, "--overwrite"), meanwhile=stop)
    assert ended == code
    rows = read(out)
    assert said == (
        f"interrupted: {len(rows)} of {COUNT} rows on disk in {out}; "
        "to go on, run again with --resume instead of --overwrite\n"
    )
    assert 20 <= len(rows) < COUNT
    assert rows == {id: row for id, row in undisturbed.items() if id in rows}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_during_a_write_waits_for_its_end(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    number: signal.Signals,
) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs lack it
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    out, went_on = tmp_path / "out.jsonl", []
    error = RowError(id="a", line=1, code="c", message="m")

    def sync(fd: int) -> None:
        signal.raise_signal(number)
        went_on.append(fd)

    out.touch()
    monkeypatch.setattr(os, "fsync", sync)
    expected = {signal.SIGTERM: Terminated, signal.SIGHUP: HungUp}.get(number, KeyboardInterrupt)
    with raise_on_signals(), ResultWriter(out) as writer, pytest.raises(expected) as stopped:
        writer.write(error)
    assert len(went_on) == 1 and list(read(out)) == ["a"]
    assert exit_code(stopped.value) == 128 + number
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL


def test_sighup_that_is_ignored_at_the_start_stays_so(
    source: Path, undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    """As nohup leaves it."""
    out = tmp_path / "out.jsonl"
    run = subprocess.Popen(
        [sys.executable, "-m", "dakrun", *arguments(source, out)],
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    )
    for count in (3, 10):
        wait_for_rows(out, count, lambda: run.poll() is None)
        run.send_signal(signal.SIGHUP)
    _, stderr = run.communicate(timeout=120)
    assert run.returncode == 0 and f"{COUNT} rows done" in stderr
    assert read(out) == undisturbed


def test_ctrl_c_in_a_process_of_its_own(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    run = subprocess.Popen(
        [sys.executable, "-m", "dakrun", *arguments(source, out)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # background jobs lack it
    )
    wait_for_rows(out, 3, lambda: run.poll() is None)
    run.send_signal(signal.SIGINT)
    stdout, stderr = run.communicate(timeout=60)
    assert run.returncode == 130 and stdout == ""
    assert stderr.startswith("interrupted: ") and stderr.endswith("run again with --resume\n")
    assert stderr.count("\n") == 1
    assert 3 <= len(read(out)) < COUNT


@pytest.mark.parametrize(
    ("number", "code"), cases(STOPS, lambda number, _: number == signal.SIGINT)
)
def test_a_load_is_shown_and_stopped(number: signal.Signals, code: int, tmp_path: Path) -> None:
    """Stopped early in a load of 2.5 GiB, which would take longer than the test waits."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt_token_ids": [5, 6]}\n')
    command = ["generate", "--model", "opt-1.3b", "--load-format", "dummy", "--device", "cpu"]
    command += ["--batch-size", "1", "-i", str(rows), "-o", str(tmp_path / "out.jsonl")]
    terminal, stderr = os.openpty()
    run = subprocess.Popen(
        [sys.executable, "-m", "dakrun", *command],
        stderr=stderr,
        env={**ENVIRONMENT, "TERM": "xterm", "COLUMNS": "120"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    os.close(stderr)
    shown = b""
    while b"loading weights" not in shown:
        shown += os.read(terminal, 4096)
    run.send_signal(number)
    with suppress(OSError):  # the terminal's other end is closed
        while more := os.read(terminal, 4096):
            shown += more
    os.close(terminal)
    assert run.wait(timeout=60) == code
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.decode())
    assert re.search(r"loading weights .*/2\.\d GiB .*ETA", text)
    said = "interrupted: no row has begun; to go on, run the same command again"
    assert said in text.replace("\r", "")
    loaded = re.findall(r"loading weights \D*([\d.]+)/2\.\d GiB", text)
    assert loaded and max(map(float, loaded)) < 2


def disk_full(code: int, said: str, out: Path, remedy: str = "free some space") -> None:
    error, hint = said.splitlines()
    assert code == 3
    assert error.startswith(f"error: {out}: cannot be written (")
    assert hint.startswith(f"hint: finished rows are kept: {remedy};")
    assert hint.endswith("run again with --resume")
    assert 0 < len(read(out)) < COUNT


def test_a_file_size_limit(
    server: Server, source: Path, undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    code, said = server.run(arguments(source, out), file_bytes=5000)
    disk_full(code, said, out, "raise the limit (ulimit -f)")
    assert out.stat().st_size <= 5000
    assert server.run(arguments(source, out, "--resume"))[0] == 0
    assert read(out) == undisturbed


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="has no /dev/full")
def test_a_device_that_is_always_full(server: Server, source: Path) -> None:
    code, said = server.run(arguments(source, "/dev/full"))
    assert code == 3
    assert [line.split(":")[0] for line in said.splitlines()] == ["error", "hint"]
    assert "No space left on device" in said


def test_a_full_file_system(source: Path, tmp_path: Path) -> None:
    disk, kept = tmp_path / "disk", tmp_path / "kept.jsonl"
    disk.mkdir()
    mount = ["unshare", "--mount", "--map-root-user", "sh", "-ec"]
    probe = 'mount -t tmpfs -o size=12k tmpfs "$0"'
    if shutil.which("unshare") is None:
        pytest.skip("has no unshare")
    if subprocess.run([*mount, probe, str(disk)], capture_output=True).returncode:
        pytest.skip("may not mount a file system in a namespace of its own")
    script = f'{probe}; code=0; "$@" || code=$?; cp "$0/out.jsonl" {kept}; exit $code'
    command = [sys.executable, "-m", "dakrun", *arguments(source, disk / "out.jsonl")]
    run = subprocess.run(
        [*mount, script, str(disk), *command], capture_output=True, text=True, env=ENVIRONMENT
    )
    assert "No space left on device" in run.stderr
    kept_name = run.stderr.replace(str(disk / "out.jsonl"), str(kept))
    disk_full(run.returncode, kept_name, kept)
