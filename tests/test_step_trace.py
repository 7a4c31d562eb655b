"""The tool that shows the kernels of a decode step, on traces made up."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tools import step_trace
from tools.step_trace import kernels, layers_of, lines, steps_of

LAYER = ["norm", "gemm", "attn", "gemm", "norm", "gemm", "gemm"]
STEP = ["embed", *4 * LAYER, "norm", "gemm", "select"]
PROMPTS = ["embed", *4 * ["norm", "gemm"], "select"]
DURATIONS = {"embed": 2.0, "norm": 1.0, "gemm": 9.0, "attn": 5.0, "select": 4.0}
GAPS = {"embed": 50.0, "attn": -0.5}  # else 1 us


def events(names: Sequence[str], slow: int | None = None) -> list[dict[str, Any]]:
    """A trace of the kernels, one of them slow, in no order, with others' events between them."""
    at, found = 1000.0, []
    for number, name in enumerate(names):
        at += GAPS.get(name, 1.0)
        took = DURATIONS[name] + 1000 * (number == slow)
        launch = {"cat": "kernel", "ts": at, "dur": took, "args": {"grid": [132, 1, 1]}}
        found += [{**launch, "name": f"void {name}<int>(Args)"}, {"name": "x", "ts": at, "ph": "i"}]
        at += took
    return found[::-1]


def test_launches_have_gaps_to_the_end_of_the_one_before() -> None:
    first, second, third = kernels(events(["norm", "attn", "embed"]))
    assert first == ("norm", 1.0, 0.0, "132x1x1")
    assert second == ("attn", 5.0, -0.5, "132x1x1")
    assert third == ("embed", 2.0, 50.0, "132x1x1")


def test_steps_are_those_with_the_most_common_kernels() -> None:
    launched = kernels(events(["norm", *5 * PROMPTS, *20 * STEP, *3 * PROMPTS]))
    steps = steps_of(launched, "embed")
    assert len(steps) == 12
    assert all([kernel.name for kernel in step] == STEP for step in steps)
    assert len(steps_of(launched[:40], "embed")) == 3
    assert steps_of(launched, "gather") == []


@pytest.mark.parametrize(
    ("names", "layer", "starts"),
    [
        (STEP, 7, [1, 8, 15, 22]),
        (["embed", *3 * ["gemm", "gemm", "attn"], "gemm", "select"], 3, [1, 4, 7]),
        (["embed", *2 * LAYER, *LAYER[:4], "copy", *LAYER[4:], *3 * LAYER], 7, [1, 8, 23, 30, 37]),
        (["embed", *5 * ["attn"], *2 * LAYER], 7, [6, 13]),  # few equal ones are no layers
        (["embed", *80 * LAYER, "select"], 7, list(range(1, 561, 7))),
        (["embed", "norm", "gemm"], 0, []),
    ],
)
def test_layers_are_what_repeats(names: list[str], layer: int, starts: list[int]) -> None:
    assert layers_of(names) == [range(start, start + layer) for start in starts]


def test_figures_are_medians_over_layers_and_steps() -> None:
    slow = 2 * len(STEP) + 3  # one attention
    head, _, *found = lines(steps_of(kernels(events([*5 * STEP], slow)), "embed"))
    assert head == "5 steps; 4 layers, and 4 kernels outside them"
    rows = [line.split() for line in found]
    assert [row[0] for row in rows] == [*LAYER, "sum", "embed", "norm", "gemm", "select", "sum"]
    assert rows[2] == ["attn", "132x1x1", "5.00", "-0.50", "4.50"]
    assert rows[7][-1] == "48.50"  # 2 norms of 2, 4 products of 10, attention
    assert rows[8] == ["embed", "132x1x1", "2.00", "50.00", "52.00"]
    assert rows[12][-1] == "69.00"


def test_a_step_without_layers() -> None:
    _, _, none, *found = lines(steps_of(kernels(events(3 * ["embed", "norm", "select"])), "embed"))
    assert none.split() == ["sum", "of", "a", "layer", "0.00"]
    assert found[-1].split()[-1] == "59.00"


class Profiled:
    """What torch's profiler would give of the command."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names

    def __enter__(self) -> "Profiled":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def export_chrome_trace(self, path: str) -> None:
        Path(path).write_text(json.dumps({"traceEvents": events(self.names)}))


def run(monkeypatch: pytest.MonkeyPatch, names: Sequence[str], *command: str) -> None:
    """Run the tool as where there is a GPU, which launches these kernels."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.profiler, "profile", lambda **_: Profiled(names))
    monkeypatch.setattr(sys, "argv", ["step_trace.py", "--", *command])
    step_trace.main()


def test_a_command_is_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, 3 * STEP, "plan", "--help")
    out = capsys.readouterr().out
    assert "Usage: dakrun plan" in out and "3 steps; 4 layers" in out


def test_a_command_that_fails_or_has_no_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="2"):
        run(monkeypatch, 3 * STEP, "plan")
    with pytest.raises(SystemExit, match=r"no kernel is called embed\.\.\.; hint: "):
        run(monkeypatch, [], "--help")
