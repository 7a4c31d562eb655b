"""The stages of planning, each alone: the time of an op, placements, candidates, the search."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dakrun.config import Workload
from dakrun.errors import CannotRun
from dakrun.hardware import load_profile
from dakrun.models import known_model
from dakrun.plan import Policy, make_plan
from dakrun.plan.assemble import cost_placement
from dakrun.plan.op_costs import StepCosts
from dakrun.plan.placement import place, slot_candidates
from dakrun.plan.plan import PrefillPlan
from dakrun.plan.planner import climb
from dakrun.plan.problem import Problem
from dakrun.plan.staging import staging_bytes

MODEL = known_model("opt-6.7b")
WORK = Workload(batch_size=16, prompt_len=480, new_tokens=32, max_model_len=512)
HOST, PEER = load_profile("h200-pcie5"), load_profile("h200-nvlink-peer")
GIB = 2**30


def costs(*remote: str) -> StepCosts:
    assert MODEL is not None
    return StepCosts(MODEL, WORK, PEER if "peer:1" in remote else HOST, remote)


@pytest.mark.parametrize("transport", ["direct", "staged"])
def test_an_op_takes_its_bound_at_least(transport: str) -> None:
    of = costs("host")
    for op in of.ops:
        for remote in (0, op.units // 3, op.units):
            placement = ((op.units - remote, remote),) * op.layers
            found = of.placed(op, placement, transport)  # type: ignore[arg-type]
            assert all(b <= p for b, p in zip(found.bounds_s, found.predicted_s, strict=True))
            staged = transport == "staged" and op.category == "linear" and remote > 0
            assert found.transport == ("staged" if staged else "direct")
            assert found is of.placed(op, placement, found.transport), "computed once"


def test_more_remote_bytes_of_an_op_take_longer_on_a_slow_link() -> None:
    of = costs("host")
    op = next(op for op in of.ops if op.name == "fc1")
    seconds = [
        sum(of.placed(op, ((op.units - n, n),) * op.layers, "direct").predicted_s)
        for n in range(op.units // 10, op.units + 1, op.units // 10)
    ]
    assert seconds == sorted(seconds) and seconds[-1] > 5 * seconds[0]


@given(
    st.integers(1, 16),
    st.integers(0, 16),
    st.sampled_from([(), ("host",), ("host", "peer:1")]),
    st.sampled_from(["greedy", "uniform"]),
)
def test_placements_hold_all_units_within_capacities(
    gib: int, slots: int, remote: tuple[str, ...], strategy: str
) -> None:
    remote = remote or ("peer:1",)
    policy = Policy(hbm_budget=gib * GIB, strategy=strategy, remote=remote)  # type: ignore[arg-type]
    of = costs(*remote)
    try:
        problem = Problem.of(of, policy)
        placed = place(problem, (slots, *(0 for _ in remote[1:])))
        found = cost_placement(problem, placed)
    except CannotRun:
        return
    for op in of.ops:
        assert len(placed[op.name]) == op.layers
        assert all(sum(counts) == op.units and min(counts) >= 0 for counts in placed[op.name])
    assert placed["attention"][0][1] == slots
    for tier, cap in enumerate(problem.caps):
        assert sum(op.resident_bytes(tier) for op in found.ops) <= cap
    assert found.predicted_s >= sum(sum(op.predicted_s) for op in found.ops)


def test_operands_of_small_steps_are_read_from_l2() -> None:
    """Of steps that read no more than the largest set that is measured to fit; nothing remote."""
    assert MODEL is not None and HOST.l2 is not None
    small = replace(
        MODEL,
        num_layers=1,
        hidden_size=512,
        embed_size=512,
        ffn_size=2048,
        num_heads=8,
        num_kv_heads=8,
        head_dim=64,
    )
    work = Workload(batch_size=1, prompt_len=16, new_tokens=8, max_model_len=64)
    size, rate = HOST.l2
    assert size == 32 << 20 and rate > 2 * HOST.hbm_bytes_per_s
    unknown = replace(HOST, sweeps={})
    for rows, from_l2 in ((1000, True), (60_000, False)):
        model = replace(small, vocab_size=rows)
        ours, plain = (StepCosts(model, work, profile, ("host",)) for profile in (HOST, unknown))
        read = sum(op.layers * op.read_bytes for op in ours.ops)
        assert (read <= size) == from_l2
        assert ours.links.direct["hbm"] == (rate if from_l2 else HOST.hbm_bytes_per_s)
        assert ours.links.direct["host"] == plain.links.direct["host"]
        plans = [make_plan(model, work, profile, Policy()) for profile in (HOST, unknown)]
        assert (plans[0].predicted_s < plans[1].predicted_s) == from_l2
        assert plans[0].profile == HOST.for_steps(read)


def test_a_free_transport_is_the_fastest_of_all() -> None:
    policy = Policy(hbm_budget=9 * GIB)
    free = Problem.of(costs("host"), policy)
    placed = place(free, (4,))
    times = {
        way: cost_placement(replace(free, transport=way), placed).predicted_s
        for way in (None, "direct", "staged")
    }
    assert times[None] <= min(times["direct"], times["staged"])


def test_slots_start_from_the_ideal_and_none() -> None:
    problem = Problem.of(costs("host"), Policy(hbm_budget=8 * GIB))
    starts = slot_candidates(problem)
    assert (0,) in starts and all(0 <= n <= WORK.batch_size for (n,) in starts)
    fixed = replace(problem, policy=replace(problem.policy, kv_offload_ratio=0.5))
    assert slot_candidates(fixed) == [(8,)]


def test_buffers_for_staging_are_taken_from_hbm() -> None:
    problem = Problem.of(costs("host"), Policy(hbm_budget=9 * GIB, transport="staged"))
    found = cost_placement(problem, place(problem, (0,)))
    needed = staging_bytes(found.ops, PrefillPlan(), *problem.machine)
    roomy = problem.with_staging(needed)
    assert needed > 0
    assert problem.caps[0] - roomy.caps[0] == pytest.approx(needed, rel=0.003), "and page tables"
    with pytest.raises(CannotRun, match="too small"):
        problem.with_staging(9 * GIB)


@given(st.integers(0, 400), st.integers(0, 400))
def test_climbing_finds_the_bottom_of_a_valley(start: int, bottom: int) -> None:
    def near(n: int, step: int) -> list[int]:
        return [n - step, n + step]

    assert climb([start], lambda n: abs(n - bottom), near, (256, 64, 16, 4, 1)) == bottom
    assert climb([start, bottom + 1], lambda n: abs(n - bottom), near, ()) in (start, bottom + 1)
    assert climb([start], lambda n: math.inf, near, (1,)) == start, "nothing is feasible"
