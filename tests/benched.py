"""Helpers of the benchmark tests: a record, the command, and copies and graphs on a CPU."""

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cards import H200, hold_to
from click.testing import CliRunner, Result

from dakrun.cli import main
from dakrun.errors import UsageError
from dakrun.hardware import LOCAL, load_profile
from dakrun.kernels.runtime import gpu_name
from dakrun.lab.ceilings import MIB, Ceilings, Effort
from dakrun.lab.output import Record, as_text
from dakrun.memory.tiers import allocate_tiers

PROFILE = load_profile("h200-pcie5")
TINY = Effort(
    hbm_bytes=256 * MIB, remote_bytes=64 * MIB, seconds=0.002, readings=3,
    chain_bytes=64 * MIB, min_launches=4, replays=3,
)  # fmt: skip
HEAD = {
    "device": "NVIDIA H200", "date": "2026-11-21", "driver": "580.65.06", "torch": "2.11.0",
    "cuda": "13.0", "dakrun": "0.1", "commit": "abc1234", "dtype": "float16", "profile": "mine",
    "ceilings_bytes_per_s": {"hbm": 4.7e12, "host": 5.14e10}, "turning_point_ratio": 0.0108,
    "ceilings_measured": True, "copied_bytes_per_s": {},
}  # fmt: skip


def run(*args: object) -> Result:
    """`dakrun bench` with these arguments."""
    command = ["bench", *map(str, args)]
    return CliRunner(env={"DAKRUN_DEBUG": "", "NO_COLOR": ""}).invoke(main, command)


def refused(result: Result, code: int, said: str, hint: str) -> None:
    """The command ended with an error that contains `said` and a hint that contains `hint`."""
    assert result.exit_code == code and result.stdout == ""
    *_, error, advice = result.stderr.splitlines()
    assert error.startswith("error: ") and said in error
    assert advice.startswith("hint: ") and hint in advice


def malformed(parse: Callable[[str], object], text: str, said: str, hint: str) -> None:
    """`parse` refuses `text` with an error that contains `said` and a hint that contains `hint`."""
    with pytest.raises(UsageError, match=said) as problem:
        parse(text)
    assert hint in problem.value.hint


def check_command(
    kernel: str,
    args: tuple[str, ...],
    wanted: Any,
    record: Record,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The command with `args` measures the sweep `wanted` and writes the record in every format."""

    def measured(found: Any, profile: Any, **rest: Any) -> Record:
        assert found == wanted and profile == PROFILE
        assert rest["command"] == "dakrun bench --ratio '0 5'"
        return record

    # Neither a GPU nor its kernels are needed to check what the command does with a record.
    monkeypatch.setattr("dakrun.lab.bench.run.check_device", lambda _: None)
    monkeypatch.setattr("dakrun.lab.bench.kernel.measure_kernel", measured)
    monkeypatch.setattr(sys, "argv", ["/bin/dakrun", "bench", "--ratio", "0 5"])
    target = tmp_path / "a.md"
    asked = ("--kernel", kernel, *args, "--profile", PROFILE.name)
    shown = run(*asked, "-o", target)
    assert shown.exit_code == 0, shown.stderr
    assert shown.stdout.startswith("NVIDIA H200") and record.columns[-2].title[:4] in shown.stdout
    assert target.read_text(encoding="utf-8") == as_text(record, "md")
    for format in ("csv", "json"):
        assert run(*asked, f"--{format}").stdout == as_text(record, format)


def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies are a CPU's; a graph takes 10 ms, and its launches are made once."""

    def seconds(launch: Callable[[], None], runs: int, *, new: bool = True) -> list[float]:
        if runs > 2:  # two runs only find the length of a chain
            launch()
        return [1e-2] * runs

    # What only a GPU has: streams, the copy engine and CUDA graphs.
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr("dakrun.lab.memory.allocate", allocate_tiers)
    monkeypatch.setattr("dakrun.lab.memory.copy", lambda to, of: to.copy_(of))
    monkeypatch.setattr("dakrun.lab.memory.BLOCK_BYTES", 2**16)
    monkeypatch.setattr("dakrun.lab.chain.graph_seconds", seconds)


def without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """HBM has 4 TB/s and the host 1; the result collects the tiers of each allocation."""
    taken: list[list[str]] = []

    def allocate(sizes: dict[str, int], _: torch.device) -> Any:
        taken.append(list(sizes))
        return allocate_tiers(sizes, torch.device("cpu"))

    # What only a GPU has: bandwidths to measure, a name, and memory of its own.
    ceilings = Ceilings({LOCAL: 4e12, "host": 1e12})
    monkeypatch.setattr("dakrun.lab.bench.kernel.measure_ceilings", lambda *_: ceilings)
    monkeypatch.setattr("dakrun.lab.bench.kernel.head", lambda *values: {"command": values[-1]})
    monkeypatch.setattr("dakrun.lab.memory.allocate", allocate)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    hold_to(H200, monkeypatch)
    return taken


def check_measured(found: Record, operand: str, times: tuple[str, ...]) -> None:
    """Invariants of any TINY sweep with units in host memory; `times` are keys of its rows."""
    assert found.head["device"] == gpu_name()
    assert list(found.head["ceilings_bytes_per_s"]) == [LOCAL, "host"]
    for row in found.rows:
        read = row[f"{operand}_bytes"]
        assert all(math.isfinite(row[key]) and row[key] > 0 for key in ("time_s", *times))
        assert row["bytes_per_s"] * row["time_s"] == pytest.approx(read)
        assert 0 < row["bound_over_time"] < 2, "ceilings and times measure the same thing"
        assert row["launches"] * read > TINY.chain_bytes
    assert json.loads(as_text(found, "json"))["rows"] == list(found.rows)
