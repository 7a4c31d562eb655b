"""The engine's loop: refilled slots, ends of requests, seeds, chunked prefill, statistics."""

import io
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
from rich.console import Console

from dakrun.config import SamplingParams
from dakrun.engine import Accepted, Step
from dakrun.engine.prompt_queue import LAUNCHES, PromptQueue
from dakrun.errors import GpuFailed, UsageError
from dakrun.hardware import load_profile
from dakrun.llm import LLM
from dakrun.plan import Policy, PromptGroups
from dakrun.report import _spread
from dakrun.requests import Completion, Request, as_requests
from dakrun.terminal.summary import render

NAME = "llama-gqa3-tied"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save(NAME, tmp_path_factory.mktemp("engine"))


def load(path: Path, batch_size: int = 4, max_model_len: int = 160) -> LLM:
    policy = Policy(offload_ratio=0.3, kv_offload_ratio=0.5)
    return LLM(
        path, device="cpu", batch_size=batch_size, max_model_len=max_model_len, policy=policy
    )


def requests(count: int, **params: object) -> list[Request]:
    return [
        Request(
            id=f"r{i}",
            line=i + 1,
            prompt_ids=tuple(range(3, 5 + i)),
            params=SamplingParams(**{"max_tokens": 8} | params),  # type: ignore[arg-type]
        )
        for i in range(count)
    ]


def by_id(completions: list[Completion]) -> dict[str, tuple[int, ...]]:
    return {c.id: c.token_ids for c in completions}


def test_a_freed_slot_is_refilled_at_once(path: Path) -> None:
    llm = load(path, batch_size=2)
    taken: list[str] = []

    def source() -> object:
        for i, request in enumerate(requests(5)):
            taken.append(request.id)
            tokens = 2 if i == 0 else 6
            yield Request(
                id=request.id,
                line=request.line,
                prompt_ids=request.prompt_ids,
                params=SamplingParams(max_tokens=tokens),
            )

    stream = llm.stream(source())  # type: ignore[arg-type]
    assert next(stream).id == "r0"
    assert taken == ["r0", "r1"]
    assert next(stream).id == "r1"
    assert taken == ["r0", "r1", "r2"], "r2 took r0's slot while r1 was running"
    assert [c.id for c in stream] == ["r2", "r3", "r4"]


@pytest.mark.parametrize(("together", "chunk_tokens"), [(1, 4096), (3, 4096), (3, 6)])
def test_requests_begin_in_groups(path: Path, together: int, chunk_tokens: int) -> None:
    """Freed slots wait for others, but not when prompts fill a pass or nothing else is left."""
    params = [SamplingParams(max_tokens=3 + 2 * i) for i in range(11)]
    prompts = [[5, 6, 7 + i] for i in range(11)]
    groups: list[int] = []
    with load(path, batch_size=4) as llm:
        alone = [llm.generate([p], q)[0].token_ids for p, q in zip(prompts, params, strict=True)]
        engine = llm.engine
        engine.prompts.together, engine.runner.chunk_tokens = together, chunk_tokens
        launch = engine.runner.launch

        def counted(step: Step) -> None:
            assert sum(part.length for part in step.prompts) <= chunk_tokens
            if step.prompts:
                groups.append(len(step.prompts))
            launch(step)

        engine.runner.launch = counted  # type: ignore[method-assign]
        asked = as_requests(prompts, params, llm.rules)  # in this order
        found = {one.id: one.token_ids for one in llm.stream(asked)}  # type: ignore[union-attr]
    assert (
        [found[str(i)] for i in range(11)] == alone
        and sum(groups) == 11
        and groups[0] == min(4, chunk_tokens // 3)
    )
    least = min(together, chunk_tokens // 6)  # prompts have 3 tokens, and half is for rows
    assert groups[2:-1] == [least] * (len(groups) - 3) and groups[-1] <= least


def test_prompts_and_rows_fit_in_a_launch(path: Path) -> None:
    """The idle rows of the rows' bucket count: 65 tokens more than one launch multiplies cost two.

    With these rows' slots in two tiers, the bucket may have many more rows than run.
    """
    params = [SamplingParams(max_tokens=2 + i % 5) for i in range(24)]
    prompts = [[5] * 60 + [i] for i in range(24)]
    with load(path, batch_size=6, max_model_len=128) as llm:
        runner, taken = llm.engine.runner, list[tuple[int, int]]()
        before = [one.token_ids for one in llm.generate(prompts, params)]
        runner.chunk_tokens, launch, llm.engine.prompts.together = 160, runner.launch, 3

        def counted(step: Step) -> None:
            if step.decode and step.prompts:
                beside = runner.tokens_beside([row.slot for row in step.decode], 1)
                taken.append((beside, sum(row.length for row in step.prompts)))
            launch(step)

        runner.launch = counted  # type: ignore[method-assign]
        runner.tokens_beside = lambda slots, width: 64 * len(slots) * width  # type: ignore[method-assign]
        assert [one.token_ids for one in llm.generate(prompts, params)] == before
    assert taken and all(prompt <= max(80, 160 - beside) for beside, prompt in taken)
    assert max(prompt for _, prompt in taken) > 64


def test_groups_follow_the_time_of_launches(path: Path) -> None:
    """Where the CPU launches slowly, more requests share a launch; what waits counts as four."""
    groups = PromptGroups(
        slots=256, steps_s=2.0, step_s=0.01, request_s=0.001, mixed_s=0.001, launch_s=0.02,
        hidden_s=0.005,
    )  # fmt: skip
    with load(path) as llm:
        engine = llm.engine
        queue = PromptQueue(engine.runner, engine.admission, groups)
        chosen = {}
        for factor in (1, 2, 3, 4, 50):
            for _ in range(LAUNCHES):
                queue.count_launch(0.02 * factor)
            chosen[factor] = queue.together
        assert chosen[1] == groups.best() < chosen[2] < chosen[3] < chosen[4] == chosen[50]
        for _ in range(LAUNCHES):
            queue.count_launch(0.001)
        assert queue.together == chosen[50], "a graph was replayed"
        queue.count_launch(0.01)
        assert queue.together == chosen[50], "one that is not like the others"
        of_cpu = PromptQueue(engine.runner, engine.admission, PromptGroups.of(engine.plan))
        for _ in range(LAUNCHES):
            of_cpu.count_launch(1.0)  # there a launch computes
        assert of_cpu.together == 1


@pytest.mark.parametrize("ahead", [1, 2])
def test_a_step_may_accept_several_tokens_of_a_row(
    path: Path, ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those behind a request's end are dropped, with their log-probabilities."""
    chosen, steps = [7, 8, 9], deque[Step]()

    def collect() -> Accepted:
        rows = steps.popleft().rows
        likeliest = [[(token, -0.5)] for token in chosen]
        return Accepted([chosen * row.wanted for row in rows], [likeliest * r.wanted for r in rows])

    with load(path, batch_size=4) as llm:
        monkeypatch.setattr(llm.engine.runner, "ahead", ahead)
        monkeypatch.setattr(llm.engine.runner, "launch", steps.append)
        monkeypatch.setattr(llm.engine.runner, "collect", collect)
        stops = [(), (8,), (9,), (3,)]
        params = [
            SamplingParams(max_tokens=5, logprobs=0, ignore_eos=True, stop_token_ids=ids)
            for ids in stops
        ]
        found = llm.generate([[5, 6]] * 4, params)
        assert llm.engine.stats.new_tokens == 5 + 2 + 3 + 5 and not llm.engine.stats.running_tokens
    assert [one.token_ids for one in found] == [(7, 8, 9, 7, 8), (7, 8), (7, 8, 9), (7, 8, 9, 7, 8)]
    assert [one.finish_reason for one in found] == ["length", "stop", "stop", "length"]
    for one in found:
        assert one.logprobs is not None
        assert [given.chosen.token_id for given in one.logprobs] == list(one.token_ids)


def test_requests_that_arrive_late(path: Path) -> None:
    """None, for a request that has not arrived, ends nothing and delays no result."""
    found: list[str] = []

    def source() -> Iterator[Request | None]:
        first, second, third = requests(3)
        yield from (first, second)
        while len(found) < 2:
            yield None
        yield third

    with load(path, batch_size=4) as llm:
        llm.engine.prompts.together = 4
        for result in llm.stream(source()):
            found.append(result.id)
    assert sorted(found) == ["r0", "r1", "r2"]


@pytest.mark.parametrize("fails", [False, True])
def test_results_wait_for_a_device_that_wants_steps(
    path: Path, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A caller may take its time with them. At an error they come first."""
    rows = [*requests(2, max_tokens=3), *requests(5, max_tokens=9)[2:]]

    def run(*, ended: bool, delay_s: float) -> list[tuple[str, int]]:
        """The ids of results, each with the number of steps launched before it."""
        found, launched = [], 0
        with load(path, batch_size=3) as llm, monkeypatch.context() as patch:
            runner = llm.engine.runner
            launch = runner.launch

            def counted(step: Step) -> None:
                nonlocal launched
                launched += 1
                if fails and launched == 8:
                    raise RuntimeError("a bug")
                launch(step)

            patch.setattr(runner, "ahead", 2)
            patch.setattr(runner, "launch", counted)
            patch.setattr(runner, "has_ended", lambda: ended)
            patch.setattr("dakrun.engine.ended.RESULT_DELAY_S", delay_s)
            with pytest.raises(RuntimeError, match="a bug") if fails else nullcontext():
                for one in llm.stream(rows):
                    found.append((one.id, launched))
            assert llm.engine.stats.running_tokens == 0
        return found

    at_once, with_two_ahead = run(ended=True, delay_s=0), run(ended=False, delay_s=60)
    late = run(ended=True, delay_s=60)
    ids = ["r0", "r1"] if fails else ["r0", "r1", "r2", "r3", "r4"]
    assert [[name for name, _ in one] for one in (at_once, with_two_ahead, late)] == [ids] * 3
    assert [one[0][1] for one in (at_once, with_two_ahead)] == [4, 5]
    assert len({launched for _, launched in late}) == 1
    assert late[0][1] == 8 if fails else late[0][1] > at_once[2][1]


def test_an_iterator_of_requests_may_wait_for_results(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked for the next one when all results are given, also while others run."""
    found: list[str] = []
    asked: list[list[str]] = []

    def source() -> Iterator[Request]:
        first, second, third, fourth = requests(4, max_tokens=3)
        yield from (first, replace(second, params=SamplingParams(max_tokens=40, ignore_eos=True)))
        for late in (third, fourth):
            asked.append(list(found))
            yield late

    with load(path, batch_size=2) as llm:
        monkeypatch.setattr(llm.engine.runner, "ahead", 2)
        monkeypatch.setattr(llm.engine.runner, "has_ended", lambda: True)
        for result in llm.stream(source()):
            found.append(result.id)
    assert asked == [["r0"], ["r0", "r2"]]
    assert found == ["r0", "r2", "r3", "r1"]


def test_no_result_waits_for_a_step_behind_which_there_is_none(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with load(path, batch_size=2) as llm:
        monkeypatch.setattr(llm.engine.runner, "ahead", 2)
        first, second = requests(2)
        last_but_one = replace(first, params=SamplingParams(max_tokens=7, ignore_eos=True))
        stream = llm.stream([last_but_one, second])
        assert next(stream).id == "r0"
        assert len(llm.engine._steps) == 1, "the last step is under way"
        assert [one.id for one in stream] == ["r1"]


def test_an_id_may_be_used_again(path: Path) -> None:
    with load(path, batch_size=2) as llm:
        alike = [replace(request, id="a") for request in requests(5)]
        assert [one.id for one in llm.stream(alike)] == ["a"] * 5


def test_one_run_has_the_slots_at_a_time(path: Path) -> None:
    llm = load(path, batch_size=2)
    alone = by_id(list(llm.stream(requests(4))))
    stream = llm.stream(requests(4))
    first = next(stream)
    with pytest.raises(UsageError, match="still generating for another") as caught:
        llm.generate([[5, 6, 7]])
    assert "own LLM" in caught.value.hint
    refused: list[BaseException] = []

    def generate() -> None:
        try:
            llm.generate([[5, 6, 7]])
        except UsageError as problem:
            refused.append(problem)

    thread = threading.Thread(target=generate)
    thread.start()
    thread.join()
    assert len(refused) == 1
    assert by_id([first, *stream]) == alone


@pytest.mark.parametrize("end", ["closed", "let go of"])
def test_a_stream_that_is_given_up_frees_the_slots(path: Path, end: str) -> None:
    llm = load(path, batch_size=2)
    alone = by_id(list(llm.stream(requests(4))))
    stream = llm.stream(requests(4, max_tokens=100))
    next(stream)
    if end == "closed":
        stream.close()  # type: ignore[attr-defined]
    else:
        del stream
    assert by_id(list(llm.stream(requests(4)))) == alone


def test_results_do_not_depend_on_batch_size_or_order(path: Path) -> None:
    sampled = requests(7, temperature=1.0, top_k=50, top_p=0.95, seed=3)
    runs = [
        by_id(list(load(path, batch_size).stream(rows)))
        for batch_size, rows in ((1, sampled), (4, sampled), (7, sampled[::-1]))
    ]
    assert runs[0] == runs[1] == runs[2]
    other = by_id(list(load(path).stream(requests(7, temperature=1.0, seed=4))))
    assert other != runs[0]


def test_equal_prompts_get_different_samples(path: Path) -> None:
    params = SamplingParams(max_tokens=12, temperature=1.0)
    first, second = load(path).generate([[5, 6, 7], [5, 6, 7]], params)
    assert first.token_ids != second.token_ids


def test_eos_ends_a_request_unless_ignored(path: Path) -> None:
    llm = load(path)
    tokens = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=20))[0].token_ids
    end = tokens[4]
    llm.engine.answers.eos = frozenset([end])
    stopped, ignoring = llm.generate(
        [[5, 6, 7], [5, 6, 7]],
        [SamplingParams(max_tokens=20), SamplingParams(max_tokens=20, ignore_eos=True)],
    )
    assert stopped.token_ids == tokens[: tokens.index(end) + 1]
    assert stopped.finish_reason == "stop"
    assert ignoring.token_ids == tokens
    assert ignoring.finish_reason == "length"


def test_steps_may_run_ahead_of_their_tokens(path: Path) -> None:
    """What is computed of a request after its end goes to nobody."""
    rows = [
        *requests(5, temperature=1.0, seed=1),
        *(replace(r, id=f"short-{r.id}") for r in requests(3, max_tokens=2)),
    ]
    results = []
    for ahead in (1, 2, 3):
        llm = load(path, batch_size=2, max_model_len=20)
        llm.engine.answers.eos = frozenset(range(0, tiny_models.VOCAB, 5))
        llm.engine.runner.ahead = ahead
        results.append({c.id: c for c in llm.stream(rows)})
        assert llm.engine.runner.ahead == ahead and not llm.engine.runner._accepted
    assert {c.finish_reason for c in results[0].values()} == {"stop", "length"}
    for other in results[1:]:
        for key, completion in results[0].items():
            assert other[key].token_ids == completion.token_ids
            assert other[key].finish_reason == completion.finish_reason


def test_waiting_for_a_request_is_not_time_of_a_step(path: Path) -> None:
    """Nor of a step that was launched before its requests were known to have ended."""

    def source(llm: LLM) -> Iterator[Request]:
        for request in requests(3):
            assert not llm.engine._steps
            time.sleep(0.5)
            yield request

    with load(path, batch_size=1) as llm:
        llm.engine.answers.eos = frozenset(range(tiny_models.VOCAB))
        llm.engine.runner.ahead = 3
        assert [c.finish_reason for c in llm.stream(source(llm))] == ["stop"] * 3
        stats = llm.engine.stats
        assert stats.step_s and sum(stats.step_s) + stats.prefill_s < 0.5


def test_a_request_ends_where_its_slot_is_full(path: Path) -> None:
    llm = load(path, max_model_len=20)
    (completion,) = llm.generate([list(range(3, 18))], SamplingParams(max_tokens=100))
    assert len(completion.token_ids) == 5
    assert completion.finish_reason == "length"


def test_a_slot_keeps_nothing_of_its_last_request(path: Path) -> None:
    """Unused cache positions may hold anything, NaN included."""
    llm = load(path, batch_size=1)
    before = by_id(list(llm.stream(requests(3))))
    cache = llm.engine.runner.cache
    for part in cache.parts:
        part.view(torch.float32).fill_(torch.nan)
    assert by_id(list(llm.stream(requests(3)))) == before


def test_long_prompts_are_prefilled_in_chunks(path: Path) -> None:
    whole = by_id(list(load(path).stream(requests(6))))
    llm = load(path)
    llm.engine.runner.chunk_tokens = 4
    assert by_id(list(llm.stream(requests(6)))) == whole


def test_statistics_count_what_was_done(path: Path) -> None:
    llm = load(path, batch_size=2)
    completions = list(llm.stream(requests(4, max_tokens=3)))
    stats = llm.engine.stats
    assert stats.requests == len(completions) == 4
    assert stats.prompt_tokens == sum(c.prompt_tokens for c in completions) == 2 + 3 + 4 + 5
    assert stats.new_tokens == 12
    assert len(stats.step_s) == 4, "two steps for each pair of requests"
    assert stats.step_rows == 8
    cached = sum(n + step for n in (2, 3, 4, 5) for step in (0, 1))
    assert stats.kv_bytes_read == cached * llm.config.kv_bytes_per_token
    assert len(stats.ttft_s) == len(stats.tpot_s) == 4
    assert all(c.ttft_s > 0 and c.tpot_s > 0 for c in completions)
    ops = {op.op.name for op in llm.plan.ops}
    assert set(llm.engine.runner.op_seconds(8)) == {*ops, "sampling"}


def test_prompts_may_be_computed_before_any_row_decodes(path: Path) -> None:
    """So that a measured step has a row of every request, however long the prompts take."""
    found = []
    for first in (False, True):
        llm = load(path, batch_size=4)
        llm.engine.runner.chunk_tokens, llm.engine.prompts_first = 4, first
        found.append(by_id(list(llm.stream(requests(4, max_tokens=3)))))
        stats = llm.engine.stats
        assert (stats.mixed_steps == 0) == first
        assert (stats.step_rows == 4 * len(stats.step_s) == 8) == first
    assert found[0] == found[1]


def test_a_report_of_a_run_that_goes_on_has_no_times_by_op(path: Path) -> None:
    """To measure them, slots may be overwritten."""
    llm = load(path, batch_size=2)
    alone = by_id(list(llm.stream(requests(4))))
    stream = llm.stream(requests(4))
    first = next(stream)
    report = llm.report()
    assert report["requests"]["finished"] == 5
    assert all(op["measured_s"] is None for op in report["ops"])
    assert by_id([first, *stream]) == alone
    assert all(op["measured_s"] > 0 for op in llm.report()["ops"])


def test_a_run_after_an_interrupted_one_gets_its_own_tokens(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted after a step was launched, and before the engine knew of it."""
    llm = load(path, batch_size=2)
    alone = by_id(list(llm.stream(requests(4))))
    launch = llm.engine.runner.launch

    def interrupted(step: Step) -> None:
        launch(step)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(llm.engine.runner, "launch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[5, 6, 7]])
    assert by_id(list(llm.stream(requests(4)))) == alone


def test_report_has_figures_with_units(path: Path) -> None:
    llm = load(path, batch_size=2)
    list(llm.stream(requests(4)))
    report = llm.report(2.0)
    assert report["schema"] == 1
    assert report["tokens_per_s"] == 32 / 2.0
    step = report["decode_step_s"]
    assert step["mean"] > 0
    assert step["p99"] >= step["median"]
    assert report["eb_bytes_per_s"] == pytest.approx(llm.plan.weight_bytes / step["mean"])
    for op in report["ops"]:
        assert op["bound_s"] <= op["predicted_s"]
        assert op["measured_s"] > 0
    assert [t["name"] for t in report["tiers"]] == ["hbm", "host"]


@pytest.mark.parametrize(
    ("count", "p99"), [(1, 1), (2, 2), (99, 99), (100, 99), (101, 100), (300, 297)]
)
def test_percentiles_are_of_the_nearest_rank(count: int, p99: int) -> None:
    spread = _spread(range(count, 0, -1))
    assert spread == {"mean": (count + 1) / 2, "median": (count + 1) / 2, "p99": p99}


def test_a_report_names_the_ops_that_the_plan_was_wrong_about(path: Path) -> None:
    llm = load(path, batch_size=2)
    list(llm.stream(requests(4)))
    report = llm.report(2.0) | {"predictions_comparable": True}
    for op, factor in zip(report["ops"], (0.5, 0.5, 2.0, 0.95, None, *[1.0] * 9), strict=False):
        op["measured_s"] = factor and factor * op["predicted_s"]
    text = io.StringIO()
    render(report, Console(file=text, width=200), verbose=True)
    names = [op["name"] for op in report["ops"]]
    # Attention is a small share of this model's step.
    assert names[1] == "attention"
    assert f"full batch: {names[0]} -50%, {names[2]} 2.0 times\n" in text.getvalue()
    report["ops"][3]["measured_s"] *= 1000  # the others' errors are nothing beside this one's
    text = io.StringIO()
    render(report, Console(file=text, width=200), verbose=True)
    assert f"full batch: {names[3]} 950.0 times\n" in text.getvalue()


def test_predictions_of_kernels_are_not_shown_where_they_did_not_run(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = load(path, batch_size=2)
    measured = replace(llm.profile.provenance, kind="measured")
    llm.plan = replace(llm.plan, profile=replace(llm.profile, provenance=measured))
    list(llm.stream(requests(4)))
    assert llm.report(2.0)["predictions_comparable"]
    monkeypatch.setattr("dakrun.llm.why_plain_torch", lambda *_: "card X lacks what they need")
    report = llm.report(2.0)
    assert not report["predictions_comparable"] and report["fallback"] == llm.fallback
    text = io.StringIO()
    render(report, Console(file=text, width=200), verbose=True)
    shown = text.getvalue()
    assert "no predictions: plain torch ran, not the kernels that are predicted: card X" in shown
    assert "bound" not in shown and "; predicted" not in shown and "round numbers" not in shown


def test_predictions_of_round_numbers_are_not_compared(path: Path) -> None:
    llm = load(path, batch_size=2)
    list(llm.stream(requests(4)))
    assert llm.profile.provenance.kind == "nominal" and not llm.profile.comparable
    text = io.StringIO()
    render(llm.report(2.0), Console(file=text, width=200), verbose=True)
    shown = text.getvalue()
    assert "no predictions: profile cpu has round numbers; dakrun profile --device cpu" in shown
    assert "predicted" not in shown and "bound" not in shown and "%" not in shown
    measured = replace(llm.profile.provenance, kind="measured")
    assert replace(llm.profile, provenance=measured).comparable
    assert load_profile("h200-spec").comparable and load_profile("h200-spec").device == "cuda"


def test_a_run_without_decode_steps_has_a_report(path: Path) -> None:
    llm = load(path)
    list(llm.stream(requests(1, max_tokens=1)))
    assert llm.report(1.0)["eb_bytes_per_s"] is None
    assert llm.report(1.0)["tpot_s"] is None


def test_a_failing_gpu_is_told(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = load(path, batch_size=2)
    runner = llm.engine.runner
    launches = runner.launch

    def failing(*step: Any) -> None:
        if runner._steps == 3:
            raise RuntimeError("CUDA error: an illegal memory access\nand much more")
        launches(*step)

    monkeypatch.setattr(runner, "launch", failing)
    rows = [*requests(1, max_tokens=2), *requests(3)[1:]]
    finished = []
    with pytest.raises(GpuFailed, match=r"^the GPU failed: CUDA error: an illegal memory access$"):
        for completion in llm.stream(rows):
            finished.append(completion.id)
    assert finished == ["r0"]


def test_other_errors_stay_what_they_are(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = load(path)

    def failing(*step: Any) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(llm.engine.runner, "launch", failing)
    with pytest.raises(RuntimeError, match="a bug"):
        list(llm.stream(requests(1)))


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (5, "prompts is of type int"),
        (b"bytes", "prompts is of type bytes"),
        ({"a": [5]}, "prompt 0: 'a' not supported in a prompt's dict"),
        (None, "prompts is of type NoneType"),
        ([[]], "prompt 0: the prompt has no tokens"),
        ([[5], [tiny_models.VOCAB]], "prompt 1: token id 331 is not in"),
        ([[5] * 160], "prompt 0: the prompt has 160 tokens"),
        (["text"], "prompt 0: the model has no tokenizer"),
        *(
            ([bad], "prompt 0: not text, a list of token ids, a list of messages, or a dict with")
            for bad in (None, 5.0, True, b"ab", {5}, [5.0], [True], ["5"], [[5]], torch.ones(2))
        ),
    ],
)
def test_bad_prompts_are_refused(path: Path, prompts: object, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load(path).generate(prompts)  # type: ignore[arg-type]


@pytest.mark.parametrize("params", [False, 5, "greedy", {"max_tokens": 3}, [None]])
def test_params_of_another_kind_are_refused(path: Path, params: object) -> None:
    with pytest.raises(UsageError, match="params are not SamplingParams"):
        load(path).generate([[5, 6, 7]], params)  # type: ignore[arg-type]


def test_stop_strings_without_a_tokenizer_are_refused_before_anything_runs(path: Path) -> None:
    llm = load(path)
    params = [SamplingParams(), SamplingParams(stop=("a",))]
    with pytest.raises(UsageError, match="prompt 1: stop strings need"):
        llm.generate([[5], [6]], params)
    with pytest.raises(UsageError, match="prompt 1: stop strings need"):
        llm.stream([[5], [6]], params)
    assert llm.engine.stats.prefill_s == 0


def test_prompts_and_params_may_be_iterators_arrays_and_tensors(path: Path) -> None:
    llm = load(path)
    expected = [c.token_ids for c in llm.generate([[5, 6], [7, 8]])]
    params = SamplingParams()
    for prompts in (
        (ids for ids in ([5, 6], iter([7, 8]))),
        torch.tensor([[5, 6], [7, 8]]),
        np.array([[5, 6], [7, 8]]),
    ):
        results = llm.generate(prompts, (own for own in (params, params)))
        assert [c.token_ids for c in results] == expected
