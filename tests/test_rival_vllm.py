"""`dakrun evaluate --rival vllm`: a stand-in for vLLM has its options, and ends in its ways."""

import csv
import json
import stat
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from dakrun.cli import main
from dakrun.errors import CannotRun
from dakrun.hardware import load_profile
from dakrun.lab.evaluate import Scope
from dakrun.lab.evaluate.points import StepPoint
from dakrun.lab.evaluate.steps import rival
from dakrun.lab.rivals import vllm
from dakrun.lab.rivals.architecture import meta_model, weight_bytes
from dakrun.lab.rivals.steps import RivalStep, rival_step
from dakrun.models import known_model

# The options of vLLM 0.33 that a step may need; those it lacks end in a TypeError, as there.
PACKAGE = """
import json, os, pathlib, sys, time
class SamplingParams:
    def __init__(self, *, max_tokens, ignore_eos, detokenize, temperature):
        self.max_tokens = max_tokens
class LLM:
    def __init__(self, model, *, dtype, load_format, skip_tokenizer_init, enable_prefix_caching,
                 max_model_len, max_num_seqs, cpu_offload_gb=0, offload_backend="auto",
                 offload_group_size=0, offload_num_in_group=1, offload_prefetch_step=1):
        said = {name: value for name, value in locals().items() if name != "self"}
        said |= json.loads(pathlib.Path(model, "config.json").read_text())
        here = pathlib.Path(__file__).parent
        (here / "asked.json").write_text(json.dumps(said))
        exec((here / "start.py").read_text())
    def generate(self, prompts, params, *, use_tqdm):
        assert all(len(prompt["prompt_token_ids"]) == 5 for prompt in prompts)
        time.sleep(0.1 + 0.02 * params.max_tokens)
"""


class Environment:
    """An interpreter whose only package is the stand-in; `start` runs when its LLM starts."""

    def __init__(self, folder: Path) -> None:
        self.package = folder / "site" / "vllm"
        self.package.mkdir(parents=True)
        (self.package / "__init__.py").write_text(PACKAGE)
        info = folder / "site" / "vllm-0.99.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.99\n")
        self.python = folder / "python"
        here = f'PYTHONPATH={info.parent} exec {sys.executable} "$@"'
        self.python.write_text(f'#!/bin/sh\ntest -z "$PYTHONPATH" || exit 9\n{here}\n')
        self.python.chmod(self.python.stat().st_mode | stat.S_IXUSR)
        self.start("")

    def start(self, code: str) -> None:
        (self.package / "start.py").write_text(code)

    def step(self, name: str, ratio: float) -> RivalStep:
        config = known_model("opt-6.7b")
        assert config is not None
        sizes = {"batch_size": 3, "prompt_len": 5, "new_tokens": 10}
        device = torch.device("cuda")
        return rival_step(
            name, config, ratio=ratio, device=device, vllm_python=self.python, **sizes
        )

    @property
    def asked(self) -> dict[str, Any]:
        """The options that the stand-in was given, and its config.json."""
        found: dict[str, Any] = json.loads((self.package / "asked.json").read_text())
        return found


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Environment:
    monkeypatch.setenv("PYTHONPATH", "ours")  # which another interpreter must not see
    return Environment(tmp_path)


def total_bytes() -> int:
    config = known_model("opt-6.7b")
    assert config is not None
    return weight_bytes(meta_model(config))


def test_the_version(environment: Environment, tmp_path: Path) -> None:
    assert vllm.version(environment.python) == "0.99"
    assert vllm.version(tmp_path / "none") is None


def test_a_step_with_uva(environment: Environment) -> None:
    found = environment.step("vllm-uva", 0.25)
    assert 0.01 < found.seconds < 0.05 and found.ratio == 0.25
    asked = environment.asked
    assert asked["offload_backend"] == "uva" and asked["offload_group_size"] == 0
    assert asked["cpu_offload_gb"] == pytest.approx(total_bytes() / 4 / 2**30)
    assert asked["architectures"] == ["OPTForCausalLM"] and asked["hidden_size"] == 4096
    assert asked["dtype"] == "float16" and asked["load_format"] == "dummy"
    assert (asked["max_model_len"], asked["max_num_seqs"]) == (15, 3)
    assert not asked["enable_prefix_caching"]


def test_the_figures_have_both_offloaders(environment: Environment, tmp_path: Path) -> None:
    out, python = tmp_path / "out", str(environment.python)
    command = ["evaluate", "--predict", "--profile", "gh200", "--quick", "--only", "fig8"]
    command += ["--rival", "vllm", "--vllm-python", python, "-o", str(out)]
    assert CliRunner().invoke(main, command).exit_code == 0
    with (out / "fig8.csv").open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["series"] in vllm.RIVALS]
    assert [(row["series"], row["x"]) for row in rows] == [(of, "8.9") for of in vllm.RIVALS]
    config = known_model("opt-6.7b")
    assert config is not None
    scope = Scope(
        models={"opt-6.7b": config}, profile=load_profile("h200-pcie5"), remote="host", quick=True,
        predict=False, vllm_python=environment.python,
    )  # fmt: skip
    sizes = {"batch_size": 3, "prompt_len": 5, "new_tokens": 10}
    step = StepPoint(model="opt-6.7b", ratio=0.1, by="vllm-prefetch", **sizes)
    found = rival(step, scope, torch.device("cuda"))
    assert found.seconds and found.tokens_per_s == 3 / found.seconds
    assert found.ratio and found.ratio == pytest.approx(4 * 402_759_680 / total_bytes())


def test_all_in_hbm_needs_no_offloader(environment: Environment) -> None:
    assert environment.step("vllm-prefetch", 0.0).ratio == 0
    asked = environment.asked
    assert (asked["offload_backend"], asked["cpu_offload_gb"]) == ("auto", 0)


@pytest.mark.parametrize(
    ("ratio", "size", "last", "count"),
    [(0.02, 32, 1, 1), (0.1, 8, 1, 4), (0.3, 3, 1, 10), (0.5, 7, 4, 17), (1.0, 1, 1, 32)],
)
def test_layers_that_prefetch_keeps_in_host_memory(
    ratio: float, size: int, last: int, count: int
) -> None:
    """As few whole layers as hold the ratio: a figure's ratio is met, or just exceeded."""
    config = known_model("opt-6.7b")
    assert config is not None
    options, found = vllm.offloading("vllm-prefetch", meta_model(config), ratio)
    assert options == {
        "offload_backend": "prefetch", "offload_group_size": size, "offload_num_in_group": last
    }  # fmt: skip
    assert sum(at % size >= size - last for at in range(32)) == count
    assert found == pytest.approx(count * 402_759_680 / total_bytes()) and (
        found >= ratio or ratio == 1
    )


@pytest.mark.parametrize(
    ("start", "said"),
    [
        ("raise ValueError('no room for the KV cache')", "failed: ValueError: no room for the KV"),
        (
            "print('(EngineCore pid=7) ERROR 11-27 [core.py:1] ValueError: Free memory is 1 GiB')\n"
            "raise RuntimeError('Engine core initialization failed. See root cause above.')",
            "failed: ValueError: Free memory is 1 GiB",
        ),
        ("sys.exit('no such option')", "failed: no such option"),
        (
            "print('INFO Model loading took 12.4 GiB memory')",
            "kept 12.4 GiB of the weights in HBM: before",
        ),
    ],
)
def test_a_failure_has_its_reason(environment: Environment, start: str, said: str) -> None:
    environment.start(start)
    with pytest.raises(CannotRun) as error:
        environment.step("vllm-uva", 0.25)
    assert str(error.value).startswith(f"vllm {said}") and error.value.hint
    environment.start("print('INFO Model loading took 9.5 GiB memory')")
    assert environment.step("vllm-uva", 0.25).seconds > 0


def test_vllm_that_takes_too_long_ends_with_its_processes(
    environment: Environment, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(vllm, "TIMEOUT_S", 2.0)
    numbers = tmp_path / "numbers"
    environment.start(
        "import subprocess\nworker = subprocess.Popen(['sleep', '600'])\n"
        f"pathlib.Path({str(numbers)!r}).write_text(f'{{os.getpid()}} {{worker.pid}}')\n"
        "time.sleep(600)"
    )
    with pytest.raises(CannotRun, match="vllm took more than 2 s"):
        environment.step("vllm-uva", 0.25)
    end = time.monotonic() + 10
    while left := [pid for pid in numbers.read_text().split() if _runs(pid)]:
        assert time.monotonic() < end, left
        time.sleep(0.05)


def _runs(pid: str) -> bool:
    """Whether a process is there, and no zombie that nobody has waited for."""
    try:
        return Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
