"""`dakrun plan` and what every command shares: output, exit codes, error lines, late imports."""

import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

import dakrun
from dakrun.cli import main
from dakrun.errors import CannotRun
from dakrun.hardware import load_profile, profile_text
from dakrun.units import format_seconds

ROOT = Path(__file__).resolve().parent.parent
LIMIT = "--max-decode-step"
PLAN = ("plan", "--model", "opt-30b", "--profile", "gh200", "--batch-size", "8")
TWO_GPUS = (*PLAN, "--profile", "h200-nvlink-peer", "--remote", "peer")


def run(*args: str, **environment: str) -> Result:
    env = {"DAKRUN_DEBUG": "", "NO_COLOR": "", "COLUMNS": "120", **environment}
    return CliRunner(env=env).invoke(main, list(args))


def plan_json(*args: str, said: str = "") -> dict[str, Any]:
    result = run(*PLAN, "--json", *args)
    assert result.exit_code == 0, result.stderr
    assert result.stderr.startswith(said) if said else result.stderr == ""
    shown: dict[str, Any] = json.loads(result.stdout)
    return shown


def error_lines(result: Result) -> tuple[str, str]:
    """The message and the hint of a failed run: exactly these two lines, and no output."""
    assert result.stdout == ""
    error, hint = result.stderr.splitlines()
    assert error.startswith("error: ") and hint.startswith("hint: ")
    return error.removeprefix("error: "), hint.removeprefix("hint: ")


def process(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter with the arguments `command`, its output piped."""
    env = {**os.environ, **environment}
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=env, text=True, capture_output=True
    )


def test_drafts_are_shown_where_they_are_asked_for() -> None:
    steps = plan_json("--speculate", "suffix:3")["drafts"]["steps"]
    assert [one["rows"] for one in steps] == [1, 2, 4, 8]
    assert steps[-1]["token_s"]["0.95"] < steps[-1]["token_s"]["0.5"] < steps[-1]["step_s"]
    text = re.sub(r"\s+", " ", run(*PLAN, "--speculate", "suffix:3").stdout)
    assert "8 rows of 4 tokens take" in text and "at an acceptance of 0.8" in text
    assert f"more than {steps[-1]['break_even_tokens_per_row']:.2f} tokens of a row" in text
    assert plan_json()["drafts"] is None and "drafts save" not in run(*PLAN).stdout
    assert "expected auto" in error_lines(run(*PLAN, "--speculate", "on"))[0]


def test_table() -> None:
    result = run(*PLAN)
    assert result.exit_code == 0 and result.stderr == ""
    lines = result.stdout.splitlines()
    first = lines.index("What each op needs")
    heading = "op shape bytes FLOP FLOP/B ridge regime a b"
    assert lines[first + 1].split() == heading.split()
    names = ["qkv", "attention", "o", "fc1", "fc2", "lm_head"]
    assert [line.split()[0] for line in lines[first + 2 : first + 8]] == names
    needs = "qkv x48 21504x7168 13.78 GiB 118.4 G 8.0 247 memory 8.8% 8.8%"
    assert lines[first + 2].split() == needs.split()
    second = lines.index("What the plan does with it")
    heading = "op ratio units SMs window via bound predicted EB GB/s"
    assert lines[second + 1].split() == heading.split()
    assert [line.split()[0] for line in lines[second + 2 : second + 8]] == names
    choice = lines[second + 2].split()
    assert choice[:6] == ["qkv", "8.4%", "118128/10896", "132/0", "-", "direct"]
    for text in ("hbm memory", "host memory", "TTFT", "decode step", "tokens/s", "EB total"):
        assert text in result.stdout
    titles = [line[:15].strip() for line in lines]
    for title in ("offload ratio", "phase", "KV per step", "prefill", "uniform bound", "advice"):
        assert title in titles
    assert "gh200" in result.stdout and "spec-sheet, 2026-11-21" in result.stdout


def test_the_answer_comes_first() -> None:
    """Three lines: where the model fits, how fast it runs, what it waits for; the tables follow."""
    lines = run(*PLAN).stdout.splitlines()
    shown = plan_json()
    assert lines[:5] == [
        "fits           hbm 52.91 of 89.41 GiB, host 4.72 of 447.03 GiB",
        "speed          536.8 tokens/s in decode steps, 504.8 with prompts; decode step 14.90 ms "
        "for 8 requests",
        "waits for      memory: HBM bandwidth (93% of the step) and the link to host memory "
        "(89% of the step)",
        "",
        "What each op needs",
    ]
    assert f"{shown['predicted']['tokens_per_s']:.1f}" == "536.8"
    assert f"{shown['predicted']['tokens_per_s_with_prompts']:.1f}" == "504.8"
    used = [tier["used_bytes"] / 2**30 for tier in shown["tiers"]]
    assert [f"{size:.2f}" for size in used] == ["52.91", "4.72"]
    computing = run(*PLAN, "--batch-size", "512").stdout.splitlines()[2]
    assert computing.startswith("waits for      arithmetic (")
    peer = run(*TWO_GPUS, "--hbm-budget", "40GiB").stdout.splitlines()[0]
    assert peer.startswith("fits           hbm ") and ", peer:1 " in peer
    small = run(*PLAN, "--hbm-budget", "10GiB", "--host-budget", "10GiB")
    message, hint = error_lines(small)
    assert small.exit_code == 3 and message.startswith("the model does not fit: ")
    assert "--host-budget" in hint


@pytest.mark.parametrize(
    ("columns", "option"), [("80", "--wide"), ("100", "--wide"), ("", "--profile=h200-pcie5")]
)
def test_piped_table_is_whole(columns: str, option: str) -> None:
    command = ("-m", "dakrun", "plan", "--model", "opt-66b", "--profile", "h200-pcie5", option)
    done = process(*command, COLUMNS=columns, TERM="dumb")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= int(columns or 120)
    assert "…" not in done.stdout and "\x1b" not in done.stdout and done.stdout.isascii()
    # "qkv x64", sizes, FLOPs, windows and times are two words
    first = lines.index("What each op needs")
    assert len(lines[first + 2].split()) == len(lines[first + 3].split()) == 12
    second = lines.index("What the plan does with it")
    for row in lines[second + 2 : second + 8]:
        windowed = "KiB" in row or "MiB" in row  # not where nothing is remote, or all staged
        assert len(row.split()) == (12 if windowed else 11), row
    assert not any(line != line.rstrip() for line in lines)


@pytest.mark.usefixtures("unadvised")
@pytest.mark.parametrize(
    ("batch_size", "ratio", "phase", "said"),
    [
        ("8", "auto", 1, "faster"),
        ("512", "0.15", 2, "no slower"),
        ("512", "0.9", 3, "costs link time"),
    ],
)
def test_phases_in_words(batch_size: str, ratio: str, phase: int, said: str) -> None:
    args = (*PLAN, "--batch-size", batch_size, "--offload-ratio", ratio)
    assert json.loads(run(*args, "--json").stdout)["phase"] == phase
    row = next(line for line in run(*args).stdout.splitlines() if line.startswith("phase"))
    assert f"{phase} of 3" in row and said in row


def test_json() -> None:
    shown = plan_json("--prompt-len", "1024")
    assert shown["workload"]["batch_size"] == 8
    assert shown["workload"]["max_model_len_tokens"] == 1024 + 32
    assert shown["profile"]["provenance"]["kind"] == "spec-sheet"
    assert [tier["name"] for tier in shown["tiers"]] == ["hbm", "host"]
    assert shown["asked_strategy"] == "auto" and shown["required_ratio"] == 0
    for kind in ("decode_step_s", "ttft_s"):
        assert 0 < shown["bound"][kind] < shown["predicted"][kind]
    assert shown["prefill"]["tokens"] == 8 * 1024 and shown["prefill"]["chunks"] == 2
    assert shown["phase"] == 1
    figures = {*shown["bound"], "tokens_per_s_with_prompts"}
    assert shown["uniform"]["runs"] and set(shown["uniform"]["predicted"]) == figures
    qkv = shown["ops"][0]
    assert qkv["transport"] == "direct"
    assert qkv["ridge_flops_per_byte"] == shown["profile"]["ridge_flops_per_byte"]
    assert [tier["window_bytes"] for tier in qkv["tiers"]] == [None, None]
    assert [tier["mixed"] for tier in qkv["tiers"]] == [False, True]
    assert sum(tier["sms"] for tier in qkv["tiers"]) == shown["profile"]["sms"]


@pytest.mark.usefixtures("unadvised")
@pytest.mark.parametrize("ratio", ["auto", "0.3"])
def test_what_others_published_is_shown_beside(ratio: str) -> None:
    """Of the same model and batch size, at their offload ratio whatever is planned."""
    (found,) = plan_json("--offload-ratio", ratio)["published"]
    assert (found["model"], found["batch_size"], found["offload_ratio"]) == ("opt-30b", 8, 0.1)
    assert found["eb_bytes_per_s"] == 3.3e12 and "2604.26074" in found["source"]
    alike = plan_json("--offload-ratio", "0.1")
    for kind in ("bound", "predicted"):
        assert found[f"{kind}_eb_bytes_per_s"] == alike[kind]["eb_bytes_per_s"]
    bound = found["bound_eb_bytes_per_s"]
    assert found["efficiency"] == pytest.approx(3.3e12 / bound)
    assert found["predicted_efficiency"] == pytest.approx(found["predicted_eb_bytes_per_s"] / bound)
    text = " ".join(run(*PLAN, "--offload-ratio", ratio).stdout.split())
    assert "published EB 3,300.0 GB/s with 10% outside hbm: 87% of the bound" in text


@pytest.mark.usefixtures("unadvised")
@pytest.mark.parametrize(
    "other", [("--batch-size", "9"), ("--model", "opt-6.7b"), ("--profile", "h200-spec")]
)
def test_nothing_is_published_of_others(other: tuple[str, ...]) -> None:
    assert plan_json(*other)["published"] == []


@pytest.mark.usefixtures("unadvised")
def test_the_uniform_strategy_is_shown_beside_the_plan() -> None:
    budget = ("--hbm-budget", "20GiB")
    shown = plan_json(*budget)["uniform"]
    itself = plan_json(*budget, "--strategy", "uniform")
    assert shown["ratio"] == itself["ratio"]
    for kind in ("bound", "predicted"):
        assert shown[kind] == itself[kind] == itself["uniform"][kind]


@pytest.mark.usefixtures("unadvised")
def test_options_reach_the_planner() -> None:
    budget = plan_json("--hbm-budget", "20GiB", "--host-budget", "400GB")["tiers"]
    assert [tier["budget_bytes"] for tier in budget] == [20 * 2**30, 4 * 10**11]
    assert plan_json("--offload-ratio", "0.25")["ratio"] == pytest.approx(0.25, abs=1e-3)
    assert plan_json("--offload-ratio", "auto") == plan_json()
    halves = plan_json("--kv-offload-ratio", "0.5")["ops"]
    assert next(op["ratio"] for op in halves if op["name"] == "attention") == 0.5
    for strategy in ("greedy", "uniform"):
        shown = plan_json("--strategy", strategy, "--hbm-budget", "20GiB")
        assert shown["strategy"] == shown["asked_strategy"] == strategy
    assert plan_json("--dtype", "float32")["model"]["dtype"] == "float32"
    assert plan_json("--max-model-len", "128")["workload"]["max_model_len_tokens"] == 128
    assert plan_json("--max-tokens", "7")["workload"]["new_tokens"] == 7


def test_auto_batch_size_and_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    def gpus(*names: str) -> None:
        # The inner name, too: find_profile has it from there.
        for module in ("dakrun.hardware", "dakrun.hardware.files"):
            monkeypatch.setattr(f"{module}.gpu_names", lambda: list(names))

    gpus()
    small = ("--profile", "auto", "--model", "opt-125m", "--batch-size", "auto")
    shown = plan_json(*small, said="profile cpu of CPU: not measured")
    assert shown["profile"]["name"] == "cpu"
    assert shown["workload"]["batch_size"] > 1
    for name, said in (
        ("h200-pcie5", "profile h200-pcie5 of NVIDIA H200: measured"),
        ("h100-pcie5", "warning: profile h100-pcie5: 6 of 95 figures spread by more than 5%"),
    ):
        gpus(load_profile(name).device_name)
        assert plan_json("--profile", "auto", said=said)["profile"]["name"] == name


def test_a_model_directory_and_a_profile_file(tmp_path: Path) -> None:
    raw = {
        "model_type": "opt", "vocab_size": 64, "hidden_size": 32, "ffn_dim": 64,
        "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 64,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    profile = tmp_path / "mine.toml"
    profile.write_text(profile_text(load_profile("cpu")).replace('"cpu"', '"mine"', 1), "utf-8")
    shown = plan_json("--model", str(tmp_path), "--profile", str(profile))
    assert shown["model"]["name"] == tmp_path.name and shown["profile"]["name"] == "mine"


@pytest.mark.parametrize(
    ("args", "code", "said", "hint"),
    [
        (("nope",), 2, "No such command 'nope'", "dakrun --help"),
        (("plan",), 2, "Missing option '--model'", "dakrun plan --help"),
        ((*PLAN, "--modell", "x"), 2, "No such option '--modell'", "dakrun plan --help"),
        ((*PLAN, "extra"), 2, "extra", "dakrun plan --help"),
        ((*PLAN, "--batch-size", "0"), 2, "'0' is not auto or an integer from 1 to 1,0", "--help"),
        ((*PLAN, "--batch-size", "x"), 2, "'--batch-size': 'x' is not auto", "--help"),
        ((*PLAN, "--batch-size", "9" * 400), 2, "999' is not auto or an integer", "--help"),
        ((PLAN[0], LIMIT, "20", *PLAN[1:]), 2, "needs --batch-size auto", "--help"),
        ((*PLAN, LIMIT, "20"), 2, "--batch-size auto, not 8", "--help"),
        ((*PLAN[:-1], "auto", LIMIT, "inf"), 2, "it is not a finite number", "--help"),
        ((*PLAN[:-1], "auto", LIMIT, "0.5"), 3, "the fastest takes", f"raise {LIMIT} to"),
        ((*PLAN, "--offload-ratio", "1.5"), 2, "'1.5' is not auto or a number", "--help"),
        ((*PLAN, "--kv-offload-ratio", "nan"), 2, "'nan' is not auto or a number", "--help"),
        ((*PLAN, "--hbm-budget", "20GX"), 2, "'20GX' is not a size", "--help"),
        ((*PLAN, "--hbm-budget", "9" * 400), 2, "999' is not a size", "--help"),
        ((*PLAN, "--host-budget", "9" * 300 + "TiB"), 2, "999TiB' is not a size", "--help"),
        ((*PLAN, "--strategy", "best"), 2, "'best' is not one of", "--help"),
        ((*PLAN, "--prompt-len", "0"), 2, "'--prompt-len'", "--help"),
        ((*PLAN, "--max-model-len", "63"), 2, "do not fit in --max-model-len 63", "to 64"),
        ((*PLAN, "--max-model-len", "4096"), 2, "2048 positions of opt-30b", "--max-model-len"),
        ((*PLAN, "--profile", "nope"), 2, "no profile 'nope'", "gh200"),
        ((*PLAN, "--model", "opt-30"), 2, "no such model directory or known name", "opt-30b"),
        ((*PLAN, "--remote", "peer:1"), 2, "no remote tier 'peer:1'", "host"),
        ((*PLAN, "--remote", "peer"), 2, "no remote tier 'peer'", "host; dakrun profile finds"),
        ((*TWO_GPUS, "--remote", "peer,peer:1"), 2, "peer and peer:1", "once"),
        ((*TWO_GPUS, "--hbm-budget", "9GiB", "--peer-budget", "1GiB"), 3,
         "too small: 9.00 GiB of HBM and 1.00 GiB of peer:1 memory", "--peer-budget or --hbm-bu"),
        ((*TWO_GPUS, "--remote", "peer,host", "--offload-ratio", "0.5", "--peer-budget", "1GiB",
          "--host-budget", "2GiB"), 3,
         "peer:1 and host memory is over its budget of 3.00 GiB by 25.", "leave --offload-ratio"),
        ((*PLAN, "--remote", "host,host"), 2, "each must be named once", "--remote host"),
        ((*PLAN, "--hbm-budget", "9GiB", "--host-budget", "1GiB"), 3,
         "the budgets are 47.", "--host-budget"),
        ((*PLAN, "--hbm-budget", "30GiB", "--offload-ratio", "0"), 3,
         "over its budget of 30.00 GiB by 27.", "--offload-ratio"),
    ],
)  # fmt: skip
def test_errors(args: tuple[str, ...], code: int, said: str, hint: str) -> None:
    result = run(*args)
    assert result.exit_code == code
    error, advice = error_lines(result)
    assert said in error and hint in advice


def test_help_and_version() -> None:
    for args in (("--help",), ("-h",), ("plan", "--help")):
        result = run(*args)
        assert result.exit_code == 0 and result.stderr == ""
        assert result.stdout.startswith("Usage: dakrun")
    assert run("--version").stdout == f"dakrun {dakrun.__version__}\n"
    bare = run()
    assert bare.exit_code == 2 and bare.stdout == "" and bare.stderr.startswith("Usage: dakrun")


def failing(monkeypatch: pytest.MonkeyPatch, problem: BaseException) -> None:
    def fail(*_: object) -> None:
        raise problem

    monkeypatch.setattr("dakrun.hardware.load_profile", fail)


def test_internal_errors_are_two_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, ZeroDivisionError("a\nb"))
    result = run(*PLAN)
    assert result.exit_code == 1
    error, hint = error_lines(result)
    assert error == "internal: ZeroDivisionError: a b" and "DAKRUN_DEBUG=1" in hint


@pytest.mark.parametrize(
    ("problem", "said", "advice"),
    [
        (PermissionError(errno.EACCES, "Denied", "a/b"), "a/b: Denied", "permissions"),
        (IsADirectoryError(errno.EISDIR, "Is a directory", "a"), "a: Is a dir", "not a folder"),
        (FileNotFoundError(errno.ENOENT, "No such file", "a", 0, "b"), "a: No such", "the path"),
        (OSError(errno.ENOSPC, "No space left\non device"), "No space left on device", "free"),
        (OSError(errno.EIO, "Input/output error", "a"), "a: Input/output error", "DAKRUN_DEBUG=1"),
        (OSError("only words"), "only words", "DAKRUN_DEBUG=1"),
        (TimeoutError(), "TimeoutError", "DAKRUN_DEBUG=1"),
        (MemoryError(), "memory ran out", "--batch-size"),
        (MemoryError("tier hbm"), "memory ran out: tier hbm", "--batch-size"),
    ],
)
def test_errors_of_the_system_name_the_file(
    monkeypatch: pytest.MonkeyPatch, problem: Exception, said: str, advice: str
) -> None:
    failing(monkeypatch, problem)
    result = run(*PLAN)
    assert result.exit_code == 3
    error, hint = error_lines(result)
    assert error.startswith(said) and advice in hint


def test_a_name_that_is_too_long() -> None:
    result = run("plan", "--model", "m" * 300, "--profile", "gh200")
    assert result.exit_code == 3
    error, hint = error_lines(result)
    assert error == "m" * 300 + ": File name too long" and "255 bytes" in hint


@pytest.mark.parametrize(
    ("problem", "code"),
    [
        (ZeroDivisionError("why"), 1),
        (OSError(errno.EIO, "why"), 3),
        (CannotRun("why", hint="how"), 3),
        (click.UsageError("why"), 2),
    ],
)
def test_debug_shows_the_traceback(
    monkeypatch: pytest.MonkeyPatch, problem: Exception, code: int
) -> None:
    failing(monkeypatch, problem)
    result = run(*PLAN, DAKRUN_DEBUG="1")
    assert result.exit_code == code and "Traceback" in result.stderr
    assert result.stderr.splitlines()[-2].startswith("error: ")
    assert "Traceback" not in run(*PLAN).stderr


def test_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, KeyboardInterrupt())
    result = run(*PLAN)
    assert result.exit_code == 130 and result.stderr.strip() == "interrupted"


@pytest.mark.parametrize("last", ["--json", "--strategy=greedy"])
def test_a_closed_pipe_is_quiet(last: str) -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "dakrun", *PLAN, last]
    done = subprocess.run(command, cwd=ROOT, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert done.stderr == "" and done.returncode == 1


@pytest.mark.parametrize("args", [("--help",), PLAN, (*PLAN, "--json")])
def test_a_full_disk_under_stdout_is_said_once(args: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "dakrun", *args]
    env = {**os.environ, "PYTHONUNBUFFERED": ""}
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command, cwd=ROOT, env=env, stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 3
    error, hint = done.stderr.splitlines()
    assert error.startswith("error: ") and error.endswith("No space left on device")
    assert hint == "hint: free some disk space, then run it again"


@pytest.mark.parametrize(
    ("args", "absent"),
    [
        (["--help"], "torch transformers cupy rich numpy huggingface_hub dakrun.plan"),
        ([*PLAN, "--json"], "torch transformers cupy rich numpy huggingface_hub"),
        ([*PLAN], "torch transformers cupy numpy huggingface_hub"),
    ],
)
def test_imports_are_late(args: list[str], absent: str) -> None:
    code = f"""
import sys
from dakrun.cli import main
try:
    main({args!r})
except SystemExit as end:
    assert not end.code
print(*sys.modules, file=sys.stderr)
"""
    done = process("-c", code)
    assert done.returncode == 0, done.stderr
    loaded = done.stderr.split()
    assert "dakrun.cli.main" in loaded and not set(loaded) & set(absent.split())


@pytest.mark.usefixtures("unadvised")
@pytest.mark.parametrize(
    "asked",
    [
        {"--prompt-len": "5000"},
        {"--prompt-len": "5000", "--max-model-len": "2048"},
        {"--prompt-len": "5000", "--max-tokens": "3000"},
        {"--prompt-len": "100", "--max-tokens": "100", "--max-model-len": "150"},
        {"--max-model-len": "5000"},
    ],
)
def test_following_the_hints_ends(asked: dict[str, str]) -> None:
    """Each names an option and a value that brings the command nearer to running."""
    for _ in range(4):
        options = (text for option in asked.items() for text in option)
        result = run("plan", "--model", "opt-30b", "--profile", "gh200", *options)
        if result.exit_code == 0:
            return
        assert result.exit_code == 2
        hint = result.stderr.replace("raise it", "raise --max-model-len")
        ((option, value),) = re.findall(r"hint: \w+ (--[a-z-]+) (?:to )?(\d+)", hint)
        assert asked.get(option) != value
        asked = {**asked, option: value}
    pytest.fail(f"the hints go in circles: {asked}")


LLAMA_70B = ("--model", "llama-3-70b", "--profile", "h100-pcie5", "--batch-size", "8")


def words(result: Result) -> str:
    return " ".join(result.stdout.split())


def test_a_format_counts_as_it_is_stored() -> None:
    """Weights of 4 bits with a 16-bit scale per 128; the table of words and lm_head have 16."""
    plan = json.loads(run("plan", *LLAMA_70B, "--format", "w4a16", "--json").stdout)
    ops = {op["name"]: op for op in plan["ops"]}
    assert ops["down"]["resident_bytes"] == 80 * 8192 * 28672 * (4 + 16 / 128) / 8
    assert ops["lm_head"]["resident_bytes"] == 2 * 8192 * 128_256
    assert ops["down"]["format"] == "int4, a scale per 128"
    assert ops["lm_head"]["format"] == "bfloat16"
    assert plan["model"]["quantization"] == {
        "method": "w4a16", "format": "4-bit, groups of 128", "costs_are_estimates": True,
        "not_applied": [],
    }  # fmt: skip
    assert plan["ratio"] == 0
    shown = words(run("plan", *LLAMA_70B, "--format", "w4a16"))
    assert (
        "4-bit, groups of 128; kept as embedding, lm_head: bfloat16; qkv, o, gate_up, down: i"
        in shown
    )
    assert "costs of products with int4 are estimates" in shown


def test_completions_of_a_file_are_as_long_as_generate_makes_them(tmp_path: Path) -> None:
    """--max-tokens is 128 for rows without their own; 32 without a file, or without rows in it."""
    (tmp_path / "p.txt").write_text("one\ntwo\n")
    (tmp_path / "none.txt").write_text("")

    def tokens(*args: str) -> int:
        shown = json.loads(run(*PLAN, "--json", *args).stdout)
        return round(shown["workload"]["new_tokens"])

    rows = ("-i", str(tmp_path / "p.txt"))
    assert tokens(*rows) == tokens(*rows, "--max-tokens", "128") == 128
    assert tokens(*rows, "--max-tokens", "32") == tokens() == 32
    assert tokens("-i", str(tmp_path / "none.txt")) == 32


def test_without_a_gpu_plan_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dakrun.hardware.gpu_names", list)
    for model in ("opt-125m", "opt-66b"):  # which do and do not fit
        shown = run("plan", "--model", model, "--batch-size", "8", "--profile", "auto")
        assert "no GPU was found: name one to plan for, as --profile h200-pcie5" in shown.stderr


def test_strategies_are_compared_by_the_plans_that_are_shown() -> None:
    """Those with the least time of a step and of the prompts that it carries."""
    asked = ("plan", "--model", "glm-4.5-air-fp8", "--profile", "gh200", "--json")
    shown = json.loads(run(*asked).stdout)
    uniform = shown["uniform"]["predicted"]["decode_step_s"]
    assert f"with uniform {format_seconds(uniform)}" in shown["strategy_reason"]


def test_gains_that_are_written_as_zero_are_not_noted() -> None:
    notes = [
        line
        for profile in ("h200-pcie5", "h100-pcie5", "gh200")
        for line in run("plan", "--model", "llama-2-7b", "--profile", profile).stdout.splitlines()
        if line.startswith("note ")
    ]
    assert not any(" 0.0%" in line for line in notes)


def test_what_a_quantized_checkpoint_would_take() -> None:
    said = "a quantized checkpoint (lossy) would have 36.79 GiB in 4 bits"
    shown = words(run("plan", *LLAMA_70B))
    assert f"{said} (fits in HBM) or 69.66 GiB in FP8 (fits in HBM), not 131.4" in shown
    small = run("plan", *LLAMA_70B, "--hbm-budget", "4GiB", "--host-budget", "4GiB")
    assert f"{said} or 69.66 GiB in FP8, not" in error_lines(small)[1]
    assert small.exit_code == 3
    assert "lossy" not in words(run("plan", *LLAMA_70B, "--model", "llama-3-8b"))


def test_a_format_is_for_models_of_16_bits(tmp_path: Path) -> None:
    config = {
        "model_type": "llama", "vocab_size": 64, "hidden_size": 128, "intermediate_size": 128,
        "num_hidden_layers": 1, "num_attention_heads": 2, "dtype": "float16",
        "quantization_config": {
            "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [64, 64],
        },
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    asked = ("--model", str(tmp_path), "--profile", "h100-pcie5", "--batch-size", "1")
    shown = words(run("plan", *asked))
    assert "FP8, a scale per 64x64 block; kept as embedding, lm_head: float16; qkv, o" in shown
    assert "not applied dynamic FP8 activations: products read the weights alone" in shown
    refused = run("plan", *asked, "--format", "awq")
    assert "stored in FP8, a scale per 64x64 block already" in error_lines(refused)[0]
    (tmp_path / "p.jsonl").write_text('{"prompt": [1]}')
    files = ("-i", str(tmp_path / "p.jsonl"), "-o", str(tmp_path / "o.jsonl"))
    refused = run("generate", "--model", str(tmp_path), "--format", "awq", *files)
    assert "--format is for random weights" in refused.stderr and refused.exit_code == 2


def test_budgets_beyond_the_machine_are_noted() -> None:
    """A mistyped unit gives a plan that looks fine."""
    command = ["plan", "--model", "llama-3-8b", "--profile", "h100-pcie5", "--batch-size", "8"]
    asked = CliRunner().invoke(main, [*command, "--hbm-budget", "500GiB", "--host-budget", "4TiB"])
    assert asked.exit_code == 0, asked.output
    assert "note: --hbm-budget 500.00 GiB is more than the 79." in asked.stderr
    assert "note: --host-budget 4.00 TiB is more than the " in asked.stderr
    assert " of profile h100-pcie5\n" in asked.stderr
    within = CliRunner().invoke(main, [*command, "--hbm-budget", "40GiB", "--peer-budget", "9TiB"])
    assert within.exit_code == 0 and "is more than" not in within.stderr
