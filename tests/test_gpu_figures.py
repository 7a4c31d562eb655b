"""The tool that compares figures of a GPU with their bars: its table, its lines, what it runs."""

import json
import time
from pathlib import Path

import pytest
from tools import gpu_figures
from tools.gpu_figures import (
    RATE,
    TABLE,
    Bar,
    Figure,
    Run,
    Runner,
    cell,
    equal,
    per,
    rows,
    write_requests,
)  # fmt: skip

from dakrun.cli.bench import MODEL, _own_options
from dakrun.cli.main import main as dakrun
from dakrun.lab.bench.run import SWEEPS

# A program of dakrun's name: rows as bench writes them, a report and answers as generate does.
# The file `plan` beside it says what differs: the factor of times, or what fails.
PROGRAM = """
import itertools, json, pathlib, sys
def of(name): return [b for a, b in zip(sys.argv, sys.argv[1:]) if a == name]
plan = json.loads(pathlib.Path("plan").read_text())
with open("calls", "a") as out: out.write(json.dumps(sys.argv[1:]) + "\\n")
if plan.get("fails") in sys.argv:
    sys.exit("\\n".join(f"line {n}" for n in range(20)))
slow = plan.get("slow", 1.0)
if sys.argv[1] == "generate":
    rows = [json.loads(line) for line in open(of("-i")[0])]
    answers = [{"id": row["id"], "token_ids": [plan.get("token", 7)]} for row in rows]
    pathlib.Path(of("-o")[0]).write_text("".join(json.dumps(row) + "\\n" for row in answers))
    times = {"wall_s": 10.0 * slow, "bound_s": 8.0, "predicted_s": 9.5,
             "decode_steps": 9}
    found, target = {"tokens_per_s": 1000 / slow, "time": times}, of("--report")[0]
else:
    sizes = [int(n) for n in of("--batch-size")] or [8]
    ratios, ways = map(float, of("--ratio") or [0]), of("--transport") or ["auto"]
    rows = [{"batch_size": n, "asked_ratio": ratio, "asked_transport": way, "step_s": slow * n,
             "ttft_s": slow, "spread": 0.0, "limit_over_time": 0.99 / slow, "speedup": 2.0,
             "eb_total_over_ceiling": 0.9 / slow, "prediction_error": -0.01, "problem": None,
             "remote_read_bytes": 98, "draft_step_s": slow}
            for n, ratio, way in itertools.product(sizes, ratios, ways)]
    if "number" in of("--expert-order"):
        rows[0]["step_s"] *= 2
    if of("--kernel"):
        rows = [{"case": case, "kv_bytes": 1e9, "bound_over_time": 0.95 / slow, "time_s": slow,
                 "speedup": 1.1 / slow} for case in of("--case") or ["4:32/8:512"]]
    found, target = {"rows": rows, "copied_bytes_per_s": {"host": 100.0}}, of("-o")[0]
pathlib.Path(target).write_text(json.dumps(found))
"""
TINY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 51_000, "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5, "hidden_act": "silu", "torch_dtype": "float32",
}  # fmt: skip
FIGURES = [(group, figure) for group, figures in TABLE.items() for figure in figures]
RUNS = {run.arguments: run for _, figure in FIGURES for run in figure.runs}


def checkout(folder: Path, **plan: object) -> Path:
    """A folder with the program, and tools that find nothing to mark."""
    for name, text in (
        ("dakrun/__init__.py", ""),
        ("dakrun/__main__.py", PROGRAM),
        ("tests/tools/format_speed.py", "print('28672x4096 8 0.300 0.31')"),
        ("tests/tools/grouped_speed.py", "print('8 ok')"),
        ("plan", json.dumps(plan)),
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def calls(folder: Path) -> list[list[str]]:
    return [json.loads(line) for line in (folder / "calls").read_text().splitlines()]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(gpu_figures, "ROOT", checkout(tmp_path / "here"))
    monkeypatch.setattr(gpu_figures.shutil, "which", lambda _: None)
    return tmp_path / "here"


def measure(capsys: pytest.CaptureFixture[str], *options: object) -> tuple[int, list[str]]:
    """The exit status, and the lines behind the first."""
    status = gpu_figures.main(list(map(str, options)))
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith("no GPU, profile ")
    return status, lines


@pytest.mark.full
def test_every_figure_has_a_value(
    here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = checkout(tmp_path / "base")
    status, lines = measure(capsys, "--base", base, "--folder", tmp_path / "kept")
    assert [line for line in lines if ": ok " not in line] == [], lines
    assert status == 0 and len(lines) == sum(len(figure.bars) for _, figure in FIGURES)
    shared = [call for call in calls(here) if call[:3] == ["generate", "--model", "llama-3-8b"]]
    assert len(shared) == 1 + 1 + 2 + 2  # normal, held, two formats, two turns
    assert len(calls(base)) == 2 + 5 * 2
    assert json.loads((tmp_path / "kept/formats-awq-hbm-0-0.json").read_text())["rows"]


def test_what_is_slower_than_the_base_is_missed(
    here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkout(here, slow=1.015, token=8)
    base, folder = checkout(tmp_path / "base"), tmp_path / "kept"
    options = "--only", "host", "--only", "file", "--only", "tokens-0", "--profile", "some.toml"
    status, lines = measure(capsys, "base", "--base", base, "--folder", folder, *options)
    assert status == 1 and lines == [
        "base-tokens-0: MISSED equal answers: 0.000, at least 1 (0 of 200)",
        "base-host: MISSED 8 rows step_s: 1.015, at most 1.01 (8000 ms, 8120 ms; 8000 ms, 8120 ms)",
        "base-file: ok tokens/s: 0.985, at least 0.98 (1,000, 985.2; 1,000, 985.2)",
    ]
    assert all(call[call.index("--profile") + 1] == "some.toml" for call in calls(base))


def test_the_rest_goes_on_behind_a_command_that_fails(
    here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkout(here, fails="qwen3-8b")
    status, lines = measure(capsys, "formats", "--only", "fp8-hbm", "--only", "awq-half")
    assert status == 1
    assert lines[0].startswith("formats-fp8-hbm-0-0: FAILED, exit code 1: bench --model qwen3-8b")
    assert lines[1:9] == [f"    line {n}" for n in range(12, 20)]
    assert lines[9].startswith("formats-fp8-hbm: FAILED 8 rows eb_total_over_ceiling: no value")
    assert [": ok " in line for line in lines[10:]] == [False, True, True, True, True]


def test_what_takes_too_long_is_left_out(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, lines = measure(capsys, "mixtures", "--seconds", "41", "--only", "half", "--only",
                            "products")  # fmt: skip
    assert status == 0 and lines[0] == "mixtures-half: left out, 120 s expected, 41 s left"
    assert lines[1].startswith("mixtures-products: ok rows under their bars: 0.000, at most 0")
    assert not (here / "calls").exists()


def test_a_command_is_ended_when_the_time_is_over(
    here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "tests/tools/slow.py").write_text("import time\nprint('so far', flush=True)\n"
                                              "time.sleep(60)")  # fmt: skip
    runner, start = Runner(tmp_path, time.monotonic() + 1.0, "auto"), time.monotonic()
    bar = Bar("marks", per(lambda text: text.count("!")), 0, True)
    runner.measure(Figure("slow", (Run("tests/tools/slow.py", 0),), [bar]))
    assert time.monotonic() - start < 20 and runner.failed
    assert capsys.readouterr().out.splitlines() == [
        "slow-0-0: FAILED, exit code none, the time is over: tests/tools/slow.py", "    so far",
        "slow: FAILED marks: no value, AttributeError(\"'dict' object has no attribute 'count'\")",
    ]  # fmt: skip


@pytest.mark.parametrize("options", (["other"], ["base"], ["limits", "--only", "zipf"]))
def test_figures_that_do_not_exist(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        gpu_figures.main(options)
    assert "no such figures, or no --base; groups: limits, formats" in capsys.readouterr().err


def test_a_problem_of_a_row_is_said() -> None:
    bar = Bar("step", cell("step_s", batch_size=8), 1.0)
    found = [{"batch_size": 1}, {"batch_size": 8, "step_s": None, "problem": "too little memory"}]
    assert bar.line([[{"rows": found}]]) == (
        "FAILED step: no value, ValueError(['too little memory'])"
    )
    assert "FAILED same: no value" in Bar("same", equal, 1.0).line([[{}, {}]])


@pytest.mark.parametrize("arguments", RUNS)
def test_dakrun_knows_all_options(arguments: str) -> None:
    """Options are parsed, and models and cases looked up; nothing is measured."""
    verb, *options = arguments.split()
    if verb.endswith(".py"):
        assert (gpu_figures.ROOT / verb).is_file()
        return
    command = dakrun.get_command(None, verb)
    more = ["-i", "in", "-o", "out"] if verb == "generate" else []
    more += ["--load-format", "dummy"] if "--model" in options else []
    with command.make_context(verb, [*options, *more]) as context:
        if verb == "bench":
            given = {name: value for name, value in context.params.items() if name not in (
                "kernel", "profile", "form", "output", "plot", "wide", "limits")}  # fmt: skip
            subject = context.params["kernel"] or MODEL
            SWEEPS[subject](**_own_options(subject, given))


def test_requests_are_the_same_again(tmp_path: Path) -> None:
    """2,000 have the lengths of those behind the figures in profiles/README.md."""
    write_requests(tmp_path / "all", 2000, 512)
    write_requests(tmp_path / "some", 200, 512)
    write_requests(tmp_path / "short", 200, 128)
    lines = (tmp_path / "all").read_text().splitlines()
    assert (tmp_path / "some").read_text().splitlines() == lines[:200]
    requests = [json.loads(line) for line in lines]
    assert sum(len(row["prompt_token_ids"]) for row in requests) == 372_568
    assert sum(row["max_tokens"] for row in requests) == 360_402
    assert len({row["id"] for row in requests}) == 2000
    short = [json.loads(line) for line in (tmp_path / "short").read_text().splitlines()]
    wanted = [{**row, "max_tokens": min(128, row["max_tokens"])} for row in requests[:200]]
    assert short == wanted


@pytest.mark.full
def test_commands_of_dakrun_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A step and a file of a tiny model on the CPU, as the figures of large ones are measured."""
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny/config.json").write_text(json.dumps(TINY))
    runner = Runner(tmp_path, time.monotonic() + 300, "cpu")
    step = Run(f"bench --model {tmp_path}/tiny --batch-size 2 --new-tokens 4", 1)
    file = Run(f"generate --model {tmp_path}/tiny --device cpu --threads 1", 1, rows=3)
    runner.measure(Figure("step", (step,), rows("limit_over_time", {2: 0.0})))
    runner.measure(Figure("same", (file, file), [Bar("answers", equal, 1.0), Bar("rate", RATE, 0)]))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("step: ok 2 rows limit_over_time: 0.")
    assert lines[1] == "same: ok answers: 1.000, at least 1 (3 of 3)"
    assert lines[2].startswith("same: ok rate: ") and len(lines) == 3 and not runner.failed
