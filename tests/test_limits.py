"""A GPU held to the limits of another card: its launches, plans and profiles are of that card."""

import json
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cards import H200, PORTABLE, SMALL, hopper, properties
from click.testing import CliRunner, Result

from dakrun.cli import main
from dakrun.config import Workload
from dakrun.errors import UsageError
from dakrun.hardware import ANY_ROWS, RUN_ON, Card, how_kernels_run, load_profile
from dakrun.kernels.runtime import described_card, gpu_name, has_kernels, held_to, jit
from dakrun.models import model_config
from dakrun.plan import Plan, Policy, make_plan

GPU = torch.device("cuda", 0)
HELD = H200.limited_to("12.0")


@pytest.fixture
def a_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU as torch describes it, on which nothing can be launched."""
    card = properties("9.0", 228, "NVIDIA H100 80GB HBM3")
    card.total_memory, card.L2_cache_size = 85 * 10**9, 50 * 2**20
    card.shared_memory_per_block_optin = 227 << 10
    card.pci_domain_id, card.pci_bus_id, card.pci_device_id = 0, 27, 0
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index=0: card)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=0: card.name)


def run(*args: str) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(main, list(args))


def test_a_held_card_has_its_own_sms_and_the_limits_of_the_other() -> None:
    assert Card.of("12.0", sms=132) == HELD
    assert H200.limited_to("9.0") is H200
    portable = hopper(132, clusters=(64, 38)).limited_to("10.0")
    assert portable.clusters == (64, 38) and not portable.has_wgmma
    assert portable.tiled_rows == ANY_ROWS, "torch's libraries use wgmma, and are not held"


@pytest.mark.parametrize(
    ("card", "capability", "why"),
    [
        (SMALL, "9.0", "cannot be held to the limits of 9.0, which has more"),
        (PORTABLE, "9.0", "cannot be held to the limits of 9.0, which has more"),
        (H200, "8.9", "no limits are known of compute capability '8.9'"),
        (H200, "rtx", "no limits are known of compute capability 'rtx'"),
    ],
)
def test_a_card_is_held_to_less_only(card: Card, capability: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        card.limited_to(capability)


def plan_on(card: Card) -> Plan:
    profile = load_profile("h100-pcie5").on(card)
    workload = Workload(batch_size=256, prompt_len=128, new_tokens=32, max_model_len=160)
    policy = Policy(offload_ratio=0.1, transport="direct")
    return make_plan(model_config("opt-6.7b"), workload, profile, policy)


def test_a_plan_has_the_limits_of_the_card_at_hand() -> None:
    profile = load_profile("h100-pcie5")
    assert profile.on(profile.card) is profile
    held = profile.on(HELD)
    assert held.card == HELD and held.linear == profile.linear and profile.card != HELD
    few = profile.on(Card.of("12.1", sms=6))
    assert few.sms == 6 and few.tier("host").sms == 5, "one is left for HBM"
    assert plan_on(HELD).predicted_s > plan_on(H200).predicted_s, (
        "without multicast a remote row block crosses the link for each tile of X"
    )


@pytest.mark.usefixtures("a_hopper")
def test_a_held_gpu_has_a_name_of_its_own() -> None:
    """So that its profile is never that of the GPU without limits."""
    assert described_card(GPU) == H200 and gpu_name() == "NVIDIA H100 80GB HBM3"
    with held_to(HELD):
        assert described_card(GPU) is HELD and has_kernels(GPU)
        assert gpu_name() == "NVIDIA H100 80GB HBM3 held to 12.0"
    with held_to(hopper(132, multicast=False)):
        assert gpu_name() == "NVIDIA H100 80GB HBM3", "an ablation leaves the limits"


@pytest.mark.usefixtures("a_hopper")
def test_a_held_kernel_leaves_the_rest_of_an_sm_to_l1(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver takes the least of 0, 8, 16, 32, 64, 100, 132 ... KiB that is enough."""
    functions: list[Any] = []

    def function(name: str) -> SimpleNamespace:
        functions.append(SimpleNamespace(kernel=SimpleNamespace(ptr=0), name=name))
        return functions[-1]

    cupy = SimpleNamespace(
        cuda=SimpleNamespace(Device=lambda _: nullcontext()),
        RawModule=lambda path: SimpleNamespace(get_function=function),
    )
    monkeypatch.setattr(jit, "_cupy", lambda: cupy)
    monkeypatch.setattr(jit, "architecture", lambda device: "sm_90a")
    monkeypatch.setattr(jit, "cached_cubin", lambda *_: "x.cubin")
    for card in (HELD, PORTABLE, H200):
        with held_to(card):
            jit.kernel("a test.cu", "copy")
    jit.kernel("another test.cu", "copy")
    percent = [vars(f).get("preferred_shared_memory_carveout") for f in functions]
    assert percent == [43, None, None, None]
    assert 64 < 0.43 * 228 <= 100


def test_what_is_said_of_a_card() -> None:
    assert how_kernels_run(HELD) == (
        "99 KiB of shared memory a block, 1 CTA an SM, no clusters, no multicast, mma.sync; the "
        "tiled GEMM multiplies many rows"
    )
    assert how_kernels_run(H200) == (
        "227 KiB of shared memory a block, 2 CTAs an SM, clusters with multicast, wgmma; the tiled "
        "GEMM multiplies many rows"
    )
    assert how_kernels_run(PORTABLE).endswith(
        "mma.sync; torch (cuBLAS, from unpacked weights) multiplies many rows"
    )


@pytest.mark.usefixtures("a_hopper")
def test_doctor_says_how_kernels_run() -> None:
    def kernels(*args: str) -> tuple[str, str]:
        result = run("doctor", "--json", *args)
        found = {check["name"]: check["finding"] for check in json.loads(result.stdout)}
        return found["kernels gpu 0"], result.stderr

    assert kernels() == (f"built for 9.0: {how_kernels_run(H200)}", "")
    finding, said = kernels("--limits", "12.0")
    assert finding == f"held to 12.0: {how_kernels_run(HELD)}"
    assert said == (
        f"held to the limits of 12.0: {how_kernels_run(HELD)}; what torch multiplies is not held: "
        "models without kernels, formats whose tiles do not fit, and what bench compares with\n"
    )


@pytest.mark.usefixtures("a_hopper")
def test_limits_that_cannot_be_held() -> None:
    result = run("doctor", "--limits", "12.5")
    assert result.exit_code == 2 and "no limits are known" in result.stderr
    many = ("generate", "--model", "x", "-i", "a.txt", "-o", "b.jsonl", "--limits", "12.0")
    result = run(*many, "--ray", "local")
    assert result.exit_code == 2 and "--limits does not go with --ray" in result.stderr
    result = run(*many, "--device", "cpu")
    assert result.exit_code == 3 and "none is used here" in result.stderr


def test_limits_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for command in (("doctor",), ("profile",), ("bench", "--model", "opt-125m")):
        result = run(*command, "--limits", "12.0")
        assert result.exit_code == 3, result.stderr
        assert "hint: dakrun plan --profile rtx-pro-6000" in result.stderr


def test_the_card_is_free_again_after_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    card = properties("9.0", 228)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index=0: card)
    during: list[Card] = []
    monkeypatch.setattr(
        "dakrun.cli.doctor.examine", lambda: during.append(described_card(GPU)) or []
    )
    assert run("doctor", "--json", "--limits", "12.0").exit_code == 0
    assert during == [HELD] and described_card(GPU) == H200 and RUN_ON == ("9.0",)
