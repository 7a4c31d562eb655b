"""Skips tests marked `gpu` where torch sees no CUDA GPU, and holds them to --limits where it does;
gives every test an empty cache folder, in which those on a GPU find the kernels that others have
compiled; prints what the compiler said of the kernels.

torch is imported only if such tests were collected: the pure tests start without it.

On a GPU: `pytest -m "gpu and not alone" -n 14`, then `pytest -m "gpu and alone"`, one by one:
tests marked `alone` need the GPU's bandwidth, memory or time for themselves. --cubins DIR keeps
compiled kernels for the next run, which then compiles only what has changed.
"""

import gc
import os
import shutil
import signal
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings

# Processes that run tests beside each other have a core each: torch's threads would wait in turns.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Tests send SIGHUP, which a program that was started by nohup would ignore.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# `make test` and `make test-more` try the same examples in every run, so that chance does not make
# them fail; `make test-more EXAMPLES=1000` tries new ones. It does not shrink a failing one, which
# may take minutes, but prints how to repeat it.
settings.register_profile(
    "few",
    deadline=None,
    derandomize=True,
    max_examples=50,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
settings.register_profile(
    "full",
    settings.get_profile("few"),
    derandomize="EXAMPLES" not in os.environ,
    max_examples=int(os.environ.get("EXAMPLES", 100)),
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    print_blob=True,
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "few"))


# Files that take longest begin first, so that processes which take file after file end together.
LONG = (
    "ray", "nvrtc", "tiled_gemm_emulated", "kernel_decoder", "survival", "gemm_emulated", "models",
    "malformed", "generate", "grouped_splitk", "grouped_tiled", "prompt_attn_emulated",
    "attention_emulated", "graph_runner_emulated", "cli_plan", "kv_pool", "advice", "resume",
    "swap", "progress", "plan_laws", "expert_moves_emulated", "select_token", "small_card",
    "engine", "checkpoint", "plot", "look_ahead", "run_time", "evaluate", "sampler",
    "python_prompts", "bench_model", "bench_prefetch", "nn_huggingface", "prefill",
)  # fmt: skip


def _place(item: pytest.Item) -> int:
    name = item.path.stem.removeprefix("test_")
    return LONG.index(name) if name in LONG else len(LONG)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_place)
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch

    if torch.cuda.is_available():
        return
    for item in gpu_items:
        item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


def pytest_collection_finish() -> None:
    """Let the garbage collector pass over a million objects of modules, which stay to the end."""
    gc.freeze()


@pytest.fixture
def unfrozen() -> Iterator[None]:
    """As in a process of its own, no object is kept from the garbage collector."""
    gc.unfreeze()
    yield
    gc.collect()
    gc.freeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--limits",
        metavar="CAPABILITY",
        help="hold the GPU of tests marked gpu to the limits of a compute capability, such as 12.0",
    )
    parser.addoption(
        "--cubins",
        type=Path,
        metavar="DIR",
        help="keep the kernels that tests marked gpu compile in DIR; else they last for one run",
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Run a test on a GPU, its fixtures included, under --limits."""
    limits = item.config.getoption("--limits")
    if limits is None or not item.get_closest_marker("gpu"):
        return (yield)
    import torch
    from cards import here

    from dakrun.kernels.runtime import held_to

    if not torch.cuda.is_available():
        return (yield)
    with held_to(here().limited_to(limits)):
        return (yield)


@pytest.fixture(scope="session")
def cubins(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all tests marked `gpu`, of all processes of a run, keep compiled kernels."""
    basetemp = tmp_path_factory.getbasetemp()
    of_run = basetemp.parent if "PYTEST_XDIST_WORKER" in os.environ else basetemp
    folder: Path = (request.config.getoption("--cubins") or of_run / "cubins").absolute()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(autouse=True)
def empty_cache(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> Path:
    """An empty cache folder for each test, so that nothing kept on this machine plays a part.

    Nor does the width of its terminal. On a GPU it has `cubins`, which are named by their sources.
    """
    monkeypatch.delenv("COLUMNS", raising=False)
    folder = tmp_path_factory.mktemp("cache")
    if request.node.get_closest_marker("gpu"):
        (folder / "cubins").symlink_to(request.getfixturevalue("cubins"))
    monkeypatch.setenv("DAKRUN_CACHE_DIR", str(folder))
    return folder


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Path]:
    """Writes a file of the given content."""

    def write(content: str | bytes, name: str = "prompts.jsonl") -> Path:
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


@pytest.fixture
def unadvised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are shown without alternatives to them, which are ten times the work."""
    from dakrun.plan.advice import Advice, busy_shares

    def advise(plan: Any, *_: Any, **__: Any) -> Any:
        return Advice(plan=plan, busy=busy_shares(plan), alternatives=())

    monkeypatch.setattr("dakrun.plan.show.overview.advise", advise)


@pytest.fixture(scope="session")
def emulated_kernels(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """What stands in for kernels.jit.kernel where there is no GPU; needs g++."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    from emulated import of_name

    return of_name(lambda: tmp_path_factory.mktemp("kernel"))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def kernel_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where kernels run: on the CPU, emulated, or on a GPU; cases marked `gpu` only there."""
    if request.param == "cpu":
        if request.node.get_closest_marker("gpu"):
            pytest.skip("too large for the emulator")
        from cards import hold_to, hopper

        emulated = request.getfixturevalue("emulated_kernels")
        monkeypatch.setattr("dakrun.kernels.runtime.jit.kernel", emulated)
        monkeypatch.setattr("dakrun.kernels.runtime.operands.check_gpu", lambda _: None)
        hold_to(hopper(3), monkeypatch)
    return request.param


KERNEL_REPORTS = pytest.StashKey[list[str]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[KERNEL_REPORTS] = []


@pytest.fixture
def kernel_reports(request: pytest.FixtureRequest) -> list[str]:
    """Lines on compiled kernels that are printed after the tests."""
    return request.config.stash[KERNEL_REPORTS]


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Where tests run in several processes, each hands its lines to the one that prints them."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["kernels"] = session.config.stash[KERNEL_REPORTS]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take the lines of a process that has ended."""
    node.config.stash[KERNEL_REPORTS] += getattr(node, "workeroutput", {}).get("kernels", [])


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if lines := config.stash[KERNEL_REPORTS]:
        terminalreporter.section("kernels")
        for line in lines:
            terminalreporter.line(line)
