"""How the GPU reads tiers, as plans and modules have it."""

import itertools

import pytest
import torch

from dakrun.config import Workload
from dakrun.engine import tier_accesses
from dakrun.hardware import load_profile
from dakrun.launches import TierAccess
from dakrun.models import known_model
from dakrun.nn import profiled_access
from dakrun.plan import Policy, make_plan


def test_a_plan_s_sms_and_windows() -> None:
    """Few row blocks on a peer are the local SMs', those of the host never."""
    work = Workload(batch_size=8, prompt_len=32, new_tokens=32, max_model_len=64)
    profile = load_profile("h200-nvlink-peer")
    for tier, ratio, mixed in (("peer", 0.06, True), ("peer", 0.3, False), ("host", 0.01, False)):
        policy = Policy(
            remote=(tier,), offload_ratio=ratio, kv_offload_ratio=0.0, transport="direct"
        )
        plan = make_plan(known_model("opt-30b"), work, profile, policy)
        of_tier, accesses = profile.tier(plan.tiers[1]), tier_accesses(plan, profile.card)
        for name in ("qkv", "o", "fc1", "fc2", "lm_head"):
            local, remote = accesses[name]
            own = plan.op(name).sms[1]
            assert local == TierAccess() and plan.op(name).mixed(1) == mixed == (own == 0)
            assert remote == TierAccess(own or of_tier.sms, of_tier.window_bytes, mixed)


@pytest.mark.parametrize(
    ("ratio", "sms"), [(0.001, 1), (0.0095, 2), (0.0109, 2), (0.0303, 4), (0.06, 8), (0.9, 118)]
)
def test_what_is_staged_is_read_from_hbm(ratio: float, sms: int) -> None:
    """The SMs of a staged part end with the others: of 1.1% of the bytes, 1.45 SMs', two."""
    work = Workload(batch_size=8, prompt_len=32, new_tokens=32, max_model_len=64)
    policy = Policy(
        remote=("peer",), offload_ratio=ratio, kv_offload_ratio=0.0, transport="staged",
        strategy="uniform",
    )  # fmt: skip
    plan = make_plan(known_model("opt-30b"), work, load_profile("h200-nvlink-peer"), policy)
    total = plan.profile.sms
    for name in ("fc1", "fc2"):
        _, remote = tier_accesses(plan, plan.profile.card)[name]
        share = plan.op(name).ratio
        assert remote == TierAccess(sms) and not plan.op(name).mixed(1)
        busiest = [max(share / n, (1 - share) / (total - n)) for n in range(1, total)]
        assert busiest[sms - 1] == min(busiest)


def test_what_is_staged_from_several_tiers_is_read_evenly() -> None:
    """An SM more for one part and one less for another would make none end sooner."""
    work = Workload(batch_size=8, prompt_len=32, new_tokens=32, max_model_len=64)
    policy = Policy(
        remote=("host", "peer"), offload_ratio=0.5, kv_offload_ratio=0.0, transport="staged",
        strategy="uniform",
    )  # fmt: skip
    profile = load_profile("h200-nvlink-peer")
    plan = make_plan(known_model("opt-30b"), work, profile, policy)
    staged = [op for op in plan.weights() if op.transport == "staged"]
    assert any(op.resident_bytes(1) and op.resident_bytes(2) for op in staged)
    for op in staged:
        held = [op.resident_bytes(tier) for tier in range(3)]
        _, *remote = tier_accesses(plan, profile.card)[op.op.name]
        sms = [132 - sum(of.sms or 0 for of in remote), *(of.sms or 0 for of in remote)]
        assert min(sms) >= 1
        most = max(n / own for n, own in zip(held, sms, strict=True))
        for fewer, more in itertools.permutations(range(3), 2):
            other = [own - (i == fewer) + (i == more) for i, own in enumerate(sms)]
            if min(other) >= 1:
                assert most <= max(n / own for n, own in zip(held, other, strict=True)) + 1e-6


@pytest.mark.parametrize(
    ("remote", "ratio", "mixed"),
    [("peer:1", 0.05, True), ("peer:1", 0.1, False), ("host", 0.005, False)],
)
def test_a_module_s_access(remote: str, ratio: float, mixed: bool) -> None:
    profile = load_profile("h200-nvlink-peer")
    tier = profile.tier(remote)
    found = profiled_access(profile, remote, torch.device("cpu"), ratio)
    assert found == TierAccess(tier.sms, tier.window_bytes, mixed)
