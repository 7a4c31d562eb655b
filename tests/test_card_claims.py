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
    Card,
    load_profile,
    shipped_profiles,
    why_no_kernels,
)
from dakrun.kernels.runtime import has_kernels
from dakrun.probe.run import kept_or_measured

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
}
GPUS = [name for name in shipped_profiles() if load_profile(name).device == "cuda"]


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
    assert (why_no_kernels(profile) is None) is (name != RTX)


def test_the_reason_names_the_card_what_it_lacks_and_the_cost() -> None:
    why = why_no_kernels(load_profile(RTX))
    assert why == (
        "dakrun's kernels do not run on NVIDIA RTX PRO 6000 Blackwell (they need 227 KiB of shared "
        "memory a block, it has 99 KiB): generate runs plain torch there, slower than predicted"
    )
    h100 = load_profile("h100-sxm")
    b300 = replace(h100, facts={"compute_capability": "10.3", "shared_bytes_per_sm": 233_472})
    assert "not built for compute capability 10.3" in (why_no_kernels(b300) or "")
    unknown = why_no_kernels(replace(h100, facts={}))
    assert unknown is not None and "may lack" in unknown and "227 KiB" in unknown
    assert why_no_kernels(load_profile("cpu")) is None
    assert not Card.of("8.0", sms=108, shared_bytes_per_sm=164 << 10).runs_kernels
    assert Card.of("10.0", sms=148).runs_kernels


@pytest.mark.parametrize("name", GPUS)
def test_plan_says_so(name: str) -> None:
    why = why_no_kernels(load_profile(name))
    result = run("plan", "--model", "opt-6.7b", "--batch-size", "8", "--profile", name, "--json")
    assert json.loads(result.stdout)["profile"]["why_no_kernels"] == why
    assert result.stderr == ("" if why is None else f"note: {why}\n")


@pytest.mark.parametrize("name", GPUS)
def test_the_answer_of_a_plan_begins_with_it(name: str) -> None:
    """All figures below are said to be those of kernels that do not run there; once, on stdout."""
    why = why_no_kernels(load_profile(name))
    result = run("plan", "--model", "opt-6.7b", "--batch-size", "8", "--profile", name)
    head = " ".join(result.stdout.partition("What each op needs")[0].split())
    begin = "fits hbm "
    if why is not None:
        begin = f"no kernels {why}; all figures below are those of the kernels, if they ran there "
    assert head.startswith(begin) and result.stderr == ""


def test_a_plan_of_several_machines_says_so_once(tmp_path: Path) -> None:
    source = tmp_path / "prompts.txt"
    source.write_text("hello there\n" * 8)
    result = run(
        *("plan", "--model", "opt-6.7b", "--batch-size", "2", "-i", str(source), "--json"),
        *("--nodes", f"{RTX}:2,h100-sxm:1"),
    )
    why = why_no_kernels(load_profile(RTX))
    nodes = json.loads(result.stdout)["nodes"]
    assert [kind["why_no_kernels"] for kind in nodes] == [why, None]
    assert result.stderr == f"note: {why}\n"


@pytest.mark.parametrize("name", [RTX, "h100-sxm"])
def test_predicted_figures_say_so(name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    why = why_no_kernels(load_profile(name))
    args = ("evaluate", "--predict", "--quick", "--only", "table1", "--profile", name)
    result = run(*args, "-o", str(tmp_path))
    assert json.loads((tmp_path / "run.json").read_text())["why_no_kernels"] == why
    assert (f"note: {why}" in result.stderr) is (why is not None)
    tables = (tmp_path / "tables.md").read_text()
    said = f"{why}; all figures below are those of the kernels, if they ran there"
    assert (said in tables.partition("####")[0]) is (why is not None)
    page = (tmp_path / "index.html").read_text()
    assert ("do not run on NVIDIA RTX PRO 6000 Blackwell" in page) is (why is not None)


def test_the_readmes_claim_what_the_cards_can() -> None:
    """README.md names cards with and without kernels; profiles/README.md the profiles without."""
    readme = " ".join((ROOT / "README.md").read_text().split())
    claim = re.search(
        r"kernels need (.*?) \((\d+) KiB of shared memory a block; not (.*?)\)", readme
    )
    assert claim is not None
    having, needed, lacking = claim.groups()
    for card, (_, shared_kib) in CARDS.items():
        runs = shared_kib >= int(needed)
        if runs:
            family = "B200" if "B200" in card else "Hopper"
            assert family in having
        else:
            assert card.removeprefix("NVIDIA ").removesuffix(" Blackwell") in lacking
        assert Card.of(CARDS[card][0], sms=132).runs_kernels is runs
    rows = (ROOT / "profiles" / "README.md").read_text().splitlines()
    for name in GPUS:
        (row,) = [line for line in rows if line.startswith("| `") and f"`{name}`" in line]
        if why_no_kernels(load_profile(name)) is not None:
            shared = load_profile(name).card.shared_bytes
            assert f"in `{name}` " in row
            assert f"cannot run yet ({shared >> 10} KiB of shared memory a block)" in row


def test_a_card_without_kernels_is_not_measured_by_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its shipped profile takes the place of a measurement, for which the kernels are launched."""
    card = "NVIDIA RTX PRO 6000 Blackwell Server Edition"
    small = properties("12.0", 100)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: small)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: card)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: pytest.fail("measured"))
    monkeypatch.setattr("dakrun.probe.run.device_name", lambda _: card)
    said: list[str] = []
    assert kept_or_measured("cuda", said.append).name == RTX
    assert said[-1] == f"not measured: {card} does not run the kernels that measure it"
