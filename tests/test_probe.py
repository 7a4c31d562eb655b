"""`dakrun profile`: what it writes on tiny sizes, where, and what it refuses. No timing asserts."""

import dataclasses
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from dakrun import cli, hardware, probe, probe_cpu
from dakrun.errors import CannotRun
from dakrun.hardware import cpu_name, find_profile, load_profile
from dakrun.measurement import Measurement
from dakrun.probe_cpu import Sizes, measure_cpu

TINY = Sizes(
    buffer_bytes=2**18, caches=0, weight_size=16, batch_sizes=(1, 8, 64), seconds=0.0, runs=3
)


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a GPU, and tiny sizes."""
    monkeypatch.setattr(hardware, "gpu_names", list)
    monkeypatch.setattr(probe, "gpu_names", list)
    monkeypatch.setattr(probe_cpu, "FULL", TINY)
    monkeypatch.setattr(probe_cpu, "QUICK", dataclasses.replace(TINY, batch_sizes=(8,)))


def run(*args: str) -> Result:
    return CliRunner(env={"DAKRUN_DEBUG": ""}).invoke(cli.main, list(args))


def test_a_measured_cpu() -> None:
    profile, measurements = measure_cpu("mine", TINY)
    assert hardware.HardwareProfile.from_toml(profile.to_toml(), source="x") == profile
    assert (profile.name, profile.device, profile.device_name) == ("mine", "cpu", cpu_name())
    assert profile.provenance.kind == "measured" and "figures spread" in profile.provenance.source
    host = profile.tier("host")
    assert profile.link_groups == {"memory": profile.hbm_bytes_per_s}
    assert profile.hbm_group == host.group == "memory"
    assert host.direct_bytes_per_s == profile.hbm_bytes_per_s
    assert set(profile.compute) == {"float32", "float16", "bfloat16"}
    for rate in profile.compute.values():
        assert [n for n, _ in rate.measured] == [1, 8, 64]
        assert rate.peak == max(flops for _, flops in rate.measured)
    assert all(m.value > 0 and m.spread >= 0 and m.runs >= 3 for m in measurements)


def test_a_profile_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    result = run("profile", "-o", str(path), "--quick")
    assert result.exit_code == 0, result.stderr
    assert "memory read" in result.stdout and "spread" in result.stdout
    assert f"written to {path}" in result.stderr
    assert load_profile(str(path)).name == "mine"
    assert [file.name for file in tmp_path.glob("*.toml*")] == ["mine.toml"]
    assert find_profile(device="cpu").name == "cpu"
    plan = run("plan", "--model", "opt-125m", "--batch-size", "8", "--profile", str(path))
    assert plan.exit_code == 0 and "mine: " in plan.stdout


def test_a_kept_profile_is_found(empty_cache: Path) -> None:
    assert run("profile").exit_code == 0
    assert find_profile(device="cpu").name == "measured-cpu"
    assert run("profile", "--name", "quiet-night").exit_code == 0
    plan = run("plan", "--model", "opt-125m", "--batch-size", "8", "--profile", "quiet-night")
    assert plan.exit_code == 0 and "quiet-night: " in plan.stdout
    kept = {file.name for file in (empty_cache / "profiles").iterdir()}
    assert kept == {"measured-cpu.toml", "quiet-night.toml"}


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("-o", "here.json"), "a profile is a .toml file"),
        (("-o", "no/such/folder/here.toml"), "no such folder"),
        (("--name", "gh200"), "a shipped profile is called 'gh200'"),
        (("--name", "../up"), "cannot be called '../up'"),
        (("--name", ""), "cannot be called ''"),
    ],
)
def test_refused_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, args: tuple[str, ...], said: str
) -> None:
    monkeypatch.setattr(probe, "measure", lambda *_, **__: pytest.fail("measured"))
    result = run("profile", *args)
    assert result.exit_code == 2 and result.stdout == ""
    assert said in result.stderr and "hint: " in result.stderr


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "taken.toml").mkdir()
    result = run("profile", "--quick", "-o", str(tmp_path / "taken.toml"))
    assert result.exit_code == 2 and "taken.toml: Is a directory" in result.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["taken.toml"]


def test_a_gpu_that_is_not_there() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    result = run("profile", "--device", "cuda")
    assert result.exit_code == 3
    assert "no CUDA GPU can be used here" in result.stderr and "hint: " in result.stderr


def test_too_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_cpu, "available_host_memory", lambda: 3 * 2**18 - 1)
    with pytest.raises(CannotRun, match=r"takes 768.00 KiB of it"):
        measure_cpu("x", TINY)


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [(1.5e10, "B/s", "15.0 GB/s"), (2e-5, "s", "20.0 us"), (0.876, "", "0.88")],
)
def test_figures_have_units(value: float, unit: str, text: str) -> None:
    found = Measurement(what="x", value=value, unit=unit, spread=0.2, runs=3)
    assert found.text == text and not found.steady
