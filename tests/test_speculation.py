"""Steps with drafts on a CPU: results are those of steps without, whatever is drafted."""

import io
import json
import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_models
from click.testing import CliRunner
from rich.console import Console
from teacher_forced import divergences, first_divergences
from tiny_tokenizer import make_tokenizer_files

from dakrun import StructuredOutputsParams
from dakrun.cli import main
from dakrun.config import SamplingParams
from dakrun.drafts import Drafter
from dakrun.engine import Admission, Step, SwapSpace
from dakrun.errors import UsageError
from dakrun.llm import LLM
from dakrun.plan import Policy
from dakrun.requests import Completion, Request
from dakrun.terminal.summary import render

MAX_LEN, ROOM = 160, 8
COMMON = tuple(random.Random(7).choices(range(3, 300), k=70))  # more than a KV block


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of random weights whose tokens are bytes, as are those of its tokenizer."""
    folder = tmp_path_factory.mktemp("drafts")
    path = tiny_models.save("llama-gqa3-tied", folder / "model")
    tokenizer = make_tokenizer_files(folder / "tokenizer")
    for name in ("vocab.json", "merges.txt", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, path / name)
    return path


def load(path: Path, speculate: str, batch_size: int = 6) -> LLM:
    """Few KV blocks in each of two tiers, and room for copies."""
    llm = LLM(
        path, device="cpu", batch_size=batch_size, max_model_len=MAX_LEN, expected_prompt=20,
        expected_tokens=10, policy=Policy(offload_ratio=0.3, kv_offload_ratio=0.5),
        speculate=speculate,
    )  # fmt: skip
    swap = llm.engine.preemption.swap = SwapSpace(llm.engine.runner.cache, ROOM)
    swap.open()
    swap.wait()
    return llm


def ragged(count: int = 36) -> list[Request]:
    """Greedy and sampled, with penalties, bad words, stop tokens and strings, forms, prefixes."""
    chance = random.Random(1)
    kinds: Sequence[Mapping[str, Any]] = (
        {},
        {"temperature": 1.0, "logprobs": 2},
        {"temperature": 0.7, "top_k": 20, "repetition_penalty": 1.2, "presence_penalty": 0.4},
        {"logprobs": 1, "stop_token_ids": tuple(range(0, 300, 9)), "ignore_eos": False},
        {"temperature": 1.0, "stop": ("e", "1"), "min_tokens": 3},
        {"structured_outputs": StructuredOutputsParams(regex="(abcabc|[0-9]{9}){1,9}")},
        {"frequency_penalty": 0.5, "bad_words": ((17, 18), (40,)), "temperature": 0.5},
    )
    return [
        Request(
            id=f"r{i}",
            line=i + 1,
            prompt_ids=(*COMMON[: 70 * (i % 3 == 0)], *chance.choices(range(3, 300), k=i + 1)),
            params=SamplingParams(
                max_tokens=chance.randint(1, 52), **{"ignore_eos": True, **kinds[i % len(kinds)]}
            ),
        )
        for i in range(count)
    ]


def run(llm: LLM, requests: Sequence[Request]) -> dict[str, Completion]:
    found = {}
    for one in llm.stream(requests):
        assert isinstance(one, Completion), one
        found[one.id] = replace(one, ttft_s=0.0, tpot_s=0.0, logprobs=None)
        if one.logprobs is not None:
            assert [given.chosen.token_id for given in one.logprobs] == list(one.token_ids)
    cache = llm.engine.runner.cache
    assert all(cache.free(tier) == count for tier, count in enumerate(cache.blocks))
    assert not llm.engine.stats.running_tokens
    return found


@pytest.fixture(scope="module")
def off(path: Path) -> dict[str, Completion]:
    """The results without drafts, each request alone."""
    with load(path, "off", batch_size=1) as llm:
        return run(llm, ragged())


class Oracle(Drafter):
    """Drafts of random lengths from the results without drafts, wrong at random places."""

    answers: Mapping[str, Completion]

    def propose(
        self, slots: Sequence[int], most: Sequence[int], forced: Mapping[int, Sequence[int]]
    ) -> list[Sequence[int]]:
        super().propose(slots, most, forced)
        return [self._guess(slot, limit) for slot, limit in zip(slots, most, strict=True)]

    def _guess(self, slot: int, limit: int) -> list[int]:
        text = tuple(self._texts[slot].all.tolist())
        for one in self.answers.values():
            whole = (*one.prompt_token_ids, *one.token_ids)  # type: ignore[misc]
            if whole[: len(text)] == text:
                right = whole[len(text) : len(text) + chance.randint(0, limit)]
                return [t if chance.random() < 0.8 else chance.randrange(300) for t in right]
        return []


chance = random.Random(3)


@pytest.mark.parametrize("blocks", ["enough room", "too few blocks"])
def test_results_are_those_without_drafts_whatever_is_drafted(
    path: Path, off: dict[str, Completion], blocks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if blocks == "too few blocks":
        monkeypatch.setattr(Admission, "_has_room", lambda *_: True)
    with load(path, "suffix:5") as llm:
        runner = llm.engine.runner
        oracle = Oracle(runner.cache.slots, 5)
        oracle.answers = off
        monkeypatch.setattr(runner, "drafter", oracle, raising=True)
        assert run(llm, ragged()) == off
        stats = llm.engine.stats
    assert (stats.preempted > 0 and stats.swapped > 0) or blocks == "enough room"
    assert stats.shared_tokens >= 5 * 64
    accepted, drafted = stats.accepted_drafts, stats.drafts
    assert set(drafted) == set(range(6)) and all(accepted[k] < k * drafted[k] for k in range(1, 6))
    assert sum(accepted.values()) > 200


def test_drafts_by_suffix_change_no_result(path: Path, off: dict[str, Completion]) -> None:
    with load(path, "suffix") as llm:
        for _ in range(2):
            assert run(llm, ragged()) == off
        stats = llm.engine.stats
        assert sum(stats.accepted_drafts.values()) > 300, "the second run repeats the first"


def test_a_text_that_repeats_itself_takes_few_steps(path: Path) -> None:
    request = Request(
        id="r", line=1, prompt_ids=(5, 6, 7, 8) * 4,
        params=SamplingParams(max_tokens=60, logit_bias=((9, 100.0),), ignore_eos=True),
    )  # fmt: skip
    lengths = list[int]()
    with load(path, "suffix:7", batch_size=1) as llm:
        launch = llm.engine.runner.launch

        def counted(step: Step) -> None:
            lengths.extend(row.length for row in step.decode)
            launch(step)

        llm.engine.runner.launch = counted  # type: ignore[method-assign]
        (found,) = run(llm, [request]).values()
        assert set(found.token_ids) == {9} and len(lengths) < 20
        assert max(lengths) == 8, "the newest token and seven drafts"
        assert llm.engine.stats.new_tokens == 60
        report = llm.report()
    drafts, text = report["drafts"], io.StringIO()
    assert drafts["tokens_per_step_and_row"] > 3 and drafts["rows_with_drafts"] > 0.6
    assert drafts["accepted_tokens"] == 59 - len(lengths) <= drafts["drafted_tokens"]
    by_length = drafts["by_length"]
    accepted = sum(one["rows"] * one["accepted_per_row"] for one in by_length)
    assert round(accepted) == drafts["accepted_tokens"]
    render(report, Console(file=text, width=200))
    assert f"{drafts['tokens_per_step_and_row']:.2f} tokens a step and row" in text.getvalue()


def test_what_a_grammar_forces_is_drafted(path: Path) -> None:
    """The only answer has one way of being written: it takes a few steps."""
    form = StructuredOutputsParams(choice=("abcdefghij klmno pqrst",))
    params = SamplingParams(max_tokens=40, structured_outputs=form)
    request = Request(id="r", line=1, prompt_ids=(5, 6), params=params)
    with load(path, "suffix:7", batch_size=1) as llm:
        (found,) = run(llm, [request]).values()
        stats = llm.engine.stats
    assert found.text == "abcdefghij klmno pqrst" and found.finish_reason == "stop"
    assert len(stats.step_s) < len(found.token_ids) / 2
    assert sum(stats.accepted_drafts.values()) > len(found.token_ids) / 2


def test_runs_are_compared_on_the_same_histories(path: Path) -> None:
    """A token that was changed is the only difference, and how far it is from the best one."""
    requests = [
        Request(
            id=f"r{i}", line=i + 1, prompt_ids=(5, 6, 7, 8 + i) * 3,
            params=SamplingParams(max_tokens=20, logprobs=20, ignore_eos=True, temperature=heat),
        )
        for i, heat in enumerate((0.0, 0.0, 0.8))
    ]  # fmt: skip
    with load(path, "off") as llm:

        def again(some: Sequence[Request]) -> dict[str, Completion]:
            return {one.id: one for one in llm.stream(some) if isinstance(one, Completion)}

        found = again(requests)
        assert divergences(again, requests, found) == (60, [])
        assert found["r1"].logprobs is not None
        place = found["r1"].logprobs[7]
        other = next(t for t in place.top if t.token_id != place.chosen.token_id)
        tokens = list(found["r1"].token_ids)
        tokens[7] = other.token_id
        history = (*requests[1].prompt_ids, *tokens[:8])
        rest = replace(requests[1].params, max_tokens=12)
        behind = again([replace(requests[1], prompt_ids=history, params=rest)])["r1"]
        changed = replace(found["r1"], token_ids=(*tokens[:8], *behind.token_ids))
        positions, (one,) = divergences(again, requests, {**found, "r1": changed})
    assert positions == 60 and one.history == history[:-1]
    assert one.gap == pytest.approx(place.chosen.logprob - other.logprob)


@pytest.mark.parametrize("heat", [0.0, 0.7])
def test_the_gap_of_a_first_difference_is_a_bias_that_makes_up_for_it(
    path: Path, heat: float
) -> None:
    params = SamplingParams(
        max_tokens=12, ignore_eos=True, temperature=heat, presence_penalty=0.5,
        repetition_penalty=1.2,
    )  # fmt: skip
    model = tiny_models.reference("llama-gqa3-tied")
    with load(path, "off") as llm:

        def against(bias: float) -> list[Completion]:
            own = replace(params, logit_bias=((token, bias),))
            return llm.generate([[5, 6, 7]], own, progress=False)

        (one,) = found = llm.generate([[5, 6, 7]], params, progress=False)
        token = one.token_ids[5]
        assert first_divergences(model, [params], found, found) == (12, [])
        positions, (differ,) = first_divergences(model, [params], found, against(-50.0))
        assert one.token_ids[positions - 1] == token and differ.gap > 0.01
        for share, same in ((0.99, True), (1.01, False)):
            (other,) = against(-share * differ.gap)
            assert (other.token_ids[:positions] == one.token_ids[:positions]) == same


@pytest.mark.parametrize("speculate", ["on", "suffix:99", 3])
def test_a_wrong_choice_is_refused(path: Path, speculate: Any) -> None:
    with pytest.raises(UsageError, match="speculate"):
        load(path, speculate)


def test_a_file_cut_off_goes_on_with_drafts(
    path: Path, make: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"a{i} b{i} a{i} b{i} a{i}", "max_tokens": 9 + 3 * i} for i in range(8)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def complete(*flags: str) -> list[dict[str, Any]]:
        out = "off.jsonl" if "off" in flags else "drafts.jsonl"
        flags = ("-i", "rows.jsonl", "-o", out, "--device", "cpu", "--speculate", *flags)
        run = CliRunner().invoke(main, ["generate", "--model", str(path), *flags])
        assert run.exit_code == 0, run.stderr
        return sorted(map(json.loads, Path(out).read_text().splitlines()), key=lambda r: r["id"])

    wanted = complete("off")
    assert complete("suffix:4") == wanted
    lines = Path("drafts.jsonl").read_text().splitlines(keepends=True)
    Path("drafts.jsonl").write_text("".join(lines[:3]) + lines[3][:20])
    assert complete("suffix", "--resume") == wanted
