"""What the cards of shipped profiles can do, against the claims of plans, pages and READMEs."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cards import properties
from click.testing import CliRunner, Result

from dakrun.cli import main
from dakrun.hardware import (
    RUN_ON,
    Card,
    load_profile,
    profile_text,
    shipped_profiles,
    why_no_kernels,
)
from dakrun.kernels.runtime import has_kernels
from dakrun.lab.probe.run import kept_or_measured

ROOT = Path(__file__).resolve().parent.parent
RTX = "rtx-pro-6000"

# Compute capability and KiB of shared memory a block of each card, from the CUDA C++ Programming
# Guide (technical specifications by compute capability).
CARDS = {
    "NVIDIA H100 80GB HBM3": ("9.0", 227),
    "NVIDIA H200": ("9.0", 227),
    "NVIDIA GH200": ("9.0", 227),
    "NVIDIA B200": ("10.0", 227),
    "NVIDIA RTX PRO 6000 Blackwell": ("12.0", 99),
    "NVIDIA GeForce RTX 5090": ("12.0", 99),
    "NVIDIA GB10": ("12.1", 99),
}
SMALL = ("rtx-pro-6000", "rtx-5090", "dgx-spark")
GPUS = [name for name in shipped_profiles() if load_profile(name).device == "cuda"]
ADA = "NVIDIA RTX 6000 Ada Generation"  # a card without kernels


@pytest.fixture
def ada(tmp_path: Path) -> str:
    """A file with the profile of a card without kernels."""
    facts = {"compute_capability": "8.9", "shared_bytes_per_sm": 100 << 10}
    profile = replace(load_profile(RTX), name="ada", device_name=ADA, facts=facts)
    path = tmp_path / "ada.toml"
    path.write_text(profile_text(profile))
    return str(path)


def run(*args: str) -> Result:
    result = CliRunner(env={"COLUMNS": "120"}).invoke(main, list(args))
    assert result.exit_code == 0, result.stderr
    return result


@pytest.mark.parametrize("name", GPUS)
def test_a_profile_says_what_its_card_has(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its facts are the card's, and its note says what a GPU of that kind really does."""
    profile = load_profile(name)
    capability, shared_kib = CARDS[profile.device_name]
    assert profile.facts["compute_capability"] == capability
    assert profile.card.shared_bytes == shared_kib << 10
    card = properties(capability, shared_kib + 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
    assert has_kernels(torch.device("cuda", 0)) is (why_no_kernels(profile) is None)
    assert why_no_kernels(profile) is None


def test_the_reason_names_the_card_what_it_lacks_and_the_cost(ada: str) -> None:
    why = why_no_kernels(load_profile(ada))
    assert why == (
        f"dakrun's kernels do not run on {ADA} (they are not built for compute capability 8.9): "
        "generate runs plain torch there, slower than predicted"
    )
    facts = {"compute_capability": "7.5", "shared_bytes_per_sm": 64 << 10}
    why = why_no_kernels(replace(load_profile(ada), facts=facts))
    assert why is not None and "they need 99 KiB of shared memory a block, it has 63 KiB" in why
    h100 = load_profile("h100-sxm")
    b300 = replace(h100, facts={"compute_capability": "10.3", "shared_bytes_per_sm": 233_472})
    assert "not built for compute capability 10.3" in (why_no_kernels(b300) or "")
    unknown = why_no_kernels(replace(h100, facts={}))
    assert unknown is not None and "may lack" in unknown and "99 KiB" in unknown
    assert why_no_kernels(load_profile("cpu")) is None
    assert not Card.of("8.0", sms=108, shared_bytes_per_sm=164 << 10).runs_kernels
    assert Card.of("10.0", sms=148).runs_kernels


@pytest.mark.parametrize("name", [*GPUS, None])
def test_plan_says_so(name: str | None, ada: str) -> None:
    name = name or ada
    why = why_no_kernels(load_profile(name))
    result = run("plan", "--model", "opt-6.7b", "--batch-size", "8", "--profile", name, "--json")
    assert json.loads(result.stdout)["profile"]["why_no_kernels"] == why
    assert result.stderr == ("" if why is None else f"note: {why}\n")


@pytest.mark.parametrize("name", [*GPUS, None])
def test_the_answer_of_a_plan_begins_with_it(name: str | None, ada: str) -> None:
    """All figures below are said to be those of kernels that do not run there; once, on stdout."""
    name = name or ada
    why = why_no_kernels(load_profile(name))
    result = run("plan", "--model", "opt-6.7b", "--batch-size", "8", "--profile", name)
    head = " ".join(result.stdout.partition("What each op needs")[0].split())
    begin = "fits hbm "
    if why is not None:
        begin = f"no kernels {why}; all figures below are those of the kernels, if they ran there "
    assert head.startswith(begin) and result.stderr == ""


def test_a_plan_of_several_machines_says_so_once(ada: str, tmp_path: Path) -> None:
    source = tmp_path / "prompts.txt"
    source.write_text("hello there\n" * 8)
    result = run(
        *("plan", "--model", "opt-6.7b", "--batch-size", "2", "-i", str(source), "--json"),
        *("--nodes", f"{ada}:2,h100-sxm:1"),
    )
    why = why_no_kernels(load_profile(ada))
    nodes = json.loads(result.stdout)["nodes"]
    assert [kind["why_no_kernels"] for kind in nodes] == [why, None]
    assert result.stderr == f"note: {why}\n"


@pytest.mark.parametrize("name", [None, "h100-sxm"])
def test_predicted_figures_say_so(name: str | None, ada: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    name = name or ada
    why = why_no_kernels(load_profile(name))
    args = ("evaluate", "--predict", "--quick", "--only", "table1", "--profile", name)
    result = run(*args, "-o", str(tmp_path))
    assert json.loads((tmp_path / "run.json").read_text())["why_no_kernels"] == why
    assert (f"note: {why}" in result.stderr) is (why is not None)
    tables = (tmp_path / "tables.md").read_text()
    said = f"{why}; all figures below are those of the kernels, if they ran there"
    assert (said in tables.partition("####")[0]) is (why is not None)
    page = (tmp_path / "index.html").read_text()
    assert (f"do not run on {ADA}" in page) is (why is not None)


@pytest.mark.parametrize("name", SMALL)
def test_estimates_are_said_to_be_estimates(name: str) -> None:
    source = load_profile(name).provenance.source
    assert "Estimates, as the kernels are built for, but not yet run on, 12." in source
    assert "that the tiled GEMM multiplies all numbers of rows above 64" in source
    (row,) = [
        line
        for line in (ROOT / "profiles" / "README.md").read_text().splitlines()
        if line.startswith("| `") and f"`{name}`" in line
    ]
    assert "estimates" in row and "not yet run" in row


@pytest.mark.parametrize("name", [*SMALL[:2], "h100-sxm"])
def test_predicted_figures_claim_no_multicast_where_there_is_none(
    name: str, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    args = ("evaluate", "--predict", "--quick", "--only", "table1", "--profile", name)
    run(*args, "-o", str(tmp_path))
    tables, page = ((tmp_path / file).read_text() for file in ("tables.md", "index.html"))
    has_clusters = bool(load_profile(name).card.clusters)
    assert ("| with multicast" in tables) is has_clusters
    said = f"{load_profile(name).device_name} has no clusters, and so no multicast"
    assert (said in page) is not has_clusters


@pytest.mark.parametrize("name", GPUS)
def test_launches_of_a_profile_s_plans_fit_its_card(name: str) -> None:
    """What the machine object of a profile allows is no more than its compute capability has."""
    card, known = load_profile(name).card, Card.of(load_profile(name).card.capability, sms=132)
    assert card.shared_bytes_per_sm <= known.shared_bytes_per_sm
    assert card.ctas_per_sm <= known.ctas_per_sm and card.has_wgmma == known.has_wgmma
    assert card.max_cluster <= known.max_cluster
    assert (card.max_cluster == 1) is (name in SMALL)


def test_the_readme_claims_what_the_cards_can() -> None:
    """It names the cards with kernels, and those that have not run them yet."""
    readme = " ".join((ROOT / "README.md").read_text().split())
    claim = re.search(r"kernels need (.*?) \(built for, but not yet run on, (.*?)\)", readme)
    assert claim is not None
    having, others = claim.groups()
    for card, (capability, _) in CARDS.items():
        assert Card.of(capability, sms=132).runs_kernels
        if capability in RUN_ON:
            assert "Hopper" in having
        else:
            name = card.removeprefix("NVIDIA ").removesuffix(" Blackwell")
            assert {"GB10": "DGX Spark"}.get(name, name.removeprefix("GeForce ")) in others


def test_a_card_without_kernels_is_not_measured_by_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its shipped profile takes the place of a measurement, for which the kernels are launched."""
    card = "NVIDIA RTX PRO 6000 Blackwell Server Edition"
    small = properties("8.9", 100)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: small)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: card)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: pytest.fail("measured"))
    monkeypatch.setattr("dakrun.lab.probe.run.device_name", lambda _: card)
    said: list[str] = []
    assert kept_or_measured("cuda", frozenset(), said.append).name == RTX
    assert said[-1] == f"not measured: {card} does not run the kernels that measure it"
