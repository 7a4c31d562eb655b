"""The shipped profiles: worked facts, where they come from, and which one a machine gets."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from dakrun.config import Workload
from dakrun.errors import UsageError
from dakrun.hardware import (
    SCHEMA,
    cpu_name,
    find_profile,
    kept_profiles_dir,
    load_profile,
    parse_profile,
    profile_text,
    shipped_profiles,
)
from dakrun.hardware import files as profile_files
from dakrun.models import known_model
from dakrun.plan import Policy, make_plan
from dakrun.resources import resource_dir

WORKLOAD = Workload(batch_size=8, prompt_len=32, new_tokens=32, max_model_len=64)


@pytest.fixture
def cache(empty_cache: Path) -> Path:
    """The folder of kept profiles of this test alone."""
    kept_profiles_dir().mkdir(parents=True)
    return kept_profiles_dir()


def keep(folder: Path, name: str, device_name: str, *, like: str = "cpu", age: int = 0) -> None:
    """A kept profile `name` of a device, `age` seconds old."""
    text = profile_text(load_profile(like))
    shipped = load_profile(like)
    text = text.replace(f'name = "{like}"', f'name = "{name}"', 1)
    text = text.replace(f'name = "{shipped.device_name}"', f'name = "{device_name}"', 1)
    path = folder / f"{name}.toml"
    path.write_text(text, encoding="utf-8")
    os.utime(path, (10**9 - age, 10**9 - age))


def test_what_is_shipped() -> None:
    assert shipped_profiles() == [
        "b200", "cpu", "dgx-spark", "gh200", "h100-pcie5", "h100-sxm", "h200-nvlink-peer",
        "h200-pcie5", "h200-spec", "rtx-5090", "rtx-pro-6000",
    ]  # fmt: skip


@pytest.mark.parametrize("name", shipped_profiles())
def test_every_profile_is_whole(name: str) -> None:
    profile = load_profile(name)
    assert profile.name == name
    assert parse_profile(profile_text(profile), source=name) == profile
    plan = make_plan(known_model("opt-6.7b"), WORKLOAD, profile, Policy())
    assert 0 < plan.bound_s <= plan.predicted_s
    text = Path(resource_dir("profiles") / f"{name}.toml").read_text(encoding="utf-8")
    assert ("data sheet" in text) or profile.provenance.kind != "spec-sheet"


@pytest.mark.parametrize(
    ("name", "ridge"),
    [
        ("h100-sxm", 295),
        ("h200-spec", 206),
        ("b200", 281),
        ("rtx-pro-6000", 281),
        ("rtx-5090", 117),
    ],
)
def test_ridge_points(name: str, ridge: int) -> None:
    profile = load_profile(name)
    assert round(profile.compute["float16"].peak / profile.hbm_bytes_per_s) == ridge


def test_measured_facts() -> None:
    for name in ("h200-pcie5", "h200-nvlink-peer"):
        profile = load_profile(name)
        assert profile.provenance.kind == "measured"
        assert profile.hbm_bytes_per_s == pytest.approx(4.7e12, rel=0.03)
        host = profile.tier("host")
        assert host.direct_bytes_per_s == pytest.approx(51.4e9, rel=0.01)
        assert host.staged_bytes_per_s == pytest.approx(55.5e9, rel=0.01)
        assert 256 * 1024 <= host.window_bytes <= 512 * 1024  # fills PCIe, costs HBM nothing
        assert 690e12 <= profile.flops_per_s("bfloat16", 512) <= 800e12
    peer = load_profile("h200-nvlink-peer").tier("peer:1")
    assert peer.direct_bytes_per_s == pytest.approx(377e9, rel=0.02)
    assert peer.staged_bytes_per_s == pytest.approx(298e9, rel=0.02)
    assert 2**20 <= peer.window_bytes <= 6 * 2**20
    assert 140e9 < peer.capacity_bytes < 151e9


def test_host_memory_that_is_slower_than_its_link() -> None:
    gh200, model = load_profile("gh200"), known_model("opt-30b")
    assert model is not None
    (listed,) = gh200.remote
    host = gh200.tier("host")
    assert listed.direct_bytes_per_s == 450e9
    assert host.direct_bytes_per_s == host.staged_bytes_per_s == 384e9
    slow = replace(gh200, remote=(replace(host, group=""),), link_groups={})
    fast = replace(gh200, remote=(replace(listed, group=""),), link_groups={})
    roomy = replace(gh200, link_groups={listed.group: 512e9})
    plans = [make_plan(model, WORKLOAD, of, Policy()) for of in (gh200, slow, fast, roomy)]
    ops = [plan.ops for plan in plans]
    assert ops[0] == ops[1] != ops[2] == ops[3]
    assert plans[0].ops[0].a == pytest.approx(384 / 4384)


@pytest.mark.parametrize(
    ("gpu", "found"),
    [
        ("NVIDIA H200", "h200-pcie5"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA H100 80GB HBM3", "h100-pcie5"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000"),
        ("NVIDIA GeForce RTX 5090", "rtx-5090"),
        ("NVIDIA GB10", "dgx-spark"),
    ],
)
def test_the_shipped_profile_of_a_gpu(
    monkeypatch: pytest.MonkeyPatch, gpu: str, found: str
) -> None:
    monkeypatch.setattr(profile_files, "gpu_names", lambda: [gpu, "NVIDIA B200"])
    assert find_profile(device="cuda").name == found


@pytest.mark.parametrize("gpus", [[], ["NVIDIA H100 PCIe"]])
def test_no_profile_of_a_gpu(monkeypatch: pytest.MonkeyPatch, gpus: list[str]) -> None:
    monkeypatch.setattr(profile_files, "gpu_names", lambda: gpus)
    with pytest.raises(UsageError, match="no profile for"):
        find_profile(device="cuda")


def test_a_kept_profile_comes_first(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_profile(device="cpu").name == "cpu"
    keep(cache, "of-another-cpu", "Abacus, 2 cores")
    assert find_profile(device="cpu").name == "cpu"
    keep(cache, "a-old", cpu_name(), age=60)
    assert find_profile(device="cpu").name == "a-old"
    keep(cache, "b-new", cpu_name())
    keep(cache, "c-old", cpu_name(), age=30)
    assert find_profile(device="cpu").name == "b-new"
    assert load_profile("c-old").name == "c-old"
    monkeypatch.setattr(profile_files, "gpu_names", lambda: ["NVIDIA H200"])
    keep(cache, "my-card", "NVIDIA H200", like="h200-spec")
    assert find_profile(device="cuda").name == "my-card"


def test_a_broken_kept_profile_is_named(cache: Path) -> None:
    (cache / "broken.toml").write_text(f"schema = {SCHEMA}\n", encoding="utf-8")
    with pytest.raises(UsageError, match=r"broken\.toml: 'device' is missing"):
        find_profile(device="cpu")


def test_a_profile_of_another_version_does_not_count(cache: Path) -> None:
    keep(cache, "mine", cpu_name())
    text = (cache / "mine.toml").read_text(encoding="utf-8")
    old = text.replace(f"schema = {SCHEMA}", f"schema = {SCHEMA - 1}")
    (cache / "old.toml").write_text(old, encoding="utf-8")
    assert find_profile(device="cpu").name == "mine"
    (cache / "mine.toml").unlink()
    assert find_profile(device="cpu").name == "cpu"
    with pytest.raises(UsageError, match=rf"old\.toml: schema is {SCHEMA - 1}, not") as caught:
        load_profile("old")
    assert "measure again with dakrun profile" in caught.value.hint


def test_the_cpu_has_a_name() -> None:
    assert cpu_name().endswith(f", {len(os.sched_getaffinity(0))} cores")
