"""The values that tests/tools/grouped_speed.py checks before it times; kernels are emulated."""

import pytest
import torch
from cards import hold_to, hopper
from emulated import atoms_map, boxes_map
from tools import grouped_speed
from tools.grouped_speed import Mixture, Step

from dakrun.config import Routing
from dakrun.kernels.experts import grouped_tiled

SMALL = Mixture(Routing(experts=6, top_k=2), hidden=128, ffn=64)


@pytest.fixture(autouse=True)
def emulated(emulated_kernels: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dakrun.kernels.runtime.jit.kernel", emulated_kernels)
    monkeypatch.setattr("dakrun.kernels.runtime.operands.check_gpu", lambda _: None)
    monkeypatch.setattr(grouped_tiled, "atoms_map", atoms_map)
    monkeypatch.setattr(grouped_tiled, "boxes_map", boxes_map)
    hold_to(hopper(3), monkeypatch)


@pytest.fixture
def step(request: pytest.FixtureRequest) -> Step:
    """A step of that many rows, of which more than 12 are many."""
    torch.manual_seed(0)
    layers = [SMALL.layer(hopper(3), torch.device("cpu")) for _ in range(2)]
    return Step(layers, request.param, SMALL, hopper(3))


def times(chains, *, replays: int, load: bool) -> list[list[float]]:
    """Launches of a chain once each, and times made up."""
    for launch, operands in chains:
        for number in range(operands):
            launch(number)
    return [[1e-6 * (1 + number)] * replays for number in range(len(chains))]


@pytest.mark.parametrize("step", [5, 20], indirect=True)
def test_values_are_checked_and_times_compared(step: Step, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped_speed, "seconds_round_robin", times)
    line = grouped_speed.measure(step, hbm=1e9, flops_per_s=1e15)
    n, experts, _, ours, _, torchs, *_, verdict = line.split()
    assert (int(n), ours, torchs, verdict) == (step.n, "1.0", "3.0", "ok")
    assert 2 <= float(experts) <= 6


@pytest.mark.parametrize(("step", "name"), [(5, "down"), (20, "up")], indirect=["step"])
def test_a_wrong_weight_is_found(step: Step, name: str) -> None:
    weight = getattr(step.layers[0], name)
    weight.parts[0].arrays[0].view(torch.bfloat16).mul_(1.5)
    with pytest.raises(ValueError, match=rf"{step.n} rows: errors of .*'sum of experts'"):
        step.check(0)
