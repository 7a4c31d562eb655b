"""Which kernels are compiled ahead: all that a model then launches, and none that there is not."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_models import CONFIGS
from transformers import AutoModelForCausalLM

from dakrun.kernels import attention, gemm, tiled_gemm
from dakrun.kernels.heuristics import X_TILES
from dakrun.kernels.tiled_shapes import PORTABLE_X_TILES
from dakrun.kernels.tiled_shapes import X_TILES as TILED
from dakrun.kernels.variants import variants

HALF = torch.float16
ROWS = [8 * tiles for tiles in X_TILES]
# Prints what was compiled after all that was to be compiled ahead.
LATE = """
import os, sys
from pathlib import Path
from dakrun import LLM, Policy, SamplingParams
from dakrun.engine import build
ahead, compile_ahead = set(), build.compile_ahead
cubins = Path(os.environ["DAKRUN_CACHE_DIR"]) / "cubins"
def compile_and_look(*args):
    compile_ahead(*args)
    ahead.update(path.name for path in cubins.iterdir())
build.compile_ahead = compile_and_look
fixed = Policy(offload_ratio=0.2, kv_offload_ratio=0.2)
with LLM(sys.argv[1], device="cuda", profile="h200-pcie5", batch_size=40, policy=fixed) as llm:
    for count in (1, 12, 40):
        llm.generate([[7] * 9] * count, SamplingParams(max_tokens=4))
assert len(ahead) > 8
print(*(path.name for path in cubins.iterdir() if path.name not in ahead))
"""


@pytest.mark.parametrize("mixes", [False, True])
def test_products_of_few_rows(mixes: bool) -> None:
    found = variants(HALF, ROWS, TILED, head_dim=128, mixes=mixes)
    few = [macros for source, macros in found if source == gemm.SOURCE]
    wanted = [
        macros
        for macros in gemm.all_defines(HALF)
        if macros["MIXES"] <= mixes and (macros["X_TILES"] < 8 or not macros["NORM"])
    ]
    assert sorted(few, key=str) == sorted(wanted, key=str)
    assert len(found) == len({(source, *macros.items()) for source, macros in found})


def test_many_rows_and_attention() -> None:
    here = variants(HALF, (1,), TILED, head_dim=80, group=16)
    many = [macros for source, macros in here if source == tiled_gemm.SOURCE]
    assert many == tiled_gemm.all_defines(HALF)
    assert (attention.SOURCE, attention.defines(HALF, 80, 16)) in here
    elsewhere = [source for source, _ in variants(HALF, (1,), PORTABLE_X_TILES, head_dim=80)]
    assert "unpack.cu" in elsewhere and tiled_gemm.SOURCE not in elsewhere


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["opt-like-350m", "llama-gqa3-tied"])
def test_nothing_is_left_to_be_compiled_behind_loading(name: str, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(CONFIGS[name], dtype=HALF).save_pretrained(tmp_path / "model")
    late = subprocess.run(
        [sys.executable, "-c", LATE, tmp_path / "model"], capture_output=True, text=True,
        env={**os.environ, "DAKRUN_CACHE_DIR": str(tmp_path)}, timeout=300,
    )  # fmt: skip
    assert late.returncode == 0, late.stderr
    assert not late.stdout.strip()
