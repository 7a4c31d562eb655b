"""The predicted TTFT of a batch: the engine's chunks, FLOPs counted twice, and its lower bounds."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dakrun.config import Workload
from dakrun.hardware import load_profile, shipped_profiles
from dakrun.known_models import known_model
from dakrun.plan.ops import PREFILL_CHUNK_TOKENS
from dakrun.plan.planner import Plan, Policy, make_plan
from dakrun.plan.prefill import predict_prefill, prefill_chunks

GIB = 2**30


def a_plan(
    name: str = "opt-6.7b",
    *,
    batch: int = 8,
    prompt: int = 100,
    profile: str = "gh200",
    policy: Policy | None = None,
) -> Plan:
    workload = Workload(
        batch_size=batch, prompt_len=prompt, new_tokens=32, max_model_len=prompt + 32
    )
    model = known_model(name)
    assert model is not None
    return make_plan(model, workload, load_profile(profile), policy or Policy())


@given(st.integers(1, 40), st.integers(1, 3 * PREFILL_CHUNK_TOKENS))
def test_chunks_hold_each_token_once(batch: int, prompt: int) -> None:
    chunks = list(prefill_chunks(batch, prompt))
    sizes = [sum(span.length for span in chunk) for chunk in chunks]
    assert sizes[:-1] == [PREFILL_CHUNK_TOKENS] * (len(sizes) - 1)
    assert 0 < sizes[-1] <= PREFILL_CHUNK_TOKENS
    spans = [span for chunk in chunks for span in chunk]
    assert [s.slot for s in spans] == sorted(s.slot for s in spans)
    for slot in range(batch):
        ends = [(s.start, s.start + s.length) for s in spans if s.slot == slot]
        assert [start for start, _ in ends] == [0, *(end for _, end in ends[:-1])]
        assert ends[-1][1] == prompt


@pytest.mark.parametrize(("batch", "prompt"), [(1, 1), (8, 300), (3, 2048), (2, 5000)])
def test_chunks_are_those_of_the_engine(batch: int, prompt: int) -> None:
    from dakrun.engine.engine import _chunks

    request = SimpleNamespace(prompt_ids=range(prompt))
    running = [SimpleNamespace(request=request, slot=slot) for slot in range(batch)]
    theirs = [
        [(part.slot, part.start, part.length) for _, part in chunk]
        for chunk in _chunks(running)  # type: ignore[arg-type]
    ]
    ours = [
        [(span.slot, span.start, span.length) for span in chunk]
        for chunk in prefill_chunks(batch, prompt)
    ]
    assert ours == theirs


@pytest.mark.parametrize("name", ["opt-6.7b", "llama-2-7b", "llama-3-8b", "opt-350m"])
@pytest.mark.parametrize(("batch", "prompt"), [(1, 1), (3, 700), (5, 2000)])
def test_flops_do_not_depend_on_chunks(name: str, batch: int, prompt: int) -> None:
    plan = a_plan(name, batch=batch, prompt=prompt)
    model = plan.model
    linear = [op.op for op in plan.ops if op.op.category == "linear"]
    per_token = sum(op.layers * 2 * op.shape[0] * op.shape[1] for op in linear[:-1])
    assert linear[-1].name == "lm_head"
    logits = 2 * linear[-1].shape[0] * linear[-1].shape[1]
    pairs = prompt * (prompt + 1) / 2
    attention = 4 * model.num_heads * model.head_dim * pairs * model.num_layers
    found = predict_prefill(plan)
    assert found.flops == pytest.approx(batch * (prompt * per_token + logits + attention))
    assert found.tokens == batch * prompt
    assert found.chunks == len(list(prefill_chunks(batch, prompt)))


@pytest.mark.parametrize("profile", shipped_profiles())
@pytest.mark.parametrize(("batch", "prompt"), [(1, 1), (1, 512), (16, 64), (16, 600)])
def test_lower_bounds(profile: str, batch: int, prompt: int) -> None:
    plan = a_plan("opt-125m", batch=batch, prompt=prompt, profile=profile)
    found = predict_prefill(plan)
    machine = plan.profile
    assert found.bound_s <= found.predicted_s
    least = found.flops / machine.compute[plan.model.dtype].peak
    assert found.bound_s >= least * (1 - 1e-9)
    in_layers = [op for op in plan.ops if op.op.in_layer and op.op.category == "linear"]
    read = found.chunks * sum(op.op.layers * op.op.read_bytes for op in in_layers)
    rates = [tier.direct_bytes_per_s for tier in machine.remote]
    assert found.bound_s >= read / (machine.hbm_bytes_per_s + sum(rates))
    launches = found.chunks * sum(op.op.layers for op in in_layers)
    assert found.predicted_s >= found.bound_s + launches * min(machine.linear.seconds)


@pytest.mark.parametrize("policy", [Policy(), Policy(hbm_budget=6 * GIB)])
@pytest.mark.parametrize("profile", ["gh200", "h200-pcie5"])
def test_it_rises_with_the_prompt_and_the_batch(profile: str, policy: Policy) -> None:
    def ttft(batch: int, prompt: int) -> float:
        plan = a_plan(batch=batch, prompt=prompt, profile=profile, policy=policy)
        return predict_prefill(plan).predicted_s

    by_prompt = [ttft(4, prompt) for prompt in (1, 2, 16, 255, 256, 257, 511, 512, 513, 1000)]
    by_batch = [ttft(batch, 500) for batch in (1, 2, 4, 5, 8, 16)]
    for times in (by_prompt, by_batch):
        assert times == sorted(set(times))


def test_remote_weights_cost_their_link_in_every_chunk() -> None:
    policy = Policy(offload_ratio=1.0, kv_offload_ratio=0.0)
    plan = a_plan(batch=8, prompt=1024, profile="h200-pcie5", policy=policy)
    found = predict_prefill(plan)
    assert found.chunks == 4
    in_layers = sum(sum(op.read_bytes(t) for t in (0, 1)) for op in plan.weights())
    lm_head = plan.op("lm_head").read_bytes(1)
    rate = 55.4e9 if plan.op("fc1").transport == "staged" else 51.4e9
    link = 4 * (in_layers - lm_head) / rate + 4 * lm_head / rate
    attention = found.bound_s - link
    assert 0 <= attention < 0.05 * link


def test_slots_are_read_from_their_tiers() -> None:
    times = {}
    for ratio in (0.0, 0.5, 1.0):
        policy = Policy(offload_ratio=0.0, kv_offload_ratio=ratio)
        plan = a_plan(batch=4, prompt=1000, profile="h200-pcie5", policy=policy)
        times[ratio] = predict_prefill(plan).bound_s
    assert times[0.0] < times[0.5] < times[1.0]
    assert times[0.5] - times[0.0] < times[1.0] - times[0.0]


def test_a_cpu_pays_for_its_rows_alone() -> None:
    """Where arithmetic is the limit, one token takes an eighth of eight (tensor cores: all)."""
    plan = a_plan("opt-125m", batch=1, prompt=1, profile="cpu")
    slow = replace(
        plan.profile,
        compute={dtype: replace(rate, peak=1e6) for dtype, rate in plan.profile.compute.items()},
    )
    one = make_plan(plan.model, plan.workload, slow, Policy())
    assert predict_prefill(one).bound_s == pytest.approx(predict_prefill(one).flops / 1e6)
