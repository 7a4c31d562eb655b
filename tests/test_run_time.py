"""Runs foretold: against measured ones, laws of their schedule, and what the commands print."""

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from dakrun.cli import main
from dakrun.config import Workload
from dakrun.geometry import KV_BLOCK
from dakrun.hardware import load_profile
from dakrun.models.hub import find_model
from dakrun.plan import (
    ExpectedRun,
    Plan,
    Policy,
    RunForecast,
    blocks_suffice,
    choose_batch_size,
    make_plan,
)
from dakrun.plan.run_time import foretell
from dakrun.plan.running_requests import END_BINS, RequestLengths, RunningRequests
from dakrun.requests import RowLengths


def plan_of(
    batch: int, prompt: int, new: int, model: str = "llama-3-8b", budget: int = 139 << 30
) -> Plan:
    config, _ = find_model(model, "auto", "dummy")
    workload = Workload(batch_size=batch, prompt_len=prompt, new_tokens=new, max_model_len=2048)
    policy = Policy(hbm_budget=budget, host_budget=100 << 30)
    return make_plan(config, workload, load_profile("h200-pcie5"), policy)


def test_one_batch_takes_its_steps() -> None:
    """Those of its prompts, then a decode step for each further token."""
    plan = plan_of(32, 512, 64)
    found = foretell(plan, [RequestLengths(512, 64)] * 32)
    assert found.new_tokens == 32 * 64 and found.prompt_tokens == 32 * 512
    assert found.waits_for == "arithmetic"
    assert found.seconds - found.mixed_s == pytest.approx(63 * plan.predicted_s, rel=0.1)
    assert found.tokens_per_s == 32 * 64 / found.seconds


def test_more_to_do_takes_longer() -> None:
    plan = plan_of(64, 256, 128)
    rows = [RequestLengths(100 + 7 * i % 300, 20 + 11 * i % 200) for i in range(200)]

    def seconds(requests: Sequence[RequestLengths], **more: float) -> float:
        return foretell(plan, requests, **more).seconds  # type: ignore[arg-type]

    whole = seconds(rows)
    assert seconds(rows[:150]) < whole < seconds([r._replace(new=r.new + 9) for r in rows])
    assert whole < seconds([r._replace(prompt=2 * r.prompt) for r in rows])
    assert seconds([r._replace(shared=64) for r in rows]) < whole < seconds(rows, thresholds=True)
    assert seconds(rows, share=0.5) == pytest.approx(2 * whole)
    assert seconds([]) == 0 and foretell(plan, []).tokens_per_s == 0


def test_of_very_many_choices_some_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(64, 256, 128)
    rows = [RowLengths(100 + 7 * i % 300, 20 + 11 * i % 200, choices=8) for i in range(1000)]
    whole = ExpectedRun(rows, 0.5).forecast(plan)
    monkeypatch.setattr("dakrun.plan.expected_run.MAX_CHOICES", 2000)
    some = ExpectedRun(rows, 0.5).forecast(plan)
    assert whole.requests == some.requests == 16_000
    assert some.seconds == pytest.approx(whole.seconds, rel=0.05)
    assert some.shared_tokens == pytest.approx(whole.shared_tokens, rel=0.05)
    huge = [rows[0]._replace(choices=8192)] * 65_536
    monkeypatch.undo()
    assert ExpectedRun(huge).forecast(plan).requests == 8192 * 65_536


@pytest.mark.parametrize("gib", [24, 75])
def test_steps_at_once_take_as_long_as_one_by_one(
    gib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(gib)
    plan = plan_of(16, 256, 128, budget=gib << 30)
    rows = [
        RequestLengths(draw.randint(65, 3000), draw.randint(1, 300), 64 * draw.randint(0, 1))
        for _ in range(100)
    ]
    at_once = foretell(plan, rows, thresholds=True)
    monkeypatch.setattr(RunningRequests, "steps_left", 1)
    one_by_one = foretell(plan, rows, thresholds=True)
    assert at_once.seconds == pytest.approx(one_by_one.seconds, rel=1e-9)
    assert at_once.mixed_s == pytest.approx(one_by_one.mixed_s, rel=1e-9)


def test_blocks_of_requests_that_wait_for_their_prompts_are_counted() -> None:
    for blocks, fits in ((103, True), (101, False)):
        running = RunningRequests(2, blocks)
        running.begin(RequestLengths(6400, 3))
        for _ in range(6):
            assert running.has_room(RequestLengths(60, 3)) == fits
            running.advance([])


def test_requests_of_one_block_each_take_all_blocks() -> None:
    """Where blocks suffice for the ends of all, no estimate counts."""
    running, one = RunningRequests(29, 10), RequestLengths(34, 30)
    for _ in range(10):
        assert running.has_room(one)
        running.begin(one)
    assert not running.has_room(one)


@pytest.mark.parametrize("most", [300, 5000])
def test_room_is_about_what_an_exact_count_says(most: int) -> None:
    """Also where ends of several steps share a bin. Other requests may end later."""
    chance, answers = random.Random(most), list[bool]()
    for _ in range(200):
        blocks = chance.randint(10, 10 + 15 * most // KV_BLOCK)
        running, held, left = RunningRequests(most, blocks), list[int](), list[int]()
        for _ in range(30):
            one = RequestLengths(chance.randint(1, most), chance.randint(1, most))
            until = [*(min(steps, one.new - 1) for steps in left), one.new - 1]
            answers.append(running.has_room(one))
            slack = 2 + len(until) * (0.5 + most / END_BINS / KV_BLOCK)
            for by in (1, -1):
                exact = blocks_suffice([*held, one.prompt], until, round(blocks + by * slack))
                assert exact >= answers[-1] if by > 0 else exact <= answers[-1]
            if answers[-1]:
                running.begin(one)
                held, left = [*held, one.prompt], [*left, one.new - 1]
    assert 0.1 < sum(answers) / len(answers) < 0.9, "both answers occur"


def ragged_run(count: int) -> tuple[ExpectedRun, Workload]:
    """A run of `count` rows of random lengths, and the workload to choose a batch size for."""
    chance = random.Random(0)
    rows = [
        RowLengths(int(chance.uniform(20, 330)), int(min(512, chance.expovariate(1 / 170) + 4)))
        for _ in range(count)
    ]
    run = ExpectedRun(rows)
    work = Workload(
        batch_size=1,
        prompt_len=round(run.mean_prompt),
        new_tokens=round(run.mean_new),
        max_model_len=2048,
    )
    return run, work


def test_the_batch_size_is_that_of_the_shortest_run() -> None:
    """The last rows of a file do not fill a large batch, whose KV cache took room from weights."""
    config, _ = find_model("llama-3-8b", "auto", "dummy")
    profile = load_profile("h200-nvlink-peer")
    run, workload = ragged_run(512)
    rows = run.rows
    policy = Policy(hbm_budget=int(33.2 * 2**30), remote=("peer",))

    def chosen(**more: object) -> Plan:
        size = choose_batch_size(config, workload, profile, policy, limit=512, **more)  # type: ignore[arg-type]
        return make_plan(config, size, profile, policy)

    full, whole = chosen(), chosen(run=run)
    assert (
        full.workload.batch_size / full.predicted_s > whole.workload.batch_size / whole.predicted_s
    )
    assert run.forecast(whole).seconds < 0.85 * run.forecast(full).seconds
    assert chosen(run=ExpectedRun([])).workload == full.workload
    many = ExpectedRun(rows, share=0.001)  # 512,000 of them: few steps are not full
    assert many.forecast(chosen(run=many)).seconds <= many.forecast(full).seconds


@pytest.mark.parametrize(("gain", "offloads"), [(1.03, True), (1.01, False), (0.9, False)])
def test_of_runs_about_as_short_one_without_offloading_is_chosen(
    monkeypatch: pytest.MonkeyPatch, gain: float, offloads: bool
) -> None:
    """`gain`: of a run with bytes outside HBM; predictions of links are less certain than 2%."""
    config, _ = find_model("llama-3-8b", "auto", "dummy")
    profile = load_profile("h200-nvlink-peer")
    policy = Policy(hbm_budget=33 << 30, remote=("peer",))
    run = ExpectedRun([RowLengths(300, 200)] * 512)
    workload = Workload(batch_size=1, prompt_len=300, new_tokens=200, max_model_len=2048)

    def forecast_by_ratio(self: ExpectedRun, plan: Plan) -> RunForecast:
        seconds = 10 / gain if plan.ratio else 10.0
        return RunForecast(
            seconds=seconds,
            mixed_s=0.0,
            requests=512,
            prompt_tokens=153_600,
            shared_tokens=0,
            new_tokens=102_400,
            waits_for="hbm",
        )

    monkeypatch.setattr(ExpectedRun, "forecast", forecast_by_ratio)

    def ratio(**more: ExpectedRun) -> float:
        size = choose_batch_size(config, workload, profile, policy, limit=512, **more)  # type: ignore[arg-type]
        return make_plan(config, size, profile, policy).ratio

    assert ratio() > 0
    assert (ratio(run=run) > 0) == offloads


def test_hbm_is_reserved_for_prompts_where_that_shortens_the_run() -> None:
    config, _ = find_model("llama-2-70b", "auto", "dummy")
    profile, run = load_profile("h100-sxm"), ExpectedRun([RowLengths(200, 180)] * 1500)
    workload = Workload(  # says that hardly a token of the prompts is to be computed
        batch_size=512, prompt_len=200, new_tokens=180, max_model_len=2048, shared_len=192
    )

    def plan(policy: Policy, **more: object) -> Plan:
        return make_plan(config, workload, profile, policy, **more)  # type: ignore[arg-type]

    alone, whole = plan(Policy()), plan(Policy(), run=run)
    assert alone.prefill.transport == "direct" and whole.prefill.transport == "staged"
    assert sum(whole.memory(0).values()) <= whole.budgets[0]
    assert run.forecast(whole).seconds < 0.98 * run.forecast(alone).seconds
    assert whole.predicted_s > alone.predicted_s
    assert plan(Policy(), run=run, max_decode_step=alone.predicted_s) == alone
    assert plan(Policy(), run=run, max_decode_step=whole.predicted_s) == whole
    direct = Policy(transport="direct")
    assert plan(direct, run=run) == plan(direct)


def test_few_blocks_make_requests_wait() -> None:
    plan = plan_of(64, 256, 128)
    rows = [RequestLengths(300, 100)] * 64
    fewer = replace(plan, spare_kv_blocks=0)
    small = replace(fewer, workload=replace(plan.workload, prompt_len=40, new_tokens=10))
    assert foretell(small, rows).seconds > 1.2 * foretell(plan, rows).seconds


def test_plan_of_a_file(tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    common = list(range(100, 300))
    rows = [{"prompt_token_ids": [*common, i], "max_tokens": 10 + i} for i in range(20)]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["plan", "--model", "llama-3-8b", "--profile", "h200-pcie5", "-i", str(source)]
    shown = CliRunner().invoke(main, [*command, "--json"])
    assert shown.exit_code == 0, shown.output
    run = json.loads(shown.stdout)["run"]
    assert run["requests"] == 20 and run["prompt_tokens"] == 20 * 201
    assert run["shared_tokens"] == 19 * 192 and run["new_tokens"] == sum(range(10, 30))
    said = CliRunner().invoke(main, command)
    assert f"predicted {run['seconds']:.1f} s for 20 requests" in said.stdout
    assert "without drafts" not in said.stdout
    drafted = CliRunner().invoke(main, [*command, "--speculate", "suffix:3"])
    assert "the time is that of a run without drafts" in drafted.stdout.splitlines()[-1]
    rate = run["new_tokens"] / run["seconds"]
    answer = f"{rate:,.1f} tokens/s in the whole run of {run['seconds']:,.1f} s for 20 requests; "
    assert said.stdout.splitlines()[1].startswith(f"speed          {answer}")
    assert json.loads(shown.stdout)["rows"] == {
        "checked": 20, "whole_file": True, "cannot_run": 0, "reasons": [], "first_errors": [],
        "prompt_tokens": run["prompt_tokens"], "max_new_tokens": run["new_tokens"],
    }  # fmt: skip
    assert "rows           all of 20 rows can run" in said.stdout.splitlines()[3]
    source.write_text("{}\n")
    refused = CliRunner().invoke(main, command)
    assert refused.exit_code == 2 and "no row can be run" in refused.stderr
    assert "hint: dakrun validate says" in refused.stderr
