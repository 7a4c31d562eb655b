"""Requests that begin while the next one waits for KV blocks: the longest that find some."""

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import tiny_models
from hypothesis import given
from hypothesis import strategies as st
from test_kv_pool import all_back, by_id, load, ragged, without_computing
from test_run_time import ragged_run

from dakrun.config import SamplingParams
from dakrun.engine.offline import _LongestFirst
from dakrun.engine.room_ahead import RoomAhead
from dakrun.hardware import load_profile
from dakrun.llm import LLM
from dakrun.models.hub import find_model
from dakrun.plan import (
    Policy,
    blocks_suffice,
    choose_batch_size,
    first_that_fits,
    make_plan,
)
from dakrun.plan.ops import kept_positions
from dakrun.requests import Request, RequestReader
from dakrun.requests.look_ahead import LookAhead


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save("llama-gqa3-tied", tmp_path_factory.mktemp("shorter"))


@given(st.lists(st.booleans(), max_size=40).map(sorted))
def test_the_first_that_fits_is_found_by_bisection(fits: list[bool]) -> None:
    asked = list[int]()

    def asks(i: int) -> bool:
        asked.append(i)
        return fits[i]

    assert first_that_fits(len(fits), asks) == (fits.index(True) if True in fits else None)
    assert len(asked) <= 1 + len(fits).bit_length()


lengths = st.tuples(st.integers(0, 300), st.integers(0, 200))


@given(st.lists(lengths, max_size=30), st.lists(lengths, max_size=10), st.integers(1, 150))
def test_room_is_about_what_an_exact_count_says(
    running: list[tuple[int, int]], others: list[tuple[int, int]], blocks: int
) -> None:
    """A request needs room until it ends, also where others do not fit behind its end."""
    held, remaining = ([of[i] for of in running] for i in range(2))
    room = RoomAhead(held, remaining, blocks)
    for prompt, new in others:
        fits = room.fits(prompt, new + 1)
        until = [*(min(n, new) for n in remaining), new]  # what they add until its end
        slack = 1 + len(until) // 4
        if fits:
            assert blocks_suffice([*held, prompt], until, blocks + slack)
            room.take(prompt, new + 1)
            held, remaining = [*held, prompt], [*remaining, new]
        else:
            assert not blocks_suffice([*held, prompt], until, blocks - 2 * slack - 8)


def test_requests_whose_prompts_wait_grow_later() -> None:
    """7,000 tokens of prompts take 70 steps: then the first request, of 460 tokens, has ended."""
    now = RoomAhead([400, 100], [60, 300], 14)
    later = RoomAhead([400, 100], [60, 300], 14, tokens=7000, step_tokens=100)
    assert not now.fits(64, 100) and later.fits(64, 100)
    later.take(64, 100)
    assert not later.fits(64, 100)


def test_only_a_part_of_the_new_tokens_is_expected() -> None:
    room = RoomAhead([], [], 20, part=0.25)
    assert room.fits(100, 4000) and not room.fits(300, 4000)
    assert room.fits(1000, 60) and not room.fits(1280, 60), "no less than a block"
    assert not room.fits(100, 4000, ends_early=False) and room.fits(100, 900, ends_early=False)


def test_others_begin_while_the_longest_waits(path: Path) -> None:
    """The same answers, and all blocks are back."""
    asked = ragged(30, 40)
    with load(path, batch_size=12) as llm:
        alone = by_id(list(llm.stream(asked)))
        order, chosen = longest_first(asked), list[bool]()

        def choose(fits: Callable[[int, int], bool]) -> bool:
            chosen.append(order.choose(fits))
            return chosen[-1]

        assert by_id(list(llm.run(order, choose=choose))) == alone and all_back(llm)
        assert sum(chosen) > 3


def test_more_rows_in_a_step(path: Path) -> None:
    asked, rows = ragged(400, 60), dict[str, float]()
    with load(path, batch_size=60) as llm:
        launched = without_computing(llm, 2)
        for way in ("in order", "chosen", "generate"):
            launched.clear()
            order = longest_first(asked)
            if way == "generate":
                llm.generate([list(r.prompt_ids) for r in asked], [r.params for r in asked])
            else:
                found = llm.run(order, choose=order.choose if way == "chosen" else None)
                assert len(list(found)) == 400 and all_back(llm)
            rows[way] = sum(launched) / len(launched)
        assert rows["in order"] * 1.04 < rows["chosen"] == rows["generate"]
        assert llm.engine.stats.preempted < 12


def longest_first(asked: Sequence[Request]) -> _LongestFirst:
    return _LongestFirst(asked, [(r.params.max_tokens or 1, len(r.prompt_ids)) for r in asked])


class Endless(Iterator[Request]):
    """Short requests, and after 14 of them a long one, next unless a short one is chosen."""

    def __init__(self, shorts: Sequence[Request], long: Request) -> None:
        self.shorts, self.long, self.given, self.chosen = shorts, [long], 0, False

    def __next__(self) -> Request:
        if self.given >= 14 and self.long and not self.chosen:
            return self.long.pop()
        if self.given == len(self.shorts):
            raise StopIteration
        self.given, self.chosen = self.given + 1, False
        return self.shorts[self.given - 1]

    def choose(self, fits: Callable[[int, int], bool]) -> bool:
        one = self.shorts[min(self.given, len(self.shorts) - 1)]
        self.chosen = fits(len(one.prompt_ids), one.params.max_tokens or 1)
        return self.chosen


def test_a_long_request_does_not_wait_for_ever(path: Path, tmp_path: Path) -> None:
    """When as many have begun before it as there are slots, it is waited for."""
    shutil.copytree(path, tmp_path / "long")
    config = json.loads((path / "config.json").read_text()) | {"max_position_embeddings": 1024}
    (tmp_path / "long" / "config.json").write_text(json.dumps(config))
    some = [SamplingParams(max_tokens=10 + 7 * i % 31, ignore_eos=True) for i in range(300)]
    shorts = [
        Request(id=f"s{i}", line=i + 1, prompt_ids=(3 + i,) * (130 + i % 20), params=params)
        for i, params in enumerate(some)
    ]
    long = Request(id="long", line=301, prompt_ids=(7,) * 990, params=some[0])
    with LLM(
        tmp_path / "long", device="cpu", batch_size=12, max_model_len=1024, expected_prompt=20,
        expected_tokens=10, policy=Policy(offload_ratio=0.0, kv_offload_ratio=0.0),
    ) as llm:  # fmt: skip
        without_computing(llm, 2)
        assert llm.engine.runner.cache.blocks[0] < 12 * 3 + 16, "few for the long one"
        source = Endless(shorts, long)
        order = [one.id for one in llm.run(source, choose=source.choose)]
        assert all_back(llm) and len(order) == 301
    assert 12 < order.index("long") < 60


def test_each_tier_has_its_own_room(path: Path) -> None:
    """A chosen request gets no slot of a tier whose blocks do not suffice to its end."""
    asked = ragged(300, 60)
    with load(path, batch_size=60, kv_offload_ratio=0.3) as llm:
        without_computing(llm, 2)
        order = longest_first(asked)
        assert len(list(llm.run(order, choose=order.choose))) == 300 and all_back(llm)
        assert llm.engine.stats.preempted < 6


def test_a_preempted_request_keeps_others_back(path: Path) -> None:
    """It is the next to get blocks: others that are shorter would take them."""
    asked = ragged(40, 100)
    with load(path, batch_size=20) as llm:
        engine, chosen = llm.engine, list[bool]()
        order = longest_first(asked)

        def choose(fits: Callable[[int, int], bool]) -> bool:
            chosen.append(any(r.tokens for r in engine.preemption.queue))
            return order.choose(fits)

        without_computing(llm, 2)
        engine.admission._has_room = lambda *_: True  # type: ignore[method-assign]
        assert len(list(llm.run(order, choose=choose))) == 40
        assert engine.stats.preempted and not any(chosen)


def test_a_file_chooses(path: Path, tmp_path: Path) -> None:
    """Rows that do not fit their estimated lengths, or cannot be run, change no answer."""
    rows = [
        {"id": r.id, "prompt_token_ids": list(r.prompt_ids), "max_tokens": r.params.max_tokens,
         "ignore_eos": True}
        for r in ragged(60, 100)
    ]  # fmt: skip
    rows[7] = {"id": "r7", "prompt_token_ids": [-1], "max_tokens": 4}
    with load(path, batch_size=20) as llm:
        kept = ragged(60, 100)
        alone = by_id(list(llm.stream([r for r in kept if r.id != "r7"])))
        chosen = list[bool]()
        path_in = tmp_path / "rows.jsonl"
        path_in.write_text("\n".join(map(json.dumps, rows)))
        with RequestReader(path_in, defaults=SamplingParams()) as reader:

            def choose(fits: Callable[[int, int], bool]) -> bool:
                chosen.append(reader.choose(fits))
                return chosen[-1]

            every = (row for row in reader.rows(llm.rules) if isinstance(row, Request))
            found = by_id(list(llm.run(every, choose=choose)))
        assert found == alone and sum(chosen) > 1


def ahead_of(lengths: Sequence[tuple[int, int]], tmp_path: Path) -> LookAhead:
    """Rows of (prompt, new tokens), numbered in their order."""
    path = tmp_path / "rows.jsonl"
    rows = [{"id": str(i), "prompt_token_ids": [5] * p, "max_tokens": n}
            for i, (p, n) in enumerate(lengths)]  # fmt: skip
    path.write_text("\n".join(map(json.dumps, rows)))
    return RequestReader(path, defaults=SamplingParams()).unparsed_rows(4096)


def test_the_look_ahead_gives_the_chosen_row_once(tmp_path: Path) -> None:
    ahead = ahead_of([(10, 40), (10, 90), (10, 20), (30, 20), (0, 5), (10, 60)], tmp_path)
    rows, taken = iter(ahead), list[str]()
    for most in (50, 30, None, 10, None):
        if most is not None:
            there = ahead.choose(lambda prompt, new, most=most: prompt + new <= most)
            assert there == (most > 10), "the empty prompt cannot be run"
        row = next(rows)
        assert row is not None
        taken.append(row.id)
    assert taken == ["0", "2", "1", "5", "3"]


def test_a_row_of_a_later_group_is_not_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dakrun.requests.look_ahead.LOOK_AHEAD", 4)
    ahead = ahead_of([(10, n) for n in (50, 60, 70, 80, 5, 40, 90, 90, 90)], tmp_path)
    rows = iter(ahead)
    first = next(rows)
    assert first is not None and first.id == "3"
    assert not ahead.choose(lambda prompt, new: new < 50), "4 and 5 are of the second group"
    assert ahead.choose(lambda prompt, new: new < 60)
    taken = next(rows)
    assert taken is not None and taken.id == "0"


def test_a_run_gets_more_slots_for_its_blocks() -> None:
    """Requests that end at different times do not need the blocks for all their ends at once."""
    config, _ = find_model("llama-3-8b", "auto", "dummy")
    profile = load_profile("h200-pcie5")
    run, workload = ragged_run(2000)
    policy = Policy(hbm_budget=20 << 30)
    chosen = choose_batch_size(config, workload, profile, policy, run=run)
    assert chosen.kept_len is not None and chosen.kept_len == kept_positions(chosen)
    plain = replace(chosen, kept_len=None)
    plain = replace(plain, batch_size=chosen.batch_size * chosen.kept_len // kept_positions(plain))
    plans = [make_plan(config, work, profile, policy) for work in (chosen, plain)]
    blocks = [sum(blocks for _, _, blocks in plan.kv_placement()) for plan in plans]
    assert blocks[0] <= 1.05 * blocks[1] and chosen.batch_size > 1.1 * plain.batch_size
    times = [run.forecast(plan).seconds for plan in plans]
    assert times[0] < 0.98 * times[1]
