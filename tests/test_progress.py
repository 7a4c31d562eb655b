"""The progress of a run: its arithmetic with a clock of the test's, and its line in a terminal."""

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from dakrun.config import SamplingParams
from dakrun.demo import MODEL
from dakrun.llm import LLM
from dakrun.requests import Request
from dakrun.terminal.progress import RunEstimate, Shown, clock, run_line

ROOT = Path(__file__).parents[1]


def test_the_forecast_gives_the_first_time_left() -> None:
    estimate = RunEstimate(tokens=1000, forecast_s=100, began=50)
    estimate.begin()
    assert estimate.at(50, 0) == Shown(0, None, 100)
    assert estimate.at(60, 0) == Shown(0, None, 90)
    # 5% in 20 s would take 380 s more; half of that counts, and half of the forecast's 80.
    assert estimate.at(70, 50) == Shown(0.05, 2.5, pytest.approx(230))
    assert estimate.at(90, 100).left_s == pytest.approx(360)  # from 10% on only what is measured


def test_tokens_of_running_rows_count() -> None:
    estimate = RunEstimate(tokens=400, began=0)
    assert estimate.at(0, 0) == Shown(0, None, None)
    for _ in range(4):
        estimate.begin()
    assert estimate.at(10, 100) == Shown(0.25, 10, 30)
    # A row that ended with half of its 100 tokens is worth 100, and what runs twice its tokens.
    estimate.end(limit=100, tokens=50)
    assert estimate.at(20, 100) == Shown(0.5, 5, 20)
    for _ in range(3):
        estimate.end(limit=100, tokens=50)
    assert estimate.at(30, 200) == Shown(1, pytest.approx(20 / 3), 0)
    assert (estimate.ended, estimate.running, estimate.failed) == (4, 0, 0)


def test_skipped_rows_are_done_but_say_nothing_of_the_speed() -> None:
    estimate = RunEstimate(tokens=400, began=0)
    estimate.skip(limit=200)
    estimate.begin()
    assert estimate.at(10, 50) == Shown(0.625, 5, 30)
    estimate.begin()
    estimate.end(limit=0, tokens=0, failed=True)
    assert (estimate.ended, estimate.skipped, estimate.failed) == (2, 1, 1)


def test_the_rate_is_that_of_the_last_half_minute() -> None:
    estimate = RunEstimate(began=0)
    for second in range(101):
        shown = estimate.at(second, 10 * second if second <= 60 else 600 + 2 * (second - 60))
    assert shown == Shown(None, 2, None)


@pytest.mark.parametrize("width", [80, 120])
def test_a_line_fits_its_terminal(width: int) -> None:
    estimate = RunEstimate()
    estimate.done, estimate.failed, estimate.running = 112_345, 12, 2048
    shown = Shown(0.456, 123_456.7, 12_345)
    line = run_line(estimate, shown, (1_200_000, False), 3661, width)
    assert len(line) < width
    assert line.startswith("112,357 of ~1,200,000 rows, 12 failed")
    passed = "" if width == 80 else "1:01:01  "
    assert line.endswith(f"45%  123,457 tokens/s  {passed}ETA 3:25:45")
    one = RunEstimate()
    assert run_line(one, Shown(None, None, None), (1, True), 7, width) == (
        "0 of 1 row  0:07  ETA -"
    )
    assert run_line(one, Shown(None, 1.4, None), None, 7, width).startswith("0 rows  1 tokens/s")
    assert "[##...] 50%" in run_line(one, Shown(0.5, None, 1), None, 7, 40)


def test_clock() -> None:
    assert [clock(s) for s in (0, 59.6, 3599, 3600)] == ["0:00", "1:00", "59:59", "1:00:00"]


def test_the_engine_counts_tokens_of_running_requests() -> None:
    with LLM(MODEL, device="cpu", batch_size=2) as llm:
        made = [
            Request(
                id=str(n), line=n, prompt_ids=(5, 6),
                params=SamplingParams(max_tokens=n, ignore_eos=True),
            )
            for n in (3, 20)
        ]  # fmt: skip
        results = llm.stream(made)
        next(results)
        assert llm.engine.stats.new_tokens == 3 and llm.engine.stats.running_tokens in (3, 4)
        assert [result.id for result in results] == ["20"]
        assert llm.engine.stats.tokens_so_far == 23 and llm.engine.stats.running_tokens == 0
        next(llm.stream(made))  # dropped, with the tokens of the other
        assert llm.engine.stats.running_tokens == 0


def start(tmp_path: Path, count: int, *, hup: int = signal.SIG_DFL) -> tuple[int, subprocess.Popen]:  # type: ignore[type-arg]
    """A run of `count` rows side by side, and its terminal of 80 columns."""
    rows = tmp_path / "rows.jsonl"
    row = {"prompt_token_ids": [5, 6], "max_tokens": 40, "ignore_eos": True}
    rows.write_text("".join(json.dumps(row) + "\n" for _ in range(count)))
    command = ["generate", "--model", str(MODEL), "--device", "cpu", "--batch-size", str(count)]
    command += ["-i", str(rows), "-o", str(tmp_path / "out.jsonl")]
    terminal, stderr = os.openpty()
    run = subprocess.Popen(
        [sys.executable, "-m", "dakrun", *command],
        stderr=stderr,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "80"},
        preexec_fn=lambda: signal.signal(signal.SIGHUP, hup),
    )
    os.close(stderr)
    return terminal, run


@pytest.mark.full
def test_rows_in_flight_are_seen_in_a_terminal(tmp_path: Path) -> None:
    terminal, run = start(tmp_path, 128)
    shown = b""
    with suppress(OSError):  # the terminal's other end is closed
        while more := os.read(terminal, 4096):
            shown += more
    os.close(terminal)
    assert run.wait(timeout=60) == 0
    lines = re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.decode()))
    flying = re.compile(
        r"0 of 128 rows, 128 running  \[[#.]{5}\] [1-9]\d*%  [\d,]+ tokens/s  0:\d\d  ETA \d+:\d\d"
    )
    assert any(flying.fullmatch(line.strip()) for line in lines), lines
    assert lines[-2:] == ["128 rows done, 0 failed, 0 skipped", ""]


# test_survival.py has a run that ignores SIGHUP.
@pytest.mark.parametrize(
    "hup", [signal.SIG_DFL, pytest.param(signal.SIG_IGN, marks=pytest.mark.full)]
)
def test_a_terminal_that_goes(hup: int, tmp_path: Path) -> None:
    """SIGHUP ends the run with whole rows; where it is ignored, the run goes on to its end."""
    terminal, run = start(tmp_path, 64, hup=hup)
    shown = b""
    while b" running" not in shown:
        shown += os.read(terminal, 4096)
    os.close(terminal)
    run.send_signal(signal.SIGHUP)  # as the kernel does to the programs of a session
    code = run.wait(timeout=120)
    rows = (tmp_path / "out.jsonl").read_text().splitlines()
    if hup == signal.SIG_IGN:
        assert code == 0 and len(rows) == 64
    else:
        assert code == 129 and len(rows) < 64
    assert all(json.loads(row)["finish_reason"] == "length" for row in rows)
