"""The planner's mathematics: row blocks cover a matrix, and the greedy equals a linear program."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linprog

from dakrun.formats import Rows
from dakrun.geometry import ROWS_PER_BLOCK, first_row, row_block_count
from dakrun.plan import Op
from dakrun.plan.greedy import Curve, best_total, best_uniform_total, greedy_ratios, uniform_ratios
from dakrun.plan.rounding import RemoteGoal, remote_bytes, round_ratios


@given(st.integers(1, 100), st.data())
def test_row_blocks_cover_each_row_of_a_run_once(rows: int, data: st.DataObject) -> None:
    count = row_block_count(rows)
    first = data.draw(st.integers(0, count))
    last = data.draw(st.integers(first, count))
    row_block = np.arange(rows) // ROWS_PER_BLOCK
    assert row_block.max() == count - 1
    covered = np.arange(first_row(first, rows), first_row(last, rows))
    assert (covered == np.flatnonzero((row_block >= first) & (row_block < last))).all()


@dataclass(frozen=True)
class Machine:
    """Rates in bytes/s and a compute time per op as a multiple of the fastest possible read."""

    local: float
    remote: float

    def curve(self, resident: float, read: float, compute: float) -> Curve:
        floor = max(compute, read / (self.local + self.remote))
        return Curve(resident, read, floor, self.local, self.remote)


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[Curve], float]:
    """Curves of all regimes over one pair of tiers, and remote bytes to place."""
    machine = Machine(draw(st.floats(1, 100)), draw(st.floats(0.1, 100)))
    curves = []
    for _ in range(draw(st.integers(1, 6))):
        resident = draw(st.floats(0.1, 100))
        read = resident * draw(st.sampled_from([1.0, 0.5, 0.01, 2.0]))
        # From no work, over C/(Bg+Bh) <= Tcomp < C/Bg, to more than either tier alone takes.
        least, most = read / (machine.local + machine.remote), read / machine.local
        compute = draw(
            st.one_of(st.just(0.0), st.floats(least, most), st.floats(most, 3 * most + read))
        )
        curves.append(machine.curve(resident, read, compute))
    total = sum(curve.resident for curve in curves)
    return curves, draw(st.floats(0, 1)) * total


def lp_time(curves: list[Curve], low: float, high: float) -> float:
    """Least total time with `low` to `high` remote bytes, by a solver that knows no stretches."""
    n = len(curves)
    unit = sum(curve.floor for curve in curves)
    total = sum(curve.resident for curve in curves)
    rows, limits = [], []
    for i, curve in enumerate(curves):
        for slope, offset in (
            (-curve.read / curve.local_rate, curve.read / curve.local_rate),
            (curve.read / curve.remote_rate, 0.0),
        ):
            row = np.zeros(2 * n)  # shares x, then times t: slope x + offset <= t
            row[i], row[n + i] = slope / unit, -1
            rows.append(row)
            limits.append(-offset / unit)
    share = np.array([curve.resident / total for curve in curves] + [0.0] * n)
    result = linprog(
        [0.0] * n + [1.0] * n,
        A_ub=[*rows, share, -share],
        b_ub=[*limits, high / total, -low / total],
        bounds=[(0, 1)] * n + [(curve.floor / unit, None) for curve in curves],
        method="highs",
    )
    assert result.success, result.message
    return float(result.fun) * unit


def total_time(curves: list[Curve], shares: list[float]) -> float:
    return sum(curve.time(x) for curve, x in zip(curves, shares, strict=True))


@given(problems())
def test_greedy_is_optimal(problem: tuple[list[Curve], float]) -> None:
    curves, remote = problem
    shares = greedy_ratios(curves, remote)
    placed = sum(x * curve.resident for x, curve in zip(shares, curves, strict=True))
    assert all(0 <= x <= 1 for x in shares)
    assert placed == pytest.approx(remote, rel=1e-9, abs=1e-9)
    assert total_time(curves, shares) == pytest.approx(lp_time(curves, remote, remote), rel=1e-5)


@given(problems())
def test_greedy_is_never_worse_than_uniform(problem: tuple[list[Curve], float]) -> None:
    curves, remote = problem
    uniform = uniform_ratios(curves, remote)
    assert len(set(uniform)) == 1
    greedy = total_time(curves, greedy_ratios(curves, remote))
    assert greedy <= total_time(curves, uniform) * (1 + 1e-9)


@given(problems())
def test_best_total_is_the_fastest(problem: tuple[list[Curve], float]) -> None:
    curves, _ = problem
    best = total_time(curves, greedy_ratios(curves, best_total(curves)))
    total = sum(curve.resident for curve in curves)
    assert best == pytest.approx(lp_time(curves, 0, total), rel=1e-5)
    assert best == pytest.approx(sum(curve.floor for curve in curves))


@given(problems(), st.booleans(), st.none() | st.floats(1, 3))
def test_best_uniform_total_is_the_fastest_of_one_ratio(
    problem: tuple[list[Curve], float], staged: bool, faster: float | None
) -> None:
    """Also of curves whose bytes past b arrive at another rate."""
    curves = [
        replace(
            curve,
            staged=staged,
            floor=max(curve.floor, staged * curve.read / curve.local_rate),
            beyond=faster and faster * curve.remote_rate,
        )
        for curve in problem[0]
    ]
    total = sum(curve.resident for curve in curves)
    best = total_time(curves, uniform_ratios(curves, best_uniform_total(curves)))
    times = [total_time(curves, uniform_ratios(curves, total * i / 64)) for i in range(65)]
    assert best <= min(times) * (1 + 1e-9)


@given(st.floats(1, 1e4), st.floats(0.1, 1e4), st.floats(1, 1e9), st.floats(0, 1e7))
def test_thresholds(local: float, remote: float, read: float, compute: float) -> None:
    curve = Machine(local, remote).curve(read, read, compute)
    turning = remote / (local + remote)
    assert curve.a == pytest.approx(min(turning, max(0, 1 - compute * local / read)), abs=1e-9)
    assert curve.b == pytest.approx(min(1, max(turning, compute * remote / read)), abs=1e-9)
    for x in (curve.a, (curve.a + curve.b) / 2, curve.b):
        assert curve.time(x) == pytest.approx(curve.floor)


def test_like_ops_stay_alike() -> None:
    machine = Machine(4.0, 1.0)
    curves = [machine.curve(10, 10, 0), machine.curve(1000, 1000, 0)]
    assert greedy_ratios(curves, 101) == pytest.approx([0.1, 0.1])
    assert greedy_ratios(curves, 606) == pytest.approx([0.6, 0.6])


def test_what_is_read_least_goes_to_the_remote_tier_first() -> None:
    machine = Machine(4.0, 1.0)
    table, weight = machine.curve(100, 1, 0), machine.curve(100, 100, 0)
    assert greedy_ratios([table, weight], 100) == pytest.approx([0.8, 0.2])
    assert greedy_ratios([table, weight], 150) == pytest.approx([1.0, 0.5])


@st.composite
def matrices(draw: st.DrawFn) -> Op:
    shape = draw(st.integers(1, 20 * ROWS_PER_BLOCK)), draw(st.integers(1, 3000))
    size = 2 * shape[0] * shape[1]
    return Op(
        name="m", category="linear", layers=draw(st.integers(1, 5)), in_layer=True, shape=shape,
        batch_size=1, element_bytes=2, resident_bytes=size, read_bytes=size, flops=0.0,
        units=row_block_count(shape[0]), format=Rows(2),
    )  # fmt: skip


@given(st.lists(matrices(), min_size=1, max_size=4), st.data())
def test_rounding_stays_within_a_unit_of_each_op(ops: list[Op], data: st.DataObject) -> None:
    shares = [data.draw(st.floats(0, 1)) for _ in ops]
    ideal = [x * op.resident_bytes for x, op in zip(shares, ops, strict=True)]
    wanted = sum(size * op.layers for size, op in zip(ideal, ops, strict=True))
    goal = RemoteGoal(required=0, limit=2 * wanted + 1e12, wanted=wanted)
    rounded = round_ratios(ops, shares, goal, lambda op, n: remote_bytes(op, n) / 1e9)
    placed, unit = 0, 0
    for op, size, layers in zip(ops, ideal, rounded, strict=True):
        assert len(layers) == op.layers and max(layers) - min(layers) <= 1
        for n in layers:
            assert remote_bytes(op, max(n - 1, 0)) <= size + 1e-3
            assert remote_bytes(op, min(n + 1, op.units)) >= size - 1e-3
        placed += sum(remote_bytes(op, n) for n in layers)
        unit = max(unit, max(op.unit_bytes(n, n + 1) for n in range(op.units)))
    assert abs(placed - wanted) <= unit


def test_bytes_beyond_the_threshold_may_come_faster() -> None:
    """As the copy engine brings those of products, and not those of caches."""
    cache = Curve(10, 10, 4.0, 4.0, 1.0)
    weight = Curve(10, 10, 4.0, 4.0, 1.0, beyond=1.25)
    assert weight.b == cache.b == pytest.approx(0.4)
    assert weight.time(0.9) == pytest.approx(4.0 + 10 * 0.5 / 1.25)
    assert greedy_ratios([cache, weight], 12) == pytest.approx([0.4, 0.8])
