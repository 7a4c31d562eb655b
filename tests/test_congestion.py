"""A profile's figures from its sweeps: the congestion window, the fitted costs of ops."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dakrun.hardware import OpCosts, Sweep, load_profile, shipped_profiles
from dakrun.lab.probe.congestion import (
    MIN_KEPT,
    TierReading,
    arithmetic_rates,
    choose_window,
    fixed_cost,
    op_costs,
    widened,
)

KIB = 1024

# Host and HBM rates measured side by side on an H200, GB/s; alone 51.53 and 4741.
H200 = {
    (sms, kib): TierReading(sms, kib * KIB, host, hbm)
    for sms, kib, host, hbm in (
        (1, 64, 18.40, 4737), (4, 64, 22.23, 4737), (32, 64, 32.05, 4746),
        (2, 128, 35.30, 4743), (4, 128, 35.21, 4736), (8, 128, 41.70, 4743),
        (16, 128, 49.23, 4742), (32, 128, 50.94, 4746), (64, 128, 51.03, 4760),
        (2, 256, 51.27, 4742), (4, 256, 48.74, 4736), (8, 256, 51.39, 4744),
        (16, 256, 51.43, 4741), (32, 256, 51.43, 4743), (64, 256, 51.42, 4739),
        (4, 512, 51.42, 4720), (8, 512, 51.41, 4725), (16, 512, 51.43, 4674),
        (8, 1024, 51.41, 4403), (16, 1024, 51.41, 4352), (32, 1024, 51.41, 4361),
        (16, 2048, 51.38, 2849), (32, 2048, 51.38, 2880), (64, 4096, 51.27, 100),
    )
}  # fmt: skip


def chosen(*left_out: tuple[int, int]) -> tuple[int, int]:
    """(SMs, KiB) of the window chosen of H200, with some points left out."""
    points = [point for key, point in H200.items() if key not in left_out]
    found = choose_window(points, 51.53, 4741)
    return found.sms, found.in_flight // KIB


def test_the_smallest_window_and_then_the_fewest_sms_are_chosen() -> None:
    assert chosen() == (8, 256)
    assert chosen((8, 256)) == (16, 256)
    assert chosen((8, 256), (16, 256)) == (8, 512)


def test_windows_that_kernels_cannot_use_are_not_chosen() -> None:
    for key in ((64, 128), (2, 256)):  # 2 KiB an SM, 128 KiB an SM
        assert not H200[key].usable
        assert choose_window([H200[key], H200[8, 256]], 51.53, 4741) == H200[8, 256]
    unusable = [point for point in H200.values() if not point.usable]
    assert choose_window(unusable, 51.53, 4741) == H200[64, 128], "where there is no other"


def test_without_a_good_point_the_least_bad_one_is_chosen() -> None:
    points = [H200[4, 64], H200[16, 1024], H200[32, 2048]]
    assert choose_window(points, 51.53, 4741) == H200[16, 1024]


def test_a_window_is_widened_where_that_costs_nothing() -> None:
    host = H200[8, 256]
    assert widened(list(H200.values()), host) == host, "HBM would be read more slowly"
    peer = TierReading(16, 1024 * KIB, 373.0, 4747)
    wider, widest = (
        TierReading(16, 2048 * KIB, 376.1, 4746),
        TierReading(16, 4096 * KIB, 376.5, 4746),
    )
    others = TierReading(32, 2048 * KIB, 376.5, 4749), TierReading(16, 512 * KIB, 380, 4747)
    assert widened([*others, peer, widest, wider], peer) == wider
    assert widened([peer, TierReading(16, 2048 * KIB, 376.1, 4700)], peer) == peer
    assert widened([peer, TierReading(16, 2048 * KIB, 373.4, 4747)], peer) == peer


@pytest.mark.parametrize("name", shipped_profiles())
def test_the_window_of_a_shipped_profile_is_the_one_chosen(name: str) -> None:
    profile = load_profile(name)
    for tier in profile.remote:
        if sweep := profile.sweeps.get(f"{tier.name} congestion"):
            points = [TierReading(int(n), int(size), a, b) for n, size, a, b, _ in sweep.rows]
            link = max(profile.sweeps[f"{tier.name} direct"].column("bytes_per_s"))
            found = widened(points, choose_window(points, link, profile.hbm_bytes_per_s))
            assert (found.sms, found.in_flight) == (tier.sms, tier.window_bytes)


rates = st.floats(1, 100)
points = st.lists(
    st.builds(TierReading, st.integers(1, 64), st.integers(1, 2**23), rates, rates), min_size=1
)


@given(points, rates, rates)
def test_no_smaller_window_would_have_done(
    found: list[TierReading], link_rate: float, hbm_rate: float
) -> None:
    best = choose_window(found, link_rate, hbm_rate)
    usable = [p for p in found if p.usable] or found
    good = [
        p
        for p in usable
        if p.remote_rate / link_rate >= MIN_KEPT and p.hbm_rate / hbm_rate >= MIN_KEPT
    ]
    assert best in (good or usable)
    assert all((best.in_flight, best.sms) <= (p.in_flight, p.sms) for p in good)


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


def test_costs_by_rows() -> None:
    """Two sizes make two equations for each number of rows."""
    rate, costs = 4e12, {8: (1.8e-6, 0.97), 64: (6e-6, 0.91)}
    rows = [
        (n, size, size / (rate * efficiency) + seconds, 0.01)
        for size in (3e7, 4e8)
        for n, (seconds, efficiency) in reversed(costs.items())
    ]
    sweep = Sweep(columns=("n", "op_bytes", "op_s", "spread"), rows=tuple(rows))
    assert op_costs(sweep, lambda _: rate) == OpCosts(
        rows=(8, 64), seconds=(1.8e-6, 6e-6), efficiency=(0.97, 0.91)
    )
    with pytest.raises(ValueError, match="two sizes"):
        op_costs(Sweep(columns=sweep.columns, rows=tuple(rows[:2])), lambda _: rate)


# cuBLAS in float16 on an H200, TFLOP/s by N: up to 128 rows take as long as reading the weight.
MATMUL = [
    (8, 29.79),
    (16, 63.65),
    (32, 126.7),
    (64, 250.4),
    (128, 472.6),
    (256, 693.1),
    (512, 758.4),
]


def test_rates_that_reading_decides_are_no_rates_of_arithmetic() -> None:
    assert arithmetic_rates(MATMUL) == ((256, 693.1), (512, 758.4))
    assert arithmetic_rates(MATMUL[:4]) == (MATMUL[3],)
    assert arithmetic_rates([(8, 1.0), (64, 1.0)]) == ((64, 1.0),)


def test_one_size_is_too_few() -> None:
    with pytest.raises(ValueError, match="two sizes"):
        fixed_cost([1e6], [1e-6], 4.7e12)
