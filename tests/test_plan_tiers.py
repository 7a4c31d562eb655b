"""Plans over several remote tiers: shares against an LP solver, then rounded plans' laws."""

from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from planned import GH200, GIB, known, work
from scipy.optimize import linprog

from dakrun.config import Workload
from dakrun.errors import CannotRun, UsageError
from dakrun.hardware import LOCAL, HardwareProfile, RemoteTier, load_profile
from dakrun.plan import Links, Plan, Policy, bound_time, decode_ops, make_plan
from dakrun.plan.greedy import Curve, best_total, greedy_ratios
from dakrun.plan.linear_program import OpLines, best_ratios, minimise


@st.composite
def links(draw: st.DrawFn, most: int = 3) -> Links:
    """A local tier, one to `most` remote ones, some of them behind a shared link."""
    names = [LOCAL, "host", "peer:1", "peer:2"][: 1 + draw(st.integers(1, most))]
    rates = {name: draw(st.floats(1, 100)) for name in names}
    groups = []
    shared = draw(st.sets(st.sampled_from(names[1:])))
    if shared:
        groups.append((frozenset(shared), draw(st.floats(1, 150))))
    return Links(rates, rates, tuple(groups))


@st.composite
def problems(
    draw: st.DrawFn, most: int = 3, *, direct_only: bool = False
) -> tuple[list[OpLines], list[float], float | None, bool]:
    """Ops of all regimes, capacities that hold them, and perhaps a fixed number of bytes."""
    over = draw(links(most))
    ops = []
    for _ in range(draw(st.integers(1, 5))):
        resident = draw(st.floats(0.1, 100))
        read = resident * draw(st.sampled_from([1.0, 0.5, 0.01]))
        fastest, local = read / over.total_rate(), read / over.direct[LOCAL]
        compute = draw(
            st.one_of(st.just(0.0), st.floats(fastest, max(fastest, local)), st.floats(0, 3 * read))
        )
        staged = not direct_only and draw(st.booleans())
        ops.append(
            OpLines(
                resident, tuple(over.lines(read, max(compute, fastest), staged=staged).values())
            )
        )
    total = sum(op.resident for op in ops)
    weights = [draw(st.floats(0.05, 1)) for _ in over.direct]
    room = draw(st.sampled_from([1.0, 1.2, 3.0]))
    capacities = [total * room * w / sum(weights) for w in weights]
    fixed = draw(st.none() | st.floats(0, 1))
    remote = None if fixed is None else min(fixed * total, sum(capacities[1:]))
    if remote is not None:
        capacities[0] = total
    return ops, capacities, remote, draw(st.booleans())


def highs(
    ops: list[OpLines], capacities: list[float], remote: float | None, uniform: bool
) -> float | None:
    """Least total time by HiGHS; None where it is infeasible."""
    tiers, n = len(capacities), len(ops)
    total = sum(op.resident for op in ops)
    width = n * tiers + n
    upper, bounds_up, equal, bounds_eq = [], [], [], []
    for i, op in enumerate(ops):
        for constant, by in op.lines:
            row = np.zeros(width)
            for tier, k in by.items():
                row[i * tiers + tier] = k
            row[n * tiers + i] = -1
            upper.append(row)
            bounds_up.append(-constant)
        row = np.zeros(width)
        row[i * tiers : (i + 1) * tiers] = 1
        equal.append(row)
        bounds_eq.append(1.0)
        if uniform and i:
            for tier in range(tiers):
                row = np.zeros(width)
                row[tier], row[i * tiers + tier] = 1, -1
                equal.append(row)
                bounds_eq.append(0.0)
    for tier, capacity in enumerate(capacities):
        row = np.zeros(width)
        row[tier : n * tiers : tiers] = [op.resident / total for op in ops]
        upper.append(row)
        bounds_up.append(capacity / total)
        if tier == 0 and remote is not None:
            equal.append(row)
            bounds_eq.append(1 - remote / total)
    result = linprog(
        [0.0] * (n * tiers) + [1.0] * n,
        A_ub=np.array(upper),
        b_ub=bounds_up,
        A_eq=np.array(equal),
        b_eq=bounds_eq,
        method="highs",
    )
    return float(result.fun) if result.success else None


@given(problems())
def test_shares_equal_the_optimum_of_a_solver(
    problem: tuple[list[OpLines], list[float], float | None, bool],
) -> None:
    ops, capacities, remote, uniform = problem
    shares = best_ratios(ops, capacities, remote, uniform=uniform)
    best = highs(ops, capacities, remote, uniform)
    if best is None or shares is None:
        assert best is None and shares is None
        return
    found = sum(bound_time(op.lines, share) for op, share in zip(ops, shares, strict=True))
    assert found == pytest.approx(best, rel=1e-6, abs=1e-9)
    for share in shares:
        assert sum(share) == pytest.approx(1, abs=1e-9)
        assert min(share) >= -1e-9
    total = sum(op.resident for op in ops)
    for tier, capacity in enumerate(capacities):
        held = sum(op.resident * share[tier] for op, share in zip(ops, shares, strict=True))
        assert held <= capacity + 1e-7 * total
    if not uniform:
        alike = best_ratios(ops, capacities, remote, uniform=True)
        if alike is not None:
            slower = sum(bound_time(op.lines, share) for op, share in zip(ops, alike, strict=True))
            assert found <= slower + 1e-6 * slower


@given(problems(1, direct_only=True))
def test_with_one_remote_tier_the_greedy_is_as_good(
    problem: tuple[list[OpLines], list[float], float | None, bool],
) -> None:
    """Direct ops over one link: greedy.py finds what the linear program finds."""
    ops, capacities, remote, _ = problem
    curves = []
    for op in ops:
        floor = max(cost for cost, by_tier in op.lines if not by_tier)
        slope = [max(by_tier.get(tier, 0.0) for _, by_tier in op.lines) for tier in (0, 1)]
        curves.append(Curve(op.resident, 1.0, floor, 1 / slope[0], 1 / slope[1]))
    total = sum(op.resident for op in ops)
    wanted = remote
    if wanted is None:
        wanted = min(max(best_total(curves), total - capacities[0]), capacities[1])
    xs = greedy_ratios(curves, wanted)
    best = highs(ops, capacities, remote, False)
    assume(best is not None)
    assert sum(c.time(x) for c, x in zip(curves, xs, strict=True)) == pytest.approx(best, rel=1e-6)


def test_simplex_on_a_degenerate_program_and_an_impossible_one() -> None:
    """Beale's example, on which the steepest column alone would cycle for ever."""
    a = np.array([[0.25, -60, -1 / 25, 9], [0.5, -90, -1 / 50, 3], [0, 0, 1, 0]])
    none = (np.zeros((0, 4)), np.zeros(0))
    x = minimise(np.array([-0.75, 150, -0.02, 6]), (a, np.array([0.0, 0, 1])), none)
    assert x is not None
    assert np.array([-0.75, 150, -0.02, 6]) @ x == pytest.approx(-0.05)
    one = np.ones((1, 1))
    assert minimise(np.ones(1), (one, np.zeros(1)), (one, np.ones(1))) is None
    with pytest.raises(ValueError, match="at least 0"):
        minimise(np.ones(1), (one, -np.ones(1)), (one, np.ones(1)))


def machine(peer: int = 40 * GIB, host: int = 400 * GIB) -> HardwareProfile:
    """GH200's rates with a peer of a tenth of HBM's rate and a slow host."""
    host_tier = replace(
        GH200.tier("host"),
        capacity_bytes=host,
        direct_bytes_per_s=5.14e10,
        staged_bytes_per_s=5.54e10,
    )
    peer_tier = RemoteTier(
        name="peer:1",
        capacity_bytes=peer,
        direct_bytes_per_s=3.77e11,
        staged_bytes_per_s=2.98e11,
        window_bytes=1 << 20,
        sms=16,
    )
    return replace(GH200, remote=(host_tier, peer_tier))


def check(plan: Plan) -> None:
    for op in plan.ops:
        for counts in op.placement:
            assert sum(counts) == op.op.units and min(counts) >= 0
        everywhere = sum(op.resident_bytes(t) for t in range(len(plan.tiers)))
        assert everywhere == op.op.layers * op.op.resident_bytes
        assert all(b <= p for b, p in zip(op.bounds_s, op.predicted_s, strict=True))
        assert sum(op.sms) <= plan.profile.sms + len(plan.tiers)
    for tier, budget in enumerate(plan.budgets):
        assert sum(plan.memory(tier).values()) <= budget


@given(
    st.sampled_from(["opt-6.7b", "llama-3-8b", "opt-350m"]),
    st.integers(1, 600),
    st.floats(0.2, 1.5),
    st.floats(0, 0.6),
    st.none() | st.floats(0, 1),
    st.none() | st.floats(0, 1),
    st.sampled_from(["greedy", "uniform"]),
    st.sampled_from([None, "direct", "staged"]),
)
def test_laws_of_plans_over_two_remote_tiers(
    name: str,
    batch: int,
    hbm: float,
    peer: float,
    ratio: float | None,
    kv_ratio: float | None,
    strategy: str,
    transport: str | None,
) -> None:
    model = known(name)
    workload = Workload(batch_size=batch, prompt_len=100, new_tokens=60, max_model_len=160)
    total = sum(op.layers * op.resident_bytes for op in decode_ops(model, workload))
    policy = Policy(
        hbm_budget=int(hbm * total) + 3 * GIB,
        peer_budget=int(peer * total),
        offload_ratio=ratio,
        kv_offload_ratio=kv_ratio,
        strategy=strategy,  # type: ignore[arg-type]
        transport=transport,  # type: ignore[arg-type]
        remote=("host", "peer"),
    )
    try:
        plan = make_plan(model, workload, machine(), policy)
    except CannotRun:
        assert ratio is not None or kv_ratio is not None
        return
    assert plan.tiers == ("hbm", "host", "peer:1")
    check(plan)


NVLINK = load_profile("h200-nvlink-peer")
OTHER_NVLINK = replace(  # as measured on another pair of H200s
    NVLINK,
    remote=tuple(
        replace(tier, direct_bytes_per_s=3.761e11, staged_bytes_per_s=2.955e11)
        if tier.name == "peer:1"
        else tier
        for tier in NVLINK.remote
    ),
)


@given(
    st.sampled_from(["llama-2-7b", "opt-6.7b", "llama-3.2-1b", "opt-30b"]),
    st.sampled_from([4, 8, 16, 100, 512]),
    st.sampled_from([NVLINK, OTHER_NVLINK, machine(peer=140 * GIB)]),
    st.none() | st.floats(0.3, 1.2),
    st.sampled_from([None, 0.002, 0.05, 0.3]),
    st.sampled_from([None, 0.25]),
    st.sampled_from(["auto", "greedy", "uniform"]),
    st.sampled_from([None, "direct", "staged"]),
    st.booleans(),
)
def test_another_remote_tier_costs_nothing(
    name: str,
    batch: int,
    profile: HardwareProfile,
    hbm: float | None,
    ratio: float | None,
    kv_ratio: float | None,
    strategy: str,
    transport: str | None,
    thorough: bool,
) -> None:
    model = known(name)
    total = sum(op.layers * op.resident_bytes for op in decode_ops(model, work(batch)))
    policy = Policy(
        hbm_budget=None if hbm is None else int(hbm * total) + 4 * GIB,
        offload_ratio=ratio,
        kv_offload_ratio=kv_ratio,
        strategy=strategy,  # type: ignore[arg-type]
        transport=transport,  # type: ignore[arg-type]
    )
    alone = []
    for tier in ("host", "peer"):
        with suppress(CannotRun):
            one = replace(policy, remote=(tier,))
            alone.append(make_plan(model, work(batch), profile, one, thorough=thorough))
    assume(alone)
    both = replace(policy, remote=("host", "peer"))
    plan = make_plan(model, work(batch), profile, both, thorough=thorough)
    check(plan)
    assert plan.predicted_s <= min(one.predicted_s for one in alone) * (1 + 1e-12)


@pytest.mark.parametrize("profile", [NVLINK, OTHER_NVLINK])
def test_a_tier_that_does_not_help_is_left_empty(profile: HardwareProfile) -> None:
    """The plan is the one without that tier."""
    alone, both = (
        make_plan(known("llama-2-7b"), work(16), profile, Policy(remote=tiers))
        for tiers in (("peer",), ("host", "peer"))
    )
    assert alone.ratio > 0.05
    assert both.tiers == ("hbm", "host", "peer:1") and sum(both.memory(1).values()) == 0
    for one, other in zip(alone.ops, both.ops, strict=True):
        assert [(local, 0, peer) for local, peer in one.placement] == list(other.placement)
        assert (one.sms[0], 0, one.sms[1]) == other.sms
        assert (one.transport, one.predicted_s) == (other.transport, other.predicted_s)
    assert alone.prefill == both.prefill and alone.fixed_bytes == both.fixed_bytes


def test_a_slot_may_span_into_the_first_of_several_remote_tiers() -> None:
    policy = Policy(hbm_budget=13 * GIB)
    alone, both = (
        make_plan(known("llama-2-7b"), work(1, 3000, 1000), NVLINK, replace(policy, remote=tiers))
        for tiers in (("peer",), ("peer", "host"))
    )
    check(both)
    assert both.kv_spill_blocks == alone.kv_spill_blocks > 0
    assert both.predicted_s == alone.predicted_s
    assert both.kv_placement() == (*alone.kv_placement(), ("host", 0, 0))


def test_the_fast_tier_fills_first() -> None:
    model = known("opt-30b")
    workload = Workload(batch_size=8, prompt_len=32, new_tokens=32, max_model_len=64)
    policy = Policy(hbm_budget=30 * GIB, peer_budget=18 * GIB, remote=("host", "peer:1"))
    plan = make_plan(model, workload, machine(), policy)
    check(plan)
    assert sum(plan.memory(2).values()) > 17.9 * GIB
    alone = make_plan(model, workload, machine(), replace(policy, remote=("host",)))
    assert plan.bound_s < alone.bound_s
    total = sum(op.op.layers * op.op.resident_bytes for op in plan.ops)
    host = total - 30 * GIB - 18 * GIB
    assert plan.bound_s >= host / 5.54e10


def test_with_everything_fitting_all_bandwidths_add_up() -> None:
    model = known("opt-30b")
    workload = Workload(batch_size=8, prompt_len=32, new_tokens=32, max_model_len=64)
    plan = make_plan(model, workload, machine(), Policy(remote=("host", "peer")))
    read = sum(plan.read_bytes(t) for t in range(3))
    assert plan.bound_s == pytest.approx(read / (4e12 + 3.77e11 + 5.14e10), rel=0.01)


def test_staged_copies_make_local_traffic_and_need_buffers() -> None:
    model = known("opt-30b")
    workload = Workload(batch_size=8, prompt_len=32, new_tokens=32, max_model_len=64)
    host = replace(GH200.tier("host"), direct_bytes_per_s=5.14e10, staged_bytes_per_s=5.54e10)
    pcie = replace(GH200, remote=(host,))
    policy = Policy(offload_ratio=0.3)
    direct, staged, auto = (
        make_plan(model, workload, pcie, replace(policy, transport=t))
        for t in ("direct", "staged", None)
    )
    assert staged.predicted_s < direct.predicted_s, "past the turning point the copy engine wins"
    assert auto.predicted_s == staged.predicted_s
    assert {op.transport for op in auto.weights()} == {"staged"}
    assert staged.fixed_bytes["staging"] > 0 and "staging" not in direct.fixed_bytes
    below = make_plan(model, workload, pcie, replace(policy, offload_ratio=0.005))
    assert {op.transport for op in below.weights()} == {"direct"}


def test_a_peer_that_is_not_there() -> None:
    workload = Workload(batch_size=8, prompt_len=32, new_tokens=32, max_model_len=64)
    with pytest.raises(UsageError, match="no remote tier 'peer'"):
        make_plan(known("opt-30b"), workload, GH200, Policy(remote=("host", "peer")))
