"""The commands that look at this machine: doctor, profile and bench.

Like the others they import what they need when they run.
"""

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import click

from dakrun.cli.bench_options import MODEL, bench_options, own_options
from dakrun.cli.console import eprint, stdout_console
from dakrun.cli.options import device_option, profile_option, resolve_run_profile
from dakrun.errors import EXIT_CANNOT_RUN


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list.")
def doctor(*, as_json: bool) -> int:
    """Show what this machine has and lacks, each lack with its remedy.

    Exits with 3 where generate cannot run at all.
    """
    from dakrun.cli.doctor import can_generate, examine, render

    checks = examine()
    if as_json:
        click.echo(json.dumps([vars(check) for check in checks]))
    else:
        render(checks, stdout_console())
    return 0 if can_generate(checks) else EXIT_CANNOT_RUN


@click.command()
@click.option("-o", "--output", metavar="FILE.toml", help="Where to write it; else in the cache.")
@click.option(
    "--quick", is_flag=True, help="Some seconds; else about a minute, or more with peer GPUs."
)
@click.option("--name", help="Name of the profile; default: that of the file or device.")
@device_option("What to measure.")
@click.option("--plot", metavar="FILE.png", help="Draw what was measured, and the roofline.")
def profile(
    *, output: str | None, quick: bool, name: str | None, device: Any, plot: str | None
) -> None:
    """Measure this machine for the planner.

    Writes a hardware profile for --profile: of torch's current GPU, host memory and the peer GPUs
    that it can read, or of the CPU. Without -o it is kept in the cache folder, where --profile auto
    finds it.
    """
    from dakrun import probe
    from dakrun.probe.table import render

    kind = probe.measured_device(device)
    path = probe.target(output, name, kind)
    if plot:
        from dakrun.plan.show.picture import check_target

        check_target(Path(plot))
    eprint(f"measuring {probe.device_name(kind)} for {probe.duration(quick=quick)}")
    result = probe.measure(name or path.stem, kind, quick=quick)
    probe.save(result.profile, path)
    render(result, stdout_console())
    eprint(f"written to {path}" + ("" if output else "; --profile auto uses it"))
    if plot:
        from dakrun.probe.plot import draw

        draw(result.profile, Path(plot))


@click.command()
@bench_options
@profile_option
def bench(
    *,
    kernel: str | None,
    profile: str,
    form: str | None,
    output: Path | None,
    plot: Path | None,
    **asked: Any,
) -> None:
    """Measure a model or a kernel beside what memory allows and the profile predicts.

    --model alone: decode steps of batches of requests, a part of all weights in a remote tier;
    without a GPU on the CPU.

    gemm: X W^T, a part of W in a remote tier; cuBLAS has all of W in HBM.

    attention: a new token for each slot, some slots in a remote tier; torch's SDPA has all in HBM.
    """
    from dakrun.bench.output import as_text, check_target, render, write
    from dakrun.bench.run import asked_sweep, check, measure
    from dakrun.plan.show import picture
    from dakrun.probe import describe_profile

    subject = kernel or MODEL
    sweep = asked_sweep(subject, own_options(subject, asked))
    if output:
        check_target(output)
    if plot:
        picture.check_target(plot)
    check(sweep)
    hardware = resolve_run_profile(profile, "cuda" if kernel else "auto", eprint)
    if profile == "auto":
        eprint(describe_profile(hardware))
    command = shlex.join(["dakrun", *sys.argv[1:]])
    for record in measure(sweep, hardware, command=command, note=eprint):
        if output:
            write(record, output)
    if plot:
        from dakrun.bench.model_plot import draw

        draw(record, plot)
    if form:
        click.echo(as_text(record, form), nl=False)
    else:
        render(record, stdout_console())
