"""`dakrun evaluate`: predicted and measured points, the store, the order, budgets and errors."""

import csv
import datetime
import itertools
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from benched import on_the_cpu, refused
from cards import H200, hold_to
from cards import here as card_here
from click.testing import CliRunner
from click.testing import Result as Ended

from dakrun.cli import main
from dakrun.config import ModelConfig
from dakrun.errors import CannotRun, GpuFailed, OutOfGpuMemory
from dakrun.hardware import LOCAL, Card, load_profile, profile_text
from dakrun.lab.ceilings import Ceilings
from dakrun.lab.chain import Launch
from dakrun.lab.evaluate import Scope, evaluate
from dakrun.lab.evaluate.cases import case_of, link_reads
from dakrun.lab.evaluate.charts import Entry
from dakrun.lab.evaluate.figures import FIGURES
from dakrun.lab.evaluate.measure import Measurer
from dakrun.lab.evaluate.points import (
    AttentionPoint,
    FilePoint,
    Point,
    ProductPoint,
    ReadPoint,
    Result,
    StepPoint,
)
from dakrun.lab.evaluate.predict import predict, short
from dakrun.lab.evaluate.run import ceilings_of, describe, in_order
from dakrun.lab.evaluate.scope import TINY
from dakrun.lab.evaluate.steps import Steps
from dakrun.lab.evaluate.store import Store, read_run
from dakrun.models import known_model, model_config

NAME = TINY.name
STEP = StepPoint(model="opt-6.7b", new_tokens=9)
MULTICAST = ProductPoint(model="opt-6.7b", op="fc1", n=1024, ratio=1.0)


def run(*args: object) -> Ended:
    """`dakrun evaluate` with these arguments."""
    command = ["evaluate", *map(str, args)]
    return CliRunner(env={"DAKRUN_DEBUG": "", "NO_COLOR": ""}).invoke(main, command)


def scope(profile: str = "h200-pcie5", **changes: Any) -> Scope:
    """OPT-6.7B on an H200, quickly, and `changes`."""
    model = known_model("opt-6.7b")
    assert model is not None
    base = Scope(
        models={"opt-6.7b": model},
        profile=load_profile(profile),
        remote="host",
        quick=True,
        predict=False,
    )
    return replace(base, **changes)


def tiny_model() -> ModelConfig:
    return model_config(str(TINY))


def tiny_scope() -> Scope:
    return scope("cpu", models={NAME: tiny_model()})


def lines(folder: Path) -> list[dict[str, Any]]:
    text = (folder / "points.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def rows(folder: Path, figure: str) -> list[dict[str, str]]:
    with (folder / f"{figure}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def predicted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("predicted")
    ended = run("--predict", "--profile", "gh200", "--quick", "-o", folder)
    assert ended.exit_code == 0, ended.stderr
    assert ended.stdout == f"{folder / 'index.html'}\n"
    return folder


@pytest.fixture(scope="module", autouse=True)
def few_steps() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dakrun.lab.evaluate.scope.QUICK_STEPS", 2)
        patch.setattr("dakrun.lab.bench.model.WARM_UP_TOKENS", 1)
        yield


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on a CPU; what it measures are smaller steps than those of its points."""
    folder, step = tmp_path_factory.mktemp("measured"), Steps.step

    def smaller(steps: Steps, point: StepPoint) -> Result:
        batch_size, prompt_len = min(point.batch_size, 16), min(point.prompt_len, 64)
        return step(steps, replace(point, batch_size=batch_size, prompt_len=prompt_len))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Steps, "step", smaller)
        ended = run("--device", "cpu", "--profile", "cpu", "--quick", "-o", folder)
    assert ended.exit_code == 0, ended.stderr
    return folder


@pytest.mark.parametrize("figure", FIGURES)
@pytest.mark.parametrize("source", ["predicted", "measured"])
def test_every_figure_has_its_points(
    source: str, figure: str, request: pytest.FixtureRequest
) -> None:
    folder = request.getfixturevalue(source)
    found = rows(folder, figure)
    assert found and all(row["source"] == source for row in found)
    rates = ("seconds", "remote_bytes_per_s", "problem")
    assert all(any(row[key] for key in rates) for row in found)
    on_cpu = source == "measured" and figure in ("fig7", "l2", "parts")  # a CPU has no SMs
    assert on_cpu or any(not row["problem"] for row in found)
    assert f'id="{figure}"' in (folder / "index.html").read_text(encoding="utf-8")


def test_tables_hold_the_points_of_the_pictures(predicted: Path) -> None:
    text = (predicted / "tables.md").read_text(encoding="utf-8")
    for figure in FIGURES.values():
        assert f"#### {figure.title}" in text
    steps = {float(row["x"]): row for row in rows(predicted, "fig8") if row["series"] == "direct"}
    table = text.partition("decode step (ms)\n\n")[2].partition("\n\n")[0].splitlines()
    header, cells = table[0].split(" | "), [line.strip("| ").split(" | ") for line in table[2:]]
    assert header[1].startswith("direct (predicted)")
    for x, milliseconds, *_ in cells:
        wanted = 1e3 * float(steps[min(steps, key=lambda at: abs(at - float(x)))]["seconds"])
        assert float(milliseconds.replace(",", "")) == pytest.approx(wanted, rel=1e-3)


def test_measured_points_have_no_problem_that_is_an_error(measured: Path) -> None:
    problems = {line["result"].get("problem") for line in lines(measured)}
    assert problems <= {None, "a technique of GPUs", "a CPU has no SMs", "needs a GPU"}


def test_the_facts_of_a_run(predicted: Path, measured: Path) -> None:
    found = read_run(predicted)
    assert found["machine"] == "predicted for gh200" and found["models"] == ["opt-6.7b"]
    found = read_run(measured)
    assert found["versions"]["torch"] == torch.__version__ and found["models"] == [NAME]
    assert found["ceilings"].keys() == {LOCAL, "host", "host by the copy engine"}
    kept = ceilings_of(found["ceilings"], "host")
    assert kept is not None and list(kept.rates) == [LOCAL, "host"]
    assert ceilings_of(found["ceilings"], "peer:1") is None


def test_points_that_are_there_are_not_measured_again(
    measured: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: Measurer, point: Point) -> Result:
        raise AssertionError(point)

    monkeypatch.setattr(Measurer, "__call__", fails)
    before = lines(measured)
    ended = run("--device", "cpu", "--profile", "cpu", "--quick", "-o", measured)
    assert ended.exit_code == 0 and f"0 of {len(before)} points" in ended.stderr
    assert lines(measured) == before


def test_a_figure_alone(tmp_path: Path) -> None:
    ended = run("--predict", "--profile", "gh200", "--quick", "--only", "fig9", "-o", tmp_path)
    assert ended.exit_code == 0, ended.stderr
    assert [path.name for path in tmp_path.glob("*.csv")] == ["fig9.csv"]
    figure, points, *profile_notes = ended.stderr.splitlines()
    assert re.fullmatch(r"fig9: \d+ points", figure)
    assert re.fullmatch(
        r"(\d+) of \1 points predicted now; \d+ have no time, the page says why", points
    )
    assert not profile_notes


def test_predictions_are_not_kept_for_the_next_run(tmp_path: Path) -> None:
    """Its profile may say something else under the same name."""
    profile, found = load_profile("gh200"), []
    for rate in (profile.hbm_bytes_per_s, 0.5 * profile.hbm_bytes_per_s):
        path = tmp_path / "gh200.toml"
        path.write_text(profile_text(replace(profile, hbm_bytes_per_s=rate)))
        ended = run("--predict", "--profile", path, "--quick", "--only", "fig9", "-o", tmp_path)
        assert ended.exit_code == 0, ended.stderr
        with (tmp_path / "fig9.csv").open() as file:
            found.append([float(row["seconds"] or 0) for row in csv.DictReader(file)])
    assert any(after > 1.1 * before for before, after in zip(*found, strict=True))


def test_points_planned_by_another_profile_do_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor by one of the same name that says something else: it would place other bytes outside."""
    profile, path = load_profile("cpu"), tmp_path / "cpu.toml"
    found = Result(source="measured", seconds=1.0)
    monkeypatch.setattr(Measurer, "__call__", lambda self, point: found)
    slower = replace(profile, hbm_bytes_per_s=0.5 * profile.hbm_bytes_per_s)
    said = list[str]()
    for by in (profile, slower, profile):
        path.write_text(profile_text(by))
        ended = run("--device", "cpu", "--profile", path, "--only", "fig9", "-o", tmp_path)
        assert ended.exit_code == 0, ended.stderr
        said.append(ended.stderr)
    points = len(lines(tmp_path)) // 2
    for text, new in zip(said, (points, points, 0), strict=True):
        assert f"{new} of {points} points measured now" in text
    assert "do not count" not in said[0]
    assert re.search(r"planned by cpu \(\w{8}\) in \S+ do not count here: this is", said[1])


@pytest.mark.parametrize(
    ("args", "code", "said", "hint"),
    [
        (("--only", "fig8,fig99"), 2, "no figure is called 'fig99'", "name any of fig8, "),
        (("--budget", "10"), 2, "'10' is not a time like 90s", "--help"),
        (("--predict", "--budget", "1min"), 2, "--budget is a time for measuring", "seconds"),
        (("--rival", "flexgen"), 2, "'flexgen' is not one of", "--help"),
        (("--rival", "vllm"), 2, "--rival vllm and --vllm-python need each other", "python of an"),
        (("--vllm-python", sys.executable), 2, "need each other", "in which vllm is installed"),
        (("--rival", "vllm", "--vllm-python", "no"), 2, "File 'no' does not exist", "--help"),
        (("--model", "opt-7b"), 2, "'opt-7b': no such model", "did you mean"),
        (("--remote", "peer"), 2, "no remote tier 'peer'", "it has: host"),
        (("--remote", "host,peer"), 2, "no remote tier", "it has: host"),
        (("--profile", "nowhere"), 2, "nowhere", ""),
        (("--profile", "dgx-spark"), 2, "dgx-spark has no tier outside HBM", "another profile"),
    ],
)
def test_errors(args: tuple[str, ...], code: int, said: str, hint: str, tmp_path: Path) -> None:
    profile = () if "--profile" in args else ("--profile", "gh200")
    refused(run("--predict", *profile, *args, "-o", tmp_path / "out"), code, said, hint)
    assert not (tmp_path / "out").exists()


def test_another_devices_profile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    ended = run("--profile", "gh200", "-o", tmp_path)
    refused(ended, 2, "profile gh200 describes a GPU, not a CPU", "add --predict")


# --- order, budget, store


def entry(point: Point, rank: int) -> Entry:
    return Entry("s", 0.0, point, rank)


def test_points_are_in_order_of_rank_and_each_once() -> None:
    late, other = replace(STEP, batch_size=512), MULTICAST
    entries = [entry(late, 2), entry(STEP, 1), entry(other, 1), entry(late, 0)]
    assert in_order(entries) == [late, other, STEP]


@pytest.mark.parametrize(
    ("point", "said"),
    [
        (STEP, "opt-6.7b, step, batch 8, 0.00% remote"),
        (replace(STEP, by="vllm", ratio=None), "opt-6.7b, step, batch 8, vllm"),
        (MULTICAST, "opt-6.7b, fc1, N=1024, 100.00% remote"),
        (ReadPoint(remote="host", sms=8, in_flight=2**20, hbm_sms=100), "host, read"),
    ],
)
def test_a_point_in_words(point: Point, said: str) -> None:
    assert describe(point) == said


FIG9 = {"fig9": FIGURES["fig9"]}


def test_a_budget_takes_the_first_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(100))
    monkeypatch.setattr("dakrun.lab.evaluate.run.time.perf_counter", lambda: next(clock))
    store, taken = Store(tmp_path, "mine"), []

    def find(point: Point) -> Result:
        taken.append(point)
        return Result(source="measured", seconds=1.0)

    done = evaluate(scope(), FIG9, store, find, {"machine": "mine"}, budget_s=2)
    assert (done.new, done.left) == (2, done.points - 2)
    assert taken == in_order(FIG9["fig9"](scope(), {}).entries)[:2]
    assert done.page.read_text(encoding="utf-8").startswith("<!doctype html>")
    again = evaluate(scope(), FIG9, Store(tmp_path, "mine"), find, {"machine": "mine"})
    assert (again.new, again.left) == (done.points - 2, 0)


def test_a_gpu_that_fails_ends_the_run_but_not_the_next(tmp_path: Path) -> None:
    def fail(point: Point) -> Result:
        raise GpuFailed("the GPU failed: illegal address", hint="none")

    with pytest.raises(GpuFailed):
        evaluate(scope(), FIG9, Store(tmp_path, "mine"), fail, {"machine": "mine"})
    assert (tmp_path / "index.html").exists() and len(lines(tmp_path)) == 1
    (kept,) = Store(tmp_path, "mine").results.values()
    assert kept.problem == "the GPU failed: illegal address"


def test_a_torn_last_line_is_cut_off(tmp_path: Path) -> None:
    store = Store(tmp_path, "mine")
    store.add(STEP, Result(source="measured", seconds=1.0))
    path = tmp_path / "points.jsonl"
    with path.open("a", encoding="utf-8") as file:
        file.write('{"key": "half a l')
    store = Store(tmp_path, "mine")
    assert store.results == {STEP.key: Result(source="measured", seconds=1.0)}
    large = Result(source="measured", problem="too large", short_of_memory=True)
    store.add(MULTICAST, large)
    assert Store(tmp_path, "mine").results[MULTICAST.key] == large
    assert [line["key"] for line in lines(tmp_path)] == [STEP.key, MULTICAST.key]


def test_results_of_other_machines_and_damaged_lines_do_not_count(tmp_path: Path) -> None:
    Store(tmp_path, "another").add(STEP, Result(source="measured", seconds=1.0))
    with (tmp_path / "points.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"key": 3}\nnull\n{"origin": "mine", "key": "k", "result": {"x": 1}}\n')
    assert Store(tmp_path, "mine").results == {}
    assert list(Store(tmp_path, "another").results) == [STEP.key]
    (tmp_path / "run.json").write_text("[", encoding="utf-8")
    assert read_run(tmp_path) == {}


def test_a_run_over_several_sittings_is_of_one_card(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes on with its card's points; tables have the dates, commits and ceilings of all."""
    ceilings = {"hbm": 3.135e12, "host": 5.1e10}

    def sit(card: str, commit: str, day: int, budget_s: float | None) -> tuple[int, int]:
        clock = iter(range(1000))
        today = datetime.date(2026, 11, day)
        monkeypatch.setattr("dakrun.lab.evaluate.run.time.perf_counter", lambda: next(clock))
        monkeypatch.setattr("dakrun.lab.evaluate.store.commit", lambda: commit)
        calendar = SimpleNamespace(date=SimpleNamespace(today=lambda: today))
        monkeypatch.setattr("dakrun.lab.evaluate.store.datetime", calendar)
        run = {"machine": card, "ceilings": ceilings, "date": "now", "commit": "now"}
        store = Store(tmp_path, card, quick=True)
        assert store.others == {"H100 (a)", "H100 (b)"} - {card} or day == 1
        found = Result(source="measured", seconds=1.0)
        done = evaluate(scope(), FIG9, store, lambda _: found, run, budget_s=budget_s)
        return done.new, done.left

    total = len(in_order(FIG9["fig9"](scope(), {}).entries))
    assert sit("H100 (a)", "abc1", 1, 3) == (3, total - 3)
    assert sit("H100 (b)", "abc2", 2, 1) == (1, total - 1)
    assert sit("H100 (a)", "abc2", 3, None) == (total - 3, 0)
    head, *_ = (tmp_path / "tables.md").read_text(encoding="utf-8").splitlines()
    assert head == (
        "H100 (a); 2026-11-01, 2026-11-03; abc1, abc2; ceilings: hbm 3,135.0 GB/s, host 51.0 GB/s"
    )
    assert read_run(tmp_path)["commit"] == "abc1, abc2"


@pytest.mark.alone
@pytest.mark.gpu
def test_a_card_has_a_name_of_its_own() -> None:
    from dakrun.lab.evaluate.run import facts

    machine = facts(scope(), "dakrun evaluate")["machine"]
    assert re.fullmatch(r"NVIDIA .* \([0-9a-f]{8}\)", machine)
    assert facts(scope(), "again")["machine"] == machine


def test_results_to_try_again_and_those_of_quick_runs_do_not_count(tmp_path: Path) -> None:
    store = Store(tmp_path, "mine")
    store.add(STEP, Result(source="measured", problem="vllm is not installed", again=True))
    store.add(MULTICAST, Result(source="measured", seconds=1.0))
    assert list(store.results) == [STEP.key, MULTICAST.key]
    assert list(Store(tmp_path, "mine").results) == [MULTICAST.key]
    assert Store(tmp_path, "mine", quick=True).results == {}
    assert {"commit", "quick"} <= lines(tmp_path)[0].keys()


def test_no_read_asks_an_sm_for_more_than_its_ring_holds() -> None:
    for entry in FIGURES["fig7"](scope(), {}).entries:
        read = entry.point
        assert isinstance(read, ReadPoint) and read.in_flight <= read.sms * 128 * 1024


# --- predictions


def test_a_step_is_the_plans() -> None:
    point = replace(STEP, ratio=0.1, transport="direct")
    found, plan = predict(point, scope()), scope().plan(STEP)
    assert found.seconds == found.predicted_s and found.ratio == pytest.approx(0.1, abs=0.01)
    assert found.weight_bytes == plan.weight_bytes
    assert found.eb == found.weight_bytes / found.seconds


def test_what_does_not_fit_says_how_much_it_needs() -> None:
    model = known_model("opt-66b")
    assert model is not None
    here, point = scope(models={"opt-66b": model}), replace(STEP, model="opt-66b")
    found = predict(replace(point, hbm_budget=50 * 10**9), here)
    assert found.problem is not None
    assert found.problem.startswith("needs 13") and found.problem.endswith(": there are 50.0 GB")
    found = predict(replace(point, batch_size=2048, prompt_len=1024, ratio=None), here)
    assert found.problem is not None
    assert "GB: HBM and host have" in found.problem
    large = predict(replace(STEP, hbm_budget=500 * 10**9), scope())
    assert large.problem is not None and large.problem.startswith("needs 500.0 GB of HBM")
    rival = predict(replace(STEP, hbm_budget=500 * 10**9, by="prefetch"), scope())
    assert rival.problem == large.problem
    assert large.short_of_memory and found.short_of_memory


def test_ablations_are_predicted_where_something_tells_their_time() -> None:
    here = scope()
    product = ProductPoint(model="opt-6.7b", op="fc2", n=8, ratio=0.011)
    step = replace(STEP, ratio=0.011, transport="direct")
    for point in (product, step):
        base = predict(point, here)
        for technique in ("window", "alignment"):
            found = predict(replace(point, without=(technique,)), here)
            assert base.seconds and found.seconds and found.predicted_s is None
            assert found.seconds > 1.02 * base.seconds
    # On an H200 the step took 1.78 x, and fc2 2.65 x (profiles/README.md).
    uneven = [predict(replace(of, without=("alignment",)), here).seconds for of in (product, step)]
    assert uneven[0] / predict(product, here).seconds == pytest.approx(2.65, rel=0.1)
    assert uneven[1] / predict(step, here).seconds == pytest.approx(1.78, rel=0.1)
    many = replace(product, n=512, without=("alignment",))
    assert predict(many, here).problem == "the planner does not model it"
    elsewhere = predict(replace(product, without=("window",)), scope("h100-sxm"))
    assert elsewhere.problem == "the profile has no sweep of congestion"


def test_prefetching_takes_the_longer_of_copies_and_the_step() -> None:
    here = scope()
    base = predict(STEP, here).seconds
    near = predict(replace(STEP, by="prefetch", ratio=0.001), here)
    far = predict(replace(STEP, by="prefetch", ratio=0.5), here)
    assert near.seconds == pytest.approx(base, rel=0.01)
    assert far.remote_bytes is not None and far.weight_bytes is not None
    assert far.seconds == pytest.approx(0.5 * far.weight_bytes / here.rates[2])
    assert predict(replace(STEP, by="transformers"), here).problem == "not predicted"


def test_layers_read_in_place_take_their_time_after_the_others() -> None:
    here = scope()
    base = predict(STEP, here).seconds
    assert base
    for ratio in (0.0, 0.3, 1.0):
        found = predict(replace(STEP, by="uva", ratio=ratio), here)
        assert found.weight_bytes and found.remote_bytes == ratio * found.weight_bytes
        link_s = found.remote_bytes / here.rates[1]
        assert found.seconds == pytest.approx((1 - ratio) * base + link_s)
    assert predict(replace(STEP, by="uva", batch_size=512, ratio=1e-4), here).seconds == (
        pytest.approx(predict(replace(STEP, batch_size=512), here).seconds, rel=0.05)
    )


def test_multicast_saves_bytes_over_the_link_from_two_tiles_on() -> None:
    here, case = scope(), case_of(scope(), MULTICAST)
    alone = replace(MULTICAST, without=("multicast",))
    assert (link_reads(here, MULTICAST, case), link_reads(here, alone, case)) == (1, 2)
    few = replace(MULTICAST, n=8)
    assert link_reads(here, few, case_of(here, few)) == link_reads(
        here, replace(few, without=("multicast",)), case_of(here, few)
    )
    found, without = predict(MULTICAST, here), predict(alone, here)
    assert found.link_bytes == found.weight_bytes and without.link_bytes == 2 * found.link_bytes
    assert without.seconds > found.seconds


@pytest.mark.parametrize("profile", ["h200-pcie5", "h100-sxm", "rtx-pro-6000"])
def test_the_rows_that_give_the_link_s_rate_need_each_byte_once(profile: str) -> None:
    from dakrun.lab.evaluate.kernels import ONCE_ROWS

    here = scope(profile)
    for op, without in itertools.product(("7168x7168", "fc1"), ((), ("multicast",))):
        once = replace(MULTICAST, op=op, n=ONCE_ROWS, without=without)
        assert link_reads(here, once, case_of(here, once)) == 1


def test_a_read_is_limited_by_window_and_sms() -> None:
    here = scope()
    tier = here.profile.tier("host")
    full = ReadPoint(remote="host", sms=8, in_flight=tier.window_bytes, hbm_sms=124)
    assert predict(full, here).remote_bytes_per_s == tier.direct_bytes_per_s
    half = replace(full, in_flight=tier.window_bytes // 2, hbm_sms=8)
    assert predict(half, here).remote_bytes_per_s == tier.direct_bytes_per_s / 2
    assert predict(half, here).hbm_bytes_per_s < predict(full, here).hbm_bytes_per_s


def test_a_file_is_foretold() -> None:
    point = FilePoint(model="opt-6.7b", requests=16, longest=32, ratio=None)
    found = predict(point, scope())
    assert found.seconds is not None and found.tokens_per_s is not None


# --- measurements


@pytest.fixture
def measurer() -> Iterator[Measurer]:
    with Measurer(tiny_scope(), torch.device("cpu")) as found:
        yield found


def test_an_op_that_a_model_lacks_is_a_points_problem(measurer: Measurer) -> None:
    point = ProductPoint(model=NAME, op="nothing", n=1, ratio=0.0)
    assert measurer(point) == Result(source="measured", problem="tiny has no op 'nothing'")


def test_an_unexpected_error_is_a_points_problem(
    measurer: Measurer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dakrun.lab.evaluate.measure.op_on_cpu", lambda *_: {}["x"])
    point = ProductPoint(model=NAME, op="qkv", n=1, ratio=0.0)
    assert measurer(point) == Result(source="measured", problem="KeyError: 'x'")


def test_a_model_that_does_not_fit_is_a_points_problem(
    measurer: Measurer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise CannotRun("the plan needs 3 GB", hint="none")

    monkeypatch.setattr("dakrun.lab.evaluate.steps.Steps.step", refuse)
    found = measurer(StepPoint(model=NAME, new_tokens=2))
    assert found.problem == "the plan needs 3 GB" and found.short_of_memory is None


@pytest.mark.parametrize(
    ("error", "again"),
    [(OutOfGpuMemory("no more", hint="none"), None), (MemoryError("no more"), True)],
)
def test_memory_that_runs_out_is_told_from_other_problems(
    error: Exception, again: bool | None, measurer: Measurer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise error

    monkeypatch.setattr("dakrun.lab.evaluate.steps.Steps.step", refuse)
    found = measurer(StepPoint(model=NAME, new_tokens=2))
    assert found.problem is not None and found.problem.endswith("no more")
    assert (found.short_of_memory, found.again) == (True, again)


def test_a_foreseen_lack_of_memory_is_the_reason(
    measurer: Measurer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise CannotRun("the budgets are 3 GB too small", hint="none")

    monkeypatch.setattr("dakrun.lab.evaluate.steps.Steps.step", refuse)
    monkeypatch.setattr("dakrun.lab.evaluate.measure.predict", lambda *_: short("needs 3 GB"))
    expected = Result(source="measured", problem="needs 3 GB", short_of_memory=True)
    assert measurer(StepPoint(model=NAME, new_tokens=2)) == expected


def test_an_ablated_model_runs_on_a_card_without_the_techniques(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from dakrun.engine import direct_accesses
    from dakrun.kernels.runtime import card_of
    from dakrun.lab.evaluate.steps import Steps
    from dakrun.launches import TierAccess, split_row_blocks

    here, gpu = scope(models={STEP.model: tiny_model()}), torch.device("cuda", 0)
    hold_to(H200, monkeypatch)
    given: list[Card] = []

    class Bench:
        def __init__(self, *_: object, **__: object) -> None:
            pass

        def run(self, _: object) -> None:
            given.append(card_of(gpu))
            raise CannotRun("enough is known", hint="none")

    monkeypatch.setattr("dakrun.lab.evaluate.steps.ModelBench", Bench)
    steps = Steps(here, gpu, Ceilings({LOCAL: 4e12}), {STEP.model: NAME})
    for without in ((), ("alignment", "multicast", "window")):
        with pytest.raises(CannotRun, match="enough"):
            steps.step(replace(STEP, without=without))
    whole, bare = given
    assert whole == H200 == card_of(gpu)
    assert not (bare.even_waves or bare.multicast or bare.windows)
    accesses = [direct_accesses(here.profile, ("host",), (8,), card)[0] for card in given]
    assert accesses == [TierAccess(8, here.profile.tier("host").window_bytes), TierAccess(8)]
    uneven = split_row_blocks((100, 20), (TierAccess(), accesses[1]), card=bare)
    assert [split.group for split in uneven] == [16, 16]


@pytest.mark.parametrize("works", [True, False])
def test_an_error_of_a_gpu_that_still_works_is_a_points_problem(
    works: bool, measurer: Measurer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("CUDA error: invalid argument")

    monkeypatch.setattr("dakrun.lab.evaluate.measure.op_on_cpu", fail)
    monkeypatch.setattr(Measurer, "_works", lambda _: works)
    point = ProductPoint(model=NAME, op="qkv", n=1, ratio=0.0)
    if works:
        problem = "the GPU failed: CUDA error: invalid argument"
        assert measurer(point) == Result(source="measured", problem=problem)
    else:
        with pytest.raises(GpuFailed, match="invalid argument"):
            measurer(point)


@pytest.mark.parametrize("by", ["transformers", "uva", "vllm-uva"])
def test_rivals_need_a_gpu(by: str, measurer: Measurer) -> None:
    assert measurer(StepPoint(model=NAME, new_tokens=2, by=by)).problem == "needs a GPU"


def test_rivals_that_are_missing_say_so() -> None:
    from dakrun.lab.evaluate.steps import rival

    gpu, here = torch.device("cuda"), tiny_scope()
    asked = StepPoint(model=NAME, new_tokens=2, by="vllm-uva")
    for python in (None, Path("/no/such/python"), Path(sys.executable)):
        found = rival(asked, replace(here, vllm_python=python), gpu)
        assert (found.problem, found.again) == ("vllm is not installed", True)
    asked = replace(asked, ratio=0.5, remote="peer:1")
    assert rival(asked, here, gpu).problem == "vllm-uva offloads to host memory only"
    asked = replace(asked, by="transformers", remote="host")
    assert rival(asked, here, gpu).problem == "transformers keeps all in HBM"


def test_a_rival_has_no_larger_budget_than_the_card() -> None:
    from dakrun.lab.evaluate.steps import rival

    pytest.importorskip("transformers")
    asked = replace(STEP, by="uva", hbm_budget=500 * 10**9)
    found = rival(asked, scope(), torch.device("cuda"))
    assert found.problem and found.problem.startswith("needs 500.0 GB of HBM")
    assert found.short_of_memory


def test_weights_of_rivals_repeat_random_values() -> None:
    from dakrun.lab.rivals.steps import repeat

    weight = torch.nn.Parameter(torch.full((4, 6), torch.nan), requires_grad=False)
    block = torch.randn(7)
    repeat(weight, block)
    assert torch.equal(weight.view(-1), block.repeat(4)[:24])


class FakeProducts:
    """Counts launches, and the last one's rows of X; multiplies nothing."""

    launches = rows = 0
    accesses: Any = ()
    card: Card

    def __init__(self, device: torch.device, card: Card) -> None:
        FakeProducts.card = card

    def variants(self, *_: object, **__: object) -> list[object]:
        return []

    def kernel_for(self, *_: object) -> str:
        return "splitk"

    def ahead(self, *_: object) -> None:
        return None

    def __call__(
        self, x: torch.Tensor, weight: Any, accesses: Any, *_: object, **__: object
    ) -> None:
        FakeProducts.launches += 1
        FakeProducts.rows = x.shape[0]
        FakeProducts.accesses = accesses
        assert sum(part.nbytes for part in weight.parts) == weight.shape[0] * weight.shape[1] * 2


def in_turns(chains: Sequence[tuple[Launch, int]], **_: object) -> list[list[float]]:
    """Times of three rounds, the fastest of which takes a second for each row of X."""
    times = []
    for launch, _ in chains:
        launch(0)
        times.append([FakeProducts.rows * slower for slower in (1.5, 1.0, 2.0)])
    return times


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Point], Result]]:
    """Measures single ops with buffers of a CPU, whose launches and rates are made up."""
    on_the_cpu(monkeypatch)
    hold_to(H200, monkeypatch)
    from dakrun.lab.evaluate import kernels as module

    monkeypatch.setattr("dakrun.lab.chains.gemm.Products", FakeProducts)
    monkeypatch.setattr("dakrun.lab.chains.gemm.seconds_round_robin", in_turns)
    monkeypatch.setattr("dakrun.lab.chains.gemm.compile_ahead", lambda *_: None)
    monkeypatch.setattr("dakrun.lab.chains.gemm.architecture", lambda _: "sm_90a")
    rates = lambda readers, _: [1e9 * r.ctas for r in readers]  # noqa: E731
    monkeypatch.setattr("dakrun.lab.memory.read_window", rates)
    monkeypatch.setattr(module, "READ_BYTES", {LOCAL: 2**24, "remote": 2**22})
    monkeypatch.setattr("dakrun.lab.chains.attention.splitk_flash_attn", lambda *_, **__: None)
    monkeypatch.setattr("dakrun.lab.chains.attention.list_items", lambda *_, **__: None)
    small = replace(module.QUICK, chain_bytes=2**20, min_launches=2)
    monkeypatch.setattr(module, "QUICK", small)
    model = replace(tiny_model(), dtype="float16", head_dim=64, hidden_size=128, embed_size=128)
    here = scope(models={NAME: model})
    found = module.Kernels(here, torch.device("cpu"))
    measure = {
        "product": found.op, "attention": found.op, "read": found.read,
    }  # fmt: skip
    yield lambda point: measure[point.kind](point)  # type: ignore[operator]
    found.close()


@pytest.mark.parametrize("without", [(), ("window",), ("alignment",), ("multicast",)])
@pytest.mark.parametrize("ratio", [0.0, 0.25, 1.0])
def test_a_product(ratio: float, without: tuple[str, ...], kernels: Callable[..., Result]) -> None:
    FakeProducts.launches = 0
    point = ProductPoint(model=NAME, op="qkv", n=8, ratio=ratio, without=without)
    found = kernels(point)
    assert found.seconds is not None and found.ratio == pytest.approx(ratio, abs=0.05)
    assert found.remote_bytes == found.ratio * found.read_bytes
    assert FakeProducts.launches > 0
    _, remote = FakeProducts.accesses
    assert FakeProducts.card.multicast == ("multicast" not in without)
    assert FakeProducts.card.even_waves == ("alignment" not in without)
    assert (remote.window_bytes is None) == ("window" in without)


@pytest.mark.parametrize(("ratio", "least"), [(1.0, 1.5), (0.25, 1.5), (0.0, 0.0)])
def test_link_traffic_is_the_time_of_a_launch_that_the_link_limits(
    ratio: float, least: float, kernels: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its time over that of 64 rows; none of a launch that is as fast with all in HBM."""
    from dakrun.lab.chains import GemmChains

    point = ProductPoint(model=NAME, op="256x128", n=512, ratio=ratio)
    here = scope(models={NAME: replace(tiny_model(), dtype="float16")})
    in_hbm_s = predict(replace(point, ratio=0.0), here).seconds
    assert in_hbm_s
    for times, limited in ((1.01 * least, bool(ratio)), (0.99 * least, False)):
        seconds = times * in_hbm_s or 1.0
        monkeypatch.setattr(GemmChains, "kernel", lambda *_, s=seconds: ([s, s, s], "tiled"))
        found = kernels(point)
        assert found.seconds == seconds and found.weight_bytes == 256 * 128 * 2
        assert found.link_bytes == (found.remote_bytes * 512 / 64 if limited else None)


@pytest.mark.alone
@pytest.mark.gpu
def test_link_traffic_is_what_the_tiles_ask_for() -> None:
    here, device = scope(), torch.device("cuda", torch.cuda.current_device())
    if not card_here().clusters:
        pytest.skip("the card has no multicast")
    with Measurer(here, device) as measurer:
        for n, without, times in ((512, (), 1), (1024, (), 1), (1024, ("multicast",), 2)):
            point = replace(MULTICAST, op="7168x7168", n=n, without=without)
            found = measurer(point)
            assert found.link_bytes and found.weight_bytes
            assert found.link_bytes / found.weight_bytes == pytest.approx(times, rel=0.05)


def test_buffers_grow_and_move(kernels: Callable[..., Result]) -> None:
    small = ProductPoint(model=NAME, op="qkv", n=8, ratio=0.5)
    assert kernels(small).seconds is not None
    assert kernels(replace(small, op="lm_head")).seconds is not None
    slots = AttentionPoint(model=NAME, batch_size=8, length=128, ratio=0.25)
    found, case = kernels(slots), case_of(scope(models={NAME: tiny_model()}), slots)
    assert found.seconds is not None and found.ratio == case.ratio == 0.25
    for without in (("alignment",), ("window",)):
        assert kernels(replace(slots, without=without)).seconds is not None
        assert kernels(replace(small, n=512, without=without)).seconds is not None


def test_reads_of_both_tiers(kernels: Callable[..., Result]) -> None:
    point = ReadPoint(remote="host", sms=8, in_flight=2**18, hbm_sms=100)
    found = kernels(point)
    assert (found.remote_bytes_per_s, found.hbm_bytes_per_s) == (8e9, 100e9)
    assert kernels(replace(point, sms=0, in_flight=0)).remote_bytes_per_s is None
    assert kernels(replace(point, hbm_sms=0)).hbm_bytes_per_s is None
    assert kernels(replace(point, in_flight=8192)).problem == "an SM cannot keep 1 KiB in flight"
    assert kernels(replace(point, hbm_sms=130)).problem == "needs 138 SMs"
