"""Decode steps of other programs, of the same architecture with random weights, on a GPU.

transformers and prefetch are those of `dakrun bench`. A program that is missing is a problem in the
result, not an error.
"""

import importlib.util
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from dakrun.config import ModelConfig
from dakrun.errors import CannotRun
from dakrun.lab.evaluate.points import Result, StepPoint

TIMEOUT_S = 300.0  # of vLLM's process
BLOCK = 2**24 + 3  # random values that are repeated in weights; odd, so that rows differ
VLLM = """
import json, sys, time
from vllm import LLM, SamplingParams
asked = json.loads(sys.argv[1])
llm = LLM(model=asked["folder"], load_format="dummy", skip_tokenizer_init=True,
          max_model_len=asked["prompt_len"] + asked["new_tokens"],
          max_num_seqs=asked["batch_size"], cpu_offload_gb=asked["offload_bytes"] / 2**30)
prompts = [{"prompt_token_ids": [3 + i] * asked["prompt_len"]} for i in range(asked["batch_size"])]
def run(tokens):
    params = SamplingParams(max_tokens=tokens, ignore_eos=True, detokenize=False)
    start = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - start
run(2)
new = asked["new_tokens"]
one, all_ = min(run(1) for _ in range(2)), min(run(new) for _ in range(2))
print("seconds", (all_ - one) / (new - 1))
"""


def rival(point: StepPoint, config: ModelConfig, device: torch.device) -> Result:
    """The decode step of the program `point.by`; CannotRun if it does not fit."""
    if device.type != "cuda":
        return _missing("needs a GPU")
    if point.remote != "host" and point.ratio:
        return _missing(f"{point.by} offloads to host memory only")
    if point.by in ("transformers", "prefetch"):
        if point.by == "transformers" and point.ratio:
            return _missing("transformers keeps all in HBM")
        return _of_bench(point, config, device)
    if importlib.util.find_spec(point.by) is None:
        return replace(_missing(f"{point.by} is not installed"), again=True)
    if point.by == "accelerate":
        return _accelerate(point, config, device)
    return _vllm(point, config)


def _missing(problem: str) -> Result:
    return Result(source="measured", problem=problem)


def _result(point: StepPoint, seconds: float, ratio: float, weight_bytes: float) -> Result:
    return Result(
        source="measured",
        seconds=seconds,
        ratio=ratio,
        weight_bytes=weight_bytes,
        remote_bytes=ratio * weight_bytes,
        tokens_per_s=point.batch_size / seconds,
    )


def _of_bench(point: StepPoint, config: ModelConfig, device: torch.device) -> Result:
    """transformers with a CUDA graph, with layers copied ahead where a ratio is asked for."""
    from dakrun.lab.bench.rival import meta_model, rival_step

    step = rival_step(
        config,
        ratio=point.ratio or 0.0,
        batch_size=point.batch_size,
        prompt_len=point.prompt_len,
        new_tokens=point.new_tokens,
        device=device,
    )
    return _result(point, step.seconds, step.ratio, _bytes(meta_model(config)))


def _bytes(model: torch.nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def _accelerate(point: StepPoint, config: ModelConfig, device: torch.device) -> Result:
    """transformers, eagerly, with the last layers in host memory, copied when they are used."""
    from accelerate import dispatch_model  # type: ignore[import-not-found]

    from dakrun.lab.bench.prefetch import decoder_layers
    from dakrun.lab.bench.rival import Step, meta_model

    model = meta_model(config)
    layers = decoder_layers(model)
    total, each = _bytes(model), _bytes(layers[0])
    count = min(len(layers), math.ceil((point.ratio or 0.0) * total / each - 1e-9))
    far = {id(layer) for layer in layers[len(layers) - count :]}
    names = {id(module): name for name, module in model.named_modules()}
    prefix = names[id(layers)]
    with torch.inference_mode(), torch.device(device):
        places: dict[str, str | int] = {}
        for layer in layers:
            place = "cpu" if id(layer) in far else device
            layer.to_empty(device=place)
            places[names[id(layer)]] = "cpu" if id(layer) in far else device.index or 0
        for name, module in model.named_modules():
            own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
            if own and not name.startswith(f"{prefix}."):
                module.to_empty(device=device, recurse=False)
                places[name] = device.index or 0
        block = 0.01 * torch.randn(BLOCK, dtype=next(model.parameters()).dtype, device=device)
        for parameter in model.parameters():
            _fill(parameter, block)
        model.tie_weights()
        model = dispatch_model(model, places, main_device=device.index or 0, force_hooks=True)
        room = point.prompt_len + point.new_tokens
        prompt = torch.randint(config.vocab_size, (point.batch_size, point.prompt_len))
        step, times = Step(model, prompt, room), []
        for _ in range(point.new_tokens - 1):
            torch.cuda.synchronize()
            start = time.perf_counter()
            step()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
    return _result(point, statistics.median(times), count * each / total, total)


def _fill(parameter: torch.Tensor, block: torch.Tensor) -> None:
    """Repeat random values in a weight: with constants a GPU draws less power and clocks higher."""
    for part in parameter.view(-1).split(len(block)):
        part.copy_(block[: len(part)])


def _vllm(point: StepPoint, config: ModelConfig) -> Result:
    """vLLM in a process of its own, with its option cpu_offload_gb."""
    from dakrun.lab.bench.rival import meta_model, transformers_config

    total, ratio = _bytes(meta_model(config)), point.ratio or 0.0
    with tempfile.TemporaryDirectory() as folder:
        transformers_config(config).save_pretrained(folder)
        asked = {
            "folder": str(Path(folder)),
            "batch_size": point.batch_size,
            "prompt_len": point.prompt_len,
            "new_tokens": point.new_tokens,
            "offload_bytes": ratio * total,
        }
        command = [sys.executable, "-c", VLLM, json.dumps(asked)]
        try:
            run = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise CannotRun(
                f"vllm took more than {TIMEOUT_S:.0f} s", hint="leave out --rival vllm"
            ) from None
    lines = [line for line in run.stdout.splitlines() if line.startswith("seconds ")]
    if run.returncode or not lines:
        reason = (run.stderr.strip().splitlines() or ["no output"])[-1]
        return _missing(f"vllm failed: {reason[:120]}")
    return _result(point, float(lines[-1].split()[1]), ratio, total)
