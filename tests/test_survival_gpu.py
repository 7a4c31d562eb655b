"""Runs on the GPU that are killed, or whose GPU fails: what had finished is whole, and goes on."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

pytestmark = [pytest.mark.gpu, pytest.mark.alone]
COUNT = 400
COMMAND = [sys.executable, "-c", "from dakrun.cli import main; main()", "generate"]
# After some steps a kernel writes where there is no memory.
FAILING = """
import cupy
from dakrun.engine.graph_runner import GraphRunner
wild = cupy.RawKernel('extern "C" __global__ void wild() { *(int*)16 = 0; }', "wild")
steps, launch = [], GraphRunner.launch
def failing(self, step):
    steps.append(step)
    if len(steps) == 40:
        wild((1,), (1,), ())
    launch(self, step)
GraphRunner.launch = failing
from dakrun.cli import main
main()
"""


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Of a model that the kernels take, with one-token prompts: how many come changes no bit."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=COUNT + 8, hidden_size=256, intermediate_size=512, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
        eos_token_id=None, bos_token_id=1, pad_token_id=0, initializer_range=0.1,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("model")
    AutoModelForCausalLM.from_config(config, dtype=torch.float16).save_pretrained(folder)
    prompts = folder / "prompts.jsonl"
    rows = [{"id": f"r{i}", "prompt_token_ids": [i + 4]} for i in range(COUNT)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return [
        "--model", str(folder), "-i", str(prompts), "--device", "cuda", "--profile", "h200-pcie5",
        "--batch-size", "6", "--max-tokens", "24", "--max-model-len", "64", "--offload-ratio",
        "0.3", "--kv-offload-ratio", "0.5",
    ]  # fmt: skip


def rows(path: Path) -> dict[str, list[int]]:
    """Token ids by id; every line must be whole."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    found = [json.loads(line) for line in lines]
    assert len({row["id"] for row in found}) == len(found)
    return {row["id"]: row["token_ids"] for row in found}


def test_killed_runs_go_on(arguments: list[str], tmp_path: Path) -> None:
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    subprocess.run([*COMMAND, *arguments, "-o", str(whole)], check=True, timeout=120)
    assert len(rows(whole)) == COUNT
    for size in (1, 20_000):
        run = subprocess.Popen([*COMMAND, *arguments, "-o", str(out), "--resume"])
        while run.poll() is None and (not out.exists() or out.stat().st_size < size):
            time.sleep(0.001)
        run.send_signal(signal.SIGKILL)
        assert run.wait(60) in (-signal.SIGKILL, 0)
    subprocess.run([*COMMAND, *arguments, "-o", str(out), "--resume"], check=True, timeout=120)
    assert rows(out) == rows(whole)


def test_a_failing_gpu_leaves_what_had_finished(arguments: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    command = [sys.executable, "-c", FAILING, "generate", *arguments, "-o", str(out)]
    environment = {**os.environ, "DAKRUN_DEBUG": "", "NO_COLOR": "1"}
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert run.returncode == 3, run.stderr
    error, hint = run.stderr.strip().splitlines()[-2:]
    assert error.startswith("error: the GPU failed: CUDA error: an illegal memory access")
    assert hint.startswith("hint: finished rows are in the output, continue with --resume")
    finished = rows(out)
    assert 0 < len(finished) < COUNT
    subprocess.run([*COMMAND, *arguments, "-o", str(out), "--resume"], check=True, timeout=120)
    assert len(rows(out)) == COUNT
    assert all(rows(out)[key] == tokens for key, tokens in finished.items())
