"""KV blocks of running requests: taken as they grow, given back, and too few of them."""

import random
from collections import deque
from pathlib import Path

import pytest
import tiny_models
import torch
from hypothesis import given
from hypothesis import strategies as st

from dakrun.config import SamplingParams, Workload
from dakrun.engine import Accepted, Admission, Step, admission
from dakrun.engine.answers import Answers
from dakrun.engine.kv_cache import KVCache
from dakrun.engine.kv_layout import RowLayout
from dakrun.engine.preemption import Preemption
from dakrun.engine.progress import RequestState
from dakrun.engine.swap import Saved
from dakrun.errors import UsageError
from dakrun.geometry import KV_BLOCK
from dakrun.kernels.attention import KVShape
from dakrun.llm import LLM
from dakrun.memory.device import in_order
from dakrun.memory.tiers import allocate_tiers
from dakrun.plan import Plan, Policy, blocks_suffice
from dakrun.plan.ops import kept_positions
from dakrun.plan.peak_blocks import peak_blocks
from dakrun.requests import Completion, Request, RowError

CPU = torch.device("cpu")
TIERS = (("hbm", 3, 5), ("host", 2, 4))  # slots and blocks


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save("llama-gqa3-tied", tmp_path_factory.mktemp("pool"))


def load(path: Path, batch_size: int = 6, kv_offload_ratio: float = 0.5) -> LLM:
    """A block for each slot, of up to three that a request takes."""
    return LLM(
        path, device="cpu", batch_size=batch_size, max_model_len=160, expected_prompt=20,
        expected_tokens=10, policy=Policy(offload_ratio=0.3, kv_offload_ratio=kv_offload_ratio),
    )  # fmt: skip


def ragged(count: int, highest: int = 130) -> list[Request]:
    chance = random.Random(count)
    return [
        Request(
            id=f"r{i}",
            line=i + 1,
            prompt_ids=tuple(chance.choices(range(3, 300), k=chance.randint(1, highest))),
            params=SamplingParams(max_tokens=chance.randint(1, 159 - highest), ignore_eos=True),
        )
        for i in range(count)
    ]


def by_id(results: list[Completion | RowError]) -> dict[str, tuple[int, ...]]:
    assert all(isinstance(one, Completion) for one in results), results
    return {one.id: one.token_ids for one in results}


def all_back(llm: LLM) -> bool:
    cache = llm.engine.runner.cache
    return all(cache.free(tier) == count for tier, count in enumerate(cache.blocks))


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 200)), min_size=1, max_size=9))
def test_the_peak_is_that_of_a_simulation(requests: list[tuple[int, int]]) -> None:
    cached, remaining = zip(*requests, strict=True)
    used = [
        sum(-(-(n + step) // KV_BLOCK) for n, left in requests if left >= step)
        for step in range(max(remaining) + 1)
    ]
    assert peak_blocks(cached, remaining) == max(used)
    for blocks in range(max(used) - 3, max(used) + len(requests) + 3):
        assert blocks_suffice(cached, remaining, blocks) == (blocks >= max(used))


def test_slots_take_blocks_of_their_tier_one_by_one() -> None:
    shape = KVShape(kv_heads=2, head_dim=64, positions=200)
    with allocate_tiers({"hbm": 2**20, "host": 2**20}, CPU) as tiers:
        cache = KVCache(TIERS, 3, shape, tiers, CPU)
        assert [cache.tier(slot) for slot in range(5)] == [0, 0, 0, 1, 1]
        assert cache.reserve(0, 65) and cache.free(0) == 3
        assert cache.reserve(0, 128) and cache.free(0) == 3, "two blocks have 128 positions"
        assert cache.reserve(0, 129) and cache.reserve(2, 128) and cache.free(0) == 0
        assert not cache.reserve(1, 1) and cache.reserve(3, 200) and cache.free(1) == 0
        cache.flush()
        tables = cache.tables
        found = [tables.addresses[slot, :n].tolist() for slot, n in ((0, 3), (2, 2), (3, 4))]
        assert found == [
            [cache.address(slot, number) for number in range(n)]
            for slot, n in ((0, 3), (2, 2), (3, 4))
        ]
        used = [address for slot in found for address in slot]
        assert len(set(used)) == 9
        for address in used:
            first = cache.parts[0 if address in found[0] + found[1] else 1].data_ptr()
            assert (address - first) % (3 * tables.layer_bytes) == 0
        assert cache.block(0, 1)[2].data_ptr() == found[0][1] + 2 * tables.layer_bytes
        assert not cache.reserve(2, 129)
        cache.release(0)
        assert cache.free(0) == 3 and cache.reserve(2, 129)
        cache.release_all()
        assert (cache.free(0), cache.free(1)) == (5, 4)


def test_gathers_on_a_peer_are_between_the_launches_of_this_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits: list[tuple[int | None, int | None]] = []  # who waits for whom

    class Stream:
        def __init__(self, device: torch.device) -> None:
            self.device = device

        def wait_stream(self, other: "Stream") -> None:
            waits.append((self.device.index, other.device.index))

    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    here, peer = torch.device("cuda", 0), torch.device("cuda", 1)
    with in_order(peer, here):
        assert waits == [(1, 0)]
    assert waits == [(1, 0), (0, 1)]
    for other, device in ((here, here), (CPU, CPU), (CPU, here)):
        with in_order(other, device):
            pass
    assert len(waits) == 2


def test_a_local_slot_may_span_tiers() -> None:
    layout = RowLayout(kv_heads=1, head_dim=8, positions=6 * KV_BLOCK, dtype=torch.float32)
    with allocate_tiers({"hbm": 2**20, "host": 2**20}, CPU) as tiers:
        cache = KVCache((("hbm", 2, 3), ("host", 1, 9)), 2, layout, tiers, CPU, spill_blocks=4)
        for part in cache.parts:
            part.random_()
        assert not cache.spill(0, 5), "more than the spill"
        assert cache.spill(0, 2) and cache.reserve(0, 5 * KV_BLOCK)
        assert (cache.free(0), cache.free(1)) == (0, 7)
        assert (cache.spilled(0), cache.remote_blocks(0)) == (2, 2)
        assert not cache.reserve(0, 5 * KV_BLOCK + 1) and not cache.spill(1, 3)
        blocks = [cache.block(0, number) for number in range(5)]
        starts = [part.data_ptr() for part in cache.parts]
        inside = [
            0 <= block.data_ptr() - starts[tier] < cache.parts[tier].numel()
            for block, tier in zip(blocks, (1, 1, 0, 0, 0), strict=True)
        ]
        assert all(inside)
        for layer, first, last in ((0, 0, 5), (1, 1, 4), (1, 2, 5), (0, 0, 2)):
            wanted = torch.stack([block[layer] for block in blocks[first:last]])
            assert torch.equal(cache.gather(layer, 0, last, first), wanted)
        runs = cache.runs(0, 0, 5)
        assert sum(len(run) for _, run in runs) == 5 and 2 in [number for number, _ in runs]
        for number, run in runs:
            for further, block in enumerate(run):
                assert torch.equal(block, blocks[number + further])
        cache.publish(0, [b"a", b"b"])
        assert cache.share(1, [b"a", b"b"]) == 0 and cache.common(0) == []
        cache.release(0)
        assert (cache.free(0), cache.free(1), cache.spilled(0)) == (3, 9, 0)
    with allocate_tiers({"hbm": 2**20, "host": 2**20}, CPU) as tiers:
        shape = KVShape(kv_heads=1, head_dim=64, positions=6 * KV_BLOCK)
        cache = KVCache((("hbm", 2, 3), ("host", 1, 9)), 1, shape, tiers, CPU, spill_blocks=4)
        assert cache.pretend(5 * KV_BLOCK) == [3, 3, 0]  # 4 of the 7 blocks for local slots
        start, size = cache.parts[1].data_ptr(), cache.parts[1].numel()
        there = [[start <= at < start + size for at in row[:5]] for row in cache.tables.addresses]
        assert there == [[True] * 3 + [False] * 2] * 2 + [[True] * 5]


def test_few_slots_are_divided_over_tiers(path: Path) -> None:
    """A request of three blocks, where the local tier has room for one, has the same tokens."""
    requests = ragged(12)
    found = []
    for ratio in (0.0, 0.66):
        with LLM(
            path, device="cpu", batch_size=1, max_model_len=160,
            policy=Policy(offload_ratio=0.3, kv_offload_ratio=ratio),
        ) as llm:  # fmt: skip
            cache = llm.engine.runner.cache
            assert cache.counts == (1, 0) and cache.blocks == ((3, 0), (1, 2))[ratio > 0]
            assert cache.spill_blocks == cache.blocks[1]
            spans: list[int] = []
            launch = llm.engine.runner.launch

            def launched(step: Step) -> None:
                spans.append(cache.spilled(0))  # noqa: B023
                launch(step)  # noqa: B023

            llm.engine.runner.launch = launched  # type: ignore[method-assign]
            found.append(by_id(list(llm.stream(requests))))
            assert all_back(llm)
            assert not llm.engine.stats.preempted
            assert (max(spans) > 0, min(spans)) == (ratio > 0, 0)
    assert found[0] == found[1]


@pytest.mark.parametrize("from_copies", [False, True])
def test_a_preempted_request_gets_blocks_for_its_last_position(from_copies: bool) -> None:
    """Of 4 blocks one request takes 2, and at the same step the other 3: they do not both fit."""
    with allocate_tiers({"hbm": 2**20}, CPU) as tiers:
        cache = KVCache((("hbm", 2, 4),), 1, RowLayout(1, 8, 256, torch.float32), tiers, CPU)
        found = Admission(cache, range(2))
        first, second = (
            RequestState(
                Request(
                    id=str(limit), line=1, prompt_ids=tuple(range(64)),
                    params=SamplingParams(max_tokens=limit, ignore_eos=True),
                ),
                None, 0, limit, tuple(range(64)),
            )
            for limit in (65, 66)
        )  # fmt: skip
        assert found.admit(first, [], [])
        second.tokens, second.prompt = [1, 2], (*second.prompt, 1, 2)
        if from_copies:
            second.saved, second.prompt = Saved([0, 1]), second.prompt[:-1]
        assert not found.admit(second, [], [first])
        assert second.end == 64 + 66 - 1


def test_blocks_are_kept_for_expected_lengths() -> None:
    work = Workload(batch_size=100, prompt_len=100, new_tokens=60, max_model_len=2000)
    assert kept_positions(work) == 3 * KV_BLOCK, "two and a half, and half of the last"
    few = Workload(batch_size=4, prompt_len=100, new_tokens=60, max_model_len=2000)
    assert kept_positions(few) == 16 * KV_BLOCK, "so that two slots have one of 2,000"
    exact = Workload(batch_size=100, prompt_len=100, new_tokens=92, max_model_len=192)
    assert kept_positions(exact) == 3 * KV_BLOCK


@pytest.fixture(scope="module")
def alone(path: Path) -> dict[str, tuple[int, ...]]:
    """The tokens of each of 40 requests, alone."""
    with load(path, batch_size=1) as llm:
        return by_id(list(llm.stream(ragged(40))))


@pytest.mark.parametrize("optimistic", [False, True])
def test_few_blocks_change_no_token(
    path: Path,
    alone: dict[str, tuple[int, ...]],
    optimistic: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor does it if requests are begun without regard to what the others will need."""
    if optimistic:
        monkeypatch.setattr(Admission, "_has_room", lambda *_: True)
    with load(path) as llm:
        assert llm.engine.runner.cache.blocks == (3, 3)
        assert by_id(list(llm.stream(ragged(40)))) == alone
        preempted = llm.engine.stats.preempted
        assert preempted > 5 if optimistic else preempted < 5
        assert all_back(llm)


def test_what_requests_took_says_what_others_need(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that may have 100 tokens, and end after 5 to 15: more of them run side by side.

    Then some that take all, and have to give up their blocks; they keep the tokens that they have.
    """
    chance = random.Random(4)
    ends = {f"r{i}": chance.randint(5, 15) if i < 40 else 100 for i in range(56)}
    requests = [
        Request(
            id=name, line=1, prompt_ids=tuple(chance.choices(range(3, 300), k=30)),
            params=SamplingParams(max_tokens=100),
        )
        for name in ends
    ]  # fmt: skip
    reason = Answers.finish_reason

    def finish(self: Answers, r: RequestState) -> str | None:
        done = len(r.tokens) >= ends[r.request.id]
        return "stop" if r.tokens and done else reason(self, r)

    monkeypatch.setattr(Answers, "finish_reason", finish)
    monkeypatch.setattr(Plan, "kv_placement", lambda _: (("hbm", 8, 8), ("host", 8, 8)))
    found, steps, rows = [], [], []
    for expects in (True, False):
        if not expects:
            monkeypatch.setattr(admission, "_expected", lambda r, held, _: r.end - held)
        with load(path, batch_size=16) as llm:
            counted: list[int] = []
            launch = llm.engine.runner.launch

            def launched(step: Step) -> None:
                counted.append(len(step.choosing))  # noqa: B023
                launch(step)  # noqa: B023

            llm.engine.runner.launch = launched  # type: ignore[method-assign]
            found.append(by_id(list(llm.stream(iter(requests)))))
            assert all_back(llm)
            steps.append(len(counted))
            rows.append(sum(counted))
            assert (llm.engine.stats.preempted > 0) == expects
    assert found[0] == found[1] and {n: len(ids) for n, ids in found[0].items()} == ends
    assert steps[0] < 0.8 * steps[1]
    assert rows[0] == rows[1] == sum(ends.values()), "no token is computed twice"


def without_computing(llm: LLM, ahead: int) -> list[int]:
    """Let `llm` have token 7 after every step; returns the rows of the steps launched so far."""
    runner, launched = llm.engine.runner, list[int]()
    steps: deque[Step] = deque()

    def launch(step: Step) -> None:
        launched.append(len(step.decode))
        steps.append(step)

    def collect() -> Accepted:
        return Accepted([[7] * row.wanted for row in steps.popleft().rows])

    runner.ahead, runner.launch, runner.drop = ahead, launch, steps.clear  # type: ignore[method-assign]
    runner.collect = collect  # type: ignore[method-assign]
    return launched


@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_a_request_restarts_only_if_no_step_in_flight_ends_another(path: Path, ahead: int) -> None:
    """The blocks of requests that end there are waited for."""
    with load(path, batch_size=20) as llm:
        without_computing(llm, ahead)
        assert len(list(llm.stream(ragged(500, 60)))) == 500
        assert llm.engine.stats.preempted < 6


def test_blocks_are_asked_for_only_where_a_step_can_be_launched(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Going through hundreds of requests takes long: once a step, not again before its tokens."""
    asked, grown = list[int](), Preemption.make_room
    monkeypatch.setattr(
        Preemption, "make_room", lambda *args, **how: asked.append(1) or grown(*args, **how)
    )
    with load(path) as llm:
        launched = without_computing(llm, 2)
        assert len(list(llm.stream(ragged(200, 60)))) == 200
    assert len(asked) < 1.2 * len(launched)


def test_requests_begin_in_small_groups_where_blocks_are_few(path: Path) -> None:
    """A group is a share of those that run: with blocks for few, slots stay free all the time."""
    with load(path, batch_size=40) as llm:
        launched = without_computing(llm, 2)
        llm.engine.prompts.together = 20
        list(llm.stream(ragged(200, 100)))
    assert sum(launched) / len(launched) > 17, "15 if a group had half of the slots"


def test_a_request_that_no_tier_holds_is_an_error(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are done; with more than two tiers a plan does not prevent it."""
    monkeypatch.setattr(Plan, "kv_placement", lambda _: (("hbm", 3, 2), ("host", 3, 1)))
    sizes = {r.id: len(r.prompt_ids) + r.params.max_tokens - 1 for r in ragged(30, 150)}
    too_long = {name for name, positions in sizes.items() if positions > 2 * KV_BLOCK}
    with load(path) as llm:
        results = list(llm.stream(ragged(30, 150)))
        assert all_back(llm)
    errors = [one for one in results if isinstance(one, RowError)]
    assert {one.id for one in errors} == too_long and 1 < len(too_long) < 17
    assert {one.id for one in results} == sizes.keys()
    assert {one.code for one in errors} == {"kv_cache_too_small"}
    assert "do not fit in the KV cache: there is room for 128 tokens" in str(errors[0])


@pytest.mark.parametrize("largest", [2, 3])
def test_the_last_request_outgrows_its_tier(
    path: Path, monkeypatch: pytest.MonkeyPatch, largest: int
) -> None:
    """It begins there since those before it ended early; nothing else runs, to end and make room.

    It goes on in another tier, or is an error where none has blocks for it.
    """
    reason = Answers.finish_reason

    def finish(self: Answers, r: RequestState) -> str | None:
        return "stop" if len(r.tokens) == 2 and r.request.id != "last" else reason(self, r)

    monkeypatch.setattr(Answers, "finish_reason", finish)
    monkeypatch.setattr(Plan, "kv_placement", lambda _: (("hbm", 3, 2), ("host", 3, largest)))
    lengths = {**{f"r{i}": 60 for i in range(40)}, "last": 110}
    ids = tuple(range(3, 33))
    requests = [
        Request(id=name, line=1, prompt_ids=ids, params=SamplingParams(max_tokens=most))
        for name, most in lengths.items()
    ]
    with load(path) as llm:
        without_computing(llm, 2)
        *_, last = llm.stream(requests)
        assert llm.engine.stats.preempted > 0 and all_back(llm)
    assert last.id == "last"
    if largest == 2:
        assert isinstance(last, RowError) and last.code == "kv_cache_too_small"
    else:
        assert isinstance(last, Completion) and last.token_ids == (7,) * 110


def test_a_stream_closed_at_a_row_that_does_not_fit_begins_no_other(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Plan, "kv_placement", lambda _: (("hbm", 3, 2), ("host", 3, 1)))
    rows = sorted(ragged(30, 150), key=lambda r: -len(r.prompt_ids) - r.params.max_tokens)
    with load(path) as llm:
        launched = without_computing(llm, 2)
        stream = llm.stream(iter(rows))
        assert isinstance(next(stream), RowError)
        llm.close()
        with pytest.raises(UsageError, match="closed while it generated"):
            list(stream)
    assert not launched


def test_a_stream_that_ends_early_gives_blocks_back(path: Path) -> None:
    with load(path) as llm:
        stream = llm.stream(ragged(20))
        next(stream)
        assert not all_back(llm)
        stream.close()
        assert all_back(llm)
