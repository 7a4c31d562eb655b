"""The command `dakrun evaluate`: the paper's figures on this machine, or from a plan, as a page."""

import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dakrun.cli.console import eprint, stderr_console
from dakrun.cli.lookups import note_no_kernels, resolve_model, resolve_profile, resolve_run_profile
from dakrun.cli.option_kinds import choice_option, option
from dakrun.cli.options import device_option
from dakrun.errors import UsageError

if TYPE_CHECKING:
    from dakrun.config import ModelConfig
    from dakrun.hardware import HardwareProfile
    from dakrun.lab.evaluate.figures import Figure

MODELS, QUICK_MODELS = ("opt-30b", "opt-6.7b", "llama-2-7b"), ("opt-6.7b",)
RIVALS = ("transformers", "prefetch", "uva", "accelerate", "vllm")
SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0}


class Duration(click.ParamType):
    """Seconds, written like 10min."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?(s|min|h)", str(value).strip())
        if match is None:
            self.fail(f"{value!r} is not a time like 90s, 10min or 2h.", param, ctx)
        return float(match[1]) * SECONDS[match[2]]


@click.command()
@option("--only", metavar="FIGURE,...", help="Figures to evaluate, like fig8,table1; default: all.")
@option(
    "--quick", is_flag=True, help="Fewer points of fewer decode steps; by default OPT-6.7B alone."
)
@option(
    "--model",
    "models",
    multiple=True,
    metavar="NAME,...",
    help="Models, with random weights. Default: opt-30b, opt-6.7b and llama-2-7b; on a CPU a tiny "
    "one.",
)
@device_option("Where to measure.")
@option("--remote", default="host", metavar="host|peer[:N]", help="The tier outside HBM.")
@choice_option(
    "--rival",
    "rivals",
    choices=RIVALS,
    multiple=True,
    default=("transformers", "prefetch", "uva"),
    help="Other programs to measure on a GPU, where they are installed; repeatable. prefetch "
    "copies whole layers ahead of use, uva reads them in place, both as dakrun bench does.",
)
@click.option(
    "--vllm-python",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    metavar="PATH",
    help="The python of an environment with vLLM, for --rival vllm, which measures its prefetch "
    "and its UVA offloader.",
)
@option("--predict", is_flag=True, help="Do not measure: predict every point with the planner.")
@option(
    "--profile",
    default="auto",
    metavar="auto|NAME|FILE",
    help="Hardware to plan for; must describe this machine unless --predict.",
)
@option(
    "--budget",
    type=Duration(),
    metavar="TIME",
    help="Start no new point after this long, like 10min.",
)
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Folder for index.html, the same as tables.md and a CSV for each figure, and run.json. "
    "Points measured there are kept.",
)
def evaluate(
    *,
    only: str | None,
    quick: bool,
    models: tuple[str, ...],
    device: Any,
    remote: str,
    rivals: tuple[str, ...],
    vllm_python: Path | None,
    predict: bool,
    profile: str,
    budget: float | None,
    output: Path,
) -> None:
    """Make the figures of the DAK paper again (arXiv 2604.26074) on this machine, as a page.

    Measures effective bandwidth and decode steps by offload ratio, ops, links, ablations and other
    programs, and writes DIR/index.html with the paper's claims beside the results; l2 and parts are
    figures of an article on L2. Points that DIR has already are not measured again, but quick and
    full runs share none, and neither do machines or profiles.
    """
    from dakrun.lab.evaluate import Scope, run
    from dakrun.lab.evaluate.store import Store
    from dakrun.lab.probe.run import measured_device
    from dakrun.plan import Policy

    if predict and budget is not None:
        raise UsageError(
            "--budget is a time for measuring; --predict measures nothing",
            hint="leave one of them out: predictions of a model take seconds",
        )
    kinds = _figures(only)
    named = _names(models)
    tiny = not predict and measured_device(device) == "cpu"
    configs = _configs(named, tiny=tiny, quick=quick)
    if predict:
        hardware = resolve_profile(profile)
        note_no_kernels(hardware)
    else:
        hardware = resolve_run_profile(profile, device, configs.values(), eprint)
        _check_device(hardware, device)
    if not hardware.remote:
        raise UsageError(
            f"profile {hardware.name} has no tier outside HBM, which an evaluation compares with",
            hint="name another profile",
        )
    (tier,) = _one_tier(Policy(remote=(remote,)).remote_tiers(hardware), remote)
    scope = Scope(
        models=configs,
        profile=hardware,
        remote=tier,
        quick=quick,
        predict=predict,
        rivals=_programs(rivals, vllm_python),
        vllm_python=vllm_python,
    )
    facts = run.facts(scope, shlex.join(["dakrun", *sys.argv[1:]]))
    store = Store(output, run.origin(facts), quick=quick)
    if others := "; ".join(sorted(store.others)):
        eprint(f"points of {others} in {output} do not count here: this is {store.origin}")
    with run.finder(scope, store.folder, facts) as (find, known), _bar() as shown:
        done = run.evaluate(scope, kinds, store, find, known, budget_s=budget, **shown)
    left = f"; {done.left} are left for another run" if done.left else ""
    source = "predicted" if predict else "measured"
    untimed = f"; {done.untimed} have no time, the page says why" if done.untimed else ""
    eprint(f"{done.new} of {done.points} points {source} now{untimed}{left}")
    click.echo(done.page)


def _programs(rivals: tuple[str, ...], vllm_python: Path | None) -> tuple[str, ...]:
    """The rivals as figures name them: vLLM is two. UsageError if it has no --vllm-python."""
    if ("vllm" in rivals) != (vllm_python is not None):
        raise UsageError(
            "--rival vllm and --vllm-python need each other",
            hint="--vllm-python is the python of an environment in which vllm is installed",
        )
    both = ("vllm-prefetch", "vllm-uva")
    return tuple(
        of for name in dict.fromkeys(rivals) for of in (both if name == "vllm" else (name,))
    )


def _names(texts: Iterable[str]) -> list[str]:
    """The names in texts such as "a,b", each once."""
    return list(dict.fromkeys(name.strip() for text in texts for name in text.split(",")))


def _figures(only: str | None) -> "Mapping[str, type[Figure]]":
    """The figures that --only names, in the page's order; UsageError for an unknown name."""
    from dakrun.lab.evaluate.figures import FIGURES

    if only is None:
        return FIGURES
    names = _names([only])
    for name in names:
        if name not in FIGURES:
            raise UsageError(
                f"--only: no figure is called {name!r}", hint=f"name any of {', '.join(FIGURES)}"
            )
    return {name: figure for name, figure in FIGURES.items() if name in names}


def _configs(names: list[str], *, tiny: bool, quick: bool) -> "dict[str, ModelConfig]":
    """The models by name; by default those of the paper, or the tiny one."""
    if tiny and not names:
        from dakrun.lab.evaluate.scope import TINY
        from dakrun.models import model_config

        return {TINY.name: model_config(str(TINY))}
    return {name: resolve_model(name, "auto") for name in names or _default(quick=quick)}


def _default(*, quick: bool) -> tuple[str, ...]:
    return QUICK_MODELS if quick else MODELS


def _one_tier(tiers: tuple[str, ...], remote: str) -> tuple[str]:
    if len(tiers) != 1:
        raise UsageError(f"--remote {remote}: one tier is needed", hint="write host or peer")
    return (tiers[0],)


def _check_device(hardware: "HardwareProfile", device: Any) -> None:
    """Raise UsageError if the profile describes another kind of device than is measured."""
    from dakrun.lab.probe.run import measured_device

    kind = measured_device(device)
    if hardware.device != kind:
        names = {"cuda": "a GPU", "cpu": "a CPU"}
        raise UsageError(
            f"profile {hardware.name} describes {names[hardware.device]}, not {names[kind]}",
            hint="leave out --profile, or add --predict to measure nothing",
        )


@contextmanager
def _bar() -> "Iterator[dict[str, Any]]":
    """A progress bar on stderr, with the time that is left; a line a figure if that is no terminal.

    Yields arguments of run.evaluate.
    """
    console = stderr_console()
    if not console.is_terminal:
        yield {"finished": lambda figure, points: eprint(f"{figure}: {points} points")}
        return
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.description}"), console=console) as bar:
        task = bar.add_task("", total=None)

        def show(done: int, total: int, name: str) -> None:
            bar.update(task, completed=done, total=total, description=name)

        yield {"progress": show}
