"""Tables at the widths of terminals: no number is cut or broken over two lines, in any of them."""

import functools
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from benched import HEAD
from rich.console import Console
from test_bench_model import record as model_record
from test_bench_model import row as model_row
from test_bench_model import sweep as model_sweep

from dakrun.cli import doctor
from dakrun.cli.console import WIDTH, width
from dakrun.cli.doctor import Check
from dakrun.config import Workload
from dakrun.hardware import load_profile
from dakrun.lab.bench.kernel_sweep import attention_sweep, gemm_sweep
from dakrun.lab.bench.model_rows import model_columns
from dakrun.lab.output import Record, as_text
from dakrun.lab.output import render as render_bench
from dakrun.lab.probe.run import Probe
from dakrun.lab.probe.table import render as render_profile
from dakrun.lab.samples import Measurement
from dakrun.models import known_model
from dakrun.plan import Policy, make_plan
from dakrun.plan.show.overview import Overview
from dakrun.plan.show.table import render
from dakrun.tables import Column, print_table
from dakrun.terminal import summary

WIDTHS = (80, 120)
COMMAND = HEAD | {"command": "dakrun bench"}


def printed(show: Callable[[Console], None], columns: int) -> list[str]:
    out = io.StringIO()
    show(Console(file=out, width=columns))
    return out.getvalue().splitlines()


def check_numbers(show: Callable[[Console], None], columns: int) -> list[str]:
    """The lines within `columns`: each of their words with a digit is one of the widest console's.

    Narrow tables may lack columns and break paths, never a number.
    """
    lines = printed(show, columns)
    assert max(map(len, lines)) <= columns
    whole = {word for line in printed(show, 2000) for word in line.split()} | {str(columns)}
    words = [word for line in lines for word in line.split() if any(map(str.isdigit, word))]
    assert set(words) <= whole, set(words) - whole
    assert "…" not in "".join(lines)
    return lines


def model_bench() -> Record:
    """Rows of a slow and of a fast model, each figure as wide as it gets."""
    slow = {
        "batch_size": 8192, "transports": "direct+staged", "ratio": 1.0, "step_s": 1.0555621,
        "tokens_per_s": 113_777.8, "eb_bytes_per_s": 4.0632e12, "eb_total_bytes_per_s": 4.7123e12,
        "limit_s": 12.345678, "limit_over_time": 1.0, "predicted_s": 1.0555621,
        "prediction_error": -0.1234, "ttft_s": 123.45678, "predicted_ttft_s": 9.87654321,
        "rival": "prefetch", "rival_ratio": 0.98, "rival_s": 1.0555621, "speedup": 12.34,
        "rival_eb_bytes_per_s": 4.7123e12, "rival_best_s": 1.0555621, "best_speedup": 12.34,
        "gpu_bytes": 139 << 30, "gap_s": 1.2345e-4,
    }  # fmt: skip
    columns = model_columns(model_sweep(rival="prefetch"))
    first = model_record(model_row())
    rows = ({**first.rows[0], **slow}, {**first.rows[0], "prediction_error": 7.57, "rival_s": 0.02})
    return Record(first.head, columns, rows)


@pytest.mark.parametrize("columns", WIDTHS)
def test_a_models_bench(columns: int) -> None:
    shown = model_bench()
    lines = check_numbers(lambda console: render_bench(shown, console), columns)
    (row,) = (line for line in lines if line.startswith("8192"))
    wanted = ("100.00%", "1,055.6", "113,778", "4,063.2", "100.0%", "-12.3%", "1,055.6")
    assert set(wanted) <= set(row.split()) and "both" in row
    head = " ".join(lines[lines.index("") :])
    titles = ("batch", "remote", "step", "tokens/s", "EB", "share", "prediction", "error", "rival")
    assert all(word in head.split() for word in titles)
    assert "--wide shows them" in " ".join(head.split())


def test_wide_has_every_column_in_a_line_for_each_row() -> None:
    shown = model_bench()
    lines = printed(lambda console: render_bench(shown, console, wide=True), 80)
    cells = shown.texts()[0]
    assert lines[-2].split() == " ".join(cells).split() and len(cells) == len(shown.columns)
    assert not any("not shown" in line for line in lines)
    titles = as_text(shown, "md").splitlines()[2]
    assert titles.split(" | ")[1:-1] == [column.title for column in shown.columns][1:-1]


@pytest.mark.parametrize("columns", WIDTHS)
@pytest.mark.parametrize("ablations", [False, True])
def test_a_gemm_bench(columns: int, ablations: bool) -> None:
    sweep = gemm_sweep(
        shapes=(), model="llama-3-70b", rows=(4096,), ratios=("1",), remote="host",
        dtype="float16", ablations=ablations,
    )  # fmt: skip
    figures = {
        "shape": "128256x16384", "ops": "gate_up", "n": 4096, "by": "splitk", "ratio": 1.0,
        "time_s": 0.01234567, "spread": 0.123, "bytes_per_s": 4.712e12, "bound_over_time": 1.0,
        "predicted_s": 0.01234567, "cublas_s": 0.01234567, "speedup": 12.34,
        "window_off_s": 0.01234567, "alignment_off_s": 0.01234567,
    }  # fmt: skip
    shown = Record(head=HEAD | {"command": "dakrun"}, columns=sweep.columns, rows=(figures,))
    lines = check_numbers(lambda console: render_bench(shown, console), columns)
    (row,) = (line.split() for line in lines if line.startswith("128256x16384"))
    assert {"4096", "100.00%", "12345.67", "4,712", "100.0%"} <= set(row)


@pytest.mark.parametrize("columns", WIDTHS)
def test_an_attention_bench(columns: int) -> None:
    sweep = attention_sweep(cases=(), ratios=("1",), remote="host", dtype="float16", head_dim="128")
    figures = {
        "case": "512:128/8:1-131072", "ratio": 1.0, "time_s": 0.12345678, "spread": 0.123,
        "bytes_per_s": 4.712e12, "bound_over_time": 1.0, "predicted_s": 0.12345678,
        "sdpa_s": 0.12345678, "speedup": 12.34,
    }  # fmt: skip
    shown = Record(head=HEAD | {"command": "dakrun"}, columns=sweep.columns, rows=(figures,))
    lines = check_numbers(lambda console: render_bench(shown, console), columns)
    (row,) = (line.split() for line in lines if line.startswith("512:128"))
    assert {"100.00%", "123456.78", "4,712", "100.0%", "12.34"} <= set(row)


@functools.cache
def on_three_tiers() -> Overview:
    model = known_model("opt-66b")
    assert model is not None
    workload = Workload(batch_size=64, prompt_len=32, new_tokens=32, max_model_len=64)
    policy = Policy(hbm_budget=60 << 30, peer_budget=40 << 30, remote=("host", "peer"))
    return Overview.of(make_plan(model, workload, load_profile("h200-nvlink-peer"), policy))


@pytest.mark.parametrize("columns", WIDTHS)
def test_a_plan(columns: int) -> None:
    lines = check_numbers(lambda console: render(on_three_tiers(), console), columns)
    second = lines.index("What the plan does with it")
    assert [line.split()[0] for line in lines[second + 2 : second + 4]] == ["qkv", "attention"]
    assert len([line for line in lines if line.startswith(("qkv", "lm_head"))]) == 4
    dropped = [line for line in lines if line.startswith("not shown in 80 columns: ")]
    assert len(dropped) == (1 if columns == 80 else 0)


@pytest.mark.parametrize("columns", WIDTHS)
def test_a_profile(columns: int) -> None:
    figures = tuple(
        Measurement(name=name, value=4.7123e12, unit="B/s", spread=0.1234, runs=12)
        for name in ("hbm read, 16 KiB x 12", "peer:1 with hbm, 64 SMs, 8.00 MiB in flight " * 3)
    )
    shown = Probe(load_profile("h200-nvlink-peer"), figures)
    lines = check_numbers(lambda console: render_profile(shown, console), columns)
    assert any({"4,712.3", "12.3%", "12", "unsteady"} <= set(line.split()) for line in lines)


@pytest.mark.parametrize("columns", WIDTHS)
def test_doctors_findings(columns: int) -> None:
    findings = f"139.80 GiB of 1,234.56 GiB, {'18 links of 26.562 GB/s each way, ' * 6}"
    path = f"/a/{'long/path/' * 20}, 70.88 GiB free"
    checks = [Check("direct transport", "note", findings, findings), Check("cache", "ok", path)]
    lines = printed(lambda console: doctor.render(checks, console), columns)
    assert max(map(len, lines)) <= columns
    words = [word for line in lines for word in line.split()]
    assert words.count("1,234.56") == 2 and words.count("26.562") == 12 and "70.88" in words


@pytest.mark.parametrize("columns", WIDTHS)
def test_a_runs_report(columns: int) -> None:
    spread = {"mean": 0.1234567, "median": 12345.678, "p99": 12345.678}
    found: dict[str, Any] = {
        "model": {"name": "opt-66b [b]", "dtype": "bfloat16", "weight_bytes": 122 << 30},
        "machine": {"device": "NVIDIA H200", "threads": 16},
        "plan": {"profile": {"name": "h200-nvlink-peer"}, "tiers": [{"name": "hbm"}],
                 "workload": {"max_model_len_tokens": 4096}},
        "experts": {"popularity": "earlier runs", "predicted_per_step": 123.4,
                    "predicted_at_mean_batch": 112.5, "measured_per_step": 113.7,
                    "predicted_local_read_share": 0.75, "measured_local_read_share": 0.83},
        "requests": {"finished": 123456, "prompt_tokens": 1234567, "new_tokens": 12345678,
                     "shared_prompt_tokens": 123456,
                     "capped": 12, "preempted": 3, "swapped": 2,
                     "structured": 12345, "valid": 12340},
        "time": {"load_s": 123.4, "prefill_s": 1234.5, "decode_s": 123456.7,
                 "decode_steps": 12345, "wall_s": 123567.8, "bound_s": 98765.4},
        "ttft_s": spread, "tpot_s": spread, "decode_step_s": spread, "predicted_step_s": 0.12,
        "predictions_comparable": True,
        "tokens_per_s": 123456.7, "eb_bytes_per_s": 4e12, "eb_total_bytes_per_s": 4.7e12,
        "tiers": [{"name": "hbm", "weights_bytes": 123 << 30, "kv_bytes": 12 << 30,
                   "vectors_bytes": 50 << 20, "activations_bytes": 865 << 20}],
        "ops": [{"name": name, "layers": 64, "bound_s": 0.1, "predicted_s": 0.5, "measured_s": 1}
                for name in ("attention", "gate_up")],
    }  # fmt: skip
    short = check_numbers(lambda console: summary.render(found, console), columns)
    lines = check_numbers(lambda console: summary.render(found, console, verbose=True), columns)
    assert lines[0].split()[:3] == short[0].split()[:3] == ["model", "opt-66b", "[b]"]
    assert len(short) <= 6  # with the lines on the profile and the rows eight at most
    assert not any(line.startswith(("tier", "attention")) for line in short)
    assert {"tier", "attention", "gate_up"} <= {line.split()[0] for line in lines}


def test_columns_of_high_rank_are_left_out_first_and_named() -> None:
    table = (
        Column("op", "left"), Column("read by a step", rank=2), Column("note", rank=1),
    )  # fmt: skip
    rows = [("qkv", "12,345.6", "1,234"), ("o", "1", "2")]
    assert printed(lambda console: print_table(console, table, rows), 120) == [
        "op  read by a step  note",
        "qkv       12,345.6 1,234",
        "o                1     2",
    ]
    narrow = printed(lambda console: print_table(console, table, rows), 18)
    assert narrow[-2:] == ["qkv 12,345.6 1,234", "o          1     2"]
    assert [line.split() for line in narrow[:-2]] == [["read", "by"], ["op", "a", "step", "note"]]
    least = printed(lambda console: print_table(console, table, rows), 12)
    assert least[:2] == ["op   note", "qkv 1,234"]
    assert " ".join(least[3:]) == "not shown in 12 columns: read by a step; --wide shows them"


@pytest.mark.parametrize(
    ("asked", "found"), [("80", 80), ("300", 300), ("", WIDTH), ("0", WIDTH), ("wide", WIDTH)]
)
def test_pipes_are_as_wide_as_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, asked: str, found: int
) -> None:
    monkeypatch.setenv("COLUMNS", asked)
    with (tmp_path / "out").open("w", encoding="utf-8") as file:
        assert width(file) == found
    assert width(io.StringIO()) == found
