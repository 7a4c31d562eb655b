"""What `--profile auto` measures of a GPU for a run: the kinds of kernels that its model uses."""

from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cards import H200, SMALL, hold_to
from planned import known

from dakrun.cli.lookups import resolve_run_profile
from dakrun.errors import CannotRun
from dakrun.hardware import (
    ESTIMATED,
    QUANTIZED,
    Card,
    HardwareProfile,
    OpCosts,
    Sweep,
    kept_profiles_dir,
    load_profile,
    save_profile,
)
from dakrun.kernels import Variant
from dakrun.lab.ceilings import MIB
from dakrun.lab.probe import gpu, kernel_costs
from dakrun.lab.probe import run as probe
from dakrun.lab.probe.effort import QUICK, Effort
from dakrun.lab.probe.expert_costs import Layers
from dakrun.lab.probe.gpu import Found
from dakrun.lab.probe.kernel_costs import EVERY_MODEL, SWEEPS, measured_variants
from dakrun.lab.probe.sweeps import Bench
from dakrun.lab.samples import Measurement, extended, provenance
from dakrun.models.hub import in_format
from dakrun.plan import cost_kinds

GPU, NAME = "NVIDIA H200", "measured-nvidia-h200"
SHIPPED = load_profile("h200-pcie5")
COSTS = OpCosts(rows=(8, 64), seconds=(2e-6, 3e-6), efficiency=(0.5, 0.25))
Measured = list[tuple[str, Set[str]]]  # profiles, and the kinds that are measured for them


def figure(name: str, spread: float) -> Measurement:
    return Measurement(name=name, value=1.0, unit="s", spread=spread, runs=3)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Measured:
    """A GPU in this machine; what is measured of it, in turn."""
    found: Measured = []

    def measure_gpu(name: str, effort: Effort, kinds: Set[str] = ESTIMATED) -> Found:
        assert effort is QUICK
        found.append((name, kinds))
        return replace(SHIPPED, name=name, **dict.fromkeys(kinds, COSTS)), ()

    def measure_more(profile: HardwareProfile, effort: Effort, kinds: Set[str]) -> Found:
        assert effort is QUICK
        found.append((profile.name, kinds))
        return replace(profile, **dict.fromkeys(kinds, COSTS)), ()

    # A GPU takes its name from the driver, and a minute to measure.
    monkeypatch.setattr("dakrun.lab.probe.run.device_name", lambda _: GPU)
    monkeypatch.setattr("dakrun.lab.probe.gpu.measure_gpu", measure_gpu)
    monkeypatch.setattr("dakrun.lab.probe.gpu.measure_more", measure_more)
    return found


def lacking(profile: HardwareProfile) -> set[str]:
    return {kind for kind in ESTIMATED if not profile.measures(kind)}


@pytest.mark.parametrize(
    ("model", "format", "kinds"),
    [
        ("llama-3-8b", "auto", set()),
        ("llama-3-8b", "awq", {"int4_zeros"}),
        ("llama-3-8b", "fp8", {"eight_bits"}),
        ("opt-30b", "auto", set()),
        ("qwen3-30b-a3b", "auto", {"experts", "router"}),
        ("qwen3-30b-a3b", "nvfp4", {"experts", "router", "e2m1"}),
    ],
)
def test_kinds_of_a_model(model: str, format: str, kinds: set[str]) -> None:
    assert cost_kinds(in_format(known(model), format)) == kinds <= ESTIMATED


def test_a_run_measures_what_its_model_uses_and_later_ones_what_is_lacking(
    measured: Measured, empty_cache: Path
) -> None:
    said: list[str] = []
    path = empty_cache / "profiles" / f"{NAME}.toml"
    first = probe.kept_or_measured("cuda", frozenset(), said.append)
    assert measured == [(NAME, frozenset())] and lacking(first) == ESTIMATED
    assert first.products_of("int4").efficiency, "estimated"
    mixture = frozenset({"experts", "router"})
    second = probe.kept_or_measured("cuda", mixture, said.append)
    assert measured[1:] == [(NAME, mixture)] and lacking(second) == ESTIMATED - mixture
    assert said[2:] == [
        f"profile {NAME} has no costs of experts and router yet: measuring them, once, for some "
        "seconds",
        f"saved as {path}; dakrun profile measures it more thoroughly",
    ]
    assert load_profile(str(path)) == second
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    third = probe.kept_or_measured("cuda", mixture | {"int4"}, said.append)
    assert measured[2:] == [(NAME, {"int4"})], "that kind alone"
    assert lacking(third) == ESTIMATED - mixture - {"int4"} and third.experts == COSTS
    for kinds in (frozenset[str](), mixture, {"int4"}):
        assert probe.kept_or_measured("cuda", kinds, said.append) == third
    assert len(measured) == 3 and len(said) == 6


@pytest.mark.parametrize(
    "kept",
    [
        replace(SHIPPED, name="quiet-night"),  # saved by a name of the user's own
        replace(SHIPPED, name=NAME, **dict.fromkeys(ESTIMATED, COSTS)),  # measured in full
        replace(SHIPPED, name=NAME, provenance=replace(SHIPPED.provenance, kind="spec-sheet")),
    ],
)
def test_other_profiles_are_not_changed(measured: Measured, kept: HardwareProfile) -> None:
    path, said = kept_profiles_dir() / f"{kept.name}.toml", list[str]()
    save_profile(kept, path)
    text = path.read_text()
    assert probe.kept_or_measured("cuda", ESTIMATED, said.append) == kept
    assert not measured and not said and path.read_text() == text


def test_a_profile_that_the_user_names_is_not_changed(measured: Measured) -> None:
    path, said = kept_profiles_dir() / f"{NAME}.toml", list[str]()
    save_profile(replace(SHIPPED, name=NAME), path)
    models = [in_format(known("llama-3-8b"), "awq")]
    for name in (NAME, str(path)):
        assert lacking(resolve_run_profile(name, "cuda", models, said.append)) == ESTIMATED
    assert not measured and not said


def test_kinds_of_all_models_of_a_run(measured: Measured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dakrun.lab.probe.run.measured_device", lambda device: device)
    models = [in_format(known("llama-3-8b"), "awq"), known("qwen3-30b-a3b")]
    resolve_run_profile("auto", "cuda", models, lambda _: None)
    resolve_run_profile("auto", "cuda", [], lambda _: None)
    assert measured == [(NAME, {"int4_zeros", "experts", "router"})]


@pytest.mark.parametrize("saves", [True, False])
def test_costs_that_cannot_be_measured_or_kept(
    measured: Measured, monkeypatch: pytest.MonkeyPatch, saves: bool
) -> None:
    """The run goes on: with estimates, or with costs that the next run measures again."""

    def fails(*_: object) -> None:
        raise CannotRun("measuring needs memory", hint="end other programs")

    path, said = kept_profiles_dir() / f"{NAME}.toml", list[str]()
    kept = replace(SHIPPED, name=NAME)
    save_profile(kept, path)
    if saves:
        monkeypatch.setattr("dakrun.lab.probe.gpu.measure_more", fails)
    else:
        monkeypatch.setattr(
            "pathlib.Path.replace",
            lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")),
        )
    found = probe.kept_or_measured("cuda", {"int4"}, said.append)
    assert lacking(found) == (ESTIMATED if saves else ESTIMATED - {"int4"})
    assert said[-1].startswith("not measured: measuring needs" if saves else "not saved: ")
    assert load_profile(str(path)) == kept
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_spread_of_old_and_new_figures_together() -> None:
    before = provenance("copies", [figure("HBM read", 0.01), figure("host read", 0.08)])
    assert before.spread == ("1 of 2 figures spread by more than 5%, most of all host read (8%)")
    more = extended(before, [figure("int4 fixed cost N=8", 0.2), figure("int4", 0.01)])
    assert more.spread == (
        "2 of 4 figures spread by more than 5%, most of all int4 fixed cost N=8 (20%)"
    )
    assert more.source.startswith("dakrun profile: medians; copies; 2 of 4")
    steady = extended(before, [figure("int4", 0.01)])
    assert steady.spread.startswith("1 of 3 figures") and "host read (8%)" in steady.spread
    spec = load_profile("gh200").provenance
    assert extended(spec, [figure("int4", 0.2)]) == spec


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
        ("llama-3-8b", "auto", 13),
        ("llama-3-8b", "awq", 17),
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
    kept = replace(SHIPPED, hbm_bytes_per_s=4e12)
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
    assert found.provenance.spread.startswith("4 of 97 figures spread by more than 5%")
    assert replace(found, int4=None, sweeps=kept.sweeps, provenance=kept.provenance) == kept
