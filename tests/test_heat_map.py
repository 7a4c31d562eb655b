"""The heat map in text: its rows, columns, blanks and mark, and that it fits its width."""

import dataclasses
import re

import pytest

from dakrun.hardware import RemoteTier, Sweep, load_profile
from dakrun.lab.probe.table import Grid, grid, grids, heat_map, short_bytes

HOST = RemoteTier(
    name="host",
    capacity_bytes=120 * 10**9,
    direct_bytes_per_s=5.14e10,
    staged_bytes_per_s=5.54e10,
    window_bytes=2**18,
    sms=8,
)
COLUMNS = ("sms", "in_flight_bytes", "remote_bytes_per_s", "hbm_bytes_per_s", "spread")
SWEEP = Sweep(
    columns=COLUMNS,
    rows=(
        (4.0, 2.0**16, 23.7e9, 4623e9, 0.01),
        (8.0, 2.0**18, 51.4e9, 4613e9, 0.01),
        (8.0, 2.0**20, 51.4e9, 4428e9, 0.01),
        (16.0, 2.0**18, 51.4e9, 4570e9, 0.01),
        (16.0, 2.0**21, 51.3e9, 3236e9, 0.02),
    ),
)


def test_a_grid() -> None:
    found = grid(HOST, SWEEP)
    assert found.sms == (4, 8, 16)
    assert found.in_flight == (2**16, 2**18, 2**20, 2**21)
    assert found.total[8, 2**20] == pytest.approx(4479.4e9)
    assert (found.chosen, found.exact) == ((8, 2**18), True)
    assert found.best == pytest.approx(4664.4e9)


def test_the_whole_text() -> None:
    assert heat_map(grid(HOST, SWEEP)) == [
        "host and HBM read together, GB/s; down: SMs that read host; "
        "across: bytes they keep in flight",
        "SMs  64K    256K      1M      2M",
        "  4 4647██",
        "  8         4664██* 4479▒▒",
        " 16         4621██          3287",
        "* chosen: 8 SMs, 256K in flight, 4664 GB/s",
        "shade: █ 99%, ▓ 97%, ▒ 90%, ░ 75% of the best or more; empty: not possible",
    ]


def cells(lines: list[str]) -> dict[str, list[str]]:
    """What stands in each row, by its number of SMs."""
    return {line.split()[0]: line.split()[1:] for line in lines if line.split()[0].isdigit()}


def test_without_block_characters() -> None:
    lines = heat_map(grid(HOST, SWEEP), ascii_only=True)
    assert all(line.isascii() for line in lines)
    assert cells(lines)["8"] == ["4664##*", "4479::"]


def test_the_nearest_point_stands_for_one_that_was_not_measured() -> None:
    tier = dataclasses.replace(HOST, window_bytes=2**21, sms=12)
    found = grid(tier, SWEEP)
    assert (found.chosen, found.exact) == ((16, 2**21), False)
    assert "* nearest to the chosen: 16 SMs, 2M in flight, 3287 GB/s" in heat_map(found)


def a_big_grid() -> Grid:
    sms, windows = (1, 2, 4, 8, 16, 32, 64, 132), [round(2**14 * 1.5**i) for i in range(20)]
    rows = [(n, w, 51.4e9, 11_940e9, 0.0) for n in sms for w in windows]
    return grid(HOST, Sweep(columns=COLUMNS, rows=tuple(tuple(map(float, row)) for row in rows)))


@pytest.mark.parametrize("width", [100, 80, 12])
def test_it_fits_and_loses_no_column(width: int) -> None:
    found = a_big_grid()
    lines = heat_map(found, width=width)
    table = [line for line in lines if re.match(r" *(SMs|\d+)( +\d\S*)+$", line)]
    blocks = [line.split()[1:] for line in table if "SMs" in line]
    assert [head for heads in blocks for head in heads] == [short_bytes(n) for n in found.in_flight]
    assert len(blocks) > 1
    assert max(map(len, lines)) <= max(width, 13)
    assert sum(line.count("*") for line in table) == 1
    assert sum(line.count("11991") for line in table) == 8 * 20


def test_equal_rates() -> None:
    """Noise is no pattern: everything near the best has the darkest shade."""
    sweep = Sweep(columns=COLUMNS, rows=((1.0, 2.0**18, 1e11, 4e12, 0.0),) * 2)
    assert cells(heat_map(grid(HOST, sweep)))["1"] == ["4100██*"]


def test_grids_of_a_profile() -> None:
    profile = dataclasses.replace(load_profile("h200-nvlink-peer"), sweeps={})
    assert grids(profile) == []
    empty = Sweep(columns=COLUMNS, rows=())
    sweeps = {"peer:1 congestion": SWEEP, "host congestion": empty, "host direct": SWEEP}
    (found,) = grids(dataclasses.replace(profile, sweeps=sweeps))
    assert found.tier == "peer:1"


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0"), (512, "512"), (2048, "2K"), (65536, "64K"), (2**20, "1M"), (2**20 - 1, "1024K"),
        (1_441_792, "1.38M"), (1_043_000, "1019K"), (3 * 2**29, "1.5G"),
    ],
)  # fmt: skip
def test_short_bytes(size: int, text: str) -> None:
    assert short_bytes(size) == text
