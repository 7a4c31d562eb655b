"""Laws of prompts in the objective: ratios are best for a decode step and the passes it carries.

The optimum comes from a solver of its own (optimum.py).
"""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from optimum import least_seconds
from planned import GH200, work
from test_plan_laws import models, profiles, workloads

from dakrun.config import ModelConfig, Workload
from dakrun.errors import CannotRun
from dakrun.hardware import HardwareProfile, load_profile
from dakrun.models import known_model
from dakrun.plan import Plan, Policy, Transport, make_plan, predict_prefill
from dakrun.plan.greedy import Curve, best_total, greedy_ratios
from dakrun.plan.linear_program import OpLines, best_ratios
from dakrun.plan.op_costs import StepCosts
from dakrun.plan.placement import ideal_ratios
from dakrun.plan.plan import PrefillPlan
from dakrun.plan.problem import Problem
from dakrun.plan.prompt_pass import PassTimes, PromptPasses
from dakrun.plan.show.overview import Prompts

EXACT = 1e-6
OPT = known_model("opt-6.7b")
PCIE = load_profile("h200-pcie5")
assert OPT is not None


def lines_of(start_end: Sequence[tuple[float, float]]) -> PassTimes:
    """Work with the given seconds at ratio 0 and at 1; constants where both are alike."""
    return PassTimes(tuple((a, {}) if a == b else (0.0, {0: a, 1: b}) for a, b in start_end), {})


@st.composite
def direct_problems(draw: st.DrawFn) -> tuple[list[Curve], float]:
    """Ops whose remote bytes are read in place by steps and passes, and remote bytes to place.

    They have any arithmetic; the last, attention, has a slot in one tier.
    """
    local, remote = draw(st.floats(1, 100)), draw(st.floats(0.1, 100))
    passes = draw(st.floats(0, 3))
    curves = []
    for _ in range(draw(st.integers(1, 6))):
        read, rows = draw(st.floats(0.1, 100)), draw(st.floats(1, 100))
        compute, longest = draw(st.floats(0, 2)) * read / local, read / min(local, remote)
        floor = max(compute, read / (local + remote))
        work = passes * max(draw(st.floats(0, 1)) * longest, read / (local + remote))
        lines = (work, work), (passes * read / local, 0.0), (0.0, passes * read / remote)
        curves.append(Curve(read * rows, read, floor, local, remote, prompts=lines))
    slots = passes * draw(st.floats(0, 10)), passes * draw(st.floats(0, 20))
    size = draw(st.floats(0.1, 100))
    floor = size / (local + remote)
    curves.append(Curve(size, size, floor, local, remote, prompts=(slots,)))
    return curves, draw(st.floats(0, 1)) * sum(curve.resident for curve in curves)


def check_agreement(problem: tuple[list[Curve], float]) -> None:
    curves, remote = problem
    total = sum(curve.resident for curve in curves)
    ops = [OpLines(c.resident, c.lines, prompts=lines_of(c.prompts)) for c in curves]

    def seconds(ratios: Sequence[float]) -> float:
        return sum(curve.time(x) for curve, x in zip(curves, ratios, strict=True))

    for fixed, placed in ((remote, remote), (None, best_total(curves))):
        greedy = seconds(greedy_ratios(curves, placed))
        program = best_ratios(ops, (total, total), fixed)
        assert program is not None
        assert greedy == pytest.approx(seconds([x for _, x in program]), rel=EXACT)
        low, high = (remote, remote) if fixed is not None else (0.0, total)
        assert greedy == pytest.approx(least_seconds(ops, low, high), rel=1e-5)


@settings(max_examples=100)
@given(direct_problems())
def test_greedy_and_linear_program_agree(problem: tuple[list[Curve], float]) -> None:
    check_agreement(problem)


@pytest.mark.full
@settings(max_examples=500)
@given(direct_problems())
def test_greedy_and_linear_program_agree_on_more(problem: tuple[list[Curve], float]) -> None:
    check_agreement(problem)


def test_a_segment_that_rounding_leaves_below_zero_takes_nothing() -> None:
    rates = 25.76694123505463, 53.20559295696371
    prompts = (0.06476476823807044,) * 2, (0.1984961205702194, 0.0), (0.0, 0.09612970347414844)
    curve = Curve(3.42, 1.8, 0.022792734441361307, *rates, prompts=prompts)
    assert min(length for _, length in curve.segments) < 0
    (ratio,) = greedy_ratios([curve], 2.4)
    assert ratio == pytest.approx(2.4 / 3.42)


@given(
    models(),
    workloads,
    profiles(),
    st.floats(0, 1),
    st.sampled_from(["direct", "staged", None]),
    st.booleans(),
)
def test_no_ratios_are_better_where_copies_overlap(
    model: ModelConfig,
    workload: Workload,
    profile: HardwareProfile,
    share: float,
    transport: Transport | None,
    fixed: bool,
) -> None:
    """Whatever a pass waits for; none that the greedy finds for one of these alone is better."""
    costs = StepCosts(model.with_dtype("float16"), workload, profile, ("host",))
    big = Policy(hbm_budget=1 << 44, host_budget=1 << 44, transport=transport, strategy="greedy")
    problem = Problem.of(costs, big)
    local = problem.total * share
    caps = (local, problem.total)
    remote = problem.total - local if fixed else None
    ratios = ideal_ratios(problem, costs.ops, remote, caps, {})
    names = [op.name for op in costs.ops]

    def seconds(found: Sequence[Sequence[float]]) -> float:
        waits = problem.prompts.seconds(zip(names, found, strict=True))
        steps = sum(
            problem.curves[n].decode_time(x) for n, (_, x) in zip(names, found, strict=True)
        )
        return steps + max(waits.values())

    ops = [
        OpLines(op.layers * op.resident_bytes, problem.lines(op), (1.0,),
                problem.prompts.times[op.name])
        for op in costs.ops
    ]  # fmt: skip
    low, high = problem.total - local, problem.total - (local if fixed else 0)
    rest = {"work": problem.prompts.rest_s}
    assert seconds(ratios) == pytest.approx(least_seconds(ops, low, high, rest), rel=1e-5)
    for curves in problem.curves_by_limit.values():
        of = [curves[name] for name in names]
        placed = low if fixed else max(low, best_total(of))
        alone = [(1 - x, x) for x in greedy_ratios(of, placed)]
        assert seconds(ratios) <= seconds(alone) * (1 + EXACT)


def test_the_linear_program_decides_where_passes_wait_for_work_and_copies() -> None:
    """The more is remote the less the work and the more the copies: the best is in between."""
    curves = [Curve(10.0, 1.0, 0.0, 1e9, 1e9, prompts=())]
    ops = [
        OpLines(10.0, curves[0].lines, prompts=PassTimes(((0.0, {0: 3.0, 1: 1.0}),), {
            "host": (0.0, {1: 4.0})}))
    ]  # fmt: skip
    (ratios,) = best_ratios(ops, (10.0, 10.0), None) or []
    assert ratios[1] == pytest.approx(0.5)  # 3 - 2 x = 4 x
    (ratios,) = best_ratios(ops, (10.0, 10.0), None, elsewhere={"host": 1.0}) or []
    assert ratios[1] == pytest.approx(1 / 3)


@pytest.mark.parametrize("transport", ["direct", "staged"])
@pytest.mark.parametrize(("batch", "prompt"), [(1, 100), (8, 512), (64, 512), (4, 12000)])
def test_they_are_the_passes_of_prefill(transport: Transport, batch: int, prompt: int) -> None:
    """Bounds alike, but for rounding, in as many passes."""
    assert OPT is not None
    model, workload = OPT, Workload(
        batch_size=batch, prompt_len=prompt, new_tokens=1, max_model_len=prompt + 1
    )  # fmt: skip
    profile = replace(PCIE, many_rows=None)
    plan = make_plan(
        replace(model, max_positions=16384), workload, profile,
        Policy(offload_ratio=0.4, transport=transport, hbm_budget=1 << 40, host_budget=1 << 40),
    )  # fmt: skip
    plan = replace(plan, prefill=PrefillPlan(chunk_tokens=4096, transport=transport))
    costs = StepCosts(plan.model, workload, profile, ("host",))
    passes = PromptPasses(costs, plan.prefill, batches=1.0)
    waits = passes.seconds((op.op.name, op.shares) for op in plan.ops)
    assert max(waits.values()) == pytest.approx(predict_prefill(plan).bound_s, rel=0.03)


def test_ratios_follow_the_prompts_of_a_step() -> None:
    """A language head has few rows in a pass, so that its remote bytes cost a pass more."""
    model, policy = known_model("llama-3.2-3b"), Policy(hbm_budget=6 << 30, transport="direct")
    assert model is not None
    many, few = (
        make_plan(model, work(4, prompt, new), PCIE, policy) for prompt, new in ((900, 4), (4, 900))
    )

    def head(plan: Plan) -> float:
        return plan.op("lm_head").ratio / plan.op("gate_up").ratio

    assert head(many) < 0.5 < head(few)
    shown = Prompts.of(many)
    assert shown.passes == pytest.approx(1 / 4)
    assert shown.changed["lm_head"] > many.op("lm_head").ratio
    alone = make_plan(model, many.workload, PCIE, policy, prompts=False)
    assert shown.changed["lm_head"] == alone.op("lm_head").ratio
    assert predict_prefill(many).predicted_s < 0.95 * predict_prefill(alone).predicted_s
    assert many.predicted_s < 1.005 * alone.predicted_s
    assert Prompts.of(make_plan(model, work(4, 900, 4), PCIE, Policy())).changed == {}


def test_shared_prefixes_are_not_computed_again() -> None:
    assert OPT is not None
    costs = [
        StepCosts(OPT, replace(work(16, 1024, 32), shared_len=shared), GH200, ("host",))
        for shared in (0, 768)
    ]
    whole, rest = (PromptPasses(of, PrefillPlan(chunk_tokens=4096), batches=1.0) for of in costs)
    assert rest.rest_s == pytest.approx(whole.rest_s / 4)
    qkv = whole.times["qkv"].work[0][0], rest.times["qkv"].work[0][0]
    assert qkv[1] == pytest.approx(qkv[0] / 4)


@pytest.mark.parametrize("remote", [("host",), ("host", "peer")])
def test_prompts_never_make_a_batch_slower(remote: tuple[str, ...]) -> None:
    """Compared with plans for decode steps alone, but for what expected passes miss."""
    assert OPT is not None
    profile = load_profile("h200-nvlink-peer")
    for gib, batch, prompt, new in ((6, 8, 500, 32), (10, 64, 100, 8), (8, 1, 1000, 200)):
        workload = work(batch, prompt, new)
        policy = Policy(hbm_budget=gib << 30, remote=remote)
        try:
            plans = [
                make_plan(OPT, workload, profile, policy, prompts=counted)
                for counted in (True, False)
            ]
        except CannotRun:
            assume(False)
        ours, alone = (new * p.predicted_s + predict_prefill(p).predicted_s for p in plans)
        assert ours <= alone * 1.005
