"""Plans of published models on known machines, errors of budgets that are too small, batch sizes.

The laws that hold for every plan are in test_plan_laws.py.
"""

import itertools
import math
import re
from dataclasses import replace
from typing import Literal

import pytest
from planned import GH200, GIB, known, work

from dakrun.config import DTYPE_BYTES, Dtype
from dakrun.errors import CannotRun, UsageError
from dakrun.hardware import HardwareProfile, load_profile
from dakrun.plan import (
    RESERVE_BYTES,
    Plan,
    Policy,
    choose_batch_size,
    compute_time,
    decode_ops,
    make_plan,
    predict_prefill,
    run_bound,
)
from dakrun.plan.batch_size import MAX_BATCH_SIZE, batch_candidates
from dakrun.plan.show.json import plan_dict


def test_opt_30b_on_gh200_turns_at_a_tenth() -> None:
    plan = make_plan(known("opt-30b"), work(8), GH200, Policy())
    for op in plan.ops:
        assert (op.a, op.b) == pytest.approx((0.45 / 4.45, 0.45 / 4.45))
        assert op.regime == "memory-bound"
    assert plan.ratio == pytest.approx(0.097, abs=0.002)
    local = make_plan(known("opt-30b"), work(8), GH200, Policy(offload_ratio=0.0))
    assert plan.bound_s / local.bound_s == pytest.approx(1 - plan.ratio, abs=0.003)


@pytest.mark.parametrize("tokens", [(992, 32), (1024, 32)])
def test_llama_70b_does_not_fit_gh200(tokens: tuple[int, int]) -> None:
    plan = make_plan(known("llama-2-70b"), work(32, *tokens), GH200, Policy())
    assert 0.34 <= plan.required_ratio <= plan.ratio <= 0.41
    assert plan.ratio == pytest.approx(plan.required_ratio, abs=1e-4)


def test_kv_cache_of_opt_30b() -> None:
    model, workload = known("opt-30b"), work(128, 1024, 32)
    assert model.kv_bytes_per_token * 128 * (1024 + 32) == pytest.approx(186e9, rel=1e-3)
    kv = plan_dict(make_plan(model, workload, GH200, Policy()))["kv"]
    assert kv["resident_bytes"] == model.kv_bytes_per_token * 128 * 1088  # whole blocks of 64
    read = kv["hbm_read_bytes_per_step"] + kv["link_read_bytes_per_step"]
    assert read == pytest.approx(model.kv_bytes_per_token * 128 * 1040)


@pytest.mark.parametrize("transport", [None, "staged"])
def test_what_is_all_local_is_not_staged(transport: Literal["staged"] | None) -> None:
    """Its kernel is planned as it is launched, and reports have a measured time for it."""
    fixed = Policy(offload_ratio=0.0, kv_offload_ratio=0.0)
    local = make_plan(known("opt-125m"), work(8), GH200, fixed)
    plan = make_plan(known("opt-125m"), work(8), GH200, replace(fixed, transport=transport))
    assert all(op.transport == "direct" for op in plan.ops)
    assert plan.predicted_s == local.predicted_s


@pytest.mark.parametrize(("ratio", "slots"), [(0.0, 0), (0.5, 8), (1.0, 16), (0.26, 4)])
def test_kv_ratio(ratio: float, slots: int) -> None:
    plan = make_plan(known("opt-6.7b"), work(16), GH200, Policy(kv_offload_ratio=ratio))
    assert plan.placement("attention", 3) == (("hbm", 16 - slots), ("host", slots))
    weights = replace(Policy(kv_offload_ratio=ratio), offload_ratio=0.3)
    plan = make_plan(known("opt-6.7b"), work(16), GH200, weights)
    remote = sum(op.resident_bytes(1) for op in plan.weights())
    assert remote / plan.weight_bytes == pytest.approx(0.3, abs=1e-5)


@pytest.mark.parametrize(
    ("policy", "said", "hint"),
    [
        (Policy(hbm_budget=GIB // 2), "must be in HBM", "--hbm-budget"),
        (Policy(hbm_budget=20 * GIB, host_budget=GIB), "the budgets are 36.", "--host-budget"),
        (Policy(hbm_budget=20 * GIB, offload_ratio=0.0),
         "over its budget of 20.00 GiB by 37.", "at auto"),
        (Policy(host_budget=GIB, offload_ratio=1.0),
         "host memory is over its budget", "at auto"),
        (Policy(host_budget=GIB // 4, kv_offload_ratio=1.0, strategy="uniform"),
         "host memory is over its budget", "at auto"),
        (Policy(hbm_budget=1520 * 2**20, kv_offload_ratio=0.0), "over its budget", "at auto"),
    ],
)  # fmt: skip
def test_budgets_that_do_not_do(policy: Policy, said: str, hint: str) -> None:
    with pytest.raises(CannotRun) as caught:
        make_plan(known("opt-30b"), work(8), GH200, policy)
    assert said in str(caught.value) and hint in caught.value.hint


def test_what_makes_no_sense() -> None:
    for field, value in (
        ("offload_ratio", 1.5), ("kv_offload_ratio", math.nan), ("offload_ratio", "auto"),
        ("offload_ratio", True), ("hbm_budget", "20GiB"), ("host_budget", -1),
        ("peer_budget", math.inf), ("strategy", "foo"), ("transport", "auto"), ("remote", "host"),
        ("remote", (None,)),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=re.escape(f"{field} is {value!r}")) as caught:
            Policy(**{field: value})  # type: ignore[arg-type]
        assert f"{field} must be " in caught.value.hint
    with pytest.raises(UsageError, match="once"):
        Policy(remote=("host", "host"))
    with pytest.raises(UsageError, match="2048 positions") as caught:
        make_plan(known("opt-30b"), work(8, 2048), GH200, Policy())
    assert "--max-model-len 2048" in caught.value.hint
    with pytest.raises(UsageError, match="no remote tier 'peer:1'"):
        make_plan(known("opt-30b"), work(8), GH200, Policy(remote=("peer:1",)))


def seconds_of_qkv(batch_size: int, profile: HardwareProfile) -> float:
    op = decode_ops(known("opt-30b"), work(batch_size))[0]
    return compute_time(op, profile, "float16")


def test_tensor_cores_work_on_eight_rows_at_least() -> None:
    eight = 2 * 8 * 21504 * 7168 / 9.894e14
    assert seconds_of_qkv(1, GH200) == seconds_of_qkv(8, GH200) == pytest.approx(eight)
    assert seconds_of_qkv(16, GH200) == pytest.approx(2 * eight)


def test_a_cpu_computes_only_the_rows_there_are() -> None:
    cpu = load_profile("cpu")
    for rows in (1, 3, 8, 9):
        flops = 2 * rows * 21504 * 7168
        assert seconds_of_qkv(rows, cpu) == pytest.approx(flops / cpu.compute["float16"].peak)


@pytest.mark.parametrize("name", ["opt-30b", "llama-2-70b", "llama-3.2-3b"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_intensity_of_decode_attention(name: str, dtype: Dtype) -> None:
    """2 (Hq / Hkv) / bytes per element, whatever the batch and the lengths."""
    model = known(name).with_dtype(dtype)
    expected = 2 * (model.num_heads / model.num_kv_heads) / DTYPE_BYTES[dtype]
    for workload in (work(1), work(64, 512, 100)):
        op = next(op for op in decode_ops(model, workload) if op.category == "attention")
        assert op.arithmetic_intensity == pytest.approx(expected)


def test_a_square_gemm_crosses_the_ridge_of_an_h100() -> None:
    """4096 x 4096 in fp16: N K M / (K M + N K + N M) = 295 near N = 345."""
    h100, model = load_profile("h100-sxm"), replace(known("opt-6.7b"), dtype="float16")
    ridge = h100.compute["float16"].peak / h100.hbm_bytes_per_s
    intensities = {}
    for n in range(300, 400):
        op = next(op for op in decode_ops(model, work(n)) if op.name == "o")
        assert op.shape == (4096, 4096)
        intensities[n] = op.arithmetic_intensity
    crossing = min(n for n, intensity in intensities.items() if intensity >= ridge)
    assert abs(crossing - 345) <= 1


def test_a_link_group_caps_its_only_tier() -> None:
    host = GH200.tier("host")
    shared = replace(GH200, remote=(replace(host, group="bus"),), link_groups={"bus": 2.25e11})
    slow = replace(host, direct_bytes_per_s=2.25e11, staged_bytes_per_s=2.25e11)
    alone = replace(GH200, remote=(slow,))
    policy = Policy(hbm_budget=40 * GIB)
    plans = [make_plan(known("opt-30b"), work(256), p, policy).ops for p in (shared, alone)]
    assert plans[0] == plans[1]


def test_batch_size() -> None:
    assert [batch_candidates(n) for n in (0, 1, 3, 8)] == [[1], [1], [1, 2, 3], [1, 2, 4, 8]]
    model, policy = (
        known("llama-2-7b"),
        Policy(hbm_budget=16 * GIB + RESERVE_BYTES, host_budget=8 * GIB),
    )
    workload = work(1, 480)
    speed = {}
    for n in batch_candidates(512):
        try:
            plan = make_plan(model, replace(workload, batch_size=n), GH200, policy)
        except CannotRun:
            continue
        speed[n] = n / plan.predicted_s
    assert 1 < len(speed) < 10
    assert batch_candidates(MAX_BATCH_SIZE)[-2:] == [1024, 2048], "few enough to plan each of them"
    best = choose_batch_size(model, workload, GH200, policy).batch_size
    plan = make_plan(model, replace(workload, batch_size=best), GH200, policy)
    assert best / plan.predicted_s > 1.05 * max(speed.values()), "between two powers of two"

    assert choose_batch_size(model, workload, GH200, policy, limit=1).batch_size == 1
    limited = replace(workload, batch_size=best // 2)
    step_s = make_plan(model, limited, GH200, policy).predicted_s
    for max_decode_step, size in ((step_s, best // 2), (math.inf, best)):
        chosen = choose_batch_size(model, workload, GH200, policy, max_decode_step=max_decode_step)
        assert chosen.batch_size == size
    with pytest.raises(CannotRun, match=r"decode step of 1.0 us or less: the fastest"):
        choose_batch_size(model, workload, GH200, policy, max_decode_step=1e-6)
    with pytest.raises(CannotRun, match="the budgets are"):
        choose_batch_size(
            model, workload, GH200, replace(policy, host_budget=0, hbm_budget=2 * GIB)
        )


def test_the_largest_batch_where_there_is_room() -> None:
    model, h200 = known("opt-6.7b"), load_profile("h200-pcie5")
    assert choose_batch_size(model, work(1), h200, Policy()).batch_size == MAX_BATCH_SIZE == 2048
    step_s = make_plan(model, work(512), h200, Policy()).predicted_s
    limited = choose_batch_size(model, work(1), h200, Policy(), max_decode_step=step_s)
    assert limited.batch_size == 512


def seconds(plan: Plan) -> float:
    """Predicted seconds of a batch: its prefill and its decode steps."""
    return plan.workload.new_tokens * plan.predicted_s + predict_prefill(plan).predicted_s


@pytest.mark.parametrize("name", ["llama-3-8b", "llama-2-7b", "opt-6.7b"])
@pytest.mark.parametrize("ratio", [0.002, 0.01, 0.03, 0.2])
def test_a_free_transport_is_as_fast_as_either(name: str, ratio: float) -> None:
    model, profile = known(name), load_profile("h200-pcie5")
    free, direct, staged = (
        make_plan(model, work(8, 32, 32), profile, Policy(offload_ratio=ratio, transport=way))
        for way in (None, "direct", "staged")
    )
    assert seconds(free) <= min(seconds(direct), seconds(staged)) * (1 + 1e-4)


@pytest.mark.parametrize("ratio", [0.002, 0.01, 0.03])
def test_rows_that_steps_hardly_read_go_first(ratio: float) -> None:
    """Those of a table of embeddings, 6.5% of the bytes."""
    model, profile = known("llama-3-8b"), load_profile("h200-pcie5")
    free, local = (
        make_plan(model, work(8, 32, 32), profile, Policy(offload_ratio=share))
        for share in (ratio, 0.0)
    )
    assert free.ratio == pytest.approx(ratio, abs=1e-3)
    assert free.predicted_s <= local.predicted_s * 1.001


@pytest.mark.parametrize("budget", [4, 8, 12, 14])
def test_buffers_are_taken_where_they_pay(budget: int) -> None:
    """A buffer for a language head of 1 GiB is a gigabyte more in host memory."""
    model, profile = known("llama-3-8b"), load_profile("h200-pcie5")
    free, direct, staged = (
        make_plan(model, work(8, 32, 32), profile, Policy(hbm_budget=budget * GIB, transport=way))
        for way in (None, "direct", "staged")
    )
    assert seconds(free) <= min(seconds(direct), seconds(staged)) * (1 + 1e-4)


def test_a_free_transport_takes_what_direct_reads_make_room_for() -> None:
    """There is no room for the buffers that its fastest plan would stage through."""
    model, profile = known("opt-125m"), load_profile("h200-spec")
    policy = Policy(hbm_budget=767_462_400 + RESERVE_BYTES)
    free, direct = (
        make_plan(model, work(2, 512, 32), profile, replace(policy, transport=way))
        for way in (None, "direct")
    )
    assert free.predicted_s <= direct.predicted_s * (1 + 1e-9)
    assert free.policy == policy and "staging" not in free.fixed_bytes


@pytest.mark.parametrize(
    ("name", "hardware", "batch_size", "budget", "slots"),
    [
        ("opt-2.7b", "rtx-pro-6000", 256, 11_095_964_492, 16),
        ("opt-6.7b", "h200-pcie5", 32, 15_041_307_688, 3),
        ("opt-1.3b", "b200", 128, 4_866_133_836, 14),
    ],
)
def test_as_fast_as_any_ratio_that_fits(
    name: str, hardware: str, batch_size: int, budget: int, slots: int
) -> None:
    """Many slots, of which the ideal number is not the best one; one beside it is."""
    model, profile = known(name), load_profile(hardware)
    policy, workload = Policy(hbm_budget=budget), work(batch_size, 32, 32)
    best, uniform, others = (
        make_plan(model, workload, profile, option).predicted_s
        for option in (
            policy,
            replace(policy, strategy="uniform"),
            replace(policy, kv_offload_ratio=slots / batch_size),
        )
    )
    assert best <= uniform * (1 + 1e-9)
    assert best <= others * 1.01


def test_batches_between_powers_of_two() -> None:
    """Where HBM is full, one slot more costs as much as a link takes for it."""
    model, profile = known("opt-30b"), load_profile("h200-pcie5")
    chosen = choose_batch_size(model, work(1, 512, 32), profile, Policy()).batch_size
    speed = {
        n: n / make_plan(model, work(n, 512, 32), profile, Policy()).predicted_s
        for n in (64, 128, chosen)
    }
    assert speed[chosen] > 1.2 * max(speed[64], speed[128])


def test_steps_take_longer_row_by_row() -> None:
    """Also where costs of few rows end and those of many begin."""
    model, profile = known("opt-6.7b"), load_profile("h200-pcie5")
    times = [
        make_plan(model, work(n, 32, 32), profile, Policy()).predicted_s for n in range(60, 131, 5)
    ]
    assert all(a < b < 1.05 * a for a, b in itertools.pairwise(times))


def test_what_a_cpu_reads_takes_as_long_wherever_it_is_said_to_lie() -> None:
    model, profile = known("opt-125m"), load_profile("cpu")
    local, remote = (
        make_plan(model, work(4, 32, 32), profile, Policy(offload_ratio=ratio))
        for ratio in (0.0, 1.0)
    )
    assert local.predicted_s == pytest.approx(remote.predicted_s)


def test_a_run_takes_at_least_its_arithmetic_memory_and_links() -> None:
    h200 = load_profile("h200-pcie5")
    model = known("llama-3-8b")
    plan = make_plan(model, work(512, 186, 180), h200, Policy(offload_ratio=0.0))
    counts = {"requests": 2000, "prompt_tokens": 372_568, "new_tokens": 360_402}
    parameters = plan.weight_bytes / 2 - 2 * model.vocab_size * model.hidden_size
    head = model.vocab_size * model.hidden_size
    flops = 2 * (parameters * (372_568 + 360_402 - 2000) + head * 360_402)
    seconds = flops / h200.compute["bfloat16"].at(4096)
    kv = 1.5e13 / h200.hbm_bytes_per_s
    found = run_bound(plan, **counts, steps=600, kv_bytes=1.5e13)
    assert found == pytest.approx(seconds + kv) and 15 < found < 22
    assert run_bound(plan, **counts, steps=10**5, kv_bytes=0) == pytest.approx(
        10**5 * sum(op.read_bytes(0) for op in plan.weights()) / h200.hbm_bytes_per_s
    )
    half = make_plan(model, work(8), h200, Policy(offload_ratio=0.5, kv_offload_ratio=0.0))
    host = h200.tier("host")
    assert run_bound(half, **counts, steps=10**4, kv_bytes=0) == pytest.approx(
        10**4 * sum(op.read_bytes(1) for op in half.weights()) / host.staged_bytes_per_s
    )
