"""Advice of `dakrun plan`: followed, it gives the speed that it names; limits of a step."""

import functools
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from dakrun.cli import main
from dakrun.config import Workload
from dakrun.hardware import load_profile
from dakrun.models import known_model
from dakrun.plan import Links, Plan, Policy, bound_time, make_plan
from dakrun.plan.advice import MIN_GAIN, ORIGINS, Advice, advise, busy_shares, limits, resource_text

GIB = 2**30


def a_plan(
    name: str, profile: str, batch: int, *, prompt: int = 32, policy: Policy | None = None
) -> Plan:
    workload = Workload(
        batch_size=batch, prompt_len=prompt, new_tokens=32, max_model_len=prompt + 32
    )
    model = known_model(name)
    assert model is not None
    return make_plan(model, workload, load_profile(profile), policy or Policy())


def plan_json(*args: str) -> dict[str, Any]:
    result = CliRunner(env={"DAKRUN_DEBUG": ""}).invoke(main, ["plan", "--json", *args])
    assert result.exit_code == 0, result.stderr
    shown: dict[str, Any] = json.loads(result.stdout)
    return shown


@functools.cache
def advised(command: str) -> dict[str, Any]:
    return plan_json(*command.split())


COMMANDS = (
    "--model opt-30b --profile gh200 --batch-size 8",
    "--model opt-30b --profile h200-pcie5 --batch-size 8 --hbm-budget 40GiB",
    "--model opt-30b --profile h200-nvlink-peer --batch-size 8 --hbm-budget 40GiB",
    "--model llama-2-70b --profile gh200 --batch-size 32 --prompt-len 1024",
    "--model opt-6.7b --profile h200-pcie5 --batch-size 64 --prompt-len 500 --hbm-budget 9GiB",
    "--model opt-30b --profile gh200 --batch-size 8 --offload-ratio 0.3 --kv-offload-ratio 0.5",
    "--model opt-6.7b --profile gh200 --batch-size 256 --strategy uniform --hbm-budget 20GiB",
    "--model opt-6.7b --profile h200-pcie5 --batch-size 8 --hbm-budget 12GiB --transport direct",
    "--model opt-125m --profile cpu --batch-size 8",
    "--model opt-66b --profile h200-nvlink-peer --remote host,peer --batch-size 1024 "
    "--hbm-budget 60GiB --peer-budget 40GiB",
)


def batch_s(shown: dict[str, Any]) -> float:
    """Seconds of a whole batch: its prompts, and as many steps as new tokens."""
    predicted, new = shown["predicted"], shown["workload"]["new_tokens"]
    return float(predicted["ttft_s"] + new * predicted["decode_step_s"])


@pytest.mark.parametrize("command", COMMANDS)
def test_following_the_advice_gives_what_it_says(
    command: str, request: pytest.FixtureRequest
) -> None:
    """Every change is written as options, and planning with them gives the speed it names."""
    shown = advised(command)
    request.getfixturevalue("unadvised")
    alternatives = shown["advice"]["alternatives"]
    order = [(ORIGINS.index(other["origin"]), -other["gain"]) for other in alternatives]
    assert order == sorted(order)
    now = batch_s(shown)
    for other in alternatives:
        planned = plan_json(*command.split(), *other["change"].split())
        then, rows = planned["predicted"], planned["workload"]["batch_size"]
        assert then["tokens_per_s"] == pytest.approx(other["predicted_tokens_per_s"])
        assert then["decode_step_s"] == pytest.approx(other["predicted_decode_step_s"])
        rate = rows / shown["workload"]["batch_size"] * now / batch_s(planned)
        assert rate - 1 == pytest.approx(other["gain"], abs=1e-9)
    sentence = shown["advice"]["sentence"]
    helping = [other for other in alternatives if other["gain"] > MIN_GAIN]
    assert ("would help" in sentence) == bool(helping)
    if helping and helping[0]["available"]:
        assert helping[0]["change"] in sentence
        planned = plan_json(*command.split(), *helping[0]["change"].split())
        rows = planned["workload"]["batch_size"]
        assert f" for {rows:,} request{'s' * (rows > 1)})" in sentence
        most = helping[0]["gain"] == max(other["gain"] for other in helping)
        assert ("would help most" in sentence) == most
    assert sentence.startswith("limited by ") and "\n" not in sentence


def advice_for(command: str) -> dict[str, Any]:
    advice: dict[str, Any] = advised(command)["advice"]
    return advice


def test_capacity_that_forces_bytes_over_a_slow_link() -> None:
    shown = advised(COMMANDS[1])
    advice, missing = shown["advice"], shown["required_ratio"]
    assert missing == pytest.approx(0.318, abs=0.005)
    assert advice["limited_by"] == ["host"]
    assert "the link to host memory" in advice["sentence"]
    assert f"{missing:.1%} of the bytes do not fit in HBM" in advice["sentence"]
    assert advice["alternatives"][0]["kind"] == "budget"
    budgets = [a["change"] for a in advice["alternatives"] if a["kind"] == "budget"]
    assert "--hbm-budget 44.00GiB" in budgets, "a tenth more is tried, too"


def test_another_tier_of_the_machine() -> None:
    assert "--remote host,peer:1" in advice_for(COMMANDS[2])["sentence"]


def test_the_users_own_limits_come_first() -> None:
    """Then what the machine has, then what it lacks, however much more that would gain."""
    both = "--hbm-budget 139.80GiB --peer-budget 139.80GiB"
    shown = advised(COMMANDS[-1])
    first = shown["advice"]["alternatives"][0]
    assert (first["change"], first["origin"]) == (both, "user")
    assert first["predicted_tokens_per_s"] > 8 * shown["predicted"]["tokens_per_s"]
    assert f"; {both} (" in shown["advice"]["sentence"]
    assert "268" not in shown["advice"]["sentence"], "HBM that the machine lacks"
    origins = [other["origin"] for other in shown["advice"]["alternatives"]]
    assert origins == sorted(origins, key=ORIGINS.index) and set(origins) == set(ORIGINS)
    dropped = plan_json(*COMMANDS[-1].partition(" --hbm-budget")[0].split())["predicted"]
    assert first["predicted_tokens_per_s"] == pytest.approx(dropped["tokens_per_s"], rel=0.01)


def test_more_hbm_than_the_machine_has() -> None:
    advice = advice_for(COMMANDS[3])
    best = max(advice["alternatives"], key=lambda other: other["gain"])
    assert best["kind"] == "budget" and not best["available"]
    assert "of HBM (gh200 has 89.41 GiB)" in advice["sentence"]
    assert best["change"] not in advice["sentence"], "no option makes a GPU larger"


def test_a_smaller_batch_where_kv_dominates() -> None:
    plan = a_plan("opt-30b", "gh200", 256, prompt=1000)
    best = next(a for a in advise(plan).alternatives if a.kind == "batch_size")
    assert best.change == "--batch-size 128" and best.gain > MIN_GAIN


def test_no_more_rows_than_there_are_requests() -> None:
    plan = a_plan("opt-30b", "gh200", 32)
    for requests, tried in ((20, {16}), (50, {16, 50}), (1000, {16, 64})):
        found = advise(plan, requests=requests).alternatives
        assert {a.plan.workload.batch_size for a in found if a.kind == "batch_size"} == tried


def test_the_requests_of_a_file_are_no_larger_batch(tmp_path: Path) -> None:
    source = tmp_path / "three.jsonl"
    source.write_text('{"prompt": "a few words"}\n' * 3)
    shown = plan_json("--model", "opt-30b", "--profile", "gh200", "-i", str(source))
    assert shown["workload"]["batch_size"] == 3
    changes = [a["change"] for a in shown["advice"]["alternatives"] if a["kind"] == "batch_size"]
    assert changes == ["--batch-size 1"]


def test_what_was_fixed_is_set_free() -> None:
    kinds = {a["kind"]: a["change"] for a in advice_for(COMMANDS[5])["alternatives"]}
    assert kinds["ratio"] == "--offload-ratio auto --kv-offload-ratio auto"
    assert "strategy" not in kinds
    kinds = {a["kind"]: a["change"] for a in advice_for(COMMANDS[6])["alternatives"]}
    assert kinds["strategy"] == "--strategy auto" and "ratio" not in kinds


def test_nothing_helps() -> None:
    plan = a_plan("opt-30b", "gh200", 512)
    advice = advise(plan)
    assert advice.limits == ["compute"]
    assert all(other.gain <= MIN_GAIN for other in advice.alternatives)
    assert "limited by arithmetic" in advice.sentence
    assert "helps by more than 2%" in advice.sentence


def test_room_that_would_lie_idle_is_not_advised() -> None:
    plan = a_plan("opt-6.7b", "gh200", 8)
    assert plan.required_ratio == 0
    assert all(other.kind != "budget" for other in advise(plan).alternatives)


@pytest.mark.parametrize(
    "plan",
    [
        a_plan("opt-6.7b", "gh200", 8),
        a_plan("opt-6.7b", "h200-pcie5", 512),
        a_plan("opt-6.7b", "h200-pcie5", 8, policy=Policy(hbm_budget=8 * GIB)),
        a_plan("opt-6.7b", "h200-nvlink-peer", 8, policy=Policy(remote=("host", "peer"))),
        a_plan("opt-6.7b", "cpu", 4),
    ],
)
def test_busy_shares(plan: Plan) -> None:
    """No resource is busy for longer than the step; limiting ones are busy nearly throughout."""
    busy = busy_shares(plan)
    assert list(busy.values()) == sorted(busy.values(), reverse=True)
    assert 0 < next(iter(busy.values())) <= 1 + 1e-9
    assert set(plan.tiers) <= set(busy)
    read = plan.read_bytes(1) / plan.predicted_s
    rates = Links.of(plan.profile, plan.tiers[1:])
    fastest = max(rates.direct["host"], rates.staged["host"])
    assert busy["host"] >= read / fastest * (1 - 1e-9)
    assert limits(busy)[0] in (next(iter(busy)), "hbm+host")


def test_a_shared_link_is_named_instead_of_its_tiers() -> None:
    assert limits({"hbm+host": 0.9, "hbm": 0.89, "compute": 0.2}) == ["hbm+host"]
    assert limits({"hbm": 0.9, "host": 0.85, "compute": 0.2}) == ["hbm", "host"]
    assert resource_text("hbm+host") == "the memory link that hbm and host share"
    assert resource_text("peer:1") == "the link to peer:1 memory"


@pytest.mark.parametrize("staged", [False, True])
def test_lines_are_named_by_what_limits(staged: bool) -> None:
    links = Links(
        {"hbm": 10.0, "host": 2.0, "peer:1": 3.0},
        {"hbm": 10.0, "host": 2.5, "peer:1": 2.0},
        ((frozenset({"host", "peer:1"}), 4.0),),
    )
    named = links.lines(100.0, 1.0, staged=staged)
    assert list(named) == ["compute", "hbm", "host", "peer:1", "host+peer:1"]
    assert bound_time(named.values(), [0.0, 0.5, 0.5]) == pytest.approx(25.0)


def test_ties_name_one_change_of_a_kind() -> None:
    plan = a_plan("opt-30b", "h200-pcie5", 8, policy=Policy(hbm_budget=40 * GIB))
    advice = advise(plan)
    doubled = [replace(a, gain=3.0) for a in advice.alternatives if a.kind == "budget"]
    assert len(doubled) > 1
    sentence = Advice(plan=plan, busy=advice.busy, alternatives=tuple(doubled)).sentence
    assert sentence.count("--hbm-budget") == 1 and ", then" not in sentence


@pytest.mark.parametrize(
    ("name", "hardware"), [("llama-2-7b", "gh200"), ("opt-6.7b", "h200-pcie5"), ("opt-125m", "cpu")]
)
def test_a_limit_that_is_raised_as_hinted_is_kept(name: str, hardware: str) -> None:
    command = ["plan", "--model", name, "--profile", hardware, "--max-decode-step"]
    refused = CliRunner().invoke(main, [*command, "0.001"])
    (limit,) = re.findall(r"raise --max-decode-step to (\S+) or more", refused.stderr)
    done = CliRunner().invoke(main, [*command, limit, "--json"])
    assert done.exit_code == 0, done.stderr
    shown = json.loads(done.stdout)
    assert shown["predicted"]["decode_step_s"] * 1e3 <= float(limit)
    assert all(
        other["predicted_decode_step_s"] * 1e3 <= float(limit)
        for other in shown["advice"]["alternatives"]
    )
