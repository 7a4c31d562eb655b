"""Results of points from the planner and its cost model alone; needs no GPU."""

import itertools
import math
import random
from dataclasses import replace
from typing import Any

from dakrun.config import Workload
from dakrun.errors import CannotRun, DakrunError
from dakrun.formats import Quantised
from dakrun.geometry import FEW_ROWS
from dakrun.hardware import LOCAL
from dakrun.lab.cases import forecast
from dakrun.lab.evaluate.cases import (
    STORED,
    ablated,
    case_of,
    foreseen,
    link_reads,
    remote_names,
)
from dakrun.lab.evaluate.points import (
    FUSED,
    OTHER,
    PART_OF,
    PARTS,
    BatchPoint,
    FilePoint,
    OpPoint,
    PartPoint,
    Point,
    ProductPoint,
    ReadPoint,
    Result,
    StepPoint,
)
from dakrun.lab.evaluate.scope import Scope
from dakrun.plan import ExpectedRun, Links, Plan, Policy, choose_batch_size, is_windowed, make_plan
from dakrun.plan.roofline import bytes_in_flight
from dakrun.requests import RowLengths

SPARE = 1.05  # budgets count nominal GB, capacities the memory that is left


def predict(point: Point, scope: Scope) -> Result:
    """The planner's result of `point`; where there is none, its `problem` says why."""
    try:
        if isinstance(point, StepPoint):
            return (_host_layers if point.by in ("prefetch", "uva") else _step)(point, scope)
        if isinstance(point, ReadPoint):
            return _read(point, scope)
        if isinstance(point, FilePoint):
            rows = lengths(point)
            return of_file(_file_plan(point, rows, scope), rows)
        if isinstance(point, BatchPoint):
            return _batch(point, scope)
        if isinstance(point, PartPoint):
            return _part(point, scope)
        assert isinstance(point, OpPoint)
        return _op(point, scope)
    except DakrunError as problem:
        return Result(source="predicted", problem=str(problem))


def short(problem: str) -> Result:
    """The result of a point for which there is too little memory."""
    return Result(source="predicted", problem=problem, short_of_memory=True)


def _predicted(seconds: float, **more: Any) -> Result:
    return Result(source="predicted", seconds=seconds, **{"predicted_s": seconds, **more})


def of_plan(plan: Plan, batch_size: int) -> Result:
    """The figures of a plan."""
    tiers = range(len(plan.tiers))
    return _predicted(
        plan.predicted_s,
        limit_s=plan.bound_s,
        read_bytes=sum(map(plan.read_bytes, tiers)),
        remote_bytes=sum(map(plan.read_bytes, tiers[1:])),
        tokens_per_s=batch_size / plan.predicted_s,
        **_of_both(plan),
    )


def _of_both(plan: Plan) -> dict[str, float]:
    """Figures of a plan that do not depend on what runs by it."""
    return {name: getattr(plan, name) for name in ("ratio", "required_ratio", "weight_bytes")}


def _step(point: StepPoint, scope: Scope) -> Result:
    if point.by != "dakrun":
        return Result(source="predicted", problem="not predicted")
    if problem := too_large(point, scope):
        return short(problem)
    bare = without(scope, point)
    try:
        found = of_plan(bare.plan(point), point.batch_size)
        return replace(found, predicted_s=None) if point.without else found
    except CannotRun:
        return short(shortage(point, scope))


def without(scope: Scope, point: StepPoint | OpPoint) -> Scope:
    """The scope whose machine launches without the techniques that `point` leaves out.

    Without the window, rates are those that the profile's sweep of congestion has for the bytes in
    flight that the rings of the tier's SMs hold. Raises CannotRun where nothing tells the time.
    """
    if not point.without:
        return scope
    rows = {"product": "n", "step": "batch_size"}.get(point.kind)
    many = rows is not None and getattr(point, rows) > FEW_ROWS
    known = {"window": not many, "alignment": rows and not many, "multicast": rows == "n"}
    if not all(known[name] for name in point.without):
        raise CannotRun("the planner does not model it", hint="measure it")
    machine, card = scope.profile, ablated(scope.profile.card, point.without)
    (name,) = remote_names(scope, point.remote)
    tier = machine.tier(name)
    if not card.windows and is_windowed(tier, card):
        if (sweep := machine.sweeps.get(f"{name} congestion")) is None:
            raise CannotRun("the profile has no sweep of congestion", hint="run dakrun profile")
        asked = tier.sms, tier.sms * card.ring_bytes
        columns = ("sms", "in_flight_bytes", "remote_bytes_per_s", "hbm_bytes_per_s")
        rates = list(zip(*map(sweep.column, columns), strict=True))
        *_, link, hbm = min(
            rates, key=lambda of: sum(abs(math.log(a / b)) for a, b in zip(of, asked, strict=False))
        )
        kept = hbm / max(rate for *_, rate in rates)
        slower = replace(tier, direct_bytes_per_s=min(link, tier.direct_bytes_per_s))
        tiers = tuple(slower if of.name == name else of for of in machine.remote)
        machine = replace(machine, hbm_bytes_per_s=kept * machine.hbm_bytes_per_s, remote=tiers)
    return replace(scope, profile=machine.launching(card))


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:.1f} GB"


def shortage(point: StepPoint, scope: Scope) -> str:
    """The problem of a decode step that does not fit, with its GB. CannotRun if room is not all."""
    plan = scope.roomy().plan(replace(point, hbm_budget=None))
    (name,) = remote_names(scope, point.remote)
    has = [point.hbm_budget or scope.profile.hbm_capacity_bytes]
    has.append(scope.profile.tier(name).capacity_bytes)
    needed = [sum(plan.memory(tier).values()) for tier in range(len(plan.tiers))]
    if point.ratio is None:
        return f"needs {_gb(sum(needed))}: {scope.near} and {name} have {_gb(sum(has))}"
    tier = 0 if needed[0] > has[0] else 1
    where = (scope.near, f"{name} memory")[tier]
    return f"needs {_gb(needed[tier])} of {where}: there are {_gb(has[tier])}"


def too_large(point: StepPoint, scope: Scope) -> str:
    """The problem of a budget that this GPU's memory cannot give, or an empty text."""
    capacity = scope.profile.hbm_capacity_bytes
    if scope.profile.device == "cpu" or (point.hbm_budget or 0) <= SPARE * capacity:
        return ""
    return f"needs {_gb(point.hbm_budget or 0)} of HBM: there are {_gb(capacity)}"


def _host_layers(point: StepPoint, scope: Scope) -> Result:
    """Layers of a rival in host memory, each byte of which crosses the link once.

    Copied to HBM ahead of use they take the longer of the copies and of a step all in HBM. Read in
    place they take that of the reads and of their part of such a step, before or after the others.
    """
    if problem := too_large(point, scope):
        return short(problem)
    machine, ratio, copies = scope.profile, point.ratio or 0.0, point.by == "prefetch"
    resident = scope.roomy().plan(replace(point, ratio=0.0, hbm_budget=None))
    moved = ratio * resident.weight_bytes
    needed = sum(resident.memory(0).values()) - moved
    if needed > (capacity := point.hbm_budget or machine.hbm_capacity_bytes):
        return short(f"needs {_gb(needed)} of {scope.near}: there are {_gb(capacity)}")
    (name,) = remote_names(scope, point.remote)
    links = Links.of(machine, (name,))
    link_s = moved / (links.staged if copies else links.direct)[name]

    def step(in_hbm_s: float) -> float:
        beside = 1.0 if copies else ratio
        return (1 - beside) * in_hbm_s + max(beside * in_hbm_s, link_s)

    seconds = step(resident.predicted_s)
    rate = point.batch_size / seconds
    return replace(
        of_plan(resident, point.batch_size), seconds=seconds, predicted_s=seconds, ratio=ratio,
        limit_s=step(resident.bound_s), remote_bytes=moved, tokens_per_s=rate,
    )  # fmt: skip


def _op(point: OpPoint, scope: Scope) -> Result:
    """A product or attention, by the SMs that a plan gives it."""
    case, is_product = case_of(scope, point), isinstance(point, ProductPoint)
    (name,), (local, remote) = remote_names(scope, point.remote), case.tier_bytes
    crossing = remote * link_reads(scope, point, case)
    planned, bare = foreseen(scope, point, case), without(scope, point)
    seconds = planned.seconds
    if bare is not scope:
        seconds = forecast(case, bare.profile, (name,), planned.sms).seconds
    if is_product:
        seconds = max(seconds, crossing / scope.profile.tier(name).direct_bytes_per_s)
    new = {"predicted_s": None} if {"window", "alignment"} & {*point.without} else {}
    return _predicted(
        seconds,
        ratio=case.ratio,
        weight_bytes=case.read_bytes if is_product else None,
        read_bytes=local + remote,
        remote_bytes=remote,
        link_bytes=crossing,
        **new,
    )


def _read(point: ReadPoint, scope: Scope) -> Result:
    """Rates in proportion to bytes in flight up to the window, and to SMs up to HBM's limit.

    A link without a window needs its latency's bytes in flight. Congestion is not modelled.
    """
    machine = scope.profile
    (name,) = remote_names(scope, point.remote)
    tier, model = machine.tier(name), machine.kernel_model
    filled = min(1.0, point.in_flight / bytes_in_flight(tier, machine))
    local = Links.of(machine, (name,)).direct[LOCAL]
    saturating = max(1.0, model.saturating_sms * machine.sms)
    return Result(
        source="predicted",
        remote_bytes_per_s=tier.direct_bytes_per_s * filled,
        hbm_bytes_per_s=local * min(1.0, point.hbm_sms / saturating),
    )


def _batch(point: BatchPoint, scope: Scope) -> Result:
    """The matrices read once at the rate of HBM, or of L2 where they fit; as costs of a product."""
    if point.by != "splitk":
        return Result(source="predicted", problem="not predicted")
    stored = STORED[point.bits]
    nbytes = stored.nbytes(point.heads * point.rows, point.cols)
    machine = scope.profile.for_steps(nbytes)
    costs = machine.products_of(stored.kind if isinstance(stored, Quantised) else "")
    fixed, efficiency = costs.at(point.n)
    seconds = nbytes / machine.hbm_bytes_per_s / efficiency + fixed
    return _predicted(seconds, weight_bytes=nbytes, predicted_s=None)


def _part(point: PartPoint, scope: Scope) -> Result:
    """Ops of the plan by their kind: what is fused into them is not predicted by itself."""
    if point.part in FUSED:
        return Result(source="predicted", problem="predicted as a part of its op")
    sizes = {"prompt_len": point.prompt_len, "new_tokens": point.new_tokens}
    step = scope.step(point.model, point.batch_size, 0.0, **sizes)
    try:
        plan = scope.plan(step)
    except CannotRun:
        return short(shortage(step, scope))
    seconds = dict.fromkeys(PARTS, 0.0)
    for op in plan.ops:
        seconds[PART_OF.get(op.op.category, OTHER)] += sum(op.predicted_s)
    seconds[OTHER] += plan.predicted_s - sum(seconds.values())
    return _predicted(seconds[point.part], predicted_s=None)


def lengths(point: FilePoint) -> list[RowLengths]:
    """Prompts and completions of the file's requests, uniform from 1 with a fixed seed."""
    draw = random.Random(0)
    sizes = (draw.randint(1, point.longest) for _ in range(2 * point.requests))
    return list(itertools.starmap(RowLengths, zip(sizes, sizes, strict=True)))


def _file_plan(point: FilePoint, rows: list[RowLengths], scope: Scope) -> Plan:
    model, run, mean = scope.models[point.model], ExpectedRun(rows), max(1, point.longest // 2)
    policy = Policy(offload_ratio=point.ratio, remote=(point.remote,))
    workload = Workload(
        batch_size=1, prompt_len=mean, new_tokens=mean, max_model_len=2 * point.longest
    )
    asked = model, workload, scope.profile, policy
    chosen = choose_batch_size(*asked, limit=point.requests, run=run)
    return make_plan(model, chosen, scope.profile, policy, run=run)


def of_file(plan: Plan, rows: list[RowLengths]) -> Result:
    """The predicted run of `rows` with `plan`."""
    run = ExpectedRun(rows).forecast(plan)
    return _predicted(run.seconds, tokens_per_s=run.tokens_per_s, **_of_both(plan))
