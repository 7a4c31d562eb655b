"""The Python API's LLM: what it refuses; its memory given back when closed or failing to load."""

import dataclasses
import json
import math
import weakref
from pathlib import Path

import numpy as np
import pytest
import tiny_models
import torch

from dakrun.config import SamplingParams
from dakrun.engine import build as build_module
from dakrun.errors import UsageError
from dakrun.hardware import load_profile, profile_text
from dakrun.llm import LLM
from dakrun.memory import tiers
from dakrun.memory.host import HostBlock
from dakrun.plan import ExpectedRun, Policy, RunKeywords, RunOptions
from dakrun.requests import Request, RowLengths

NAME = "llama-gqa3-tied"
POLICY = Policy(offload_ratio=0.3, kv_offload_ratio=0.5)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save(NAME, tmp_path_factory.mktemp("llm") / NAME)


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> list[HostBlock]:
    """The memory of every tier that is allocated."""
    made = []
    take = tiers._take

    def noted(*args: object) -> object:
        made.append(take(*args))  # type: ignore[arg-type]
        return made[-1]

    monkeypatch.setattr(tiers, "_take", noted)
    return made  # type: ignore[return-value]


def test_keywords_are_the_options() -> None:
    names = {field.name for field in dataclasses.fields(RunOptions)}
    assert set(RunKeywords.__annotations__) == names


def test_keywords_change_given_options(path: Path) -> None:
    with LLM(path, run=RunOptions(device="cpu", batch_size=2), batch_size=3) as llm:
        assert llm.plan.workload.batch_size == 3
    with pytest.raises(UsageError, match="batch_sise"):
        LLM(path, run=RunOptions(device="cpu"), batch_sise=3)  # type: ignore[call-arg]


def test_closing_gives_the_memory_back(path: Path, blocks: list[HostBlock]) -> None:
    with LLM(path, device="cpu", batch_size=2, policy=POLICY) as llm:
        assert len(llm.generate([[5, 6, 7]])) == 1
        mappings = [weakref.ref(block._mapping) for block in blocks]
        assert len(mappings) == 2 and all(mapping() for mapping in mappings)
    assert not any(mapping() for mapping in mappings)
    llm.close()
    with pytest.raises(UsageError, match="this LLM is closed"):
        llm.generate([[5, 6, 7]])


def test_threads_are_the_cores_that_may_be_used(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    for cores, asked in ((3, None), (64, None), (3, 5)):
        monkeypatch.setattr("dakrun.llm.usable_cores", lambda cores=cores: cores)
        LLM(path, device="cpu", batch_size=1, threads=asked).close()
    assert chosen == [3, 16, 5]
    with pytest.raises(UsageError, match="threads is 0"):
        LLM(path, threads=0)
    with pytest.raises(UsageError, match="threads is 100,000, above"):
        LLM(path, threads=100_000)


def test_other_options_of_vllm(path: Path) -> None:
    """They are taken where they change nothing, and named where they would."""
    LLM(model=path, device="cpu", batch_size=1, tensor_parallel_size=1, seed=0).close()
    for option, value in (("tensor_parallel_size", 2), ("gpu_memory_utilization", 0.9)):
        with pytest.raises(UsageError, match=f"^{option} is not supported$") as caught:
            LLM(path, device="cpu", **{option: value})  # type: ignore[arg-type]
        assert caught.value.hint.startswith("leave it out")
    assert "the options are model, dtype, device, profile" in caught.value.hint
    assert "other" not in caught.value.hint


def test_the_longest_completions_begin_first(path: Path) -> None:
    tokens = [2, 2, 2, 2, 9]
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in tokens]
    with LLM(path, device="cpu", batch_size=2) as llm:
        found = llm.generate([[5, 6, 7]] * 5, params)
        steps = llm.report()["time"]
    assert [len(one.token_ids) for one in found] == tokens
    assert steps["prefill_steps"] + steps["decode_steps"] == 9


def test_a_stream_ends_with_its_llm(path: Path, blocks: list[HostBlock]) -> None:
    llm = LLM(path, device="cpu", batch_size=1, policy=POLICY)
    params = SamplingParams(max_tokens=2)
    stream = llm.stream(Request(id=i, line=1, prompt_ids=(5, 6), params=params) for i in "abc")
    next(stream)
    mappings = [weakref.ref(block._mapping) for block in blocks]
    llm.close()
    with pytest.raises(UsageError, match="closed while it generated"):
        next(stream)
    assert not any(mapping() for mapping in mappings)


def test_a_batch_that_is_chosen_fills_a_cpu_s_memory_once() -> None:
    with LLM("opt-125m", device="cpu", load_format="dummy", max_batch_size=1) as llm:
        small = llm.plan
    free = 4 * sum(sum(small.memory(tier).values()) for tier in range(2))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("dakrun.engine.machine_planner.available_host_memory", lambda: free)
        with LLM("opt-125m", device="cpu", load_format="dummy") as llm:
            taken = sum(sum(llm.plan.memory(tier).values()) for tier in range(2))
    assert llm.plan.workload.batch_size > 1 and taken <= free


def test_numbers_of_numpy_are_numbers(path: Path) -> None:
    policy = Policy(hbm_budget=np.int64(10**9), offload_ratio=np.float32(0.5))  # type: ignore[arg-type]
    with LLM(path, device="cpu", batch_size=np.int64(2), policy=policy) as llm:  # type: ignore[arg-type]
        params = SamplingParams(max_tokens=np.int64(2), temperature=np.float32(0.5))  # type: ignore[arg-type]
        assert len(llm.generate([[5, 6]], params)[0].token_ids) == 2
        assert json.loads(json.dumps(llm.report()))["plan"]["ratio"] == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize("value", [np.array([1, 2]), np.array(["auto"]), np.bool_(True)])
def test_arrays_are_no_numbers(path: Path, value: object) -> None:
    with pytest.raises(UsageError, match="batch_size is"):
        LLM(path, device="cpu", batch_size=value)  # type: ignore[arg-type]


def test_a_failed_load_gives_the_memory_back(
    path: Path, blocks: list[HostBlock], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **options: object) -> None:
        raise OSError("the disk broke")

    monkeypatch.setattr(build_module, "load", fail)
    with pytest.raises(OSError, match="the disk broke"):
        LLM(path, device="cpu", batch_size=2, policy=POLICY)
    assert len(blocks) == 2
    assert all(block._mapping is None and block.tensor.numel() == 0 for block in blocks)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("device", "cuda:1"),
        ("device", "tpu"),
        ("dtype", "int8"),
        ("dtype", torch.float32),
        ("load_format", "x"),
        ("profile", None),
        ("policy", {"offload_ratio": 0.5}),
        ("batch_size", 0),
        ("batch_size", 2.5),
        ("batch_size", "8"),
        ("batch_size", None),
        ("max_batch_size", None),
        ("expected_run", [RowLengths(1, 1)]),
        ("max_model_len", 0),
        ("max_model_len", "20"),
        ("expected_tokens", 0),
        ("expected_prompt", 0),
        ("max_decode_step", math.nan),
        ("max_decode_step", "5ms"),
    ],
)
def test_options_that_cannot_be_meant(path: Path, option: str, value: object) -> None:
    with pytest.raises(UsageError) as caught:
        LLM(path, **({"device": "cpu"} | {option: value}))  # type: ignore[arg-type]
    assert str(caught.value) == f"{option} is {value!r}"
    assert caught.value.hint.startswith(f"{option} must be ")


def test_a_run_says_what_to_plan_for(path: Path) -> None:
    run = ExpectedRun([RowLengths(4, 2, 3), RowLengths(8, 6)])
    with LLM(path, device="cpu", expected_tokens=7, expected_run=run) as llm:
        work = llm.plan.workload
        assert (work.prompt_len, work.new_tokens) == (5, 3) and work.batch_size <= 4
    with LLM(path, device="cpu", expected_tokens=7, expected_run=ExpectedRun([])) as llm:
        assert (llm.plan.workload.new_tokens, llm.plan.workload.batch_size) == (7, 1)


def test_a_time_per_token_is_no_use_beside_a_batch_size(path: Path) -> None:
    with pytest.raises(UsageError, match=r"max_decode_step is 0\.1") as caught:
        LLM(path, device="cpu", batch_size=4, max_decode_step=0.1)
    assert "unless batch_size is 'auto'" in caught.value.hint


def test_a_profile_may_be_a_path(path: Path, tmp_path: Path) -> None:
    profile = tmp_path / "mine.toml"
    profile.write_text(profile_text(load_profile("cpu")).replace('"cpu"', '"mine"', 1))
    with LLM(path, device="cpu", batch_size=2, profile=profile) as llm:
        assert llm.profile.name == "mine"


def test_random_weights_need_no_more_than_a_config(path: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((path / "config.json").read_bytes())
    tokens = []
    for policy in (POLICY, Policy(offload_ratio=0.0)):
        with LLM(tmp_path, device="cpu", batch_size=2, policy=policy, load_format="dummy") as llm:
            tokens.append([row.token_ids for row in llm.generate([[5, 6, 7], [8]])])
            assert llm.report()["model"]["name"] == f"{tmp_path.name} with random weights"
    assert tokens[0] == tokens[1] and len(tokens[0][0]) == 128
