"""Launch configurations of the tiled GEMM: laws for every shape, and choices for some."""

from dataclasses import replace

import pytest
from cards import H200, PORTABLE, hopper
from hypothesis import example, given
from hypothesis import strategies as st

from dakrun import launches
from dakrun.geometry import (
    ATOM_BYTES,
    TILED_MAX_STAGES,
    TILED_MIN_OUTPUT_BLOCKS,
)
from dakrun.hardware import BARRIER_BYTES, Card
from dakrun.kernels.gemm import StreamKWorkspace
from dakrun.launches import (
    Launch,
    Shape,
    TierAccess,
    TierTiles,
    beside,
    most_rows_like,
    shapes,
    tiled_config,
    wide_tiles,
    x_tiles,
)
from dakrun.units import ceil_div

SMALL = replace(PORTABLE, shared_bytes_per_sm=100 * 1024)
LONE = Card.of("12.0", sms=188)  # without clusters
W_ATOMS = (ATOM_BYTES, 544, 272)  # bytes of atoms of W: of 16 bits, and of smaller formats
LOCAL, HOST = TierAccess(), TierAccess(8, 256 * 1024)


def partial_sums_fit(launch: Launch) -> bool:
    """A CTA has room for the partial sums of native/tiled_segments.cuh: all segments of its passes.

    A pass is 4 tiles of 8 rows by 64, 16 bytes of each for each of 256 threads.
    """
    shape = launch.shape
    parts = ceil_div(ceil_div(shape.tiles, 4), shape.k_ctas)
    met = shape.k_ctas * parts * 4 * 256 * 16 if shape.k_ctas > 1 else 0
    units = max(shape.units_bytes(tier.tile_row_blocks) for tier in launch.tiers if tier.clusters)
    return launch.shared_bytes - launch.blocks * launches.OUTPUT_BLOCK_BYTES - units >= met


@pytest.mark.parametrize("card", [H200, replace(H200, shared_bytes_per_sm=100 * 1024), SMALL, LONE])
@pytest.mark.parametrize("atom_bytes", W_ATOMS)
def test_tiles_of_every_size_have_a_ring(card: Card, atom_bytes: int) -> None:
    """Warpgroups read whole groups, but nothing behind the end of shared memory."""
    for shape in shapes(card, atom_bytes=atom_bytes):
        for row_blocks in range(1, shape.row_blocks + 1):
            stages = shape.stages(card, row_blocks)
            launch = Launch(shape, stages, (TierTiles(1, row_blocks),)).with_max_blocks(card)
            assert TILED_MIN_OUTPUT_BLOCKS <= launch.blocks <= launches.MAX_OUTPUT_BLOCKS
            assert stages >= 2 and partial_sums_fit(launch)
            assert launch.shared_bytes <= card.shared_bytes - BARRIER_BYTES
            reading = ceil_div(row_blocks, shape.group_row_blocks) * shape.group_row_blocks
            last = (stages - 1) * shape.stage_bytes(row_blocks)
            staged = launch.blocks * launches.OUTPUT_BLOCK_BYTES + shape.units_bytes(row_blocks)
            in_stages = 0 if shape.has_units else reading * ATOM_BYTES
            assert staged + last + in_stages <= launch.shared_bytes


@given(
    st.integers(17, 4096), st.integers(1, 20_000), st.floats(0, 1), st.sampled_from(W_ATOMS),
    st.sampled_from([TierAccess(), TierAccess(8, 256 * 1024), TierAccess(32, 4 << 20)]),
)  # fmt: skip
@example(33, 18_993, 0.5, 528, TierAccess())
def test_the_largest_workspace_has_room_for_all_partial_tiles(
    n: int, row_blocks: int, share: float, atom_bytes: int, access: TierAccess
) -> None:
    """Of a launch for remote tiers and one for the local tier, each with two CTAs on all SMs."""
    far = round(share * row_blocks)
    config = tiled_config(
        n, (row_blocks - far, far), (LOCAL, access), cols=2048, card=H200, atom_bytes=atom_bytes
    )
    assert StreamKWorkspace.largest(2 * H200.sms, "meta").fits(config)


@given(
    n=st.integers(1, 4096),
    row_blocks=st.lists(st.integers(0, 4000), min_size=1, max_size=3).filter(any),
    cols=st.integers(1, 30_000),
    sms=st.integers(28, 160),
    card=st.sampled_from([H200, SMALL, LONE]),
    window=st.sampled_from([None, 1, 256 * 1024]),
    multicast=st.booleans(),
    even_waves=st.booleans(),
    atom_bytes=st.sampled_from(W_ATOMS),
)
def test_laws(
    n: int,
    row_blocks: list[int],
    cols: int,
    sms: int,
    card: Card,
    window: int | None,
    multicast: bool,
    even_waves: bool,
    atom_bytes: int,
) -> None:
    remote = (TierAccess(sms, window) for sms in (1, 2))
    access = [LOCAL, *remote][: len(row_blocks)]
    card = replace(card, sms=sms, multicast=multicast, even_waves=even_waves)
    sizes = {"cols": cols, "atom_bytes": atom_bytes}
    config = tiled_config(n, row_blocks, access, **sizes, card=card)
    on_sms = (ceil_div(launch.ctas, launch.shape.ctas_per_sm) for launch in config.launches)
    assert sum(on_sms) <= sms
    whole = tiled_config(n, [sum(row_blocks)], [LOCAL], **sizes, card=card)
    segments = {launch.shape.k_ctas for launch in (*config.launches, *whole.launches)}
    assert len(segments) == 1  # bits do not depend on where row blocks lie
    for launch in config.launches:
        shape = launch.shape
        assert shape.atom_bytes == atom_bytes
        assert shape.tiles in (
            wide_tiles(wgmma=card.has_wgmma, units=shape.has_units)
            if shape.wide
            else x_tiles(wgmma=card.has_wgmma)
        )
        assert shape.ctas <= card.max_cluster
        assert 2 <= launch.stages <= TILED_MAX_STAGES and launch.shared_bytes < card.shared_bytes
        assert partial_sums_fit(launch)
        for count, tier in zip(row_blocks, launch.tiers, strict=True):
            assert not tier.clusters or count
            assert tier.clusters <= shape.places(card).max_clusters(shape.ctas)
            assert 1 <= tier.tile_row_blocks <= shape.row_blocks
            assert not tier.clusters or 1 <= tier.window <= shape.copies(launch.stages)
            assert 1 <= tier.block_tiles <= ceil_div(n, shape.rows)
            assert not tier.stream_k or (shape.k_ctas == 1 and even_waves)
            assert even_waves or not tier.clusters or tier.tile_row_blocks == shape.row_blocks
    for number, count in enumerate(row_blocks):
        launches = [launch for launch in config.launches if launch.tiers[number].clusters]
        assert len(launches) == (count > 0)


@given(
    n=st.integers(1, 4096),
    row_blocks=st.lists(st.integers(0, 4000), min_size=1, max_size=3).filter(any),
    cols=st.integers(1, 30_000),
    card=st.sampled_from([H200, SMALL, LONE, PORTABLE]),
    window=st.sampled_from([None, 1, 256 * 1024]),
    even_waves=st.booleans(),
    atom_bytes=st.sampled_from(W_ATOMS),
)
def test_rows_that_are_kept_under_one_number_have_one_choice(
    n: int,
    row_blocks: list[int],
    cols: int,
    card: Card,
    window: int | None,
    even_waves: bool,
    atom_bytes: int,
) -> None:
    access = [LOCAL, *(TierAccess(sms, window) for sms in (1, 2))][: len(row_blocks)]
    card = replace(card, even_waves=even_waves)
    most = most_rows_like(n)
    assert n <= most <= 4096 and most_rows_like(most) == most
    own, of_most = (
        tiled_config(rows, row_blocks, access, cols=cols, card=card, atom_bytes=atom_bytes)
        for rows in (n, most)
    )
    assert own == of_most


# Tiles of one tier are much smaller than another one's, and more is read behind a stage.
@example(n=33, row_blocks=[0, 425, 4, 13161], cols=512, sms=114, card=H200)
@example(n=65, row_blocks=[3471, 3, 2395, 12954], cols=64, sms=132, card=H200)
@given(
    n=st.integers(1, 4096),
    row_blocks=st.lists(st.integers(0, 4000), min_size=2, max_size=4).filter(lambda o: any(o[1:])),
    cols=st.integers(1, 30_000),
    sms=st.integers(28, 160),
    card=st.sampled_from([H200, SMALL, LONE]),
)
def test_tiers_without_limits_have_all_sms(
    n: int, row_blocks: list[int], cols: int, sms: int, card: Card
) -> None:
    card = replace(card, sms=sms)
    config = tiled_config(n, row_blocks, [LOCAL] * len(row_blocks), cols=cols, card=card)
    whole = tiled_config(n, [sum(row_blocks)], [LOCAL], cols=cols, card=card)
    assert len({launch.shape.k_ctas for launch in (*config.launches, *whole.launches)}) == 1
    assert len(config.launches) == 1 + (row_blocks[0] > 0)
    for launch in config.launches:
        assert launch.ctas <= sms and partial_sums_fit(launch)
        assert launch.blocks >= TILED_MIN_OUTPUT_BLOCKS
    for number, count in enumerate(row_blocks):
        launches = [launch for launch in config.launches if launch.tiers[number].clusters]
        assert launches == ([config.launches[number == 0 and row_blocks[0] > 0]] if count else [])


@pytest.mark.parametrize("rows", [7168, 21504, 28672])
def test_many_rows_of_x_make_the_largest_tiles(rows: int) -> None:
    (launch,) = tiled_config(2048, [rows // 8], [LOCAL], cols=7168, card=H200).launches
    (tier,) = launch.tiers
    assert (launch.shape, launch.stages) == (Shape(32, 2, w_ctas=2), 4)
    assert (tier.tile_row_blocks, tier.clusters) == (16, 66)


@pytest.mark.parametrize("rows", [4096, 6144, 7168])
def test_few_rows_of_x_leave_few_sms_without_work(rows: int) -> None:
    (launch,) = tiled_config(128, [rows // 8], [LOCAL], cols=7168, card=H200).launches
    assert launch.ctas > 110


@pytest.mark.parametrize(
    ("n", "rows"), [(256, 6144), (256, 7168), (256, 12288), (512, 6144), (512, 7168)]
)
def test_wide_tiles_leave_few_sms_without_work(n: int, rows: int) -> None:
    """Tiles are of any number of row blocks, so that one or two waves occupy nearly every SM."""
    (launch,) = tiled_config(n, [rows // 8], [LOCAL], cols=7168, card=H200).launches
    shape, (tier,) = launch.shape, launch.tiers
    tiles = shape.tile_count(n, rows // 8, tier.tile_row_blocks)
    assert shape.wide and tiles > 0.96 * ceil_div(tiles, tier.clusters) * tier.clusters
    assert launch.ctas >= 126


@pytest.mark.parametrize("atom_bytes", W_ATOMS[1:])
def test_a_w_of_fewer_bits_has_tiles_of_many_rows_of_x(atom_bytes: int) -> None:
    """Half as many rows of X in a tile would take as many instructions to expand W, twice."""
    (launch,) = tiled_config(
        512, (512,), (LOCAL,), cols=4096, card=H200, atom_bytes=atom_bytes
    ).launches
    assert (launch.shape.rows, launch.shape.k_ctas) == (256, 2)


def test_a_small_gpu_has_small_tiles() -> None:
    (launch,) = tiled_config(2048, [3584], [LOCAL], cols=7168, card=replace(SMALL, sms=84)).launches
    assert launch.shape.tiles == 8 and not launch.shape.wide and launch.stages >= 3


@pytest.mark.parametrize("n", [256, 512, 1024, 2048, 4096])
def test_a_remote_row_block_crosses_the_link_once(n: int) -> None:
    remote, local = tiled_config(n, [0, 896], [LOCAL, HOST], cols=7168, card=H200).launches * 2
    assert remote is local  # there is but one
    assert remote.shape.rows >= n
    tier = remote.tiers[1]
    assert tier.window * tier.tile_row_blocks * 1024 * tier.clusters <= 256 * 1024
    (alone,) = tiled_config(
        n, [0, 896], [LOCAL, HOST], cols=7168, card=replace(H200, multicast=False)
    ).launches
    assert alone.shape.x_ctas == 1


@pytest.mark.parametrize("n", [128, 256, 512, 1024, 4096])
@pytest.mark.parametrize(("rows", "cols"), [(4096, 4096), (16384, 4096), (4096, 16384)])
def test_a_small_remote_part_is_not_waited_for(n: int, rows: int, cols: int) -> None:
    """Its CTAs multiply about as much as local ones, and keep their link busy."""
    far = rows // 8 // 32
    remote, local = tiled_config(
        n, [rows // 8 - far, far], [LOCAL, HOST], cols=cols, card=H200
    ).launches
    tier, others = remote.tiers[1], local.tiers[0]
    shares = far * n / (tier.clusters * remote.shape.ctas), (rows // 8 - far) * n / local.ctas
    assert others.clusters and shares[0] < 1.1 * shares[1]
    in_flight = 1024 * tier.clusters * remote.shape.k_ctas * tier.window * tier.tile_row_blocks
    enough = 2.3e-6 * far * 16 * cols / (2 * n * rows * cols / 500e12)  # while the rest multiplies
    assert in_flight >= min(128 * 1024, enough)


@pytest.mark.parametrize(
    ("row_blocks", "clusters", "size"), [(896, 132, 14), (132 * 16, 132, 16), (1, 9, 1)]
)
def test_tiles_are_as_small_as_makes_no_more_waves(
    row_blocks: int, clusters: int, size: int
) -> None:
    assert Shape(32, 2).smallest_tile(512, row_blocks, clusters) == size


def test_local_clusters_have_the_places_that_remote_ones_leave() -> None:
    """22 clusters of 5 CTAs run at a time; one more would run after all others."""
    access = [LOCAL, TierAccess(8, 2**18)]
    config = tiled_config(96, [504, 8], access, cols=14336, card=H200)
    assert [launch.shape.ctas for launch in config.launches] == [5, 5]
    assert sum(launch.clusters for launch in config.launches) == H200.max_clusters(5)
    left = beside(H200, 3, 4)
    assert left == hopper(120, clusters=(60, 33, 27, 19, 14, 12, 12))
    assert beside(H200, 9, 1) == hopper(123) and min(beside(H200, 15, 8).clusters) == 1


def test_a_part_that_waits_for_its_link_has_few_clusters() -> None:
    """More would divide the window into stages that do not fill it."""
    config = tiled_config(96, [460, 52], [LOCAL, TierAccess(8, 2**18)], cols=16384, card=H200)
    remote, local = config.launches
    tiles = remote.tiers[1]
    in_flight = tiles.clusters * remote.shape.k_ctas * tiles.window * tiles.tile_row_blocks
    assert 0.9 * 2**18 < in_flight * 1024 <= 2**18
    assert local.ctas > 100


@pytest.mark.parametrize("n", [0, 4097])
def test_rows_that_no_launch_takes(n: int) -> None:
    with pytest.raises(ValueError, match=f"expected 1 to 4096 rows, got {n}"):
        tiled_config(n, [8], [LOCAL], cols=64, card=H200)
