"""`dakrun bench --model`: sweeps, limits, rows, formats, pictures and errors; and small models, on
the CPU and on a GPU.
"""

import csv
import io
import json
import math
import struct
import sys
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from benched import HEAD, refused, run
from peers import readable_peer, with_peers
from rich.console import Console

from dakrun.config import Workload
from dakrun.errors import CannotRun, UsageError
from dakrun.hardware import LOCAL, load_profile
from dakrun.lab.bench.model import ROUNDS, measure_model, requests
from dakrun.lab.bench.model_plot import draw, ideal_s, lines
from dakrun.lab.bench.model_rows import (
    limit_s,
    measured_links,
    measured_row,
    model_columns,
    row_of,
    summary,
)
from dakrun.lab.bench.model_sweep import ModelCase, ModelSweep, model_sweep
from dakrun.lab.ceilings import Ceilings
from dakrun.lab.output import Record, as_text, render
from dakrun.lab.rivals.steps import RivalStep
from dakrun.llm import LLM
from dakrun.models import known_model
from dakrun.plan import Links, Plan, Policy, make_plan, predict_prefill
from dakrun.requests import RowLengths

H200, PEERS = load_profile("h200-pcie5"), load_profile("h200-nvlink-peer")
RATES = Ceilings({LOCAL: 4.7e12, "host": 5.1e10}, copied={"host": 5.5e10})
POINT = ModelCase(batch_size=8, ratio=0.25, transport="auto")
FAILED = row_of(POINT, problem="too large")
NAME = "opt-like-125m"


def sweep(**asked: Any) -> ModelSweep:
    """What the command line's defaults and `asked` ask for."""
    defaults = {
        "model": "opt-6.7b", "load_format": "dummy", "format": "auto",
        "batch_sizes": (8,), "ratios": ("0",),
        "transports": ("auto",), "strategies": ("greedy",), "remote": "host",
        "dtype": "float16", "prompt_len": 32, "new_tokens": 32, "rival": None,
        "popularity": "auto", "orders": ("use",),
        "hbm_budget": None, "host_budget": None, "peer_budget": None,
    }  # fmt: skip
    return model_sweep(**{**defaults, **asked})


def a_plan(profile: str = "h200-pcie5", batch_size: int = 8, **fixed: Any) -> Plan:
    config = known_model("opt-6.7b")
    assert config is not None
    workload = Workload(batch_size=batch_size, prompt_len=32, new_tokens=32, max_model_len=64)
    return make_plan(config, workload, load_profile(profile), Policy(**fixed))


def row(point: ModelCase = POINT, **changes: Any) -> dict[str, Any]:
    plan = a_plan(batch_size=point.batch_size, **changes)
    return measured_row(
        point, plan, step_s=array("d", (0.02, 0.03, 0.04)), ttft_s=0.2,
        kv_bytes=1e9, limit_s=0.015, ceiling_bytes_per_s=5e12, gap_s=2e-6, gpu_bytes=14 * 2**30,
    )  # fmt: skip


def record(*rows: dict[str, Any]) -> Record:
    head = HEAD | {
        "model": "opt-6.7b", "load_format": "dummy", "format": "auto",
        "prompt_tokens": 32, "new_tokens": 16,
        "ceilings_bytes_per_s": RATES.rates, "copied_bytes_per_s": RATES.copied,
        "command": "dakrun bench --model opt-6.7b",
    }  # fmt: skip
    return Record(head=head, columns=model_columns(sweep()), rows=rows)


def test_a_sweep() -> None:
    found = sweep(
        batch_sizes=(8, 1, 8), ratios=("0", "0.0", "auto"), transports=("staged", "direct")
    )
    assert [(p.batch_size, p.transport, p.ratio) for p in found.points()] == [
        (batch, transport, ratio)
        for batch in (8, 1) for transport in ("staged", "direct") for ratio in (0, "auto")
    ]  # fmt: skip
    assert found.config.dtype == "float16"
    assert sweep(dtype="bfloat16").config.dtype == "bfloat16"


def test_the_policy_of_a_point() -> None:
    free = ModelCase(batch_size=1, ratio="auto", transport="auto")
    common = sweep(remote="host, peer:1", hbm_budget=5).policy
    assert free.policy(common) == Policy(remote=("host", "peer:1"), hbm_budget=5)
    fixed = ModelCase(batch_size=1, ratio=0.0, transport="staged")
    assert fixed.policy(Policy()) == Policy(offload_ratio=0.0, transport="staged")
    assert str(free) == "batch 1, planned ratio remote, auto"
    assert str(fixed) == "batch 1, 0.00% remote, staged"


def test_strategies_are_distinguished() -> None:
    both = sweep(ratios=("0.3",), strategies=("greedy", "uniform", "greedy"))
    greedy, uniform = both.points()
    free = replace(greedy, strategy="auto")
    expected = Policy(offload_ratio=0.3, strategy="uniform", remote=("host",))
    assert uniform.policy(both.policy) == expected
    assert (str(greedy), str(uniform)) == (f"{free}, greedy", f"{free}, uniform")
    assert "strategy" in [column.key for column in model_columns(both)]
    assert "strategy" not in [column.key for column in model_columns(sweep())]
    rows = [row(p, strategy=p.strategy, offload_ratio=p.ratio) for p in both.points()]
    assert list(lines(rows)) == ["batch 8, auto, greedy", "batch 8, auto, uniform"]


def test_the_remote_tiers() -> None:
    assert sweep(ratios=("0",)).remote_tiers(H200) == []
    for ratio in ("0.1", "auto"):
        assert sweep(ratios=("0", ratio)).remote_tiers(H200) == [H200.tier("host")]
    both = sweep(ratios=("0.1",), remote="peer,host").remote_tiers(PEERS)
    assert [tier.name for tier in both] == ["peer:1", "host"]
    with pytest.raises(UsageError, match="no remote tier 'peer'"):
        sweep(remote="peer").remote_tiers(H200)
    with pytest.raises(UsageError, match="peer and peer:1"):
        sweep(remote="peer,peer:1").remote_tiers(PEERS)


@pytest.mark.parametrize("transport", ["direct", "staged"])
def test_the_limit_in_hbm(transport: str) -> None:
    plan = a_plan(offload_ratio=0.0, transport=transport)
    alone = measured_links(Ceilings({LOCAL: 4.7e12}), H200)
    assert limit_s(plan, alone) == pytest.approx(plan.read_bytes(0) / 4.7e12)
    assert limit_s(plan, measured_links(RATES, H200)) == limit_s(plan, alone)


@pytest.mark.parametrize(("transport", "rate"), [("direct", 5.1e10), ("staged", 5.5e10)])
def test_the_limit_of_a_link(transport: str, rate: float) -> None:
    plan = a_plan(offload_ratio=0.5, kv_offload_ratio=0.0, transport=transport, strategy="uniform")
    link_s = plan.read_bytes(1) / rate
    found = limit_s(plan, measured_links(RATES, H200))
    attention_s = plan.op("attention").read_bytes(0) / 4.7e12
    assert link_s <= found <= (link_s + attention_s) * (1 + 1e-9)
    assert (found == pytest.approx(link_s)) == (transport == "staged"), "copies run ahead"


@pytest.mark.parametrize("transport", ["direct", "staged", None])
@pytest.mark.parametrize("strategy", ["greedy", "uniform"])
@pytest.mark.parametrize("ratio", [0.0, 0.01, 0.1, 1.0, None])
def test_no_limit_is_below_the_ideal_or_above_the_bound(
    ratio: float | None, strategy: str, transport: str | None
) -> None:
    plan = a_plan(offload_ratio=ratio, strategy=strategy, transport=transport)
    profiles = Links.of(H200, ("host",))
    found = limit_s(plan, profiles)
    assert found <= plan.bound_s * (1 + 1e-9)
    read = [plan.read_bytes(tier) for tier in (0, 1)]
    fastest = profiles.staged["host"], profiles.direct[LOCAL]
    assert found >= max(read[1] / fastest[0], read[0] / fastest[1]) * (1 - 1e-9)


@pytest.mark.parametrize("ratio", [0.0, 0.3])
def test_the_limit_of_a_cpu_is_its_memory(ratio: float) -> None:
    plan = a_plan("cpu", offload_ratio=ratio, hbm_budget=10**12, host_budget=10**12)
    links = Links.of(load_profile("cpu"), ("host",))
    total = plan.read_bytes(0) + plan.read_bytes(1)
    assert limit_s(plan, links) == pytest.approx(total / 1.2e10)


def test_a_row() -> None:
    found, plan = row(offload_ratio=0.25), a_plan(offload_ratio=0.25)
    assert found["step_s"] == 0.03 and found["steps"] == 3 and found["ttft_s"] == 0.2
    assert found["predicted_ttft_s"] == predict_prefill(plan).predicted_s
    assert found["tokens_per_s"] == pytest.approx(8 / 0.03)
    assert found["eb_bytes_per_s"] == plan.weight_bytes / 0.03
    assert found["eb_total_bytes_per_s"] == pytest.approx(
        (plan.weight_bytes + 1e9) / 0.03, rel=1e-3
    )
    assert found["limit_over_time"] == pytest.approx(0.5)
    assert found["prediction_error"] == pytest.approx(plan.predicted_s / 0.03 - 1)
    assert row(profile="cpu", offload_ratio=0.0)["prediction_error"] is None  # of round numbers
    assert found["ratio"] == pytest.approx(0.25, abs=1e-3)
    assert found["transports"] in ("direct", "staged", "direct+staged")
    planned = plan.memory(0)
    assert found["planned_gpu_bytes"] == sum(planned.values()) - planned["context"]
    assert row(offload_ratio=0.0)["transports"] is None
    assert summary(found) == "step 30.00 ms, EB 443.2 GB/s, 50.0% of the limit"


def test_a_failed_row() -> None:
    failed = FAILED
    assert summary(failed) == "not measured: too large"
    assert failed.keys() == row().keys()
    asked = {"batch_size", "asked_ratio", "asked_transport", "strategy", "order", "problem"}
    assert {key for key, value in failed.items() if value is not None} == asked


def test_keys_carry_units() -> None:
    plain = {"batch_size", "asked_transport", "asked_ratio", "transports", "ratio", "steps"}
    plain |= {
        "strategy",
        "spread",
        "limit_over_time",
        "eb_total_over_ceiling",
        "prediction_error",
        "speedup",
        "best_speedup",
        "rival",
        "rival_ratio",
        "problem",
        "order",
        "experts_per_step",
        "predicted_experts_per_step",
        "local_read_share",
        "predicted_local_read_share",
    }
    keys = row().keys()
    assert all(key.endswith(("_s", "_bytes", "_per_s")) for key in keys - plain)
    assert {column.key for column in model_columns(sweep(rival="prefetch"))} <= keys


def test_forms() -> None:
    found = record(row(), FAILED)
    head, _, table = as_text(found, "csv").partition("\n")
    assert head.startswith("# opt-6.7b, 32 + 16 tokens, random weights; NVIDIA H200, 2026-11-21")
    assert "host 51.0 GB/s, copy engine from host 55.0 GB/s (turning point 1.08%)" in head
    first, second = csv.DictReader(io.StringIO(table))
    assert float(first["step_s"]) == 0.03 and first["problem"] == ""
    assert second["step_s"] == "" and second["problem"] == "too large"
    shown = json.loads(as_text(found, "json"))
    assert shown["prompt_tokens"] == 32 and shown["rows"][1]["problem"] == "too large"
    last = as_text(found, "md").splitlines()[-1]
    assert last.split("|")[1:5] == [" 8 ", " auto ", " - ", " - "]


def test_the_table_fits() -> None:
    out = io.StringIO()
    render(record(row(), FAILED), Console(file=out, width=120))
    assert max(map(len, out.getvalue().splitlines())) <= 120 and "…" not in out.getvalue()
    assert "30.000" in out.getvalue() and "443.2" in out.getvalue()


def test_a_row_of_slow_steps_is_one_line() -> None:
    seconds = ("step_s", "limit_s", "predicted_s", "ttft_s", "predicted_ttft_s")
    shown = record(row(offload_ratio=1.0))
    slow = {**shown.rows[0], **dict.fromkeys(seconds, 1.0555621)}
    out = io.StringIO()
    render(Record(shown.head, shown.columns, (slow,)), Console(file=out, width=120), wide=True)
    cells = out.getvalue().splitlines()[-1].split()
    assert len(cells) == len(shown.columns) and cells.count("1,055.6") == len(seconds)


def test_a_cpus_head() -> None:
    shown = record(row())
    changed = {
        "driver": None, "cuda": None, "copied_bytes_per_s": {}, "ceilings_measured": False,
        "ceilings_bytes_per_s": {LOCAL: 1.2e10}, "load_format": "auto", "format": "auto",
    }  # fmt: skip
    cpu = Record({**shown.head, **changed}, shown.columns, shown.rows)
    line = as_text(cpu, "md").splitlines()[0]
    assert line.startswith("opt-6.7b, 32 + 16 tokens; NVIDIA H200, 2026-11-21; torch 2.11.0, dak")
    assert "; ceilings from the profile: hbm 12.0 GB/s; predicted" in line


def test_lines() -> None:
    points = [(8, "staged", 0.5), (8, "staged", 0.0), (8, "direct", 0.1), (1, "direct", 0.0)]
    rows = [
        row(ModelCase(batch_size=n, ratio=ratio, transport=transport), offload_ratio=ratio)
        for n, transport, ratio in points
    ]
    found = lines(rows)
    assert list(found) == ["batch 1, direct", "batch 8, direct", "batch 8, staged"]
    assert [line["asked_ratio"] for line in found["batch 8, staged"]] == [0.0, 0.5]


def test_the_ideal() -> None:
    assert ideal_s(100, 0.0, (10, 1)) == 10 and ideal_s(100, 1.0, (10, 1)) == 100
    assert ideal_s(110, 1 / 11, (10, 1)) == pytest.approx(10)
    assert ideal_s(100, 0.7, (10,)) == 10


def test_a_picture(tmp_path: Path) -> None:
    path = tmp_path / "bench.png"
    points = [ModelCase(batch_size=8, ratio=r, transport="direct") for r in (0.0, 0.02, 0.3)]
    rows = [row(point, offload_ratio=point.ratio) for point in points]
    draw(record(*rows, FAILED), path)
    assert png_width(path) == 2130
    draw(record(rows[0]), path)
    assert png_width(path) == 2130


def png_width(path: Path) -> int:
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n" and head[12:16] == b"IHDR"
    return int(struct.unpack(">II", head[16:])[0])


def test_requests() -> None:
    rows = [RowLengths(5, 7)] * 3
    found = list(requests(rows, 100))
    assert len({request.prompt_ids for request in found}) == len(found) == 3
    assert {len(request.prompt_ids) for request in found} == {5}
    assert all(r.params.max_tokens == 7 and r.params.ignore_eos for r in found)
    assert found == list(requests(rows, 100))


@pytest.mark.parametrize(
    ("args", "said", "hint"),
    [
        ((), "a kernel or a model", "--kernel gemm"),
        (("--model", "opt-30b"), "architecture", "--load-format dummy"),
        (("--model", "opt-30"), "opt-30", "opt-30b"),
        (("--ratio", "2"), "'2' is not an offload ratio", "or auto"),
        (("--ratio", "turning-point"), "'turning-point' is not an offload ratio", "or auto"),
        (("--transport", "both"), "'both'", "--help"),
        (("--batch-size", "0"), "0", "--help"),
        (("--new-tokens", "2"), "2", "--help"),
        (("--prompt-len", "2017"), "2048 positions", "lower --prompt-len"),
        (("--remote", "peer"), "'peer'", "host"),
        (("--profile", "h200-pcie5"), "describes a GPU", "--profile auto"),
        (("--profile", "none"), "'none'", "h200-pcie5"),
        (("-o", "a.txt"), "a.txt", "-o a.csv"),
        (("--plot", "a.jpg"), "a.jpg", "--plot a.png"),
        (("--shape", "8x8"), "--shape is an option of --kernel gemm", "--batch-size"),
        (("--kernel", "gemm", "--plot", "a.png"), "--plot is an option of whole models", "--shape"),
        (("--kernel", "attention", "--model", "opt-30b"), "gemm and whole models", "--case"),
    ],
)
def test_errors(
    args: tuple[str, ...], said: str, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    known = ("--model", "opt-6.7b", "--load-format", "dummy", "--profile", "cpu")
    named = not args or "--model" in args or "--kernel" in args
    refused(run(*args) if named else run(*known, *args), 2, said, hint)


class Fussy(LLM):
    """An LLM for which batches of 3 are too large; those of 4 are interrupted."""

    def __init__(self, *args: Any, batch_size: int, **options: Any) -> None:
        if batch_size == 3:
            raise CannotRun("3 are too many", hint="take fewer")
        if batch_size == 4:
            raise KeyboardInterrupt
        super().__init__(*args, batch_size=batch_size, **options)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save(NAME, tmp_path_factory.mktemp("bench") / NAME)


@pytest.fixture
def tiny(path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[object, ...]:
    """Options for a tiny model on the CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    # An LLM that fails on request, and fewer rounds.
    monkeypatch.setattr("dakrun.lab.bench.model.LLM", Fussy)
    monkeypatch.setattr("dakrun.lab.bench.model.ROUNDS", 2)
    monkeypatch.setattr("dakrun.lab.bench.model.WARM_UP_TOKENS", 1)
    monkeypatch.setattr(sys, "argv", ["/bin/dakrun", "bench", "--model", NAME])
    return ("--model", path, "--profile", "cpu", "--prompt-len", 4, "--new-tokens", 5)


def test_a_tiny_model(tiny: tuple[object, ...], tmp_path: Path) -> None:
    table, picture = tmp_path / "bench.csv", tmp_path / "bench.png"
    points = ("--batch-size", 1, "--batch-size", 2, "--ratio", 0, "--ratio", 0.5)
    result = run(*tiny, *points, "--transport", "direct", "--json", "-o", table, "--plot", picture)
    assert result.exit_code == 0, result.stderr
    assert len(result.stderr.splitlines()) == 5 and "of the limit" in result.stderr
    shown = json.loads(result.stdout)
    assert shown["command"] == f"dakrun bench --model {NAME}" and shown["driver"] is None
    asked = [(r["batch_size"], r["asked_ratio"]) for r in shown["rows"]]
    assert asked == [(1, 0), (1, 0.5), (2, 0), (2, 0.5)]
    weights = 2 * sum(p.numel() for p in tiny_models.reference(NAME).parameters() if p.ndim == 2)
    for found in shown["rows"]:
        assert found["steps"] == 2 * 4 and found["problem"] is None
        assert found["ratio"] == pytest.approx(found["asked_ratio"], abs=0.02)
        assert found["eb_bytes_per_s"] * found["step_s"] == pytest.approx(found["weight_bytes"])
        assert found["eb_total_bytes_per_s"] > found["eb_bytes_per_s"]
        assert 0 < found["limit_s"] < found["predicted_s"]
        assert found["ttft_s"] > 0
        assert found["gap_s"] is None and found["gpu_bytes"] is None
        positions = 2 * 162 * 320  # which are no matrix of the plan
        assert found["weight_bytes"] == weights - positions
    rows = list(csv.DictReader(io.StringIO(table.read_text().partition("\n")[2])))
    assert [float(r["step_s"]) for r in rows] == [r["step_s"] for r in shown["rows"]]
    assert png_width(picture) == 2130


def test_steps_with_drafts(tiny: tuple[object, ...]) -> None:
    """Batches whose steps with drafts would be too large have none; a token takes its share."""
    points = ("--batch-size", 2, "--batch-size", 258, "--speculate", 3)
    result = run(*tiny, *points, "--json")
    assert result.exit_code == 0, result.stderr
    small, large = json.loads(result.stdout)["rows"]
    assert small["step_s"] > 0 and small["steps"] == 2 * 4
    shares = [small["draft_step_s"] / small[f"token_at_{rate}_s"] for rate in (50, 80, 95)]
    assert shares == pytest.approx([1.875, 2.952, 3.7099], rel=1e-3)
    assert large["step_s"] > 0 and large["draft_step_s"] is large["token_at_80_s"] is None
    assert "drafts" in run(*tiny, "--batch-size", 2, "--speculate", 3).stdout
    assert "drafts" not in run(*tiny).stdout


def test_plain_torch_on_a_gpu_is_named(
    tiny: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    points = (*tiny, "--batch-size", 1, "--ratio", 0)
    assert "plain torch" not in run(*points).stderr
    monkeypatch.setattr("dakrun.llm.why_plain_torch", lambda *_: "card X lacks shared memory")
    said = "runs on plain torch, slower than the kernels: card X lacks shared memory"
    assert said in run(*points).stderr.splitlines()


def test_what_cannot_run_is_a_row(tiny: tuple[object, ...]) -> None:
    dummy = ("--load-format", "dummy")
    result = run(*tiny, "--batch-size", 3, "--batch-size", 2, *dummy, "--json")
    assert result.exit_code == 0, result.stderr
    failed, measured = json.loads(result.stdout)["rows"]
    assert failed["problem"] == "3 are too many" and failed["step_s"] is None
    assert measured["problem"] is None and measured["step_s"] > 0
    assert "batch 3, 0.00% remote, auto: not measured: 3 are too many" in result.stderr


def of_a_rival(
    tiny: tuple[object, ...], monkeypatch: pytest.MonkeyPatch, *options: object
) -> tuple[list[dict[str, Any]], list[tuple[int, float]], str]:
    """The rows of two batch sizes, of which 1 does not fit the rival; its runs; stderr.

    The rival has ten layers, and takes 3 s and 10 s for each offloaded one.
    """
    asked = []

    def step(
        name: str, config: object, *, ratio: float, batch_size: int, **rest: object
    ) -> RivalStep:
        assert rest["prompt_len"] == 4 and rest["new_tokens"] == 5
        asked.append((batch_size, ratio))
        if batch_size == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        whole = math.ceil(ratio * 10) / 10
        return RivalStep(3.0 + 100 * whole, whole)

    # A rival runs on GPUs alone.
    monkeypatch.setattr("dakrun.lab.rivals.steps.rival_step", step)
    monkeypatch.setattr("dakrun.lab.bench.run.check_device", lambda _: None)
    monkeypatch.setattr("dakrun.lab.bench.model.ROUNDS", 1)
    points = ("--batch-size", 1, "--batch-size", 2, "--ratio", 0, "--ratio", 0.55)
    result = run(*tiny, *points, *options, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)["rows"], asked, result.stderr


def test_the_rival(tiny: tuple[object, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    rows, asked, said = of_a_rival(tiny, monkeypatch, "--rival", "transformers")
    assert asked == [(1, 0), (2, 0)]
    assert "transformers, batch 1, 0.00% remote: not measured: the GPU's memory ran out" in said
    assert "transformers, batch 2, 0.00% remote: step 3.00 s" in said
    assert [row["rival_s"] for row in rows] == [None, None, 3, 3]
    assert [row["speedup"] for row in rows[:2]] == [None, None]
    for row in rows[2:]:
        assert row["speedup"] == 3 / row["step_s"] and row["rival_ratio"] == 0


def test_a_rival_that_prefetches(tiny: tuple[object, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row has the rival with as many bytes outside HBM, in whole layers, and in HBM.

    These are weights alone, but of 55% here also KV blocks, more of two requests than of one.
    """
    rows, asked, said = of_a_rival(
        tiny, monkeypatch, "--rival", "prefetch", "--transport", "direct", "--transport", "staged"
    )
    assert len(set(asked)) == len(asked), "once each"
    one, two = ([ratio for rows, ratio in asked if rows == n and ratio] for n in (1, 2))
    assert {(1, 0), (2, 0)} < set(asked) and 0.55 < min(one) < max(two) < 0.6
    assert "prefetch, batch 2, 60.00% remote: step 63.00 s" in said
    assert {row["rival"] for row in rows} == {"prefetch"}
    assert {row["rival_best_s"] for row in rows[:4]} == {None}
    for row in rows[4:]:
        rival_s, ratio = (63, 0.6) if row["asked_ratio"] else (3, 0)
        assert (row["rival_s"], row["rival_ratio"], row["rival_best_s"]) == (rival_s, ratio, 3)
        assert row["speedup"] == rival_s / row["step_s"]
        assert row["best_speedup"] == 3 / row["step_s"]
        assert row["rival_eb_bytes_per_s"] == row["weight_bytes"] / rival_s


def test_a_rival_at_the_planned_ratio(
    tiny: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, asked, _ = of_a_rival(tiny, monkeypatch, "--rival", "prefetch", "--ratio", "auto")
    assert {row["ratio"] for row in rows if row["asked_ratio"] == "auto"} == {0}
    assert [ratio > 0 for _, ratio in asked] == [False, True] * 2, "once each"


def test_columns_of_a_rival() -> None:
    plain = [column.title for column in model_columns(sweep())]
    titles = [column.title for column in model_columns(sweep(rival="prefetch"))]
    assert titles == [
        *plain, "rival", "rival ms", "speedup", "rival remote", "rival EB GB/s", "rival in HBM ms",
        "speedup in HBM",
    ]  # fmt: skip
    assert [column.title for column in model_columns(sweep(rival="transformers"))] == titles[:-4]


@pytest.mark.parametrize("rival", ["transformers", "prefetch"])
def test_a_rival_needs_a_gpu(tiny: tuple[object, ...], rival: str) -> None:
    refused(run(*tiny, "--rival", rival), 3, "CUDA GPU", "dakrun doctor")


def test_nothing_that_can_run(tiny: tuple[object, ...]) -> None:
    refused(run(*tiny, "--batch-size", 3), 3, "3 are too many", "take fewer")


def test_what_was_measured_is_kept(tiny: tuple[object, ...], tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    result = run(*tiny, "--batch-size", 2, "--batch-size", 4, "-o", path)
    assert result.exit_code == 130
    (kept,) = json.loads(path.read_text())["rows"]
    assert kept["batch_size"] == 2 and kept["step_s"] > 0


@pytest.mark.parametrize("error", [MemoryError("no more"), torch.OutOfMemoryError("no more\nat")])
def test_memory_that_runs_out(
    error: Exception, tiny: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("dakrun.lab.bench.model.LLM", fail)  # an LLM that is too large
    refused(run(*tiny), 3, "memory ran out: no more", "smaller batches")


@pytest.mark.alone
@pytest.mark.gpu
def test_a_small_model_on_two_gpus() -> None:
    peer = readable_peer()
    wanted = sweep(
        model="opt-125m", batch_sizes=(2,), ratios=("0.5", "auto"), remote="host,peer",
        transports=("direct", "staged"), prompt_len=8, new_tokens=9, peer_budget=60 * 2**20,
    )  # fmt: skip
    *_, found = measure_model(wanted, with_peers(peer), command="it", progress=print)
    tiers = [LOCAL, "host", f"peer:{peer}"]
    assert list(found.head["ceilings_bytes_per_s"]) == tiers
    assert list(found.head["copied_bytes_per_s"]) == tiers[1:]
    assert [row["problem"] for row in found.rows] == [None] * 4
    for row in found.rows:
        assert 0 < row["limit_over_time"] < 1.2 and 0 < row["eb_total_over_ceiling"] < 1.2


@pytest.mark.alone
@pytest.mark.gpu
def test_a_small_model_on_a_gpu() -> None:
    wanted = sweep(
        model="opt-125m", batch_sizes=(2,), ratios=("0", "0.5"), transports=("direct", "staged"),
        prompt_len=8, new_tokens=9,
    )  # fmt: skip
    *_, found = measure_model(wanted, H200, command="it", progress=print)
    assert list(found.head["ceilings_bytes_per_s"]) == [LOCAL, "host"]
    assert found.head["copied_bytes_per_s"]["host"] > 0
    assert [row["problem"] for row in found.rows] == [None] * 4
    for row in found.rows:
        assert row["steps"] == ROUNDS * 8 and row["gap_s"] is not None
        assert 0 < row["limit_over_time"] < 1.2 and row["gpu_bytes"] > 0
