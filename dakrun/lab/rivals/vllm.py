"""vLLM's decode step, in a process of its own."""

import json
import subprocess
import sys
import tempfile

from dakrun.config import ModelConfig
from dakrun.errors import CannotRun
from dakrun.lab.rivals.architecture import transformers_config

TIMEOUT_S = 300.0
PROGRAM = """
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


def step_seconds(config: ModelConfig, offload_bytes: float, **sizes: int) -> float:
    """Seconds of a decode step with so many bytes by its option cpu_offload_gb.

    `sizes` are batch_size, prompt_len and new_tokens. Raises CannotRun if vLLM fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        transformers_config(config).save_pretrained(folder)
        asked = {"folder": folder, "offload_bytes": offload_bytes, **sizes}
        command = [sys.executable, "-c", PROGRAM, json.dumps(asked)]
        try:
            run = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise CannotRun(
                f"vllm took more than {TIMEOUT_S:.0f} s", hint="leave out --rival vllm"
            ) from None
    lines = [line for line in run.stdout.splitlines() if line.startswith("seconds ")]
    if run.returncode or not lines:
        reason = (run.stderr.strip().splitlines() or ["no output"])[-1]
        raise CannotRun(f"vllm failed: {reason[:120]}", hint="leave out --rival vllm")
    return float(lines[-1].split()[1])
