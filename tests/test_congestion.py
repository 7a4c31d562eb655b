"""What a profile keeps of its sweeps: the window chosen, the fixed cost fitted."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dakrun.congestion import KEEPS, Point, choose_window, fixed_cost

KIB = 1024

# Host and HBM rates measured side by side on an H200, GB/s.
H200 = [
    Point(4, 64 * KIB, 23.7, 4623),
    Point(8, 256 * KIB, 51.4, 4613),
    Point(4, 256 * KIB, 51.0, 4610),
    Point(16, 512 * KIB, 51.4, 4610),
    Point(8, 1024 * KIB, 51.4, 4428),
    Point(16, 2048 * KIB, 51.3, 3236),
]


def test_the_smallest_window_and_then_the_fewest_sms_are_chosen() -> None:
    assert choose_window(H200, 51.4, 4612) == Point(4, 256 * KIB, 51.0, 4610)
    assert choose_window(H200[:2] + H200[3:], 51.4, 4612) == H200[1]


def test_without_a_good_point_the_least_bad_one_is_chosen() -> None:
    assert choose_window([H200[0], H200[4], H200[5]], 51.4, 4612) == H200[4]


rates = st.floats(1, 100)
points = st.lists(
    st.builds(Point, st.integers(1, 64), st.integers(1, 2**23), rates, rates), min_size=1
)


@given(points, rates, rates)
def test_no_smaller_window_would_have_done(
    found: list[Point], link_rate: float, hbm_rate: float
) -> None:
    chosen = choose_window(found, link_rate, hbm_rate)
    good = [
        p for p in found if p.remote_rate >= KEEPS * link_rate and p.hbm_rate >= KEEPS * hbm_rate
    ]
    assert chosen in (good or found)
    assert all((chosen.in_flight, chosen.sms) <= (p.in_flight, p.sms) for p in good)


@given(
    st.floats(1e-7, 1e-5),
    st.floats(0.5, 1.0),
    st.lists(st.floats(1e6, 1e9), min_size=2, max_size=8, unique_by=lambda size: round(size, -6)),
)
def test_a_cost_without_noise_is_found_again(
    fixed: float, efficiency: float, sizes: list[float]
) -> None:
    rate = 4.7e12
    seconds = [size / (rate * efficiency) + fixed for size in sizes]
    found = fixed_cost(sizes, seconds, rate)
    assert found == (pytest.approx(fixed, rel=1e-3, abs=1e-10), pytest.approx(efficiency, rel=1e-3))


@given(
    st.lists(
        st.tuples(st.integers(1, 500).map(lambda n: n * 2e6), st.floats(0.3, 3)),
        min_size=2,
        max_size=8,
        unique_by=lambda pair: pair[0],
    )
)
def test_a_fitted_cost_is_possible(found: list[tuple[float, float]]) -> None:
    sizes = [size for size, _ in found]
    seconds = [noise * size / 4.7e12 + 1e-6 for size, noise in found]
    fixed, efficiency = fixed_cost(sizes, seconds, 4.7e12)
    assert fixed >= 0 and 0 < efficiency <= 1 + 1e-12


def test_one_size_is_too_few() -> None:
    with pytest.raises(ValueError, match="two sizes"):
        fixed_cost([1e6], [1e-6], 4.7e12)
