"""The predicted TTFT of a batch: the engine's chunks, FLOPs counted twice, and its lower bounds."""

import heapq
import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dakrun.config import Workload
from dakrun.hardware import load_profile, shipped_profiles
from dakrun.models import known_model
from dakrun.plan import (
    Plan,
    Policy,
    PromptGroups,
    Transport,
    make_plan,
    predict_prefill,
)
from dakrun.plan.footprint import activation_bytes
from dakrun.plan.plan import PrefillPlan
from dakrun.plan.prefill import PREFILL_LAUNCH_ROWS, pass_seconds, passes
from dakrun.plan.staging import staging_bytes

GIB = 2**30


def a_plan(
    name: str = "opt-6.7b",
    *,
    batch: int = 8,
    prompt: int = 100,
    profile: str = "gh200",
    policy: Policy | None = None,
    new: int = 32,
) -> Plan:
    workload = Workload(
        batch_size=batch, prompt_len=prompt, new_tokens=new, max_model_len=prompt + new
    )
    model = known_model(name)
    assert model is not None
    model = replace(model, max_positions=max(model.max_positions, prompt + new))
    return make_plan(model, workload, load_profile(profile), policy or Policy())


@given(st.lists(st.integers(1, 6000), min_size=1, max_size=40), st.sampled_from([2048, 4096]))
def test_passes_hold_each_token_once(prompts: list[int], tokens: int) -> None:
    found = list(passes(dict(enumerate(prompts)), tokens))
    sizes = [sum(segment.length for segment in segments) for segments in found]
    assert sizes[:-1] == [tokens] * (len(sizes) - 1)
    assert 0 < sizes[-1] <= tokens
    segments = [segment for segments in found for segment in segments]
    assert [s.slot for s in segments] == sorted(s.slot for s in segments)
    for slot, prompt in enumerate(prompts):
        ends = [(s.start, s.start + s.length) for s in segments if s.slot == slot]
        assert [start for start, _ in ends] == [0, *(end for _, end in ends[:-1])]
        assert ends[-1][1] == prompt


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
    assert found.chunks == -(-batch * prompt // plan.prefill.chunk_tokens)


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
    for times in (by_prompt, by_batch):  # measured costs of a launch may fall a little with rows
        assert all(after > 0.9999 * before for before, after in itertools.pairwise(times))
    assert by_prompt[-1] > 1.015 * by_prompt[-4] and by_batch[-1] > 1.1 * by_batch[0]


@pytest.mark.parametrize("transport", ["direct", "staged"])
def test_remote_weights_cross_their_link_in_every_pass(transport: Transport) -> None:
    """Where they are read directly, once for all rows that a launch takes."""
    policy = Policy(offload_ratio=1.0, kv_offload_ratio=0.0, transport=transport)
    plan = a_plan(batch=8, prompt=1024, profile="h200-pcie5", policy=policy)
    host = plan.profile.tier("host")
    rate = host.staged_bytes_per_s if transport == "staged" else host.direct_bytes_per_s
    for tokens in (2048, 4096, 8192):
        prefill = PrefillPlan(chunk_tokens=tokens, transport=transport)
        found = predict_prefill(replace(plan, prefill=prefill))
        assert found.chunks == 8192 // tokens
        lm_head = plan.op("lm_head").read_bytes(1)
        in_layers = sum(op.read_bytes(1) for op in plan.weights()) - lm_head
        times = found.chunks if transport == "staged" else max(2, found.chunks)
        link = (times * in_layers + found.chunks * lm_head) / rate
        compute = found.flops / plan.profile.compute["float16"].peak
        assert max(link, compute) * (1 - 1e-9) <= found.bound_s < 1.05 * max(link, 1.15 * compute)


def test_a_pass_that_needs_nearly_all_experts_stages_all() -> None:
    """There is room for two matrices, and for 7 experts in 64 MiB that are exchanged."""
    policy = Policy(offload_ratio=0.5, kv_offload_ratio=0.0)
    plan = a_plan("qwen3-30b-a3b", batch=64, prompt=512, profile="h100-sxm", policy=policy)
    assert plan.prefill.transport == "staged"
    experts = [op for op in plan.ops if op.op.chances and op.remote_bytes]
    assert len(experts) == 2 and all(op.transport == "direct" for op in experts)
    needed = 2 * max(op.largest_remote_part for op in experts)
    needed += 7 * sum(op.op.resident_bytes for op in experts) // 128
    assert needed <= plan.memory(0)["staging"] < 1.1 * needed
    host = plan.profile.tier("host")
    for tokens, staged in ((4, False), (16, False), (64, True), (4096, True)):
        assert all(plan.prefill.stages(op.op.with_rows(tokens)) is staged for op in experts)
        remote = sum(op.remote_bytes if staged else op.read_at(1, tokens) for op in experts)
        rate = host.staged_bytes_per_s if staged else host.direct_bytes_per_s
        seconds = pass_seconds(plan, 0, 0, [((0, tokens), 1)], 0.0)
        assert remote / rate < seconds < 1.2 * remote / rate + 0.05
    direct = replace(plan, prefill=PrefillPlan(transport="direct"))
    assert not any(direct.prefill.stages(op.op) for op in experts)
    # A tile reads an expert's matrix once for all rows of a launch; 8,192 rows take two launches.
    once, also_once, twice = (
        pass_seconds(direct, 0, 0, [((0, tokens), 1)], 0.0) for tokens in (2048, 4096, 8192)
    )
    assert sum(op.remote_bytes for op in experts) / host.direct_bytes_per_s < once
    assert also_once < 1.1 * once and 1.8 * also_once < twice < 2.2 * also_once


def test_passes_grow_until_the_link_is_hidden() -> None:
    policy = Policy(offload_ratio=1.0, kv_offload_ratio=0.0)
    large = a_plan(batch=32, prompt=512, profile="h200-pcie5", policy=policy)
    assert large.prefill.transport == "staged" and large.prefill.chunk_tokens > 4096
    base = replace(large, prefill=PrefillPlan(transport="staged"))
    times = [predict_prefill(plan).predicted_s for plan in (large, base)]
    assert times[0] < 0.25 * times[1]
    local = a_plan(batch=32, prompt=512, profile="h200-pcie5", policy=Policy(offload_ratio=0.0))
    assert local.prefill == PrefillPlan(chunk_tokens=PREFILL_LAUNCH_ROWS)


@pytest.mark.parametrize("spare", [0, 1, 1 << 28, 1 << 29, 1 << 30, 1 << 34])
def test_passes_have_the_room_that_is_left(spare: int) -> None:
    """What they take is in the memory map; no budget is exceeded."""
    fixed = {"offload_ratio": 0.6, "kv_offload_ratio": 0.0}
    least = a_plan(batch=32, prompt=512, profile="h200-pcie5", policy=Policy(**fixed))
    held = {k: v for k, v in least.memory(0).items() if k not in ("activations", "staging")}
    model, work = least.model, least.workload
    policy = Policy(
        hbm_budget=sum(held.values()) + activation_bytes(model, work) + (1 << 29) + spare, **fixed
    )
    plan = a_plan(batch=32, prompt=512, profile="h200-pcie5", policy=policy)
    memory = plan.memory(0)
    assert sum(memory.values()) <= plan.budgets[0]
    assert memory["activations"] >= activation_bytes(model, work, plan.prefill.chunk_tokens)
    machine = plan.profile, plan.tiers[1:], plan.model.dtype
    assert memory["staging"] >= staging_bytes(plan.ops, plan.prefill, *machine)
    base = replace(plan, prefill=PrefillPlan())
    assert predict_prefill(plan).predicted_s <= predict_prefill(base).predicted_s


@pytest.mark.parametrize("profile", ["cpu", "h200-pcie5"])
def test_plain_torch_keeps_to_small_passes(profile: str) -> None:
    model = known_model("opt-125m")
    assert model is not None
    work = Workload(batch_size=64, prompt_len=1000, new_tokens=8, max_model_len=1008)
    policy = Policy(offload_ratio=0.5)
    plan = make_plan(model.with_dtype("float32"), work, load_profile(profile), policy)
    assert plan.prefill == PrefillPlan()


def test_prompts_of_one_pass_do_not_wait_for_their_slots() -> None:
    """What they leave there goes over the link while the next op is computed."""
    times = {}
    for ratio in (0.0, 1.0):
        policy = Policy(offload_ratio=0.0, kv_offload_ratio=ratio)
        plan = a_plan(batch=4, prompt=1000, profile="h200-pcie5", policy=policy)
        times[ratio] = predict_prefill(plan).bound_s
    assert times[1.0] == pytest.approx(times[0.0])


def test_keys_and_values_cross_the_link_beside_compute() -> None:
    """Written by the copy engine, and read where a prompt goes on in another pass."""
    policy = Policy(offload_ratio=0.0, kv_offload_ratio=1.0)
    plan = a_plan(batch=1, prompt=6000, profile="h200-pcie5", policy=policy, new=20)
    found = predict_prefill(plan)
    position = plan.model.kv_bytes_per_token
    assert found.chunks == 2 and found.bound_s > 4096 * position / 51.4e9
    slow = replace(plan.profile.tier("host"), staged_bytes_per_s=1e9)
    slower = replace(plan, profile=replace(plan.profile, remote=(slow,)))
    assert predict_prefill(slower).bound_s == pytest.approx(6000 * position / 1e9)


def test_a_cpu_pays_for_its_rows_alone() -> None:
    """Where arithmetic is the limit, one token takes an eighth of eight (tensor cores: all)."""
    plan = a_plan("opt-125m", batch=1, prompt=1, profile="cpu")
    slow = replace(
        plan.profile,
        compute={dtype: replace(rate, peak=1e6) for dtype, rate in plan.profile.compute.items()},
    )
    one = make_plan(plan.model, plan.workload, slow, Policy())
    assert predict_prefill(one).bound_s == pytest.approx(predict_prefill(one).flops / 1e6)


def seconds_of_a_file(plan: Plan, together: int, pass_s: float, requests: int) -> float:
    """A run whose requests begin `together` at a time, in passes of `pass_s` besides their tokens.

    Lengths spread evenly around the plan's mean; a step takes the plan's time.
    """
    draw, work = random.Random(0), plan.workload
    ends = [0] * work.batch_size  # the step after which each slot is free
    step = passes = 0
    for first in range(0, requests, together):
        starting = min(together, requests - first)
        freed = [heapq.heappop(ends) for _ in range(starting)]
        step = max(step, freed[-1])
        passes += 1
        for _ in range(starting):
            heapq.heappush(ends, step + draw.randint(1, 2 * work.new_tokens))
    return max(ends) * plan.predicted_s + passes * pass_s


@pytest.mark.parametrize(
    ("name", "batch", "ratio", "slower", "least"),
    [
        ("llama-3-8b", 256, 0.0, 1, 2),
        ("llama-3-8b", 64, 0.0, 1, 3),
        ("qwen3-30b-a3b", 400, 0.0, 1, 10),
        ("qwen3-30b-a3b", 400, 0.0, 2, 25),
        ("opt-6.7b", 64, 0.3, 1, 1),
        ("opt-30b", 8, 0.5, 1, 1),
    ],
)
def test_requests_begin_in_groups_that_cost_least(
    name: str, batch: int, ratio: float, slower: int, least: int
) -> None:
    """Where a step takes as long as it takes to launch one with prompts, they begin at once.

    Launches may be `slower` than the profile says.
    """
    policy = Policy(offload_ratio=ratio, kv_offload_ratio=0.0)
    plan = a_plan(name, batch=batch, new=180, profile="h200-pcie5", policy=policy)

    def pass_s(k: int) -> float:
        """Of the GPU, or of the CPU beyond the time that the GPU needs anyway."""
        tokens = k * plan.workload.prompt_len + batch
        own = k * predict_prefill(plan).predicted_s / batch
        if not ratio and batch <= 64 and tokens <= 1024:
            return 0.002
        return max(0.002, launch_s - 1.5 * plan.predicted_s - own)

    groups = PromptGroups.of(plan)
    launch_s = slower * groups.launch_s
    chosen = replace(groups, launch_s=launch_s).best()
    times = {
        k: seconds_of_a_file(plan, k, pass_s(k), 40 * batch)
        for k in {1, 2, 3, 4, *range(4, batch // 2 + 1, max(1, batch // 32)), chosen}
    }
    assert times[chosen] <= 1.03 * min(times.values())
    assert chosen >= least and (chosen == 1) == (least == 1)
