"""What `--profile auto` measures of a GPU for a run: the kinds of kernels that its model uses."""

from collections.abc import Set
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from planned import known

from dakrun.cli import main
from dakrun.cli.lookups import resolve_run_profile
from dakrun.errors import CannotRun
from dakrun.hardware import (
    ESTIMATED,
    HardwareProfile,
    OpCosts,
    kept_profiles_dir,
    load_profile,
    save_profile,
)
from dakrun.lab.probe import run as probe
from dakrun.lab.probe.effort import QUICK, Effort
from dakrun.lab.probe.gpu import Found
from dakrun.lab.samples import Measurement, extended, provenance
from dakrun.models.hub import in_format
from dakrun.plan import RunOptions, cost_kinds

GPU, NAME = "NVIDIA H200", "measured-nvidia-h200"
SHIPPED = replace(load_profile("h200-pcie5"), **dict.fromkeys(ESTIMATED))
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
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Set[str]]:
    """The kinds that runs ask `--profile auto` for; runs end there."""
    found: list[Set[str]] = []

    def kept_or_measured(device: str, kinds: Set[str], progress: object) -> None:
        found.append(kinds)
        raise CannotRun("that is all", hint="of this test")

    monkeypatch.setattr("dakrun.lab.probe.run.kept_or_measured", kept_or_measured)
    return found


DUMMY = ("--load-format", "dummy")


@pytest.mark.parametrize(
    ("command", "kinds"),
    [
        (("generate", "--model", "llama-3-8b", *DUMMY, "--format", "awq"), {"int4_zeros"}),
        (("generate", "--model", "llama-3-8b", *DUMMY), set()),
        (("bench", "--model", "qwen3-30b-a3b", *DUMMY), {"experts", "router"}),
        (("evaluate", "--model", "llama-3-8b", "--model", "mixtral-8x7b"), {"experts", "router"}),
    ],
)
def test_each_command_asks_for_its_models(
    asked: list[Set[str]], tmp_path: Path, command: tuple[str, ...], kinds: set[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"id": "a", "prompt_token_ids": [1, 2]}\n')
    files = {
        "generate": ("-i", str(prompts), "-o", str(tmp_path / "out.jsonl")),
        "bench": (),
        "evaluate": ("-o", str(tmp_path / "results")),
    }
    result = CliRunner().invoke(main, [*command, *files[command[0]]])
    assert "that is all" in result.stderr and asked == [kinds]


def test_a_node_of_ray_asks_for_its_model(
    asked: list[Set[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray")
    from dakrun.ray import node

    monkeypatch.setattr(node, "kept_or_measured", probe.kept_or_measured)
    with pytest.raises(CannotRun, match="that is all"):
        node.load_on_node("llama-3-8b", RunOptions(load_format="dummy", format="fp8"))
    assert asked == [{"eight_bits"}]
