"""Swap space: KV blocks that requests give up, copied to host memory and back."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import tiny_models
from planned import known, work

from dakrun.config import SamplingParams
from dakrun.engine import Admission, Step, SwapSpace, swap_beats_recompute
from dakrun.hardware import load_profile
from dakrun.llm import LLM
from dakrun.plan import Policy, make_plan
from dakrun.requests import Completion, Request, RowError

ROOM = 8


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save("llama-gqa3-tied", tmp_path_factory.mktemp("swap"))


@pytest.fixture(scope="module")
def alone(path: Path) -> dict[str, tuple[int, ...]]:
    """The tokens of each request, alone."""
    with load(path, batch_size=1) as llm:
        return by_id(list(llm.stream(ragged())))


@pytest.fixture
def optimistic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests begin without regard to the blocks that the others will need."""
    monkeypatch.setattr(Admission, "_has_room", lambda *_: True)


def load(path: Path, batch_size: int = 6, room: int = ROOM, **policy: float) -> LLM:
    """Three blocks in each tier for three slots; a request takes up to three. Room for copies."""
    fixed = {"offload_ratio": 0.3, "kv_offload_ratio": 0.5} | policy
    llm = LLM(
        path, device="cpu", batch_size=batch_size, max_model_len=160, expected_prompt=20,
        expected_tokens=10, policy=Policy(**fixed),
    )  # fmt: skip
    llm.engine.preemption.swap = SwapSpace(llm.engine.runner.cache, room)
    llm.engine.preemption.swap.open()
    llm.engine.preemption.swap.wait()
    return llm


def ragged(count: int = 30) -> list[Request]:
    chance = random.Random(1)
    return [
        Request(
            id=f"r{i}",
            line=i + 1,
            prompt_ids=tuple(chance.choices(range(3, 300), k=chance.randint(1, 100))),
            params=SamplingParams(
                max_tokens=chance.randint(1, 59),
                temperature=float(i % 2),
                logprobs=2 if i % 3 == 0 else None,
                ignore_eos=True,
            ),
        )
        for i in range(count)
    ]


def by_id(results: list[Completion | RowError]) -> dict[str, tuple[int, ...]]:
    assert all(isinstance(one, Completion) for one in results), results
    for one in results:
        assert one.logprobs is None or len(one.logprobs) == len(one.token_ids)
    return {one.id: one.token_ids for one in results}


def all_back(llm: LLM, room: int = ROOM) -> bool:
    cache = llm.engine.runner.cache
    free = all(cache.free(tier) == count for tier, count in enumerate(cache.blocks))
    return free and llm.engine.preemption.swap.free == room


@pytest.mark.usefixtures("optimistic")
def test_requests_go_on_from_copies(path: Path, alone: dict[str, tuple[int, ...]]) -> None:
    """Tokens are those of each request alone, and no token of a prompt is computed twice."""
    with load(path) as llm:
        computed: list[int] = []
        launch = llm.engine.runner.launch

        def launched(step: Step) -> None:
            computed.extend(part.length for part in step.prompts)
            launch(step)

        llm.engine.runner.launch = launched  # type: ignore[method-assign]
        for _ in range(2):
            assert by_id(list(llm.stream(ragged()))) == alone
            assert all_back(llm)
        stats = llm.engine.stats
        assert stats.preempted == stats.swapped > 10
        assert sum(computed) == stats.prompt_tokens


@pytest.mark.usefixtures("optimistic")
def test_a_stream_that_ends_early_gives_copies_back(path: Path) -> None:
    with load(path) as llm:
        stream = llm.stream(ragged())
        while llm.engine.stats.swapped < 3:
            next(stream)
        stream.close()
        assert all_back(llm)


@pytest.mark.usefixtures("optimistic")
@pytest.mark.parametrize("room", [0, pytest.param(1, marks=pytest.mark.full), 2])
def test_with_less_room_more_is_computed_again(
    path: Path, alone: dict[str, tuple[int, ...]], room: int
) -> None:
    with load(path, room=room) as llm:
        assert by_id(list(llm.stream(ragged()))) == alone
        stats = llm.engine.stats
        assert stats.swapped < stats.preempted and (stats.swapped > 0) == (room > 0)
        assert all_back(llm, room)


def test_its_memory_is_what_the_plan_leaves_of_the_host_s(path: Path) -> None:
    with load(path) as llm:
        plan, cache = llm.plan, llm.engine.runner.cache
        cache.blocks = (40, 3)
        used = sum(plan.memory(1).values())
        for spare, wanted in ((0, 0), (3, 3), (11, 10)):
            budgets = (plan.budgets[0], used + spare * plan.kv_block_bytes)
            assert SwapSpace.of(cache, replace(plan, budgets=budgets)).size == wanted


def test_copies_are_made_where_they_are_faster() -> None:
    """2,000 tokens of Llama-3-8B: 250 MiB there and back over PCIe 5.0, or 3.2e13 FLOP."""
    profile = load_profile("h200-pcie5")
    plan = make_plan(known("llama-3-8b"), work(8), profile, Policy())
    assert swap_beats_recompute(plan, 2000)
    slow = (replace(t, direct_bytes_per_s=5e9, staged_bytes_per_s=5e9) for t in profile.remote)
    assert not swap_beats_recompute(
        replace(plan, profile=replace(profile, remote=tuple(slow))), 2000
    )
