"""`dakrun bench --kernel gemm`: sweeps, cases, rows, formats and errors; and a tiny sweep, on a GPU
and with kernels that stand in for a GPU's.
"""

import csv
import io
import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from benched import (
    HEAD,
    PROFILE,
    TINY,
    check_command,
    check_measured,
    malformed,
    on_the_cpu,
    refused,
    run,
    without_a_gpu,
)
from cards import H200, PORTABLE, SMALL, hopper
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from dakrun.config import Workload
from dakrun.errors import CannotRun, UsageError
from dakrun.geometry import row_block_count
from dakrun.hardware import LOCAL, RemoteTier, load_profile
from dakrun.kernels.gemm import splitk_gemm
from dakrun.kernels.gemm.dispatch import Products
from dakrun.kernels.runtime import card_of
from dakrun.lab.bench.kernel import measure_kernel
from dakrun.lab.bench.kernel_sweep import (
    DEFAULT_SHAPES,
    KernelSweep,
    gemm_sweep,
    kernel_row,
    parse_ratio,
    parse_shape,
)
from dakrun.lab.cases import (
    TURNING_POINT,
    Case,
    Forecast,
    Weight,
    buffer_bytes,
    forecast,
    remote_units,
)
from dakrun.lab.ceilings import FULL, MAX_LAUNCHES, MIB, Ceilings, link_ring
from dakrun.lab.chain import launch_seconds
from dakrun.lab.chains import GemmChains
from dakrun.lab.memory import Room, allocate
from dakrun.lab.output import Record, as_text, commit, render, write
from dakrun.launches import TierAccess, few_rows
from dakrun.memory.matrix import TieredMatrix
from dakrun.models import known_model
from dakrun.plan import Policy, make_plan

PRODUCTS = Products(torch.device("cpu"), PORTABLE)


def sweep(**asked: Any) -> KernelSweep:
    """What the command line's defaults and `asked` ask for."""
    defaults = {
        "shapes": (), "model": None, "rows": (1, 8, 16), "ratios": ("0",), "remote": "host",
        "dtype": "float16", "ablations": False,
    }  # fmt: skip
    return gemm_sweep(**{**defaults, **asked})


def case(row_blocks: tuple[int, ...] = (96, 32), **changes: Any) -> Case:
    values = {
        "operand": Weight(8 * sum(row_blocks), 1024, n=8), "dtype": "float16", "requested": 0.25,
        "units": row_blocks, "launches": 10,
    }  # fmt: skip
    return Case(**{**values, **changes})


def record(rows: int = 2, **asked: Any) -> Record:
    wanted = sweep(shapes=("1024x1024",), **asked)
    off = {"window_off_s": None, "alignment_off_s": 2.5e-6} if wanted.ablations else {}
    found = kernel_row(
        case(), (1e-6, 2e-6, 3e-6), "splitk", bound_s=1.5e-6, predicted_s=1.9e-6,
        baseline_s=5e-6, **off,
    )  # fmt: skip
    head = HEAD | {"command": "dakrun bench --kernel gemm -n 8"}
    return Record(head=head, columns=wanted.columns, rows=(found,) * rows)


@pytest.mark.parametrize("text", ["28672x7168", " 28672X7168 ", "028672x7168"])
def test_shapes(text: str) -> None:
    assert parse_shape(text) == Weight(28672, 7168)
    assert str(parse_shape(text)) == "28672x7168"


@pytest.mark.parametrize(
    ("text", "said", "hint"),
    [
        *((text, "is not a shape MxK", "--shape 28672x7168")
          for text in ("", "7168", "7168x", "x7168", "7168*7168", "-1x8", "1.5x8", "8x8x8", "٣x8")),
        ("0x8", "0x8 is empty", "at least 1"),
        ("8x0", "8x0 is empty", "at least 1"),
        ("4096x4100", "multiple of 8", "4096x4104"),
    ],
)  # fmt: skip
def test_malformed_shapes(text: str, said: str, hint: str) -> None:
    malformed(parse_shape, text, said, hint)


def test_pure_parts_start_without_torch() -> None:
    code = "import sys, dakrun.lab.bench, dakrun.cli; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not {"torch", "numpy", "rich", "transformers"} & set(done.stdout.split())


def test_ratios() -> None:
    assert [parse_ratio(text, TURNING_POINT) for text in ("0", "0.05", "1", TURNING_POINT)] == [
        *(0.0, 0.05, 1.0), TURNING_POINT,
    ]  # fmt: skip
    for text in ("-0.1", "1.01", "nan", "inf", "5%", "", "turning point"):
        with pytest.raises(UsageError, match="not an offload ratio") as problem:
            parse_ratio(text, TURNING_POINT)
        assert "turning-point" in problem.value.hint


def test_a_sweep() -> None:
    assert [replace(of, n=1) for of in sweep(rows=(3,)).operands] == list(DEFAULT_SHAPES)
    assert all(text in gemm_help() for text in map(str, DEFAULT_SHAPES))
    some = sweep(shapes=("16x8", "8x16", "16x8"), rows=(8, 1, 8), ratios=("0", "0.0", "0.5"))
    sizes = ((16, 8), (8, 16))
    assert some.operands == tuple(Weight(*size, n=n) for size in sizes for n in (8, 1))
    assert some.ratios == (0.0, 0.5)


def gemm_help() -> str:
    return " ".join(run("--help").stdout.split())


def test_the_shapes_of_a_model() -> None:
    assert sweep(model="opt-30b", rows=(1,)).operands == (
        Weight(21504, 7168, ("qkv",)), Weight(7168, 7168, ("o",)), Weight(28672, 7168, ("fc1",)),
        Weight(7168, 28672, ("fc2",)), Weight(50272, 7168, ("lm_head",)),
    )  # fmt: skip
    llama = sweep(model="llama-3-8b", shapes=("4096x4096",), rows=(1,)).operands
    assert llama == (
        Weight(4096, 4096, ("o",)), Weight(6144, 4096, ("qkv",)), Weight(28672, 4096, ("gate_up",)),
        Weight(4096, 14336, ("down",)), Weight(128256, 4096, ("lm_head",)),
    )  # fmt: skip
    alike = {of.ops for of in sweep(model="opt-350m").operands}
    assert ("project_in",) in alike and ("lm_head",) in alike


def test_the_remote_tiers() -> None:
    peers = load_profile("h200-nvlink-peer")
    assert sweep(ratios=("0",)).remote_tiers(PROFILE) == []
    for ratio in ("0.1", TURNING_POINT):
        assert sweep(ratios=("0", ratio)).remote_tiers(PROFILE) == [PROFILE.tier("host")]
    for remote in ("peer", "peer:1"):
        found = sweep(ratios=("1",), remote=remote).remote_tiers(peers)
        assert found == [peers.tier("peer:1")]
    for remote in ("peer", "peer:3", "host,peer"):
        with pytest.raises(UsageError, match="no remote tier"):
            sweep(ratios=("1",), remote=remote).remote_tiers(PROFILE)
    with pytest.raises(UsageError, match="describes a CPU"):
        sweep().remote_tiers(load_profile("cpu"))


@given(st.integers(1, 20_000), st.floats(0, 1), st.floats(0, 1))
def test_row_blocks_per_tier(row_blocks: int, ratio: float, turning_point: float) -> None:
    near = remote_units(row_blocks, ratio, turning_point)
    assert 0 <= near <= row_blocks and abs(near - row_blocks * ratio) <= 0.5 + 1e-6
    below = remote_units(row_blocks, TURNING_POINT, turning_point)
    assert row_blocks * turning_point - 1 <= below <= row_blocks * turning_point


def test_at_the_turning_point_the_remote_tier_is_not_waited_for() -> None:
    ceilings = Ceilings({LOCAL: 4.741e12, "host": 5.14e10})
    assert ceilings.turning_point == pytest.approx(5.14e10 / (5.14e10 + 4.741e12))
    far = remote_units(896, TURNING_POINT, ceilings.turning_point)
    assert far == 9
    sizes = (896 - far) * 114_688, far * 114_688
    assert ceilings.seconds(sizes) == sizes[0] / 4.741e12
    assert ceilings.seconds((sizes[0] - 114_688, sizes[1] + 114_688)) > ceilings.seconds(sizes)
    assert Ceilings({LOCAL: 4e12}).turning_point == 0
    assert Ceilings({LOCAL: 4e12}).seconds((4 * 10**12,)) == 1


@pytest.mark.parametrize("name", ["h200-pcie5", "h200-nvlink-peer", "gh200", "b200"])
def test_the_ring_of_a_window(name: str) -> None:
    for tier in load_profile(name).remote:
        chunk, stages = link_ring(tier, H200)
        assert tier.window_bytes // 2 < chunk * stages * tier.sms <= tier.window_bytes


@given(st.integers(1, 2**26), st.integers(1, 200))
def test_any_window_has_a_ring(window: int, sms: int) -> None:
    tier = RemoteTier(
        name="host", capacity_bytes=1, direct_bytes_per_s=1.0, staged_bytes_per_s=1.0,
        window_bytes=window, sms=sms,
    )  # fmt: skip
    for card in (H200, SMALL):
        chunk, stages = link_ring(tier, card)
        assert chunk % 16 == 0 and stages >= 2
        assert chunk * stages <= min(128 * 1024, card.shared_bytes)


def test_launches_of_a_chain() -> None:
    assert FULL.launches(2**31) == FULL.launches(2**40) == FULL.min_launches == 8
    assert FULL.launches(2**25) * 2**25 > FULL.chain_bytes >= 2**31
    assert FULL.launches(128) == MAX_LAUNCHES


def test_a_case() -> None:
    some = case((96, 32))
    assert some.ratio == 0.25 and some.read_bytes == 128 * 16 * 1024
    assert some.tier_bytes == (96 * 16 * 1024, 32 * 16 * 1024)
    # cuBLAS has all of each weight in HBM, aligned.
    sizes = buffer_bytes([some, case((128, 0)), case((0, 128))], 256)
    assert sizes == [10 * (128 * 16 * 1024 + 256), 10 * 128 * 16 * 1024]
    assert buffer_bytes([case((128,))], 256) == sizes[:1]
    odd = case((3, 1), operand=Weight(32, 8, n=8))
    assert all(size % 256 == 0 for size in buffer_bytes([odd], 256))


def predicted(some: Case, remote: tuple[str, ...]) -> Forecast:
    return forecast(some, PROFILE, remote)


@pytest.mark.parametrize("ratio", [0.0, 0.25, 1.0])
@pytest.mark.parametrize(("model", "n"), [("opt-30b", 8), ("llama-3-8b", 64)])
def test_predictions_are_the_plans(model: str, n: int, ratio: float) -> None:
    config = known_model(model)
    assert config is not None
    workload = Workload(batch_size=n, prompt_len=32, new_tokens=32, max_model_len=64)
    policy = Policy(
        offload_ratio=ratio, kv_offload_ratio=0.0, strategy="uniform", transport="direct"
    )
    plan = make_plan(config, workload, replace(PROFILE, norm=None), policy)  # bench has no norms
    for op in plan.weights():
        if op.op.category != "linear":
            continue
        (counts,) = set(op.placement)
        same = case(counts, operand=Weight(*op.op.shape, n=n), dtype=config.dtype)
        found = predicted(same, ("host",))
        assert found.seconds == pytest.approx(op.predicted_s[0], rel=1e-9)
        assert found.sms == op.sms


def test_a_prediction_without_remote_tiers() -> None:
    here = predicted(case((128,)), ())
    assert here.sms == (PROFILE.sms,)
    assert here.seconds == predicted(case((128, 0)), ("host",)).seconds


def test_a_row() -> None:
    row = record().rows[0]
    assert row["shape"] == "1024x1024" and row["ratio"] == row["asked_ratio"] == 0.25
    assert row["time_s"] == 2e-6 and row["bytes_per_s"] == 128 * 16 * 1024 / 2e-6
    ratios = row["bound_over_time"], row["speedup"], row["spread"]
    assert ratios == pytest.approx((0.75, 2.5, 0.5))
    assert "alignment_off_s" not in row
    ablated = record(ablations=True).rows[0]
    assert ablated["alignment_off_s"] == 2.5e-6 and ablated["window_off_s"] is None


def test_keys_carry_units() -> None:
    plain = {
        *("shape", "ops", "n", "by", "asked_ratio", "ratio", "launches", "spread"),
        *("bound_over_time", "speedup"),
    }
    row = record(ablations=True).rows[0]
    assert all(key.endswith(("_s", "_bytes")) for key in row.keys() - plain)
    for wanted in (sweep(), sweep(model="opt-30b", ablations=True)):
        assert {column.key for column in wanted.columns} <= row.keys()


def test_csv() -> None:
    head, _, table = as_text(record(ablations=True), "csv").partition("\n")
    assert head.startswith("# NVIDIA H200, 2026-11-21") and head.endswith("gemm -n 8")
    rows = list(csv.DictReader(io.StringIO(table)))
    assert len(rows) == 2 and float(rows[1]["time_s"]) == 2e-6
    assert rows[0]["window_off_s"] == "" and rows[0]["shape"] == "1024x1024"


def test_json() -> None:
    shown = json.loads(as_text(record(ablations=True), "json"))
    assert shown["schema"] == 1 and shown["ceilings_bytes_per_s"]["hbm"] == 4.7e12
    assert shown["command"] == "dakrun bench --kernel gemm -n 8"
    assert [row["time_s"] for row in shown["rows"]] == [2e-6, 2e-6]
    assert shown["rows"][0]["window_off_s"] is None


def test_markdown() -> None:
    head, empty, *table, last = as_text(record(ablations=True), "md").split("\n")
    assert empty == last == "" and len(table) == 4
    assert "ceilings: hbm 4,700.0 GB/s, host 51.4 GB/s (turning point 1.08%)" in head
    for fact in ("NVIDIA H200", "2026-11-21", "driver 580.65.06", "torch 2.11.0", "CUDA 13.0"):
        assert fact in head
    assert "dakrun 0.1, commit abc1234;" in head
    assert head.endswith("`dakrun bench --kernel gemm -n 8`")
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    assert len({len(row) for row in cells}) == 1
    assert cells[0][:5] == ["shape", "N", "kernel", "remote", "time us"]
    assert cells[2] == [
        *("1024x1024", "8", "splitk", "25.00%", "2.00", "50.0%", "1,049", "75.0%", "1.90", "5.00"),
        *("2.50", "-", "2.50"),
    ]


@pytest.mark.parametrize("width", [60, 120])
def test_the_table(width: int) -> None:
    out = io.StringIO()
    shown = record(ablations=True, model="opt-30b")
    long = {**shown.rows[0], "shape": "128256x16384", "ops": "gate_up"}
    render(replace(shown, rows=(long,)), Console(file=out, width=width))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert lines[0].startswith("NVIDIA H200") and "…" not in out.getvalue()
    if width == 120:
        (row,) = (line.split() for line in lines if line.startswith("128256x16384"))
        assert row[1:5] == ["gate_up", "8", "splitk", "25.00%"]


@pytest.mark.parametrize("name", ["a.csv", "a.json", "a.md"])
def test_files(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    write(record(), path)
    assert path.read_text(encoding="utf-8") == as_text(record(), path.suffix[1:])


def test_bad_targets(tmp_path: Path) -> None:
    for path, said in (
        (tmp_path / "a.txt", ".csv, .json or .md"),
        (tmp_path / "csv", ".csv, .json or .md"),
        (tmp_path / "no" / "a.csv", "no such folder"),
    ):
        refused(run("--kernel", "gemm", "-o", path), 2, said, "-o")
    (tmp_path / "b.md").mkdir()
    refused(run("--kernel", "gemm", "-o", tmp_path / "b.md"), 2, "is a folder", "-o result.csv")


@pytest.mark.parametrize(
    ("args", "code", "said", "hint"),
    [
        (("--shape", "7168"), 2, "'7168' is not a shape", "--shape 28672x7168"),
        (("--shape", "8x9"), 2, "multiple of 8", "8x16"),
        (("--ratio", "2"), 2, "'2' is not an offload ratio", "--ratio 0.1"),
        (("-n", "0"), 2, "0", "--help"),
        (("--model", "opt-30"), 2, "opt-30", "opt-30b"),
        (("--dtype", "float32"), 2, "'float32'", "--help"),
        (("-o", "a.txt"), 2, "a.txt", "-o a.csv"),
        ((), 3, "CUDA GPU", "dakrun doctor"),
    ],
)
def test_errors(
    args: tuple[str, ...], code: int, said: str, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refused(run("--kernel", "gemm", *args), code, said, hint)


def test_the_kernel_must_be_named() -> None:
    refused(run(), 2, "a kernel or a model", "--kernel")


def test_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    args = ("-n", "8", "--ratio", "0", "--ratio", TURNING_POINT)
    wanted = sweep(rows=(8,), ratios=("0", TURNING_POINT))
    check_command("gemm", args, wanted, record(), tmp_path, monkeypatch)


def test_the_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DAKRUN_COMMIT", raising=False)
    assert commit(tmp_path) is None, "an installed package"
    if shutil.which("git"):
        for who in ("AUTHOR", "COMMITTER"):
            monkeypatch.setenv(f"GIT_{who}_NAME", "x")
            monkeypatch.setenv(f"GIT_{who}_EMAIL", "x@example.com")

        def git(*args: str) -> str:
            run = subprocess.run(
                ["git", *args], cwd=tmp_path, capture_output=True, text=True, check=True
            )
            return run.stdout.strip()

        file = tmp_path / "file"
        file.write_text("one")
        git("init")
        git("add", "file")
        git("commit", "-m", "one")
        short = git("rev-parse", "--short", "HEAD")
        git("tag", "v1")
        assert commit(tmp_path) == short
        (tmp_path / "results.md").write_text("new")
        assert commit(tmp_path) == short, "a new file is no change"
        file.write_text("two")
        assert commit(tmp_path) == f"{short}-dirty"
        monkeypatch.setenv("PATH", os.devnull)
        assert commit(tmp_path) is None, "no git"
    monkeypatch.setenv("DAKRUN_COMMIT", "abc1234")
    assert commit(tmp_path) == "abc1234"


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches that a CPU does."""

    def multiply(
        x: torch.Tensor,
        weight: TieredMatrix,
        config: Any,
        out: torch.Tensor,
        **options: Any,
    ) -> None:
        assert options["pdl"] and len(x) <= 64
        assert config.splits == tuple(part.split for part in weight.parts)
        out.copy_(x.float() @ weight.dense().float().T)

    # A kernel, the SMs that it runs on, and the choice of kernels for a GPU.
    on_the_cpu(monkeypatch)
    monkeypatch.setattr("dakrun.kernels.gemm.splitk.splitk_gemm", multiply)
    monkeypatch.setattr("dakrun.lab.chains.gemm.Products", lambda *_: PRODUCTS)


def new_chains(buffers: dict[str, torch.Tensor]) -> GemmChains:
    return GemmChains(buffers, torch.float16, H200, 3)


@pytest.mark.parametrize(("once", "rounds"), [(1e-2, 1), (4e-3, 1), (1e-3, 4), (3e-3, 2)])
def test_a_chain_is_long(once: float, rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def seconds(launch: Callable[[], None], runs: int, *, new: bool = True) -> list[float]:
        assert new == (runs == 2), "two runs only find the length of a chain"
        seen.clear()
        launch()
        return [once * len(seen) / 3] * runs

    monkeypatch.setattr("dakrun.lab.chain.graph_seconds", seconds)  # needs a GPU
    found = launch_seconds(seen.append, 3, replays=5)
    assert found == pytest.approx([once / 3] * 5)
    assert seen == [0, 1, 2] * rounds


@pytest.mark.parametrize(("n", "loaded"), [(8, False), (512, True)])
def test_many_rows_are_timed_under_load(
    cpu: None, n: int, loaded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the profile: else their clocks are higher than in steps that follow each other."""
    some = case((13,), operand=Weight(100, 192, n=n), launches=4)
    under_load: list[bool] = []

    def in_turns(chains: list[Any], *, replays: int, load: bool) -> list[list[float]]:
        under_load.append(load)
        assert [count for _, count in chains] == [4]
        return [[1e-3] * replays]

    monkeypatch.setattr("dakrun.lab.chains.gemm.seconds_round_robin", in_turns)
    with Room(torch.device("cpu")) as room:
        chains = new_chains(room.at_least({LOCAL: buffer_bytes([some], 256)[0]}))
        chains.fill(some.operand)
        times, _ = chains.kernel(some, [TierAccess()])
        assert len(times) == len(chains.baseline(some)) == 3
    assert under_load == [True, True] * loaded


@pytest.mark.parametrize("row_blocks", [(13,), (13, 0), (10, 3), (0, 13)])
@pytest.mark.parametrize("even_waves", [True, False])
def test_chains_read_every_weight(cpu: None, row_blocks: tuple[int, ...], even_waves: bool) -> None:
    # Padded in both directions, so that packed and dense weights differ in size.
    some = case(row_blocks, operand=Weight(100, 200, n=3), launches=4)
    assert row_block_count(100) == 13
    sizes = dict(zip((LOCAL, "host"), buffer_bytes([some], 256), strict=False))
    with Room(torch.device("cpu")) as room:
        buffers = room.at_least(sizes)
        chains = new_chains(buffers)
        chains.fill(some.operand)
        weights = [buffer.view(torch.float16).float() for buffer in buffers.values()]
        assert all(w.std() == pytest.approx(200**-0.5, rel=0.05) for w in weights if len(w) > 128)
        access = [TierAccess(), TierAccess(8, 256 * 1024)][: len(row_blocks)]
        assert chains.kernel(some, access, hopper(132, even_waves=even_waves)) == (
            [1e-2 / 4] * 3,
            "splitk",
        )
        assert chains.baseline(some) == [1e-2 / 4] * 3


def test_a_launch_reads_what_the_one_before_wrote(cpu: None) -> None:
    some = case((2,), operand=Weight(16, 16, n=2), launches=5)
    buffer = torch.zeros(buffer_bytes([some], 256)[0], dtype=torch.uint8)
    chains = new_chains({LOCAL: buffer})
    ends: list[tuple[int, torch.Tensor, torch.Tensor]] = []
    chains.products(some, lambda number, x, out: ends.append((number, x, out)))
    assert [number for number, *_ in ends] == [0, 1, 2, 3, 4]
    for (_, x, out), (_, after, _) in itertools.pairwise(ends):
        assert out.data_ptr() == after.data_ptr() != x.data_ptr()


def test_a_sweep_without_a_gpu(cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = without_a_gpu(monkeypatch)
    compiled: list[tuple[str, dict[str, int]]] = []
    monkeypatch.setattr("dakrun.lab.chains.gemm.architecture", lambda _: "sm_90a")
    monkeypatch.setattr(
        "dakrun.lab.chains.gemm.compile_ahead", lambda some, _: compiled.extend(some)
    )
    wanted = sweep(
        shapes=("160x64", "64x160"), rows=(1, 8), ratios=("0", TURNING_POINT, "1"), ablations=True
    )
    said: list[str] = []
    found = measure_kernel(
        wanted, PROFILE, effort=replace(TINY, chain_bytes=1), command="it",
        progress=said.append,
    )  # fmt: skip
    assert found.head["command"] == "it" and taken == [[LOCAL, "host"]] and len(said) == 1 + 12
    assert compiled == list(PRODUCTS.variants((1, 8), torch.float16)), (
        "the host's link has a window"
    )
    assert [(row["shape"], row["n"], row["ratio"]) for row in found.rows] == [
        *(("160x64", n, ratio) for n in (1, 8) for ratio in (0, 0.2, 1)),
        *(("64x160", n, ratio) for n in (1, 8) for ratio in (0, 0.125, 1)),
    ]
    for row in found.rows:
        assert row["time_s"] == row["cublas_s"] == row["alignment_off_s"] == 1e-2 / 4
        assert (row["window_off_s"] is None) == (row["ratio"] == 0)
        assert row["launches"] == 4 and row["predicted_s"] > 0


@pytest.mark.parametrize(
    ("sizes", "said"),
    [({LOCAL: 2**40}, "1.00 TiB of GPU 0"), ({"host": 2**60}, "host memory")],
)
def test_too_little_memory(
    sizes: dict[str, int], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("memory_reserved", "memory_allocated", "current_device"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (2**37, 2**37))
    with pytest.raises(CannotRun, match=said) as problem:
        allocate(sizes, torch.device("cuda", 0))
    assert "smaller shapes" in problem.value.hint


@pytest.mark.alone
@pytest.mark.gpu
def test_a_tiny_sweep(capsys: pytest.CaptureFixture[str]) -> None:
    wanted = sweep(
        shapes=("2048x1024", "1000x520"), rows=(16, 64, 72), ratios=("0", "0.5", TURNING_POINT),
        ablations=True, dtype="bfloat16",
    )  # fmt: skip
    taken = torch.cuda.memory_allocated()
    found = measure_kernel(wanted, PROFILE, effort=TINY, command="it", progress=print)
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(found.rows) == 19
    check_measured(found, "weight", ("cublas_s", "alignment_off_s", "predicted_s"))
    assert all((row["window_off_s"] is None) == (row["ratio"] == 0) for row in found.rows)
    gpu = torch.device("cuda", torch.cuda.current_device())
    few = few_rows(card_of(gpu))
    for row in found.rows:
        many = "tiled" if few < 72 else "torch" if row["ratio"] else "splitk"
        assert row["by"] == ("splitk" if row["n"] <= 64 else many)
    assert torch.cuda.memory_allocated() < taken + 128 * MIB, "the buffers are given back"


@pytest.mark.alone
@pytest.mark.gpu
def test_activations_stay_finite() -> None:
    some = case((32, 32), operand=Weight(512, 512, n=8), launches=100)
    sizes = dict(zip((LOCAL, "host"), buffer_bytes([some], 256), strict=True))
    ends: list[torch.Tensor] = []
    gpu = torch.device("cuda", torch.cuda.current_device())
    with Room(gpu) as room:
        chains = GemmChains(room.at_least(sizes), torch.float16, card_of(gpu), 3)
        chains.fill(some.operand)
        patch = pytest.MonkeyPatch()
        with patch.context() as patched:

            def keeping(x: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
                ends.append(x)
                return splitk_gemm(x, *rest, **options)

            patched.setattr("dakrun.kernels.gemm.splitk.splitk_gemm", keeping)
            chains.kernel(some, [TierAccess(), TierAccess(8, 256 * 1024)])
        torch.cuda.synchronize()
        for end in ends[-2:]:
            assert torch.isfinite(end).all() and 1e-3 < end.float().std() < 1e3
