"""Plans whose decode steps stage experts: copy all remote ones ahead of their use."""

from dataclasses import replace

import pytest
from test_popularity import qwen, work

from dakrun.engine import tier_accesses
from dakrun.hardware import LOCAL, load_profile
from dakrun.lab.bench.model_rows import limit_s
from dakrun.models import known_model
from dakrun.plan import Links, Policy, make_plan
from dakrun.plan.advice import busy_shares
from dakrun.plan.plan import PrefillPlan
from dakrun.plan.run_bound import run_limits
from dakrun.plan.step_time import StepTimes


def test_steps_that_read_nearly_all_experts_copy_them() -> None:
    """Smaller steps of the plan read in place what they choose, as a plan of direct reads does."""
    room = {"offload_ratio": 0.5, "kv_offload_ratio": 0.0}
    profile = load_profile("h100-pcie5")
    model, host = qwen(), profile.tier("host")
    assert host.staged_bytes_per_s > 1.02 * host.direct_bytes_per_s
    staged, direct = (
        make_plan(model, work(64), profile, Policy(**room, transport=by))  # type: ignore[arg-type]
        for by in (None, "direct")
    )
    few = make_plan(model, work(8), profile, Policy(**room))  # type: ignore[arg-type]
    for name in ("experts_gate_up", "experts_down"):
        one, other = staged.op(name), direct.op(name)
        assert (one.transport, other.transport, few.op(name).transport) == (
            "staged", "direct", "direct",
        )  # fmt: skip
        assert one.is_copied and one.read_bytes(1) == one.remote_bytes
        assert sum(one.predicted_s) == pytest.approx(one.remote_bytes / host.staged_bytes_per_s)
        assert one.read_at(1, 8) < 0.5 * one.remote_bytes < 0.51 * one.read_at(1, 64)
    assert staged.predicted_s < direct.predicted_s
    times = StepTimes(staged).products(8), StepTimes(replace(staged, ops=direct.ops)).products(8)
    assert times[0] == pytest.approx(times[1], rel=0.02)
    card = profile.card
    assert card
    accesses = [tier_accesses(plan, card)["experts_down"] for plan in (staged, direct)]
    assert accesses[0] == accesses[1]
    work_done = {
        "requests": 64,
        "prompt_tokens": 64,
        "new_tokens": 640,
        "steps": 10,
        "kv_bytes": 0.0,
    }
    bound = run_limits(staged, **work_done)["host"]  # of what is read: copies bring more
    read = sum(op.op.tier_reads(of)[1] for op in staged.weights() for of in op.placement)
    assert bound == pytest.approx(10 * read / host.staged_bytes_per_s)
    link = {LOCAL: 3e12, "host": 5e10}
    limit = limit_s(staged, replace(Links.of(profile, ("host",)), direct=link, staged=link))
    assert limit == pytest.approx(sum(op.read_bytes(1) for op in staged.ops) / 5e10, rel=1e-3)


def test_the_least_read_experts_are_not_copied_with_the_others() -> None:
    """They are the remote ones: of all bytes nearly all are read, but not of theirs."""
    profile = load_profile("h100-pcie5")
    plan = make_plan(qwen(1.0), work(96), profile, Policy(offload_ratio=0.5, kv_offload_ratio=0.0))
    for op in plan.ops:
        if op.op.chances:
            assert op.op.can_be_staged() and not op.op.can_be_staged(op.shares[0])
            assert op.transport == "direct" and not op.is_copied
            assert not PrefillPlan(transport="staged").stages(op.op, op.shares[0])


def test_experts_are_copied_where_there_is_no_room_to_copy_large_matrices() -> None:
    """Two of GLM's lm_head in 16 bits would take 2.3 GiB of HBM; of a layer's experts less."""
    model = known_model("glm-4.5-air-fp8")
    assert model
    plan = make_plan(model, work(64), load_profile("h100-pcie5"), Policy())
    by = {op.op.name: op.transport for op in plan.ops if op.ratio > 0}
    assert by["experts_down"] == by["experts_gate_up"] == "staged" and by["lm_head"] == "direct"
    busy = busy_shares(plan)
    assert busy["host"] == pytest.approx(1, abs=0.02)
