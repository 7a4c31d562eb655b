"""Laws of plans: every byte has a place, budgets hold, and no plan within them is faster.

The optimum comes from a linear program over shares; rounding to units may cost one unit per op.
"""

import contextlib
import json
from dataclasses import replace
from typing import Any

import pytest
from cases import few_examples
from hypothesis import assume, given
from hypothesis import strategies as st
from optimum import least_seconds, sides
from planned import GH200, work

from dakrun.config import ModelConfig, Workload
from dakrun.errors import CannotRun
from dakrun.hardware import HardwareProfile, OpCosts, load_profile
from dakrun.models import known_model
from dakrun.plan import (
    RESERVE_BYTES,
    Op,
    Plan,
    Policy,
    Transport,
    compute_time,
    decode_ops,
    make_plan,
)
from dakrun.plan.linear_program import OpLines
from dakrun.plan.op_costs import StepCosts
from dakrun.plan.planner import MIN_OFFLOAD_GAIN
from dakrun.plan.problem import Problem
from dakrun.plan.show.json import overview_dict
from dakrun.plan.show.op_tables import CHOICES, NEEDS, choice_rows, need_rows
from dakrun.plan.show.overview import Overview
from dakrun.plan.show.table import summary_rows

FREE = OpCosts(rows=(1,), seconds=(0.0,), efficiency=(1.0,))


@st.composite
def models(draw: st.DrawFn) -> ModelConfig:
    heads, head_dim = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([32, 64, 160]))
    hidden = heads * head_dim
    family = draw(st.sampled_from(["opt", "llama"]))
    return ModelConfig(
        name="random",
        family=family,
        vocab_size=draw(st.integers(10, 3000)),
        hidden_size=hidden,
        ffn_size=draw(st.integers(1, 3000)),
        num_layers=draw(st.integers(1, 4)),
        num_heads=heads,
        num_kv_heads=heads if family == "opt" else draw(st.sampled_from([1, heads])),
        head_dim=head_dim,
        max_positions=4096,
        embed_size=draw(st.sampled_from([hidden, 96])),
        tied_embeddings=draw(st.booleans()),
        dtype=draw(st.sampled_from(["float16", "float32"])),
    )


@st.composite
def profiles(draw: st.DrawFn) -> HardwareProfile:
    """Machines whose tiers are alike or far apart, may share a link, and compute at any rate.

    Their copy engines are about as fast as a link, as those of a GPU are.
    """
    local, remote = draw(st.floats(1e9, 1e12)), draw(st.floats(1e9, 1e12))
    shared = draw(st.sampled_from(["nothing", "host", "both"]))
    limit = draw(st.floats(0.5, 1)) * (remote + (local if shared == "both" else 0))
    peak = local * draw(st.sampled_from([0.1, 1.0, 8.0, 300.0]))
    host = replace(
        GH200.tier("host"),
        direct_bytes_per_s=remote,
        staged_bytes_per_s=remote * draw(st.floats(0.7, 1.1)),
        group="" if shared == "nothing" else "bus",
    )
    return replace(
        GH200,
        hbm_bytes_per_s=local,
        hbm_group="bus" if shared == "both" else "",
        link_groups={} if shared == "nothing" else {"bus": limit},
        remote=(host,),
        context_bytes=0,
        linear=FREE,
        attention=FREE,
        compute={dtype: replace(rate, peak=peak) for dtype, rate in GH200.compute.items()},
    )


workloads = st.builds(work, st.integers(1, 24), st.integers(1, 300), st.integers(1, 100))
ratios = st.one_of(st.none(), st.sampled_from([0.0, 0.5, 1.0]), st.floats(0, 1))
strategies = st.sampled_from(["auto", "greedy", "uniform"])


def total_bytes(ops: tuple[Op, ...]) -> int:
    return sum(op.layers * op.resident_bytes for op in ops)


def unit_sizes(op: Op) -> int:
    """Bytes of the largest unit of one layer."""
    return max(op.unit_bytes(n, n + 1) for n in range(op.units))


def slowest_rate(profile: HardwareProfile) -> float:
    rates = profile.hbm_bytes_per_s, profile.tier("host").direct_bytes_per_s
    return min(*rates, *profile.link_groups.values())


def unit_time(op: Op, profile: HardwareProfile) -> float:
    """Most that one unit more or less in every layer of `op` can cost, in seconds."""
    read = unit_sizes(op) * op.read_bytes / op.resident_bytes
    return op.layers * read / slowest_rate(profile)


def fixed_bytes(model: ModelConfig, workload: Workload, profile: HardwareProfile) -> int:
    """What lies in HBM besides weights and KV where nothing is staged."""
    local = Policy(offload_ratio=0.0, kv_offload_ratio=0.0, strategy="uniform")  # the soonest made
    return sum(make_plan(model, workload, profile, local).fixed_bytes.values())


@st.composite
def budgeted(draw: st.DrawFn) -> tuple[ModelConfig, Workload, HardwareProfile, Policy]:
    """A planning problem whose budgets hold everything, with little or much room."""
    model, workload, profile = draw(models()), draw(workloads), draw(profiles())
    total = total_bytes(decode_ops(model, workload))
    fixed = fixed_bytes(model, workload, profile)
    local = draw(st.floats(0, 1.2)) * total
    room = draw(st.sampled_from([0.0, 0.01, 0.3, 2.0])) * total
    policy = Policy(
        hbm_budget=fixed + int(local),
        host_budget=max(0, total - int(local)) + int(room),
        offload_ratio=draw(ratios),
        kv_offload_ratio=draw(ratios),
        strategy=draw(strategies),
        transport="direct",
    )
    return model, workload, profile, policy


def check_laws(plan: Plan) -> None:
    """What holds for every plan: all units placed, bytes add up, budgets kept, layers alike."""
    for op in plan.ops:
        resident = [op.resident_bytes(tier) for tier in range(2)]
        assert sum(resident) == op.op.layers * op.op.resident_bytes
        assert len(op.placement) == op.op.layers
        for local, remote in op.placement:
            assert min(local, remote) >= 0 and local + remote == op.op.units
        remote_units = [remote for _, remote in op.placement]
        assert max(remote_units) - min(remote_units) <= 1
        assert op.ratio == pytest.approx(resident[1] / sum(resident), abs=1e-12)
        read = sum(op.read_bytes(tier) for tier in range(2))
        assert read == pytest.approx(op.op.layers * op.op.read_bytes)
        assert op.a <= op.b + 1e-12
    spare = plan.spare_kv_blocks * plan.kv_block_bytes
    for tier, budget in enumerate(plan.budgets):
        memory = plan.memory(tier)
        assert sum(memory.values()) <= budget
        held = memory["weights"] + memory["kv"] - (0 if tier else spare)
        assert held == sum(op.resident_bytes(tier) for op in plan.ops)


@given(budgeted())
def test_laws_of_plans(problem: tuple[ModelConfig, Workload, HardwareProfile, Policy]) -> None:
    model, workload, profile, policy = problem
    ops = decode_ops(model, workload)
    try:
        plan = make_plan(model, workload, profile, policy)
    except CannotRun as refusal:
        assert "\n" not in f"{refusal}{refusal.hint}" and refusal.hint
        assert "budget" in str(refusal) and "B" in str(refusal)
        if policy.offload_ratio is None and policy.kv_offload_ratio is None:
            assert policy.hbm_budget is not None and policy.host_budget is not None
            fixed = fixed_bytes(model, workload, profile)
            room = policy.hbm_budget + policy.host_budget - fixed - total_bytes(ops)
            slot = next(op for op in ops if op.category == "attention")
            assert room < max(slot.layers * unit_sizes(slot), *map(unit_sizes, ops))
        return
    check_laws(plan)
    assert plan.ratio >= plan.required_ratio - 1e-12
    kv, kv_ratio, ratio = plan.op("attention"), policy.kv_offload_ratio, policy.offload_ratio
    if kv_ratio is not None:
        assert abs(kv.ratio - kv_ratio) * workload.batch_size <= 0.5 + 1e-9
    if ratio is not None:
        placed = sum(op.resident_bytes(1) for op in plan.weights())
        asked = ratio * plan.weight_bytes
        if kv_ratio is None:
            placed, asked = placed + kv.resident_bytes(1), ratio * total_bytes(ops)
        units = sum(op.layers * unit_sizes(op) for op in ops if op.category != "attention")
        slack = 0 if kv_ratio is not None else kv.op.layers * unit_sizes(kv.op)
        assert abs(placed - asked) <= units + slack


def problem_of(plan: Plan) -> Problem:
    """The problem of `plan`, which reads directly, with all bytes that it may place."""
    costs = StepCosts(plan.model, plan.workload, plan.profile, ("host",))
    return Problem.of(costs, replace(plan.policy, strategy="greedy"))


def check_optimal(plan: Plan, problem: Problem, placed: set[str]) -> None:
    """No ratios of the ops but `placed` have a lower bound of steps with their prompts.

    Whole units may cost one unit of each op.
    """
    passes, profile = problem.prompts, plan.profile
    ops = [op.op for op in plan.ops if op.op.name not in placed]
    fixed = [op for op in plan.ops if op.op.name in placed]
    lines = [
        OpLines(op.layers * op.resident_bytes, problem.lines(op), (1.0,), passes.times[op.name])
        for op in ops
    ]
    elsewhere = passes.seconds((op.op.name, op.shares) for op in fixed)
    there = sum(op.resident_bytes(1) for op in fixed)
    required = plan.required_ratio * total_bytes(tuple(op.op for op in plan.ops)) - there
    best = least_seconds(lines, max(required, 0.0), plan.budgets[1] - there, elsewhere)
    waits = passes.seconds((op.op.name, op.shares) for op in plan.ops)
    achieved = sum(sum(op.bounds_s) for op in plan.ops if op not in fixed) + max(waits.values())
    allowed = sum(unit_time(op, profile) for op in ops)
    if not placed:
        slot = plan.op("attention").op
        allowed += slot.layers * unit_sizes(slot) / slowest_rate(profile)  # weights, by a slot
        slopes = [max(abs(b - a) for a, b in map(sides, passes.times[op.name].work)) /
                  (op.layers * op.resident_bytes) for op in ops]  # fmt: skip
        allowed += max(slopes) * slot.layers * unit_sizes(slot)
    for op in ops:
        allowed += max(abs(b - a) for a, b in map(sides, passes.times[op.name].work)) / op.units
    assert best * (1 - 1e-5) <= achieved <= best * (1 + 1e-5) + allowed


@given(budgeted(), st.booleans())
def test_no_plan_is_much_faster(
    problem: tuple[ModelConfig, Workload, HardwareProfile, Policy], kv_fixed: bool
) -> None:
    """None with as many remote slots: those are chosen by predicted times, see the next law."""
    model, workload, profile, policy = problem
    kv_ratio = (policy.kv_offload_ratio or 0.0) if kv_fixed else None
    policy = replace(policy, offload_ratio=None, kv_offload_ratio=kv_ratio, strategy="greedy")
    try:
        plan = make_plan(model, workload, profile, policy)
    except CannotRun:
        assume(False)
    check_optimal(plan.forgone or plan, problem_of(plan), {"attention"})


@given(budgeted())
def test_greedy_is_the_greedy_for_weights_and_kv(
    problem: tuple[ModelConfig, Workload, HardwareProfile, Policy],
) -> None:
    """No ratios of weights and KV have a lower bound, but for whole units: one of each op."""
    model, workload, profile, policy = problem
    policy = replace(policy, offload_ratio=None, kv_offload_ratio=None, strategy="greedy")
    try:
        plan = make_plan(model, workload, profile, policy)
    except CannotRun:
        assume(False)
    assert (plan.strategy, set(plan.tried_s)) == ("greedy", {"greedy"})
    check_optimal(plan.forgone or plan, problem_of(plan), set())


@given(budgeted(), st.sampled_from([None, "direct", "staged"]))
def test_uniform_is_one_ratio_for_weights_and_kv(
    problem: tuple[ModelConfig, Workload, HardwareProfile, Policy], transport: Transport | None
) -> None:
    """There is a ratio that every layer of every op has, but for one of its units."""
    model, workload, profile, policy = problem
    policy = replace(policy, kv_offload_ratio=None, strategy="uniform", transport=transport)
    try:
        plan = make_plan(model, workload, profile, policy)
    except CannotRun:
        assume(False)
    assert (plan.strategy, set(plan.tried_s)) == ("uniform", {"uniform"})
    lowest, highest = 0.0, 1.0
    for op in (plan.forgone or plan).ops:
        unit = unit_sizes(op.op)
        for counts in op.placement:
            remote = op.op.tier_bytes(counts)[1]
            lowest = max(lowest, (remote - unit) / op.op.resident_bytes)
            highest = min(highest, (remote + unit) / op.op.resident_bytes)
    assert lowest <= highest + 1e-9
    if policy.offload_ratio is not None:
        assert lowest - 1e-9 <= policy.offload_ratio <= highest + 1e-9


@given(budgeted())
def test_no_number_of_remote_slots_is_faster(
    problem: tuple[ModelConfig, Workload, HardwareProfile, Policy],
) -> None:
    model, workload, profile, policy = problem
    workload = replace(workload, batch_size=min(workload.batch_size, 5))
    policy = replace(policy, offload_ratio=None, kv_offload_ratio=None, strategy="auto")
    try:
        plan = make_plan(model, workload, profile, policy)
    except CannotRun:
        assume(False)
    allowed = sum(unit_time(op.op, profile) for op in plan.weights())
    # Few row blocks leave SMs idle, so that one more or less counts for more than slots do.
    few = (op for op in plan.weights() if op.op.units < profile.sms)
    idle = sum(sum(op.predicted_s) - sum(op.bounds_s) for op in few)
    # A gain below MIN_OFFLOAD_GAIN, and the SMs of slots that all tiers together read fastest.
    slack = (
        MIN_OFFLOAD_GAIN
        + profile.kernel_model.remote_attention_cost * profile.tier("host").sms / profile.sms
    )
    for slots in range(workload.batch_size + 1):
        other = replace(policy, kv_offload_ratio=slots / workload.batch_size)
        with contextlib.suppress(CannotRun):
            rival = make_plan(model, workload, profile, other)
            assert (
                plan.predicted_s - idle <= rival.predicted_s * (1 + slack) + allowed
                or plan.bound_s <= rival.bound_s * (1 + slack) + allowed
            )


def test_slots_leave_weights_their_room() -> None:
    """Found by the law above: the three slots that are ideal take all of the remote tier."""
    model = ModelConfig(
        name="small", family="opt", vocab_size=20, hidden_size=64, ffn_size=109, num_layers=1,
        num_heads=2, num_kv_heads=2, head_dim=32, max_positions=4096, embed_size=64,
        tied_embeddings=False, dtype="float32",
    )  # fmt: skip
    profile = replace(
        GH200,
        hbm_bytes_per_s=1e9,
        remote=(replace(GH200.tier("host"), direct_bytes_per_s=1.54e9, group=""),),
        link_groups={},
        context_bytes=0,
        linear=FREE,
        attention=FREE,
        compute={dtype: replace(rate, peak=8e9) for dtype, rate in GH200.compute.items()},
    )
    policy = Policy(hbm_budget=5_203_112 + RESERVE_BYTES, host_budget=358_144, transport="direct")
    plan = make_plan(model, work(5, 128, 1), profile, policy)
    others = [
        make_plan(model, work(5, 128, 1), profile, replace(policy, kv_offload_ratio=slots / 5))
        for slots in range(4)
    ]
    assert plan.predicted_s == min(other.predicted_s for other in others)
    assert plan.op("attention").placement == ((3, 2),)


def best_is_missed(problem: tuple[ModelConfig, Workload, HardwareProfile, Policy]) -> bool:
    """Whether a plan with a fixed transport or strategy is faster than the one with neither fixed.

    For decode steps alone: where copies are allowed, prompts may be worth a longer step.
    Raises CannotRun if the free one is refused where a fixed one fits.
    """
    *given_problem, policy = problem
    policy = replace(policy, strategy="auto", transport=None)
    narrower = [
        replace(policy, strategy=strategy, transport=transport)
        for strategy in ("auto", "greedy", "uniform")
        for transport in (None, "direct", "staged")
    ]
    times = []
    for fixed in narrower:
        with contextlib.suppress(CannotRun):
            times.append(make_plan(*given_problem, fixed, prompts=False).predicted_s)
    assume(times)
    free = make_plan(*given_problem, policy, prompts=False)
    slack = MIN_OFFLOAD_GAIN if free.forgone else 1e-9  # of all local: a gain of less is none
    return free.predicted_s * (1 - slack) > min(times)


@pytest.mark.hypothesis  # so that make test-more runs it too
def test_the_search_seldom_misses_the_best() -> None:
    """2 of 1,800 random problems were missed. Two of 30, or four of 100, are a worse search."""
    missed = []

    @few_examples(30)
    @given(budgeted())
    def count(problem: tuple[ModelConfig, Workload, HardwareProfile, Policy]) -> None:
        missed.append(best_is_missed(problem))

    count()
    assert sum(missed) <= max(1, 0.03 * len(missed))


@given(models(), workloads, profiles())
def test_auto_is_no_slower_than_everything_local(
    model: ModelConfig, workload: Workload, profile: HardwareProfile
) -> None:
    auto = make_plan(model, workload, profile, Policy())
    local = make_plan(model, workload, profile, Policy(offload_ratio=0.0))
    assert local.ratio == 0 and auto.required_ratio == 0
    assert auto.predicted_s <= local.predicted_s * (1 + 1e-9)


@given(models(), workloads, profiles())
def test_thresholds_and_regimes(
    model: ModelConfig, workload: Workload, profile: HardwareProfile
) -> None:
    profile = replace(profile, link_groups={}, hbm_group="", remote=(
        replace(profile.remote[0], group=""),
    ))  # fmt: skip
    local, remote = profile.hbm_bytes_per_s, profile.tier("host").direct_bytes_per_s
    turning = remote / (local + remote)
    for op in make_plan(model, workload, profile, Policy()).ops:
        compute, read = compute_time(op.op, profile, model.dtype), op.op.read_bytes
        lowest = min(turning, max(0, 1 - compute * local / read))
        assert op.a == pytest.approx(lowest, abs=1e-9)
        assert op.b == pytest.approx(min(1, max(turning, compute * remote / read)), abs=1e-9)
        if op.regime == "memory-bound":
            assert op.a == pytest.approx(turning) == pytest.approx(op.b)
        assert (op.regime == "compute-bound") == (compute >= read / local)


@few_examples(16)  # each makes ten plans more, for advice
@given(budgeted())
def test_presentation(problem: tuple[ModelConfig, Workload, HardwareProfile, Policy]) -> None:
    model, workload, profile, policy = problem
    try:
        plan = make_plan(model, workload, profile, policy)
    except CannotRun:
        assume(False)
    everything = Overview.of(plan)
    shown = json.loads(json.dumps(overview_dict(everything), allow_nan=False))
    assert shown["schema"] == 1
    assert shown["profile"]["provenance"]["kind"] == profile.provenance.kind
    tiers = shown["tiers"]
    assert [tier["used_bytes"] for tier in tiers] == [sum(plan.memory(t).values()) for t in (0, 1)]
    assert sum(tier["weights_bytes"] for tier in tiers) == plan.weight_bytes
    assert sum(tier["kv_bytes"] for tier in tiers) == shown["kv"]["resident_bytes"]
    read = sum(tier["read_bytes_per_step"] for tier in tiers)
    assert (shown["sampling_s"], shown["waits_s"]) == (plan.sampling_s, plan.waits_s)
    others = plan.sampling_s + plan.waits_s
    figures = ("bound", plan.bound_s, 0.0), ("predicted", plan.predicted_s, others)
    for kind, seconds, others in figures:
        assert (
            shown[kind]["decode_step_s"]
            == seconds
            == pytest.approx(sum(op[f"{kind}_s"] for op in shown["ops"]) + others)
        )
        assert shown[kind]["tokens_per_s"] * seconds == pytest.approx(workload.batch_size)
        assert shown[kind]["eb_bytes_per_s"] * seconds == pytest.approx(plan.weight_bytes)
        assert shown[kind]["eb_total_bytes_per_s"] * seconds == pytest.approx(read)
    for op in shown["ops"]:
        units = zip(*op["units_by_layer"].values(), strict=True)
        assert [sum(layer) for layer in units] == [op["units_per_layer"]] * op["layers"]
        check_tiers_of_op(op, profile)
    for tier in tiers:
        parts = [next(t for t in op["tiers"] if t["name"] == tier["name"]) for op in shown["ops"]]
        held = sum(part["resident_bytes"] for part in parts)
        assert held == tier["weights_bytes"] + tier["kv_bytes"]
        read = sum(part["read_bytes_per_step"] for part in parts)
        assert read == pytest.approx(tier["read_bytes_per_step"])
    assert (shown["uniform"]["runs"] is True) or shown["uniform"]["reason"]
    assert shown["advice"]["limited_by"] and shown["advice"]["sentence"]
    assert all(0 <= share <= 1 + 1e-9 for share in shown["advice"]["busy_shares"].values())
    assert all(len(row) == len(NEEDS) for row in need_rows(plan))
    assert all(len(row) == len(CHOICES) for row in choice_rows(plan))
    assert all(text.isascii() for row in summary_rows(everything) for text in row)


def check_tiers_of_op(op: dict[str, Any], profile: HardwareProfile) -> None:
    """The JSON figures of one op by tier add up to those of the op."""
    parts, layers = op["tiers"], op["layers"]
    assert [part["units"] for part in parts] == [sum(n) for n in op["units_by_layer"].values()]
    assert sum(part["units"] for part in parts) == op["units_per_layer"] * layers
    assert sum(part["resident_bytes"] for part in parts) == op["resident_bytes"]
    read = sum(part["read_bytes_per_step"] for part in parts)
    assert read == pytest.approx(op["read_bytes_per_step"])
    assert read == pytest.approx(op["eb_bytes_per_s"] * op["predicted_s"])
    assert sum(part["sms"] for part in parts) <= profile.sms
    assert parts[0]["window_bytes"] is None
    direct = op["transport"] == "direct"
    for part in parts[1:]:
        apart = direct and part["units"] > 0 and not part["mixed"]
        assert part["window_bytes"] == (profile.tier(part["name"]).window_bytes if apart else None)
        assert (part["sms"] > 0) == apart
        assert not part["mixed"] or (direct and part["units"] > 0 and parts[0]["sms"] > 0)


def test_past_all_thresholds_a_step_takes_the_time_of_its_link() -> None:
    """However the remote bytes are divided; README.md of dakrun/plan has these figures."""
    model, policy = known_model("opt-30b"), Policy(offload_ratio=0.3, transport="direct")
    assert model is not None
    for strategy in ("greedy", "uniform"):
        plan = make_plan(model, work(512), GH200, replace(policy, strategy=strategy))
        assert all(op.ratio >= op.b - 0.001 for op in plan.ops)
        link = plan.read_bytes(1) / GH200.tier("host").direct_bytes_per_s
        assert plan.bound_s == pytest.approx(link, rel=1e-3)


def test_a_number_of_slots_that_fits_is_found() -> None:
    """Also where the ideal one fits only rounded away from the nearest, with a slot's room left."""
    model = ModelConfig(
        name="small", family="opt", vocab_size=10, hidden_size=32, ffn_size=1, num_layers=1,
        num_heads=1, num_kv_heads=1, head_dim=32, max_positions=4096, embed_size=32,
        tied_embeddings=False, dtype="float16",
    )  # fmt: skip
    workload = work(5, 1, 1)
    profile = replace(
        GH200,
        hbm_bytes_per_s=1e9,
        remote=(replace(GH200.tier("host"), direct_bytes_per_s=1e9, group=""),),
        context_bytes=0,
        linear=FREE,
        attention=FREE,
        compute={dtype: replace(rate, peak=1e8) for dtype, rate in GH200.compute.items()},
    )
    ops, fixed = decode_ops(model, workload), fixed_bytes(model, workload, profile)
    slot = next(op for op in ops if op.category == "attention").unit_bytes(0, 1)
    for local in range(0, total_bytes(ops), slot // 8):
        host = total_bytes(ops) - local + slot
        policy = Policy(hbm_budget=fixed + local, host_budget=host, transport="direct")
        check_laws(make_plan(model, workload, profile, policy))


@pytest.mark.parametrize("positions", [129, 200, 350])  # 3, 4 and 6 blocks of KV
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_divided_slots_have_whole_blocks(slots: int, positions: int) -> None:
    model, workload = known_model("opt-125m"), work(slots, positions - 10, 10)
    profile = replace(GH200, context_bytes=0)
    ops = decode_ops(model, workload)
    fixed = fixed_bytes(model, workload, profile)
    unit = max(op.layers * unit_sizes(op) for op in ops)
    for local in range(0, total_bytes(ops), total_bytes(ops) // 5):
        host = total_bytes(ops) - local + unit
        policy = Policy(hbm_budget=fixed + local, host_budget=host, transport="direct")
        check_laws(make_plan(model, workload, profile, policy))


def test_few_remote_row_blocks_leave_even_waves() -> None:
    """OPT-6.7B's matrices divide by 128, and not by the SMs that the host's leave."""
    work = Workload(batch_size=8, prompt_len=32, new_tokens=32, max_model_len=64)
    model, profile = known_model("opt-6.7b"), load_profile("h200-pcie5")
    host = profile.tier("host").sms
    few = make_plan(model, work, profile, Policy(offload_ratio=0.005, transport="direct"))
    many = make_plan(model, work, profile, Policy(offload_ratio=0.3, transport="direct"))
    for name in ("qkv", "o", "fc1", "fc2"):
        row_blocks = few.op(name).placement[0][0]
        assert -(-row_blocks // few.op(name).sms[0]) * 128 == few.op(name).op.units
        used = many.op(name).sms
        assert sum(used) == profile.sms and 0.75 * host <= used[1] <= host < 32


def test_a_peer_is_worth_it_and_a_slow_link_is_not() -> None:
    work = Workload(batch_size=8, prompt_len=32, new_tokens=32, max_model_len=64)
    model = known_model("opt-30b")
    plan = make_plan(model, work, load_profile("h200-nvlink-peer"), Policy(remote=("peer",)))
    assert plan.ratio == pytest.approx(0.070, abs=0.003) and plan.forgone is None
    for op in plan.weights():
        (counts,) = set(op.placement)
        assert op.mixed(1) and op.bounds_s[0] < op.predicted_s[0], counts
    plan = make_plan(model, work, load_profile("h200-pcie5"), Policy())
    assert plan.ratio == 0 and plan.forgone is not None
    assert 0 < plan.forgone.ratio < 0.02
    assert plan.forgone.predicted_s > (1 - MIN_OFFLOAD_GAIN) * plan.predicted_s
    (note,) = (text for title, text in summary_rows(Overview.of(plan)) if title == "note")
    assert "for a gain below 2% all bytes stay in hbm" in note
