"""vLLM's decode step, in a process and an environment of its own.

The options are those of vLLM 0.23 to 0.33 (vllm.config.offload there). Knows no plans.
"""

import functools
import json
import os
import re
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from dakrun.errors import CannotRun
from dakrun.lab.rivals.architecture import decoder_layers, weight_bytes
from dakrun.lab.rivals.host_layers import layer_bytes, offloaded

RIVALS = ("vllm-prefetch", "vllm-uva")
TIMEOUT_S = 300.0
OTHER_RUNNER = "before 0.33 set VLLM_USE_V2_MODEL_RUNNER=0"  # vLLM's issue 51396
PROGRAM = """
import json, sys, time
from vllm import LLM, SamplingParams
options, batch, prompt, new = json.loads(sys.argv[1])
llm = LLM(**options)
prompts = [{"prompt_token_ids": [3 + row] * prompt} for row in range(batch)]
def seconds(tokens):
    params = SamplingParams(max_tokens=tokens, ignore_eos=True, detokenize=False, temperature=0.0)
    start = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - start
seconds(2)
half = new // 2  # by then all prompts are there, also where they take several steps
part, whole = (min(seconds(tokens) for _ in range(2)) for tokens in (half, new))
print("seconds", (whole - part) / (new - half), flush=True)
"""
VERSION = "from importlib.metadata import version; print(version('vllm'))"
SECONDS = re.compile(r"^seconds (\S+)$", re.MULTILINE)
LOADED = re.compile(r"Model loading took ([0-9.]+) GiB")
ERROR = re.compile(r"\w*(?:Error|Exception): (?!Engine core).*")  # whose cause is another error


@functools.cache
def version(python: Path) -> str | None:
    """The version of vLLM in the environment of the interpreter `python`; None without one."""
    try:
        run = subprocess.run([python, "-c", VERSION], capture_output=True, text=True, env=_env())
    except OSError:
        return None
    return None if run.returncode else run.stdout.strip()


def step(
    python: Path, name: str, model: PreTrainedModel, ratio: float, *, batch_size: int,
    prompt_len: int, new_tokens: int,
) -> tuple[float, float]:  # fmt: skip
    """Seconds of a decode step of `model`, on the meta device, and the ratio in host memory.

    `name` is one of RIVALS. Raises CannotRun if vLLM fails.
    """
    offload, ratio = offloading(name, model, ratio)
    with tempfile.TemporaryDirectory() as folder:
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(folder)
        options = {
            "model": folder,
            "dtype": str(model.dtype).removeprefix("torch."),
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "enable_prefix_caching": False,
            "max_model_len": prompt_len + new_tokens,
            "max_num_seqs": batch_size,
            **offload,
        }
        asked = json.dumps([options, batch_size, prompt_len, new_tokens])
        said = _output([str(python), "-c", PROGRAM, asked])
    total, loaded, problem = weight_bytes(model), LOADED.search(said), ""
    if not (found := SECONDS.findall(said)):
        problem = f"failed: {(ERROR.findall(said) or said.splitlines() or ['no output'])[-1]:.120}"
    elif loaded and float(loaded[1]) * 2**30 > (1 - ratio / 2) * total + max(layer_bytes(model)):
        problem = f"kept {loaded[1]} GiB of the weights in HBM: {OTHER_RUNNER}"
    if problem:
        raise CannotRun(f"vllm {problem}", hint="leave out --rival vllm")
    return float(found[-1]), ratio


def offloading(name: str, model: PreTrainedModel, ratio: float) -> tuple[dict[str, Any], float]:
    """vLLM's options that put `ratio` of the weight bytes in host memory, and the ratio they mean.

    UVA takes bytes. Prefetch takes the last layers of each group of layers: as few as hold the
    bytes, and few of each group, so that they are evenly spread.
    """
    if not ratio:
        return {}, 0.0
    total = weight_bytes(model)
    if name == "vllm-uva":
        return {"offload_backend": "uva", "cpu_offload_gb": ratio * total / 2**30}, ratio
    wanted, layers = offloaded(model, ratio), len(decoder_layers(model))
    count, last, size = min(
        (count, last, -size)
        for size in range(1, layers + 1)
        for last in range(1, size + 1)
        if (count := sum(at % size >= size - last for at in range(layers))) >= wanted
    )
    options = {"offload_group_size": -size, "offload_num_in_group": last}
    return {"offload_backend": "prefetch", **options}, count * max(layer_bytes(model)) / total


def _output(command: list[str]) -> str:
    """What `command` writes to stdout and stderr. CannotRun if it takes more than TIMEOUT_S.

    vLLM has processes of its own: an error or interrupt here ends the whole group.
    """
    process = subprocess.Popen(
        command, env=_env(), text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        return process.communicate(timeout=TIMEOUT_S)[0]
    except BaseException as problem:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        if isinstance(problem, subprocess.TimeoutExpired):
            text = f"vllm took more than {TIMEOUT_S:.0f} s"
            raise CannotRun(text, hint="leave out --rival vllm") from None
        raise


def _env() -> dict[str, str]:
    """The environment variables without those that name this Python's packages."""
    ours = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    kept = {name: value for name, value in os.environ.items() if name not in ours}
    return {**kept, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
