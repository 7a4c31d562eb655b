"""Measures the figures that a version must reach on a GPU, and compares them with their bars.

    python tests/tools/gpu_figures.py mixtures formats --seconds 500
    python tests/tools/gpu_figures.py base --base ../before --only file --folder kept

Groups are the keys of TABLE. limits compares the card with itself held to --limits 12.0; base runs
commands of this checkout in turns with those of --base DIR; draft_speed.py has files with drafts.
Without groups all run, base only with --base, in the order of TABLE. A figure is left out if its
commands are expected to take longer than what is left of --seconds, on an H100 whose profile is in
the cache: with --profile auto the first command of a model may measure one, the first with --limits
another. A command is ended when the time is over. Figures share commands, but for those in turns.

The card's name comes first, then a line for each value with its bar, ok or MISSED, and the times or
rates that it follows from. The last lines of a command that fails are shown, and the rest goes on.
Exit status 1: a value is missed, or a command failed.
"""

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import click
import numpy as np

ROOT = Path(__file__).parents[2]
Result = Any  # what a command wrote: its JSON, with the answers to requests, or a script's text
Value = Callable[..., tuple[float, str]]  # of each run's result: a value, what it follows from


@dataclass(frozen=True)
class Run:
    """Arguments of dakrun, or a script; seconds expected; rows that generate gets, their tokens."""

    arguments: str
    seconds: int = field(compare=False)
    rows: int = 2000
    most_tokens: int = 512
    base: bool = False  # from the checkout --base


@dataclass(frozen=True)
class Bar:
    """A value of a figure's results, whose median of all turns is at least `bar`, or at most."""

    what: str
    value: Value
    bar: float
    most: bool = False

    def line(self, turns: Sequence[Sequence[Result]]) -> str:
        """The value, its bar, and ok, MISSED, or FAILED if there is no value."""
        try:
            found = [self.value(*results) for results in turns]
        except Exception as problem:  # of any kind, where a command has not written what is read
            return f"FAILED {self.what}: no value, {problem!r}"
        value, details = median(value for value, _ in found), "; ".join(said for _, said in found)
        met = value <= self.bar if self.most else value >= self.bar
        bar = f"{'at most' if self.most else 'at least'} {self.bar:.3g}"
        return f"{'ok' if met else 'MISSED'} {self.what}: {value:.3f}, {bar} ({details})"


@dataclass(frozen=True)
class Figure:
    """One run or two to compare, as often as `turns`, and the bars of their values."""

    name: str
    runs: tuple[Run, ...]
    bars: Sequence[Bar]
    turns: int = 1


def cell(key: str, **wanted: Any) -> Value:
    """`key` of the first row with the `wanted` values, without the sign of prediction errors."""

    def value(*results: Result) -> tuple[float, str]:
        rows = [next(row for row in of["rows"] if wanted.items() <= row.items()) for of in results]
        if problems := list(filter(None, (row.get("problem") for row in rows))):
            raise ValueError(problems)
        time = key if key.endswith("_s") else "step_s" if "step_s" in rows[0] else "time_s"
        said = ", ".join(f"{1e3 * row[time]:.4g} ms" for row in rows)
        return per(lambda row: abs(row[key]))(*rows)[0], said

    return value


def per(value: Callable[[Result], float]) -> Value:
    """The value of the one run, or that of the second run over the first's."""

    def ratio(*results: Result) -> tuple[float, str]:
        found = [value(of) for of in results]
        return found[-1] / (found[0] if found[1:] else 1), ", ".join(f"{of:,.4g}" for of in found)

    return ratio


def equal(first: Result, second: Result) -> tuple[float, str]:
    """The share of answers that have the same tokens in both runs."""
    first, second = first["answers"], second["answers"]
    same = sum(ids is not None and second.get(id) == ids for id, ids in first.items())
    return same / len(first), f"{same} of {len(first)}"


def foretold(result: Result) -> tuple[float, str]:
    """How far a run's wall time is from the predicted one, as a share of it."""
    wall, predicted = (result["time"][key] for key in ("wall_s", "predicted_s"))
    said = f"{wall:.4g} s, predicted {predicted:.4g} s, {result['tokens_per_s']:.4g} tokens/s"
    return abs(wall / predicted - 1), said


def worst(key: str, least_bytes: float = 0) -> Value:
    """The smallest `key` of a kernel's cases that read so many bytes of KV."""
    return per(lambda of: min(case[key] for case in of["rows"] if case["kv_bytes"] >= least_bytes))


def write_requests(path: Path, rows: int, most_tokens: int) -> None:
    """Ragged requests, the same in every call: logarithms of both lengths are normal."""
    chance = np.random.default_rng(7)
    prompts = np.clip(np.exp(chance.normal(4.7, 1.1, 2000)), 8, 1500).astype(int)
    answers = np.clip(np.exp(chance.normal(4.9, 0.9, 2000)), 4, 512).astype(int)
    lengths = enumerate(zip(prompts[:rows], answers[:rows], strict=True))
    path.write_text("".join(json.dumps({
        "id": f"r{number}", "ignore_eos": True,
        "max_tokens": min(most_tokens, int(answer)),
        "prompt_token_ids": chance.integers(10, 50_000, prompt).tolist(),  # all models have them
    }) + "\n" for number, (prompt, answer) in lengths))  # fmt: skip


@dataclass
class Runner:
    """Runs commands until the time `end`; `folder` keeps what they write."""

    folder: Path
    end: float
    profile: str
    base: Path | None = None
    done: dict[Run, Result] = field(default_factory=dict)
    failed: bool = False

    def measure(self, figure: Figure) -> None:
        """Run the figure's commands, or say that they are left out; print a line for each bar."""
        new = [run for run in figure.runs if figure.turns > 1 or run not in self.done]
        expected, left = figure.turns * sum(run.seconds for run in new), self.end - time.monotonic()
        if expected > left:
            return click.echo(f"{figure.name}: left out, {expected} s expected, {left:.0f} s left")
        turns = []
        for turn in range(figure.turns):
            for number, run in enumerate(figure.runs):
                if run in new:
                    self.done[run] = self.result(run, f"{figure.name}-{turn}-{number}")
            turns.append([self.done[run] for run in figure.runs])
        for bar in figure.bars:
            click.echo(f"{figure.name}: {(line := bar.line(turns))}")
            self.failed |= not line.startswith("ok")

    def result(self, run: Run, stem: str) -> Result:
        """What the command wrote, {} if nothing; its last lines are shown if it failed."""
        command, generates = run.arguments.split(), run.arguments.startswith("generate")
        log, out, answers = (self.folder / f"{stem}.{end}" for end in ("log", "json", "jsonl"))
        out.unlink(missing_ok=True)
        if not (script := command[0].endswith(".py")):
            target = "--report" if generates else "-o"
            command = ["-m", "dakrun", *command, "--profile", self.profile, target, str(out)]
            command += ["--load-format", "dummy"] if "--model" in command else []
        if generates:
            requests = self.folder / "requests.jsonl"
            write_requests(requests, run.rows, run.most_tokens)
            command += ["-i", str(requests), "-o", str(answers), "--overwrite"]
        checkout, paths = self.base if run.base else ROOT, os.environ.get("PYTHONPATH", "")
        with log.open("w", encoding="utf-8") as said:
            code: object = "none, the time is over"
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = subprocess.run(
                    [sys.executable, *command], cwd=checkout, stdout=said, stderr=said,
                    timeout=max(0.1, self.end - time.monotonic()),
                    env={**os.environ, "PYTHONPATH": f"{checkout}{os.pathsep}{paths}"},
                ).returncode  # fmt: skip
        text = log.read_text(encoding="utf-8", errors="replace")
        if code != 0:
            last = "\n    ".join(text.strip().splitlines()[-8:])
            click.echo(f"{stem}: FAILED, exit code {code}: {run.arguments}\n    {last}")
            self.failed = True
        found = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}
        if found and generates:
            rows = map(json.loads, answers.read_text(encoding="utf-8").splitlines())
            found["answers"] = {row["id"]: row.get("token_ids") for row in rows}
        return text if script and code == 0 else found


def rows(key: str, bars: Mapping[int, float], **wanted: Any) -> list[Bar]:
    """Bars of a figure by the rows of a step; times and errors are at most so large."""
    return [Bar(" ".join(map(str, (n, "rows", key, *wanted.values()))),
                cell(key, batch_size=n, **wanted), bar, key.endswith(("_s", "_error")))
            for n, bar in bars.items()]  # fmt: skip


OPT, LLAMA, MOE = (f"bench --model {name}" for name in (
    "opt-6.7b", "llama-3-8b", "qwen3-30b-a3b --dtype bfloat16"))  # fmt: skip
FILE, SLOWER = Run("generate --model llama-3-8b", 40), {8: 1.02, 64: 1.12}
RATE, MANY = per(lambda of: of["tokens_per_s"]), "--batch-size 8 --batch-size 64"
FIXED = "generate --model opt-6.7b --batch-size 64 --strategy uniform --transport direct"
HALF = "--ratio 0.5 --transport direct --transport staged --new-tokens 16"
EXPERTS = f"{MOE} --ratio 0.475 --transport direct --new-tokens 16 --batch-size 8 --popularity"
WAYS = [bar for way in ("direct", "staged") for bar in (
    *rows("limit_over_time", {8: 0.97}, asked_transport=way),
    *rows("prediction_error", {8: 0.03}, asked_transport=way))]  # fmt: skip
CASES = ("bench --kernel attention", "64:32/8:256", *(f"{1 << n}:32/8:2048" for n in range(9)),
         *(f"64:32/8:{length}" for length in (512, 1024, 4096, 8192)))  # fmt: skip
TABLE = {
    "limits": [
        Figure(name, (run, replace(run, arguments=f"{run.arguments} --limits 12.0")), bars)
        for name, run, bars in (
            ("opt", Run(f"{OPT} {MANY} --ratio 0 --ratio 0.1", 40),
             rows("step_s", SLOWER, asked_ratio=0) + rows("step_s", SLOWER, asked_ratio=0.1)),
            ("llama", Run(f"{LLAMA} {MANY}", 30), rows("step_s", SLOWER)),
            ("file", replace(FILE, seconds=65), [Bar("tokens/s", RATE, 0.42)]),
            ("prompts", Run(f"{LLAMA} --batch-size 1 --batch-size 16 --prompt-len 4096 "
                            "--new-tokens 3", 25), rows("ttft_s", {1: 2.6, 16: 2.6})),
        )
    ],
    "formats": [
        *(Figure(f"{name}-hbm", (Run(f"bench --model {model} --format {name}", 40),),
                 rows("eb_total_over_ceiling", {8: least}) + rows("prediction_error", {8: 0.03}))
          for name, model, least in (("awq", "llama-3-70b", 0.80), ("fp8", "qwen3-8b", 0.85))),
        *(Figure(f"{name}-file", (FILE, Run(f"{FILE.arguments} --format {name}", 40)),
                 [Bar("tokens/s over 16 bits", RATE, 0.93)]) for name in ("awq", "fp8")),
        Figure("awq-half", (Run(f"{LLAMA} --format awq {HALF}", 40),), WAYS),
        Figure("fp8-half", (Run(f"{LLAMA} --format fp8 {HALF}", 40),), WAYS),
        Figure("products", (Run("tests/tools/format_speed.py", 50),),
               [Bar("times above their bars", per(lambda text: text.count("!")), 0, True)]),
    ],
    "mixtures": [
        Figure("hbm", (Run(f"{MOE} --batch-size 1 {MANY} --popularity uniform", 45),),
               rows("limit_over_time", {1: 0.65, 8: 0.80, 64: 0.85})),
        Figure("half", (Run(f"{EXPERTS} uniform --batch-size 1 --rival on-demand", 120),),
               rows("limit_over_time", {1: 0.93, 8: 0.97}) + rows("speedup", {1: 0.952, 8: 0.952})),
        Figure("zipf", tuple(Run(f"{EXPERTS} zipf:1.0 --expert-order {order}", 40)
                             for order in ("use", "number")),
               [Bar("by number over by use", cell("step_s"), 1.8)]),
        Figure("file", (Run(MOE.replace("bench", "generate"), 60),), [Bar("share of the bound", per(
            lambda of: of["time"]["bound_s"] / of["time"]["wall_s"]), 0.70)]),
        Figure("products", (Run("tests/tools/grouped_speed.py", 30),),
               [Bar("rows under their bars", per(lambda text: text.count("under")), 0, True)]),
        *(Figure(f"beyond-{name}", (Run(f"generate --model {model}", seconds, 256, 128),),
                 [Bar("wall time's distance from the prediction", foretold, 0.10, True)])
          for name, model, seconds in (("glm", "glm-4.5-air-fp8", 200),
                                       ("qwen", "qwen3-235b-a22b-gptq-int4", 260))),
    ],
    "drafts": [
        Figure("verify", (Run(f"{OPT} --speculate 8 --ratio 0.48", 65),),
               [Bar("rate over the copy engine's", per(lambda of: of["rows"][0]["remote_read_bytes"]
                    / of["rows"][0]["draft_step_s"] / of["copied_bytes_per_s"]["host"]), 0.97)]),
    ],
    "articles": [
        Figure("attention", (Run(" --case ".join(CASES), 35),),
               [Bar("worst of 256 MB and more", worst("bound_over_time", 256e6), 0.93),
                Bar("64 of 256", cell("bound_over_time", case="64:32/8:256"), 0.78)]),
        Figure("prompts", (Run("bench --kernel prompt-attention", 30),),
               [Bar("worst over FlashAttention", worst("speedup"), 1.0)]),
    ],
    "base": [
        Figure(name, (replace(run, base=True), run), bars, turns) for name, run, bars, turns in (
            *((f"tokens-{ratio}", Run(f"{FIXED} --offload-ratio {ratio}", 40, 200),
               [Bar("equal answers", equal, 1.0)], 1) for ratio in (0, 0.1)),
            ("opt", Run(f"{OPT} --batch-size 8 --batch-size 96 --batch-size 512", 45),
             rows("step_s", {8: 1.01, 96: 1.01, 512: 1.01}), 2),
            ("llama", Run(f"{LLAMA} {MANY}", 25), rows("step_s", {8: 1.01, 64: 1.01}), 2),
            ("host", Run(f"{OPT} --ratio 0.1", 25), rows("step_s", {8: 1.01}), 2),
            ("file", FILE, [Bar("tokens/s", RATE, 0.98)], 2),
            ("opt-30b", Run("bench --model opt-30b", 45), rows("step_s", {8: 1.01}), 2),
        )
    ],
}  # fmt: skip


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compare figures of a GPU with their bars.")
    parser.add_argument("groups", nargs="*", help=f"of {', '.join(TABLE)}; default: all")
    parser.add_argument("--seconds", type=float, default=3600, help="for everything")
    parser.add_argument("--only", action="append", metavar="NAME", help="a figure; repeatable")
    parser.add_argument("--folder", type=Path, help="keeps what commands write; default: a new one")
    parser.add_argument("--profile", default="auto", help="of all commands; default: auto")
    parser.add_argument("--base", type=Path, metavar="DIR", help="the checkout to compare with")
    of = parser.parse_args(given)
    end, smi = time.monotonic() + of.seconds, shutil.which("nvidia-smi")
    groups = of.groups or [group for group in TABLE if group != "base" or of.base]
    figures = [replace(one, name=f"{group}-{one.name}") for group in TABLE if group in groups
               for one in TABLE[group] if not of.only or one.name in of.only]  # fmt: skip
    if not set(groups) <= set(TABLE) or not figures or ("base" in groups and not of.base):
        parser.error(f"no such figures, or no --base; groups: {', '.join(TABLE)}")
    folder = Path(of.folder or tempfile.mkdtemp(prefix="gpu-figures-")).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    card = [smi, "--query-gpu=name", "--format=csv,noheader"] if smi else ["echo", "no GPU"]
    name = subprocess.check_output(card, text=True).strip()
    click.echo(f"{name}, profile {of.profile}; all output is kept in {folder}")
    runner = Runner(folder, end, of.profile, of.base and of.base.resolve())
    for figure in figures:
        runner.measure(figure)
    return int(runner.failed)


if __name__ == "__main__":
    sys.exit(main())
