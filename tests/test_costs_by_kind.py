"""Costs of kernels by kind: what is launched to measure them, and compiled ahead.

Without a GPU: stand-ins for kernels take a microsecond a launch.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from cards import H200, SMALL, hold_to
from planned import known

from dakrun.hardware import ESTIMATED, QUANTIZED, Card, OpCosts, Sweep, load_profile
from dakrun.kernels import Variant
from dakrun.lab.ceilings import MIB
from dakrun.lab.probe import gpu, kernel_costs
from dakrun.lab.probe.effort import QUICK
from dakrun.lab.probe.expert_costs import Layers
from dakrun.lab.probe.kernel_costs import EVERY_MODEL, SWEEPS, measured_variants
from dakrun.lab.probe.sweeps import Bench
from dakrun.models.hub import in_format
from dakrun.plan import cost_kinds

SHIPPED = replace(load_profile("h200-pcie5"), **dict.fromkeys(ESTIMATED))


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Variant]:
    """Variants of kernels as they are launched, without effect, each for a microsecond."""
    found: list[Variant] = []
    launches = 0

    def kernel(source: str, name: str, defines: dict[str, int] | None = None) -> SimpleNamespace:
        if (variant := (source, dict(defines or {}))) not in found:
            found.append(variant)
        return SimpleNamespace(launch=launch)

    def launch(*_: object, **how: object) -> None:
        nonlocal launches
        launches += 1

    def seconds(launch: Callable[[], None]) -> float:
        before = launches
        launch()
        return 1e-6 * (launches - before) + 1e-9

    def bytes_read(layers: Layers) -> float:
        return 1e6 * layers._products._routing.experts

    # Operands have no memory: they are torch's meta tensors, with the sizes of a GPU's.
    monkeypatch.setattr("dakrun.kernels.runtime.jit.kernel", kernel)
    monkeypatch.setattr("dakrun.kernels.runtime.operands.check_gpu", lambda _: None)
    monkeypatch.setattr("dakrun.kernels.runtime.tensor_map._encoded", lambda *_: (0,) * 16)
    monkeypatch.setattr("dakrun.lab.probe.expert_costs.Layers.bytes_read", bytes_read)
    monkeypatch.setattr("dakrun.lab.chain.graph_seconds", lambda f, runs, **_: [seconds(f)] * runs)
    monkeypatch.setattr("dakrun.lab.chain.recorded", lambda f: SimpleNamespace(replay=f))
    monkeypatch.setattr("dakrun.lab.chain.event_seconds", seconds)
    monkeypatch.setattr("dakrun.lab.chain.MIN_SECONDS", 1e-5)
    monkeypatch.setattr("dakrun.lab.chain.LOAD_SECONDS", 0.0)
    return found


@pytest.mark.parametrize("card", [H200, SMALL], ids=["hopper", "small"])
@pytest.mark.parametrize("kind", SWEEPS)
def test_what_is_launched_is_compiled_ahead(
    launched: list[Variant], monkeypatch: pytest.MonkeyPatch, kind: str, card: Card
) -> None:
    hold_to(card, monkeypatch)
    hbm = torch.empty(QUICK.hbm_bytes, dtype=torch.uint8, device="meta")
    assert SWEEPS[kind](Bench(card, hbm, QUICK)).rows
    ahead = measured_variants(QUICK, card, {kind})
    assert launched and all(variant in ahead for variant in launched)
    if kind in QUANTIZED:
        assert len(launched) == len(ahead), "and no more"
    whole = measured_variants(QUICK, card, EVERY_MODEL | ESTIMATED)
    assert all(variant in whole for variant in ahead)


def test_how_much_is_compiled() -> None:
    """On a Hopper; before it was 58 variants for every model."""
    for model, format, most in (
        ("llama-3-8b", "auto", 14),
        ("llama-3-8b", "awq", 19),
        ("qwen3-30b-a3b", "auto", 25),
    ):
        kinds = cost_kinds(in_format(known(model), format))
        found = measured_variants(QUICK, H200, EVERY_MODEL | kinds)
        assert len(found) <= most
        assert found[0][0] == "select_token.cu", "which takes longest to compile"
    assert not measured_variants(QUICK, H200, set())


def test_kinds_are_measured_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the profile's own rates, and in HBM: neither links nor other kernels are measured."""
    sweep = Sweep(
        columns=("n", "op_bytes", "op_s", "bytes_per_s", "spread"),
        rows=tuple((8, size, 2e-6 + size / 2e12, 2e12, 0.01) for size in (32 * MIB, 392 * MIB)),
    )
    spread = load_profile("h100-pcie5").provenance  # 6 of 95 figures spread
    kept = replace(SHIPPED, hbm_bytes_per_s=4e12, provenance=spread)
    benches: list[Bench] = []
    ahead: list[Variant] = []

    def measure(bench: Bench) -> Sweep:
        benches.append(bench)
        return sweep

    @contextmanager
    def compiling(needed: list[Variant], arch: str) -> Iterator[Callable[[], None]]:
        ahead.extend(needed)
        yield lambda: None

    cpu = torch.device("cpu")
    others = dict.fromkeys(SWEEPS, lambda _: pytest.fail("measured"))
    monkeypatch.setattr(kernel_costs, "SWEEPS", others | {"int4": measure})
    monkeypatch.setattr(gpu, "_device", lambda: cpu)
    monkeypatch.setattr(gpu.runtime, "card_of", lambda _: H200)
    monkeypatch.setattr(gpu.runtime, "architecture", lambda _: "sm_90a")
    monkeypatch.setattr(gpu, "compiling", compiling)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (MIB << 9, MIB << 10))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    found, figures = gpu.measure_more(kept, QUICK, frozenset({"int4"}))
    assert found.int4 == OpCosts(rows=(8,), seconds=(2e-6,), efficiency=(0.5,))
    assert ahead == measured_variants(QUICK, H200, {"int4"})
    assert [bench.hbm.numel() for bench in benches] == [256 * MIB], "half of what is free"
    assert found.sweeps == {**kept.sweeps, "int4": sweep}
    assert [figure.name for figure in figures] == ["int4 fixed cost N=8", "int4 efficiency N=8"]
    assert found.provenance.spread.startswith("6 of 97 figures spread by more than 5%")
    assert replace(found, int4=None, sweeps=kept.sweeps, provenance=kept.provenance) == kept
