"""A GPU whose memory runs out all the same: one line by how much, and one more plan with less.

test_gpu_memory.py compares used with planned memory on a GPU.
"""

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from planned import GIB, known, work

from dakrun.config import SamplingParams
from dakrun.engine import build, gpu_errors
from dakrun.errors import GpuFailed, OutOfGpuMemory
from dakrun.hardware import load_profile
from dakrun.llm import LLM
from dakrun.plan import RESERVE_BYTES, Policy, make_plan

TORCH_SAYS = (
    "CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 79.10 GiB of "
    "which 512.00 MiB is free. Including non-PyTorch memory, this process has 78 GiB in use."
)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save("llama-gqa3-tied", tmp_path_factory.mktemp("memory") / "model")


@pytest.fixture(scope="module", autouse=True)
def frozen_again() -> Iterator[None]:
    """A second plan lets the garbage collector see all objects again, as conftest.py does not."""
    yield
    gc.collect()
    gc.freeze()


def failing(function: Any, error: Exception, calls: list[int], at: int) -> Any:
    """`function`, which raises `error` at its call number `at`, counted in `calls` from 1."""

    def call(*args: Any, **options: Any) -> Any:
        calls.append(len(calls) + 1)
        if calls[-1] == at:
            raise error
        return function(*args, **options)

    return call


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        (TORCH_SAYS, GIB),
        ("CUDA error: out of memory\nCUDA kernel errors might be ...", 0),
        ("CUDA_ERROR_OUT_OF_MEMORY: out of memory", 0),
        ("cudaErrorMemoryAllocation: CUDA out of memory", 0),
    ],
)
def test_the_error_says_by_how_much(text: str, missing: int) -> None:
    with pytest.raises(OutOfGpuMemory, match="the GPU's memory ran out") as caught, gpu_errors():
        raise RuntimeError(text)
    assert caught.value.missing == missing and "--hbm-budget" in caught.value.hint
    assert ("by 1.00 GiB" in str(caught.value)) == bool(missing)


def test_other_errors_are_not_of_memory() -> None:
    with pytest.raises(GpuFailed), gpu_errors():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(RuntimeError, match="out of memory"), gpu_errors():
        raise RuntimeError("the host is out of memory")


def test_a_load_that_fails_is_planned_once_more(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    load = failing(build.load, torch.OutOfMemoryError(TORCH_SAYS), calls, 1)
    monkeypatch.setattr(build, "load", load)
    with LLM(path, device="cpu", batch_size=2, policy=Policy(hbm_budget=4 * GIB)) as llm:
        assert llm.plan.budgets[0] == 3 * GIB and len(calls) == 2
        assert "ran out by 1.00 GiB" in llm.replanned and "3.00 GiB" in llm.replanned
        assert len(llm.generate([[5, 6, 7]])) == 1


def test_memory_that_others_have_taken_is_not_planned_with(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was missing when the tiers were allocated does not say how much others have taken."""
    load = failing(build.load, torch.OutOfMemoryError(TORCH_SAYS), [], 1)
    monkeypatch.setattr(build, "load", load)
    monkeypatch.setattr("dakrun.engine.machine_planner.available_host_memory", lambda: 2 * GIB)
    policy = Policy(hbm_budget=4 * GIB, host_budget=GIB)
    with LLM(path, device="cpu", batch_size=2, policy=policy) as llm:
        assert llm.plan.budgets[0] == 2 * GIB


def test_a_second_failure_is_an_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*args: Any, **options: Any) -> Any:
        raise torch.OutOfMemoryError(TORCH_SAYS)

    monkeypatch.setattr(build, "load", load)
    with pytest.raises(OutOfGpuMemory, match=r"by 1\.00 GiB, with .* 3\.00 GiB too") as caught:
        LLM(path, device="cpu", batch_size=2, policy=Policy(hbm_budget=4 * GIB))
    assert "use --hbm-budget 2048MiB" in caught.value.hint


@pytest.mark.parametrize("at", [1, 4])
def test_a_run_that_fails_begins_its_requests_again(
    path: Path, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [[5 + i, 6, 7] for i in range(7)]
    params = [SamplingParams(max_tokens=2 + i, temperature=i % 2, seed=i) for i in range(7)]
    policy = Policy(hbm_budget=4 * GIB)
    with LLM(path, device="cpu", batch_size=3, policy=policy) as llm:
        whole = llm.generate(prompts, params)
        assert not llm.replanned
    with LLM(path, device="cpu", batch_size=3, policy=policy) as llm:
        error = torch.OutOfMemoryError("CUDA out of memory.")
        runner, calls = llm.engine.runner, []
        monkeypatch.setattr(runner, "launch", failing(runner.launch, error, calls, at))
        found = llm.generate(prompts, params)
        assert llm.plan.budgets[0] == 4 * GIB - RESERVE_BYTES and llm.replanned
        assert llm.engine.stats.requests == len(prompts)
    assert [one.token_ids for one in found] == [one.token_ids for one in whole]


def test_bytes_on_the_host_have_page_tables_in_hbm() -> None:
    """Room for them is taken from weights, 1/400 of what capacity forces onto the host."""
    model, profile = known("llama-2-70b"), load_profile("h100-sxm")
    plan = make_plan(model, work(8, 256, 64), profile, Policy())
    memory = plan.memory(0)
    on_host = sum(plan.memory(1).values())
    assert on_host > 50 * GIB and sum(memory.values()) <= plan.budgets[0]
    assert memory["reserve"] >= RESERVE_BYTES + on_host / 410
    assert memory["reserve"] <= RESERVE_BYTES + on_host / 390


def test_a_cpu_keeps_no_reserve() -> None:
    plan = make_plan(known("opt-125m"), work(1, 8, 8), load_profile("cpu"), Policy())
    assert "reserve" not in plan.memory(0)
