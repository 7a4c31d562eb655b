"""`dakrun profile` on tiny sizes: its file, its errors; the profile that --profile auto means."""

import dataclasses
import datetime
from collections.abc import Callable, Set
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from rich.console import Console

from dakrun.cli import main
from dakrun.config import Dtype, Workload
from dakrun.demo import MODEL, task
from dakrun.errors import CannotRun, UsageError
from dakrun.hardware import (
    ComputeRate,
    HardwareProfile,
    OpCosts,
    cpu_name,
    describe_profile,
    find_profile,
    load_profile,
    parse_profile,
    profile_text,
    save_profile,
)
from dakrun.lab.probe import run as probe
from dakrun.lab.probe.cpu import (
    Sizes,
    Stopwatch,
    attention_costs,
    linear_costs,
    measure_cpu,
    norm_costs,
    sampling_costs,
)
from dakrun.lab.probe.table import facts, render
from dakrun.lab.samples import Measurement, provenance, spread
from dakrun.models import known_model
from dakrun.plan import Policy, make_plan

TINY = Sizes(
    buffer_bytes=2**18, caches=0, weight_size=16, batch_sizes=(1, 8, 64), seconds=0.0, runs=3
)


def see_gpus(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Let the driver report these GPUs."""
    for module in ("dakrun.hardware", "dakrun.hardware.files"):
        monkeypatch.setattr(f"{module}.gpu_names", lambda: list(names))


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a GPU, and tiny sizes."""
    see_gpus(monkeypatch)
    # The command offers no sizes.
    monkeypatch.setattr("dakrun.lab.probe.cpu.FULL", TINY)
    monkeypatch.setattr("dakrun.lab.probe.cpu.QUICK", dataclasses.replace(TINY, batch_sizes=(8,)))


def run(*args: str) -> Result:
    return CliRunner(env={"DAKRUN_DEBUG": ""}).invoke(main, list(args))


def test_a_measured_cpu() -> None:
    profile, measurements = measure_cpu("mine", TINY)
    assert parse_profile(profile_text(profile), source="x") == profile
    assert (profile.name, profile.device, profile.device_name) == ("mine", "cpu", cpu_name())
    assert profile.provenance.kind == "measured" and "figures spread" in profile.provenance.source
    host = profile.tier("host")
    assert profile.link_groups == {"memory": profile.hbm_bytes_per_s}
    assert profile.hbm_group == host.group == "memory"
    assert host.direct_bytes_per_s == profile.hbm_bytes_per_s
    assert set(profile.compute) == {"float32", "float16", "bfloat16"}
    for rate in profile.compute.values():
        assert [n for n, _ in rate.measured] == [1, 8, 64]
        assert rate.peak == max(flops for _, flops in rate.measured)
    assert profile.linear.efficiency == (1.0,) and profile.attention.rows == (1, 8, 64)
    assert profile.norm is not None and profile.sampling is not None
    assert all(min(costs.seconds) > 0 for costs in (profile.linear, profile.norm))
    assert all(m.value > 0 and m.spread >= 0 and m.runs >= 3 for m in measurements)


def test_costs_are_of_ops_with_and_without_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """An op's fixed cost is its time without work; its efficiency that of the time beyond it."""

    def seconds(watch: object, name: str, call: Callable[[], object]) -> float:
        call()
        return (1e-5 if "fixed" in name else 3e-5) * (4 if "float32" in name else 1)

    # A machine's own times would differ from run to run.
    monkeypatch.setattr("dakrun.lab.probe.cpu.Stopwatch.seconds", seconds)
    watch, read = Stopwatch(TINY), 1e12
    rate = {dtype: ComputeRate(peak=1e15) for dtype in ("float32", "bfloat16")}
    found = attention_costs(watch, torch.rand(2**16), rate, read)
    # Each call reads 2^16 elements, in both dtypes, and takes 80 or 20 us beyond the fixed cost.
    assert found.seconds == pytest.approx((2e-5,) * 3)
    assert found.efficiency == pytest.approx(((4 * 2**16 / 8e-5 * 2**17 / 2e-5) ** 0.5 / read,) * 3)
    assert norm_costs(watch, read).seconds == pytest.approx((1e-5,))  # two norms in one call
    sampling = sampling_costs(watch, read)
    assert sampling.seconds == pytest.approx((2e-5,)) and sampling.rows == (8,)
    assert linear_costs(watch) == OpCosts(rows=(1,), seconds=(1e-5,), efficiency=(1.0,))


@pytest.mark.parametrize(("dtype", "rate"), [("float32", 2e10), ("bfloat16", 5e10)])
def test_a_step_is_the_sum_of_its_ops(dtype: Dtype, rate: float) -> None:
    """OPT-125m on a CPU whose ops compute at `rate`, each with a fixed cost of its kind."""
    cost = {"efficiency": (1.0,), "rows": (8,)}
    profile = dataclasses.replace(
        load_profile("cpu"),
        linear=OpCosts(seconds=(1e-5,), **cost),
        attention=OpCosts(seconds=(1e-3,), **cost),
        norm=OpCosts(seconds=(2e-5,), **cost),
        sampling=OpCosts(seconds=(1e-4,), **cost),
        compute={dtype: ComputeRate(peak=rate)},
        hbm_bytes_per_s=1e15,
        link_groups={"memory": 1e15},
    )
    model = known_model("opt-125m")
    assert model is not None
    workload = Workload(batch_size=8, prompt_len=32, new_tokens=32, max_model_len=64)
    plan = make_plan(model.with_dtype(dtype), workload, profile, Policy(offload_ratio=0.0))
    elements = 12 * 12 * 768**2 + 50272 * 768
    arithmetic = (2 * 8 * elements + 12 * 4 * 8 * workload.mean_kv_len * 768) / rate
    fixed = 49 * 1e-5 + 12 * 1e-3 + 25 * 2e-5 + 1e-4
    assert plan.predicted_s == pytest.approx(arithmetic + fixed, rel=1e-3)


def test_a_profile_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    result = run("profile", "-o", str(path), "--quick")
    assert result.exit_code == 0, result.stderr
    assert "memory read" in result.stdout and "spread" in result.stdout
    assert f"written to {path}" in result.stderr
    assert load_profile(str(path)).name == "mine"
    assert [file.name for file in tmp_path.glob("*.toml*")] == ["mine.toml"]
    assert find_profile(device="cpu").name == "cpu"
    plan = run("plan", "--model", "opt-125m", "--batch-size", "8", "--profile", str(path))
    assert plan.exit_code == 0 and "mine: " in plan.stdout


def test_a_kept_profile_is_found(empty_cache: Path) -> None:
    assert run("profile").exit_code == 0
    assert find_profile(device="cpu").name == "measured-cpu"
    assert run("profile", "--name", "quiet-night").exit_code == 0
    plan = run("plan", "--model", "opt-125m", "--batch-size", "8", "--profile", "quiet-night")
    assert plan.exit_code == 0 and "quiet-night: " in plan.stdout
    kept = {file.name for file in (empty_cache / "profiles").iterdir()}
    assert kept == {"measured-cpu.toml", "quiet-night.toml"}


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("-o", "here.json"), ".toml"),
        (("-o", "no/such/folder/here.toml"), "no such folder"),
        (("--name", "gh200"), "'gh200'"),
        (("--name", "../up"), "'../up'"),
        (("--name", ""), "''"),
    ],
)
def test_refused_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, args: tuple[str, ...], said: str
) -> None:
    monkeypatch.setattr("dakrun.lab.probe.run.measure", lambda *_, **__: pytest.fail("measured"))
    result = run("profile", *args)
    assert result.exit_code == 2 and result.stdout == ""
    assert said in result.stderr and "hint: " in result.stderr


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "taken.toml").mkdir()
    result = run("profile", "--quick", "-o", str(tmp_path / "taken.toml"))
    assert result.exit_code == 2 and "taken.toml: is a folder" in result.stderr
    with pytest.raises(UsageError, match=r"taken.toml: Is a directory"):
        save_profile(load_profile("cpu"), tmp_path / "taken.toml")
    assert [file.name for file in tmp_path.iterdir()] == ["taken.toml"]


def test_a_gpu_that_is_not_there() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    result = run("profile", "--device", "cuda")
    assert result.exit_code == 3
    assert "no CUDA GPU" in result.stderr and "hint: " in result.stderr


def test_too_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dakrun.lab.probe.cpu.available_host_memory", lambda: 3 * 2**18 - 1)
    with pytest.raises(CannotRun, match=r"768\.00 KiB of memory"):
        measure_cpu("x", TINY)


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [(1.5e10, "B/s", "15.0 GB/s"), (2e-5, "s", "20.0 us"), (0.876, "", "0.88")],
)
def test_figures_have_units(value: float, unit: str, text: str) -> None:
    found = Measurement(name="x", value=value, unit=unit, spread=0.2, runs=3)
    assert found.text == text and not found.steady


def test_a_part_of_an_op_spreads_over_the_time_of_the_whole() -> None:
    added, whole = [1e-8, 3e-8, 2e-8, 1e-8], [1.0e-5, 1.1e-5, 1.0e-5, 0.9e-5]
    assert spread(added) > 0.5
    assert spread(added, of=whole) == pytest.approx(1.25e-8 / 1e-5)


CARD = "NVIDIA H100 PCIe"  # no shipped profile is of it


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[tuple[str, bool]]]:
    """Puts a GPU into this machine; gives what is measured of it: (name, whether quickly)."""

    def put(name: str) -> list[tuple[str, bool]]:
        measured: list[tuple[str, bool]] = []

        def measure(
            name_of: str, device: str, *, quick: bool, kinds: Set[str], note: object
        ) -> probe.Probe:
            assert device == "cuda" and not kinds
            measured.append((name_of, quick))
            found = dataclasses.replace(
                load_profile("h200-pcie5"), name=name_of, device_name=name,
                provenance=dataclasses.replace(
                    load_profile("h200-pcie5").provenance, date=datetime.date.today().isoformat()
                ),
            )  # fmt: skip
            return probe.Probe(found, ())

        see_gpus(monkeypatch, name)
        # A GPU takes its name from the driver, and minutes to measure.
        monkeypatch.setattr("dakrun.lab.probe.run.device_name", lambda device: name)
        monkeypatch.setattr("dakrun.lab.probe.run.measure", measure)
        return measured

    return put


Card = Callable[[str], list[tuple[str, bool]]]


@pytest.mark.parametrize("name", [CARD, "NVIDIA H200"])
def test_a_gpu_without_a_kept_profile_is_measured_once(
    card: Card, empty_cache: Path, name: str
) -> None:
    measured, said = card(name), list[str]()
    found = probe.kept_or_measured("cuda", frozenset(), said.append)
    stem = "measured-" + name.lower().replace(" ", "-")
    assert found.name == stem and measured == [(stem, True)]
    assert name in said[0] and "some seconds" in said[0]
    assert said[1].startswith(f"saved as {empty_cache / 'profiles' / stem}.toml")
    assert probe.kept_or_measured("cuda", frozenset(), said.append) == found
    assert len(said) == 2 and len(measured) == 1
    assert find_profile(device="cuda") == found, "plan takes it, too"


def test_a_gpu_that_cannot_be_measured(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise CannotRun("CuPy is not installed", hint="install it")

    said: list[str] = []
    card("NVIDIA H200")
    monkeypatch.setattr("dakrun.lab.probe.run.measure", fails)
    assert probe.kept_or_measured("cuda", frozenset(), said.append).name == "h200-pcie5"
    assert said[-1] == "not measured: CuPy is not installed"
    card(CARD)
    monkeypatch.setattr("dakrun.lab.probe.run.measure", fails)
    with pytest.raises(CannotRun, match="CuPy is not installed"):
        probe.kept_or_measured("cuda", frozenset(), said.append)


def test_a_measured_profile_that_cannot_be_kept(card: Card, empty_cache: Path) -> None:
    measured, said = card(CARD), list[str]()
    (empty_cache / "profiles").write_text("in the way")
    assert probe.kept_or_measured("cuda", frozenset(), said.append).device_name == CARD
    assert said[-1].startswith("not saved: ") and len(measured) == 1


def test_a_cpu_is_not_measured_unasked(card: Card) -> None:
    measured, said = card(cpu_name()), list[str]()
    assert probe.kept_or_measured("cpu", {"int4"}, said.append).name == "cpu"
    assert not measured and not said


def test_plan_does_not_measure(card: Card) -> None:
    measured = card("NVIDIA H100 80GB HBM3")
    plan = run("plan", "--model", "opt-125m", "--batch-size", "8")
    assert plan.exit_code == 0 and not measured
    warning, line = plan.stderr.splitlines()
    assert warning.startswith("warning: profile h100-pcie5: 6 of 95 figures spread by more than 5%")
    assert " on another machine; predictions may be off: run dakrun profile " in warning
    assert line.startswith("profile h100-pcie5 of NVIDIA H100 80GB HBM3: measured ")
    assert line.endswith(" on another machine; dakrun profile measures this machine")


def spreading(name: str, *spreads: float) -> probe.Probe:
    """A profile of this CPU whose figures have these spreads."""
    figures = tuple(
        Measurement(name=f"figure {i}", value=1.0, unit="B/s", spread=spread, runs=3)
        for i, spread in enumerate(spreads)
    )
    found = dataclasses.replace(
        load_profile("cpu"),
        name=name,
        device_name=cpu_name(),
        provenance=provenance("of a test", figures),
    )
    return probe.Probe(found, figures)


@pytest.mark.parametrize(
    ("spreads", "kept"),
    [
        ([(0.05, 0.01)], 0),  # steady: measured once
        ([(0.2, 0.01), (0.01, 0.02)], 1),
        ([(0.2, 0.01), (0.1, 0.3)], 0),  # the second has more that spread
        ([(0.2, 0.01), (0.1, 0.01)], 1),  # as many, but not as far
    ],
)
def test_a_profile_that_spreads_is_measured_again(
    monkeypatch: pytest.MonkeyPatch, spreads: list[tuple[float, ...]], kept: int
) -> None:
    found = [spreading("mine", *each) for each in spreads]
    coming, said = iter(found), list[str]()
    monkeypatch.setattr("dakrun.lab.probe.cpu.measure_cpu", lambda *_: _parts(next(coming)))
    assert probe.measure("mine", "cpu", note=said.append) == found[kept]
    assert next(coming, None) is None
    again = "1 of 2 figures spread by more than 5%, most of all figure 0 (20%): measuring once more"
    assert said == [again] * (len(found) - 1)


def _parts(found: probe.Probe) -> tuple[HardwareProfile, tuple[Measurement, ...]]:
    return found.profile, found.measurements


@pytest.mark.parametrize("spread", [0.02, 0.2])
def test_auto_warns_of_a_kept_profile_that_spreads_at_each_use(
    empty_cache: Path, tmp_path: Path, spread: float
) -> None:
    path = probe.target(None, "noisy", "cpu")
    save_profile(spreading("noisy", spread, 0.01).profile, path)
    prompts = tmp_path / "p.txt"
    prompts.write_text(task.prompt(3, 4) + "\n", encoding="utf-8")
    run_it = ("generate", "--model", str(MODEL), "-i", str(prompts), "--device", "cpu")
    plan_it = ("plan", "--model", "opt-125m", "--batch-size", "8")
    warning = (
        "warning: profile noisy: 1 of 2 figures spread by more than 5%, most of all figure 0 "
        "(20%); predictions may be off: run dakrun profile while nothing else runs here"
    )
    for number, command in enumerate((run_it, plan_it, run_it, plan_it)):
        output = ("-o", str(tmp_path / f"{number}.jsonl")) if command is run_it else ()
        result = run(*command, *output)
        assert result.exit_code == 0, result.stderr
        assert (warning in result.stderr.splitlines()) is (spread > 0.05)
        assert "profile noisy of" in result.stderr
        named = run(*plan_it, "--profile", "noisy")
        assert named.exit_code == 0 and "warning" not in named.stderr


def test_generate_says_what_it_took(tmp_path: Path) -> None:
    prompts = tmp_path / "p.txt"
    prompts.write_text(task.prompt(3, 4) + "\n", encoding="utf-8")
    arguments = ("--model", str(MODEL), "-i", str(prompts), "--device", "cpu")
    result = run("generate", *arguments, "-o", str(tmp_path / "a.jsonl"))
    assert result.exit_code == 0
    *_, took, _ = result.stderr.splitlines()
    assert took.startswith("profile cpu of CPU: not measured, round numbers; ")
    named = run("generate", *arguments, "-o", str(tmp_path / "b.jsonl"), "--profile", "cpu")
    assert named.exit_code == 0 and "profile cpu of" not in named.stderr


def dated(name: str, days: int) -> HardwareProfile:
    profile = load_profile("h200-pcie5")
    date = datetime.date.today() - datetime.timedelta(days=days)
    provenance = dataclasses.replace(profile.provenance, date=date.isoformat())
    return dataclasses.replace(profile, name=name, provenance=provenance)


@pytest.mark.parametrize(
    ("days", "age"), [(-1, "today"), (0, "today"), (1, "1 day ago"), (40, "40 days ago")]
)
def test_how_old_a_profile_is(days: int, age: str) -> None:
    assert describe_profile(dated("mine", days)) == f"profile mine of NVIDIA H200: measured {age}"
    shipped = describe_profile(dated("h200-pcie5", days))
    assert f"measured {age} on another machine; dakrun profile" in shipped
    assert "not measured, from a data sheet" in describe_profile(load_profile("gh200"))


def test_a_date_that_is_none() -> None:
    profile = dated("mine", 0)
    provenance = dataclasses.replace(profile.provenance, date="last winter")
    line = describe_profile(dataclasses.replace(profile, provenance=provenance))
    assert line == "profile mine of NVIDIA H200: measured last winter"


def test_the_sizes_of_the_machine() -> None:
    profile = load_profile("h200-pcie5")
    more = {**profile.facts, "nvlink": "NVLink 4, 18 links of 26.562 GB/s each way"}
    found = dict(facts(dataclasses.replace(profile, facts=more)))
    assert (found["SMs"], found["HBM"], found["L2"]) == ("132", "139.80 GiB", "60.00 MiB")
    assert found["shared memory per SM"] == "228.00 KiB"
    assert found["host memory that can be page-locked"] == "124.37 GiB"
    assert found["PCIe"] == "PCIe 5.0 x16" and found["NVLink"].startswith("NVLink 4, 18 links")
    assert {"NUMA", "torch", "CUDA"} <= set(found)
    assert "NVLink" not in dict(facts(profile))
    assert facts(load_profile("cpu")) == [("device", "CPU")]


@pytest.mark.parametrize("width", [40, 80])
def test_the_legend_fits_the_console(width: int, tmp_path: Path) -> None:
    figures = (Measurement(name="linear", value=0.9, unit="", spread=0.01, runs=3),)
    with (tmp_path / "out").open("w", encoding="utf-8") as file:
        render(probe.Probe(load_profile("cpu"), figures), Console(file=file, width=width))
    lines = (tmp_path / "out").read_text(encoding="utf-8").splitlines()
    assert max(map(len, lines)) <= width
    text = " ".join(" ".join(lines).split())
    assert "spread: interquartile range" in text and "efficiency: lower bound" in text
