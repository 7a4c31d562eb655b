"""The picture of a measured profile: its data, PNGs of all kinds of profiles, what is refused."""

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from rich.console import Console
from test_plot import png_size

from dakrun.cli import main
from dakrun.errors import CannotRun
from dakrun.hardware import HardwareProfile, Sweep, load_profile, parse_profile, profile_text
from dakrun.lab.probe import run as probe
from dakrun.lab.probe.plot import best_by_doubling, chains, curves, draw
from dakrun.lab.probe.table import render

KIB, MIB = 2**10, 2**20
SMS = 132
RINGS = [(2 * KIB, 2), (4 * KIB, 4), (8 * KIB, 4), (8 * KIB, 8), (16 * KIB, 8)]


def link(in_flight: int, sms: int, rate: float, latency: float, per_sm: float) -> float:
    """Bytes/s over a link that `in_flight` bytes fill, or that a few SMs cannot."""
    return min(rate, in_flight / latency, sms * per_sm)


def collapse(in_flight: int) -> float:
    """Share of HBM's rate that is left beside that many host bytes in flight."""
    known = {20: 0.96, 21: 0.70, 22: 0.57, 23: 0.52}
    return known.get(in_flight.bit_length() - 1, 1.0)


def hbm(in_flight: int) -> float:
    """Bytes/s of HBM alone."""
    return 4.735e12 * min(1.0, in_flight / (6.4 * MIB))


def congestion(rate: float, latency: float, per_sm: float, *, falls: bool) -> Iterator[list[float]]:
    for window in (2**i for i in range(15, 24)):
        for sms in (1, 2, 4, 8, 16, 32, 64):
            if 2 * KIB <= window // sms <= 128 * KIB:
                left = hbm((SMS - sms) * 96 * KIB) * (collapse(window) if falls else 1.0)
                yield [sms, window, link(window, sms, rate, latency, per_sm), left, 0.01]


def sweep(columns: str, rows: Iterator[list[float]] | list[list[float]]) -> Sweep:
    return Sweep(
        columns=(*columns.split(), "spread"), rows=tuple(tuple(map(float, row)) for row in rows)
    )


def a_measured_gpu(*tiers: str) -> HardwareProfile:
    """A profile with the sweeps of an H200, of these remote tiers."""
    links = {"host": (5.14e10, 2.7e-6, 5.2e10), "peer:1": (3.77e11, 2.6e-6, 4e10)}
    rings = [(4 * KIB, 8), (8 * KIB, 8), (16 * KIB, 4), (16 * KIB, 12), (32 * KIB, 6)]
    ops = {4: (0.62, 0.5), 8: (0.75, 0.63), 32: (0.876, 0.76), 98: (0.962, 0.91), 392: (0.99, 0.97)}
    sweeps = {
        "hbm": sweep("ctas chunk_bytes stages bytes_per_s", [
            [ctas, *ring, hbm(ctas * ring[0] * ring[1]), 0.01]
            for ctas in (64, 118, SMS) for ring in rings
        ]),
        "l2": sweep("set_bytes bytes_per_s", [
            [n * MIB, rate * 1e12, 0.01]
            for n, rate in ((4, 11.8), (16, 11.2), (24, 9.5), (32, 7.9), (64, 5.1), (256, 4.7))
        ]),
        "chain": sweep("op_bytes overlap op_s bytes_per_s", [
            [n * MIB, pdl, n * MIB / (ops[n][not pdl] * 4.735e12),
             ops[n][not pdl] * 4.735e12, 0.01]
            for n in ops for pdl in (1, 0)
        ]),
    }  # fmt: skip
    for name in tiers:
        sweeps[f"{name} direct"] = sweep("sms chunk_bytes stages bytes_per_s", [
            [sms, *ring, link(sms * ring[0] * ring[1], sms, *links[name]), 0.01]
            for sms in (1, 2, 4, 8, 16, 32, 64, SMS) for ring in RINGS
        ])  # fmt: skip
        sweeps[f"{name} congestion"] = sweep(
            "sms in_flight_bytes remote_bytes_per_s hbm_bytes_per_s",
            congestion(*links[name], falls=name == "host"),
        )
    profile = load_profile("h200-nvlink-peer")
    remote = tuple(tier for tier in profile.remote if tier.name in tiers)
    return dataclasses.replace(profile, remote=remote, sweeps=sweeps)


def drawn(profile: HardwareProfile, tmp_path: Path) -> tuple[int, int]:
    """Size in pixels of the picture of `profile`, which is not blank."""
    path = tmp_path / "profile.png"
    draw(profile, path)
    assert path.stat().st_size > 20_000
    return png_size(path)


def test_a_gpu(tmp_path: Path) -> None:
    one = drawn(a_measured_gpu("host"), tmp_path)
    two = drawn(a_measured_gpu("host", "peer:1"), tmp_path)
    assert one[0] == two[0] > 1800 and 1400 < one[1] < two[1]


@pytest.mark.parametrize("name", ["cpu", "gh200", "b200"])
def test_a_profile_without_sweeps_has_the_roofline_alone(tmp_path: Path, name: str) -> None:
    width, height = drawn(load_profile(name), tmp_path)
    assert width < 1200 and height < 900


def test_a_profile_read_back_draws(tmp_path: Path) -> None:
    profile = a_measured_gpu("host")
    again = parse_profile(profile_text(profile), source="x")
    assert again == profile
    drawn(again, tmp_path)


def test_a_window_between_the_measured_ones_draws(tmp_path: Path) -> None:
    profile = a_measured_gpu("host")
    host = dataclasses.replace(profile.tier("host"), window_bytes=300_000, sms=7)
    drawn(dataclasses.replace(profile, remote=(host,)), tmp_path)


def test_curves() -> None:
    found = curves(a_measured_gpu("host", "peer:1"))
    assert list(found) == ["HBM", "L2", "host", "peer:1"]
    assert len(found["host"]) == 8 * len(RINGS)
    assert found["host"][0] == (4 * KIB, pytest.approx(4 * KIB / 2.7e-6))
    assert max(rate for _, rate in found["peer:1"]) == 3.77e11
    assert found["L2"][-1] == (256 * MIB, 4.7e12)
    assert curves(load_profile("cpu")) == {}


def test_best_by_doubling() -> None:
    points = [(64.0, 1.0), (60.0, 3.0), (70.0, 2.0), (128.0, 2.5)]
    assert best_by_doubling(points) == [(60.0, 3.0), (128.0, 2.5)]


def test_chains() -> None:
    found = chains(a_measured_gpu("host"))
    assert list(found) == [True, False]
    assert [size for size, _ in found[True]] == [n * MIB for n in (4, 8, 32, 98, 392)]
    rate = 4.735e12 / load_profile("h200-nvlink-peer").hbm_bytes_per_s
    assert [share for _, share in found[True]] == pytest.approx(
        [rate * share for share in (0.62, 0.75, 0.876, 0.962, 0.99)]
    )
    assert all(plain < pdl for (_, pdl), (_, plain) in zip(*found.values(), strict=True))


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_the_heat_maps_follow_the_table(encoding: str, tmp_path: Path) -> None:
    path = tmp_path / "out.txt"
    with path.open("w", encoding=encoding) as file:
        render(probe.Probe(a_measured_gpu("host", "peer:1"), ()), Console(file=file, width=120))
    lines = path.read_text(encoding=encoding).splitlines()
    starts = [i for i, line in enumerate(lines) if "and HBM read together" in line]
    assert max(map(len, lines[starts[0] :])) <= 100
    assert [lines[i].split()[0] for i in starts] == ["host", "peer:1"]
    assert lines[starts[0] + 1].split() == [
        "SMs", "32K", "64K", "128K", "256K", "512K", "1M", "2M", "4M", "8M",
    ]  # fmt: skip
    chosen = lines[starts[0] + 5]
    assert chosen.split()[0] == str(load_profile("h200-nvlink-peer").tier("host").sms)
    assert "4786██*" in chosen or "4786##*" in chosen


def test_a_profile_without_sweeps_has_no_heat_map(capsys: pytest.CaptureFixture[str]) -> None:
    render(probe.Probe(load_profile("cpu"), ()), Console(width=120))
    assert "read together" not in capsys.readouterr().out


def run(*args: str) -> Result:
    return CliRunner(env={"DAKRUN_DEBUG": ""}).invoke(main, ["profile", *args])


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was measured, by name, with a profile of sweeps for a result."""
    names: list[str] = []

    def measure(name: str, *_: object, **__: object) -> probe.Probe:
        names.append(name)
        return probe.Probe(dataclasses.replace(a_measured_gpu("host"), name=name), ())

    monkeypatch.setattr(probe, "measure", measure)
    return names


def test_the_option(tmp_path: Path, measured: list[str]) -> None:
    picture = tmp_path / "mine.png"
    result = run("-o", str(tmp_path / "mine.toml"), "--device", "cpu", "--plot", str(picture))
    assert result.exit_code == 0, result.stderr
    assert png_size(picture)[0] > 1800 and measured == ["mine"]
    assert "host and HBM read together" in result.stdout and "* chosen: 8 SMs" in result.stdout
    assert load_profile(str(tmp_path / "mine.toml")).name == "mine"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("mine.pdf", "a picture is a .png file"),
        ("no/folder.png", "no such folder"),
        ("", "is a folder"),
    ],
)
def test_refused_before_anything_is_measured(
    tmp_path: Path, measured: list[str], name: str, said: str
) -> None:
    path = tmp_path / name
    result = run("-o", str(tmp_path / "mine.toml"), "--device", "cpu", "--plot", str(path))
    assert result.exit_code == 2 and result.stdout == "" and measured == []
    assert f"error: {path}: {said}" in result.stderr and "hint: " in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_no_matplotlib(
    tmp_path: Path, measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(CannotRun, match="needs matplotlib") as caught:
        draw(load_profile("cpu"), tmp_path / "cpu.png")
    assert caught.value.hint == "pip install 'dakrun[plot]'"
    result = run("--device", "cpu", "--plot", str(tmp_path / "mine.png"))
    assert result.exit_code == 3 and measured == []
