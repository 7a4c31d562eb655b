"""Configurations of the tiled GEMM: laws that hold for every shape, and choices for some."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dakrun.kernels.heuristics import TierAccess
from dakrun.kernels.tiled_heuristics import (
    H200,
    MAX_STAGES,
    PORTABLE_X_TILES,
    WARPGROUPS,
    Limits,
    even_tile,
    ring_bytes,
    tiled_config,
)
from dakrun.units import ceil_div

SMALL = Limits(99 * 1024, PORTABLE_X_TILES)
LOCAL = TierAccess()


@given(
    n=st.integers(1, 4096),
    octets=st.lists(st.integers(0, 4000), min_size=1, max_size=3).filter(any),
    cols=st.integers(1, 30_000),
    sms=st.integers(4, 160),
    limits=st.sampled_from([H200, SMALL]),
    window=st.sampled_from([None, 1, 256 * 1024]),
)
def test_laws(
    n: int, octets: list[int], cols: int, sms: int, limits: Limits, window: int | None
) -> None:
    access = [LOCAL, TierAccess(1, window), TierAccess(2, window)][: len(octets)]
    config = tiled_config(n, octets, access, cols=cols, sms=sms, limits=limits)
    assert config.x_tiles in limits.x_tiles and 1 <= config.ctas <= sms
    assert config.shared_bytes < limits.shared_bytes
    for count, tier in zip(octets, config.tiers, strict=True):
        assert (tier.ctas > 0) == (count > 0)
        assert 1 <= tier.row_groups <= WARPGROUPS and 1 <= tier.tile_octets <= 8 * tier.row_groups
        assert 2 <= tier.stages <= MAX_STAGES and 1 <= tier.window <= tier.stages
        if count:
            size = ring_bytes(config.x_tiles, tier.row_groups, tier.stages)
            assert size <= config.shared_bytes
        rows = 8 * config.x_tiles * WARPGROUPS // tier.row_groups
        assert 1 <= tier.block_tiles <= ceil_div(n, rows)


def test_many_rows_of_x_make_the_largest_tiles() -> None:
    config = tiled_config(2048, [3584], [LOCAL], cols=7168, sms=132)
    (tier,) = config.tiers
    assert (config.x_tiles, tier.row_groups, tier.tile_octets, tier.stages) == (32, 2, 16, 4)
    assert tier.block_tiles == 8


def test_few_rows_of_x_leave_no_sm_without_work() -> None:
    (tier,) = tiled_config(128, [896], [LOCAL], cols=7168, sms=132).tiers
    assert tier.ctas > 120


def test_a_small_gpu_has_small_tiles() -> None:
    config = tiled_config(2048, [3584], [LOCAL], cols=7168, sms=84, limits=SMALL)
    assert config.x_tiles == 16 and config.tiers[0].stages == 2


def test_remote_tiers_have_the_sms_that_they_are_read_by() -> None:
    access = [LOCAL, TierAccess(8, 256 * 1024)]
    local, remote = tiled_config(512, [800, 96], access, cols=7168, sms=132).tiers
    assert (local.ctas <= 124, remote.ctas) == (True, 8)
    assert remote.window * remote.tile_octets * 1024 * remote.ctas <= 256 * 1024


@pytest.mark.parametrize(
    ("octets", "ctas", "size"), [(896, 132, 14), (132 * 16, 132, 16), (1, 9, 1)]
)
def test_tiles_are_as_small_as_makes_no_more_waves(octets: int, ctas: int, size: int) -> None:
    assert even_tile(512, octets, ctas, 32, 2) == size


@pytest.mark.parametrize("n", [0, 4097])
def test_rows_that_no_launch_takes(n: int) -> None:
    with pytest.raises(ValueError, match=f"expected 1 to 4096 rows, got {n}"):
        tiled_config(n, [8], [LOCAL], cols=64, sms=4)
