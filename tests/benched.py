"""What tests of the benchmarks share: a record's head, the command, copies and graphs of a CPU."""

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from dakrun.bench import tiers
from dakrun.bench.ceilings import Ceilings
from dakrun.bench.effort import MIB, Effort
from dakrun.bench.output import Record, as_text
from dakrun.cli import main as cli
from dakrun.hardware.files import load_profile
from dakrun.hardware.profile import LOCAL
from dakrun.memory.tiers import allocate_tiers
from dakrun.probe import chain

PROFILE = load_profile("h200-pcie5")
TINY = Effort(
    hbm_bytes=256 * MIB, remote_bytes=64 * MIB, seconds=0.002, readings=3,
    chain_bytes=64 * MIB, least_launches=4, replays=3,
)  # fmt: skip
HEAD = {
    "device": "NVIDIA H200", "date": "2026-11-21", "driver": "580.65.06", "torch": "2.11.0",
    "cuda": "13.0", "dakrun": "0.1", "dtype": "float16", "profile": "mine",
    "ceilings_bytes_per_s": {"hbm": 4.7e12, "host": 5.14e10}, "turning_point_ratio": 0.0108,
    "ceilings_measured": True, "copied_bytes_per_s": {},
}  # fmt: skip


def run(kernel: str, *args: str) -> Result:
    """`dakrun bench --kernel` with more arguments."""
    command = ["bench", "--kernel", kernel, *args]
    return CliRunner(env={"DAKRUN_DEBUG": "", "NO_COLOR": ""}).invoke(cli.main, command)


def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies are a CPU's; a graph takes 10 ms, and its launches are made once."""

    def seconds(launch: Callable[[], None], runs: int, *, new: bool = True) -> list[float]:
        if runs > 2:  # not to find out how long a chain is to be
            launch()
        return [1e-2] * runs

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(tiers, "copy", lambda to, of: to.copy_(of))
    monkeypatch.setattr(tiers, "BLOCK_BYTES", 2**16)
    monkeypatch.setattr(chain, "graph_seconds", seconds)


def without_a_gpu(module: Any, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Lets `module` measure as if HBM had 4 TB/s, the host 1; where it takes memory, by tier."""
    taken: list[list[str]] = []

    def take(sizes: dict[str, int], _: torch.device) -> Any:
        taken.append(list(sizes))
        return allocate_tiers(sizes, torch.device("cpu"))

    monkeypatch.setattr(
        module, "measure_ceilings", lambda *_: Ceilings({LOCAL: 4e12, "host": 1e12})
    )
    monkeypatch.setattr(module, "head", lambda *values: {"command": values[-1]})
    monkeypatch.setattr(tiers, "take", take)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties",
        lambda _: type("Properties", (), {"multi_processor_count": 132}),
    )  # fmt: skip
    return taken


def check_measured(found: Record, operand: str, times: tuple[str, ...]) -> None:
    """What holds of any TINY sweep with a share in host memory; `times` are keys of its rows."""
    assert found.head["device"] == torch.cuda.get_device_name()
    assert list(found.head["ceilings_bytes_per_s"]) == [LOCAL, "host"]
    for row in found.rows:
        read = row[f"{operand}_bytes"]
        assert all(math.isfinite(row[key]) and row[key] > 0 for key in ("time_s", *times))
        assert row["bytes_per_s"] * row["time_s"] == pytest.approx(read)
        assert 0 < row["bound_over_time"] < 2, "ceilings and times measure the same thing"
        assert row["launches"] * read > TINY.chain_bytes
    assert json.loads(as_text(found, "json"))["rows"] == list(found.rows)
