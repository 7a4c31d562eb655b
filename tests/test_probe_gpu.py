"""Measuring a GPU: efforts, the profile made of sweeps, and on a GPU the measuring itself."""

import datetime
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cards import H200, PORTABLE, SMALL, hold_to
from test_measured_h200 import shows_what_the_method_rests_on

from dakrun.errors import CannotRun
from dakrun.geometry import (
    BANDWIDTH_MAX_SOURCES,
    TILED_PORTABLE_X_TILES,
    TILED_WIDE_TILES,
    TILED_X_TILES,
)
from dakrun.hardware import (
    ESTIMATED,
    QUANTIZED,
    OpCosts,
    RemoteTier,
    Sweep,
    load_profile,
    parse_profile,
    profile_text,
)
from dakrun.kernels import Reader, Variant, read_multicast, read_once, read_window
from dakrun.kernels.runtime import card_of, gpu_name, jit
from dakrun.lab.ceilings import KIB, MIB, fitting, ring_for
from dakrun.lab.probe.congestion import PER_SM, grouped
from dakrun.lab.probe.effort import FULL, QUICK, Effort, buffer_sizes
from dakrun.lab.probe.gpu import GpuProbe, measure_gpu
from dakrun.lab.probe.kernel_costs import EVERY_MODEL, KernelCosts, measured_variants
from dakrun.lab.probe.sweeps import Bench
from dakrun.lab.samples import Measurement, provenance

GIB = 2**30
MEASURED = load_profile("h200-pcie5")


@pytest.mark.parametrize(
    ("per_cta", "ring"),
    [
        (1 * KIB, None),
        (2 * KIB, (1 * KIB, 2)),
        (8 * KIB, (2 * KIB, 4)),
        (64 * KIB, (16 * KIB, 4)),
        (128 * KIB, (16 * KIB, 8)),
        (256 * KIB, None),
    ],
)
def test_rings(per_cta: int, ring: tuple[int, int] | None) -> None:
    assert ring_for(per_cta, H200) == ring
    assert ring_for(per_cta, SMALL) == (None if per_cta > 64 * KIB else ring)
    assert ring is None or ring[0] * ring[1] == per_cta


@pytest.mark.parametrize("effort", [FULL, QUICK], ids=["full", "quick"])
def test_the_grid_has_windows_for_kernels(effort: Effort) -> None:
    grid = [(n, w) for n in effort.sms for w in effort.windows if ring_for(w // n, SMALL)]
    usable = {w for n, w in grid if PER_SM[0] <= w // n <= PER_SM[1]}
    assert usable >= {128 * KIB, 256 * KIB, 512 * KIB, MIB}
    assert any(w >= 2 * MIB for _, w in grid)


@pytest.mark.parametrize("effort", [FULL, QUICK], ids=["full", "quick"])
def test_rings_of_a_card(effort: Effort) -> None:
    for rings in (effort.hbm_rings, effort.remote_rings):
        assert fitting(rings, H200) == list(rings)
        small = fitting(rings, SMALL)
        assert len(small) == len(set(small)) and {chunk for chunk, _ in small} == dict(rings).keys()
        assert all(stages >= 2 and chunk * stages < SMALL.shared_bytes for chunk, stages in small)
    assert max(chunk * stages for chunk, stages in fitting(effort.hbm_rings, SMALL)) == 96 * KIB


def test_buffers() -> None:
    wanted = {"hbm": FULL.hbm_bytes, "host": FULL.host_bytes, "peer:2": FULL.peer_bytes}
    assert buffer_sizes(FULL, 140 * GIB, 128 * GIB, [2]) == wanted
    less = buffer_sizes(FULL, 3 * GIB + 5, 2 * GIB + 5, [])
    assert less == {"hbm": 3 * GIB // 2, "host": GIB // 2}
    with pytest.raises(CannotRun, match=r"256.00 MiB of hbm memory, 128.00 MiB"):
        buffer_sizes(QUICK, GIB // 4, 128 * GIB, [])
    with pytest.raises(CannotRun, match="of host memory"):
        buffer_sizes(QUICK, 140 * GIB, GIB // 2, [])


@pytest.mark.parametrize("effort", [FULL, QUICK], ids=["full", "quick"])
def test_what_is_compiled_ahead(effort: Effort) -> None:
    for card in (H200, PORTABLE, SMALL, replace(SMALL, tiled_rows=512)):
        needed = measured_variants(effort, card, EVERY_MODEL | ESTIMATED)
        sources = [source for source, _ in needed]
        assert len(needed) == len({(source, *macros.items()) for source, macros in needed})
        tiled = {macros["TILES"] for source, macros in needed if source == "tiled_gemm.cu"}
        every = {*TILED_X_TILES, *TILED_WIDE_TILES} if card.has_wgmma else {*TILED_PORTABLE_X_TILES}
        assert tiled == (every if card.tiled else set())
        unpacked = [macros for source, macros in needed if source == "unpack.cu"]
        of_torch = card in (PORTABLE, replace(SMALL, tiled_rows=512))
        assert [bool(macros.get("CODE")) for macros in unpacked].count(False) == of_torch
        assert sources.count("splitk_flash_attn.cu") == 1
    quick = measured_variants(QUICK, H200, EVERY_MODEL | ESTIMATED)
    few = [macros for source, macros in quick if source == "splitk_gemm.cu"]
    of_few = sorted(macros["NORM"] for macros in few if not macros.get("CODE"))
    assert of_few == [0, 1], "8 rows; 64 are the tiled GEMM's"


def remote(name: str, rate: float) -> RemoteTier:
    return RemoteTier(
        name=name, capacity_bytes=GIB, direct_bytes_per_s=rate, staged_bytes_per_s=rate,
        window_bytes=MIB, sms=16,
    )  # fmt: skip


def test_peers_that_share_a_link_form_a_group() -> None:
    tiers = [remote("host", 5e10), remote("peer:1", 4e11), remote("peer:2", 4e11)]
    assert grouped(tiers, None) == (tiers, {})
    assert grouped(tiers, 7.9e11) == (tiers, {})
    found, groups = grouped(tiers, 4.1e11)
    assert groups == {"peers": 4.1e11}
    assert [tier.group for tier in found] == ["", "peers", "peers"]


def test_where_the_figures_come_from() -> None:
    figures = [
        Measurement(name=name, value=1.0, unit="B/s", spread=spread, runs=5)
        for name, spread in (("HBM read", 0.01), ("host read", 0.08), ("host copy", 0.002))
    ]
    found = provenance("copies", figures)
    assert (found.kind, found.date) == ("measured", datetime.date.today().isoformat())
    assert "copies; 1 of 3 figures" in found.source and "host read (8%)" in found.source


class StillBench(Bench):
    """Readers that all run at the rate of their tier, without a GPU."""

    def readings(self, *readers: Reader) -> list[list[float]]:
        here = self.hbm.data_ptr()
        link = 5.153e10 if len(readers) == 1 else 5.132e10
        return [[4.63e12 if r.address == here else link] * 3 for r in readers]

    def reads(self, columns: Sequence[str], *_: object) -> Sweep:
        known = (sweep for name, sweep in MEASURED.sweeps.items() if "peer" not in name)
        return next(sweep for sweep in known if sweep.columns[:-1] == tuple(columns))


def test_what_becomes_of_sweeps(monkeypatch: pytest.MonkeyPatch) -> None:
    # Sweeps need a GPU: those of a profile stand in.
    for kind in ("congestion", "multicast"):
        sweep = MEASURED.sweeps[f"host {kind}"]
        monkeypatch.setattr(
            f"dakrun.lab.probe.sweeps.{kind}_sweep", lambda *_, sweep=sweep, **__: sweep
        )
    monkeypatch.setattr(
        "dakrun.lab.probe.sweeps.copy_rates", lambda *_: [5.54e10, 5.55e10, 5.56e10]
    )
    monkeypatch.setattr(
        "dakrun.lab.probe.sweeps.staging_rates", lambda *_: ([5.2e10] * 3, [4.4e12] * 3)
    )
    hbm, host = (torch.empty(64 * MIB, dtype=torch.uint8) for _ in range(2))
    probe = GpuProbe(StillBench(H200, hbm, FULL))
    assert probe.ring == (32 * KIB, 6), "the ring that reads HBM fastest on all SMs"
    tier = probe.remote_tier("host", host, GIB)
    assert tier == RemoteTier(
        name="host", capacity_bytes=GIB,
        direct_bytes_per_s=5.132e10, staged_bytes_per_s=5.2e10,  # while HBM is read, as a run does
        window_bytes=256 * KIB, sms=8,
    )  # fmt: skip
    said = {m.name: m.value for m in probe.log.measurements}
    assert said["host read, window of 256.00 KiB on 8 SMs"] == 5.132e10
    assert said["host read, direct"] == 5.153e10
    assert said["HBM read beside host, window of 256.00 KiB on 8 SMs"] == 4.63e12
    assert said["host to HBM, copy engine"] == 5.55e10
    assert said["host, multicast to 8"] == MEASURED.sweeps["host multicast"].rows[-1][2]
    assert probe.peers_together({"host": host, "peer:1": host}) is None
    seconds = {size: size / 4.63e12 / 0.97 + 1.8e-6 for size in (32 * MIB, 392 * MIB)}
    chains = Sweep(
        columns=("n", "op_bytes", "op_s", "bytes_per_s", "spread"),
        rows=tuple((8, size, t, size / t, 0.01) for size, t in seconds.items()),
    )
    kernels = KernelCosts(probe.bench, probe.hbm_rate, MEASURED.compute["float16"], probe.log)
    found = kernels.fitted("linear", chains)
    assert found == OpCosts(rows=(8,), seconds=(1.8e-6,), efficiency=(0.97,))
    assert kernels.sweeps["linear"] == chains
    assert [(m.name, m.value, m.spread) for m in probe.log.measurements[-2:]] == [
        ("linear fixed cost N=8", 1.8e-6, 0.01), ("linear efficiency N=8", 0.97, 0.01),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "values",
    [
        {"ctas": 0},
        {"sharers": 5},
        {"sharers": 0},
        {"chunk": 8},
        {"chunk": 24},
        {"stages": 0},
        {"stages": 65, "chunk": 16},
        {"bytes": 4 * 4096 - 1},
    ],
)
def test_bad_readers(values: dict[str, int]) -> None:
    good = {"address": 0, "bytes": MIB, "ctas": 4, "chunk": 4096, "stages": 4}
    assert Reader(**good).in_flight == 64 * KIB
    with pytest.raises(ValueError, match="expected"):
        Reader(**{**good, **values})


def test_a_ring_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    sink = torch.zeros(4, dtype=torch.int32)
    for card, stages in ((H200, 15), (SMALL, 7)):
        hold_to(card, monkeypatch)
        with pytest.raises(ValueError, match="do not fit"):
            read_once(0, 0, ctas=4, chunk=16 * KIB, stages=stages, sink=sink, pdl=False)


def test_bad_readings() -> None:
    reader = Reader(address=0, bytes=MIB, ctas=1, chunk=4096, stages=4)
    for readers in ([], [reader] * (BANDWIDTH_MAX_SOURCES + 1)):
        with pytest.raises(ValueError, match=f"expected 1 to {BANDWIDTH_MAX_SOURCES} readers"):
            read_window(readers, 0.001)
    with pytest.raises(ValueError, match="bytes"):
        read_multicast(0, MIB, clusters=65, size=2, chunk=16 * KIB, stages=4, chunks=8)
    sink = torch.zeros(4, dtype=torch.int32)
    for nbytes, ctas in ((4097, 4), (4096, 5)):
        with pytest.raises(ValueError, match="expected whole chunks"):
            read_once(0, nbytes, ctas=ctas, chunk=4096, stages=2, sink=sink, pdl=False)


@pytest.fixture
def with_clusters() -> None:
    if not card_of(torch.device("cuda", 0)).clusters:
        pytest.skip("the card has no clusters")


@pytest.mark.alone
@pytest.mark.gpu
def test_a_quick_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.cuda.mem_get_info()[0]
    ahead: list[Variant] = []

    def compiling(needed: list[Variant], arch: str) -> AbstractContextManager[Any]:
        ahead.extend(needed)
        return jit.compiling(needed, arch)

    monkeypatch.setattr("dakrun.lab.probe.gpu.compiling", compiling)  # to see what is compiled
    folder = tmp_path / "cubins"
    monkeypatch.setenv("DAKRUN_CACHE_DIR", str(tmp_path))
    jit._kernel.cache_clear()
    jit._module.cache_clear()
    profile, measurements = measure_gpu("quick", QUICK)
    others = "bandwidth-", "copy_blocks-"  # the second by card_of(), for a process's first caller
    compiled = [path.name for path in folder.iterdir() if not path.name.startswith(others)]
    assert len(compiled) == len(ahead), "all of them ahead, and no more"
    assert parse_profile(profile_text(profile), source="quick") == profile
    assert (profile.device, profile.device_name) == ("cuda", gpu_name())
    shows_what_the_method_rests_on(profile)
    linear, attention = profile.linear, profile.attention
    assert linear.rows == QUICK.rows and attention.rows == QUICK.slots
    assert all(0 < seconds < 30e-6 for seconds in linear.seconds)
    assert all(0 < seconds < 80e-6 for seconds in attention.seconds)
    assert all(value > 0.7 for value in (*linear.efficiency, *attention.efficiency))
    of_kinds = [getattr(profile, kind) for kind in QUANTIZED]
    assert all(costs.rows == (8, 16, 64, 512) for costs in of_kinds)
    assert all(0.2 < value < 1 for costs in of_kinds for value in costs.efficiency[:2])
    experts, router = profile.experts, profile.router
    assert (
        experts
        and router
        and (experts.rows, router.rows)
        == ((1, 4, 16, 32, 64, 128, 256), (8, 64, 512, 1024, 2048, 4096))
    )
    assert 0.6 < experts.efficiency[0] < 1 and 1e-6 < experts.seconds[0] < 10e-6
    assert 3e-6 < router.seconds[0] < 15e-6
    assert set(profile.compute) == {"float16", "bfloat16", "float32"}
    assert profile.facts["l2_bytes"] > 0 and "numa" in profile.facts
    assert all(m.runs >= 3 and (m.value > 0 or "fixed cost" in m.name) for m in measurements)
    assert torch.cuda.mem_get_info()[0] > before - 600 * MIB, "the buffers are given back"


@pytest.mark.alone
@pytest.mark.gpu
def test_readers_side_by_side() -> None:
    data = torch.zeros(64 * MIB, dtype=torch.uint8, device="cuda")
    reader = Reader(address=data.data_ptr(), bytes=data.numel(), ctas=3, chunk=4096, stages=5)
    shared = Reader(
        address=data.data_ptr(), bytes=data.numel(), ctas=4, chunk=48, stages=64, sharers=3
    )
    assert all(rate > 0 for rate in read_window([reader, shared], 0.001))


@pytest.mark.alone
@pytest.mark.gpu
@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("chunks", [0, 1, 6, 7, 8, 23])
def test_a_launch_reads_every_chunk_once(pdl: bool, chunks: int) -> None:
    chunk, ctas, stages = 4096, 3, 2
    data = torch.randint(0, 2**16, (23, chunk // 4), dtype=torch.int32, device="cuda")
    sinks = [torch.full((ctas,), -1, dtype=torch.int32, device="cuda") for _ in range(4)]
    torch.cuda.synchronize()  # with PDL a launch reads before it waits for its predecessor
    for sink in sinks:
        read_once(
            data.data_ptr(), chunks * chunk, ctas=ctas, chunk=chunk, stages=stages, sink=sink,
            pdl=pdl,
        )  # fmt: skip
    firsts = data[:chunks, 0].tolist()
    for sink in sinks:
        assert sink.tolist() == [sum(firsts[cta::ctas]) for cta in range(ctas)]


@pytest.mark.alone
@pytest.mark.gpu
@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("chunks", [1, 3, 4, 9])
def test_a_launch_in_clusters(with_clusters: None, size: int, chunks: int) -> None:
    data = torch.zeros(MIB, dtype=torch.uint8, device="cuda")
    read: dict[str, Any] = {"clusters": 3, "chunk": 16 * KIB, "stages": 3, "chunks": chunks}
    assert read_multicast(data.data_ptr(), data.numel(), size=size, **read) > 0
    torch.cuda.synchronize()


@pytest.mark.alone
@pytest.mark.gpu
def test_a_launch_that_the_driver_refuses(with_clusters: None) -> None:
    data = torch.zeros(MIB, dtype=torch.uint8, device="cuda")
    with pytest.raises(RuntimeError, match=r"launch of read_multicast failed: .*cluster 32"):
        read_multicast(
            data.data_ptr(), data.numel(), clusters=1, size=32, chunk=4096, stages=2, chunks=1
        )
    assert torch.ones(3, device="cuda").sum() == 3
