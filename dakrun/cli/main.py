"""The commands of `dakrun` together, and the small ones: profile, convert, doctor, demo.

Each command imports its modules when it runs, so that --help and plan start at once.
"""

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dakrun import __version__
from dakrun.cli.bench import bench
from dakrun.cli.console import eprint, stdout_console
from dakrun.cli.errors import ErrorLines
from dakrun.cli.evaluate import evaluate
from dakrun.cli.generate import generate
from dakrun.cli.limits import limits_option
from dakrun.cli.option_kinds import Size
from dakrun.cli.options import device_option, threads_option
from dakrun.cli.plan import plan
from dakrun.cli.validate import validate
from dakrun.config import DTYPE_BYTES
from dakrun.errors import EXIT_CANNOT_RUN, EXIT_FAILED, UsageError

if TYPE_CHECKING:
    from dakrun.config import Dtype


@click.group("dakrun", cls=ErrorLines, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="dakrun", message="%(prog)s %(version)s")
def main() -> None:
    """Offline batch inference for language models in several memory tiers."""
    # libgomp reads these when torch is imported. Threads that wait for each other sleep after some
    # microseconds: longer spinning slows a step down many times where other programs run on the
    # same cores, and waking up for every op takes a third of a small model's step.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")


for command in (generate, validate, plan, bench, evaluate):
    main.add_command(command)


@main.command()
@click.option("-o", "--output", metavar="FILE.toml", help="File to write; default: in the cache.")
@click.option(
    "--quick", is_flag=True, help="Measure for seconds; otherwise a minute, more with peer GPUs."
)
@click.option("--name", help="Name of the profile; default: that of the file or device.")
@device_option("What to measure.")
@limits_option
@click.option("--plot", metavar="FILE.png", help="Draw the measurements and the roofline.")
def profile(
    *, output: str | None, quick: bool, name: str | None, device: Any, plot: str | None
) -> None:
    """Measure this machine for the planner.

    Writes a hardware profile for --profile: of torch's current GPU, the host memory and the peer
    GPUs that it can read, or of the CPU. Without -o it goes to the cache folder, where --profile
    auto finds it.
    """
    from dakrun.hardware import save_profile, spread_warning
    from dakrun.lab.probe import run as probe
    from dakrun.lab.probe.table import render
    from dakrun.plan.show import picture

    kind = probe.measured_device(device)
    path = probe.target(output, name, kind)
    if plot:
        picture.check_target(Path(plot))
    eprint(f"measuring {probe.device_name(kind)} for {probe.duration(quick=quick)}")
    result = probe.measure(name or path.stem, kind, quick=quick, note=eprint)
    save_profile(result.profile, path)
    render(result, stdout_console())
    eprint(f"written to {path}" + ("" if output else "; --profile auto uses it"))
    if (warning := spread_warning(result.profile)) is not None:
        eprint(warning)
    if plot:
        from dakrun.lab.probe.plot import draw

        draw(result.profile, Path(plot))


@main.command()
@click.argument("source", metavar="SRC", type=click.Path(path_type=Path))
@click.argument("target", metavar="DST", type=click.Path(path_type=Path))
@click.option(
    "--shard-size", type=Size(), default="4GiB", show_default=True,
    help="Maximum bytes of an output file.",
)  # fmt: skip
@click.option(
    "--dtype", type=click.Choice(tuple(DTYPE_BYTES)),
    help="Of the weights of a GGUF file.  [default: bfloat16]",
)  # fmt: skip
def convert(*, source: Path, target: Path, shard_size: int, dtype: "Dtype | None") -> None:
    """Write pytorch_model*.bin files, or a GGUF file, as safetensors into a new folder.

    SRC is a folder with .bin files, of which config.json and the tokenizer are copied, too, or a
    .gguf file (llama, qwen2 or qwen3), which is dequantized. Runs no code from the files.
    """
    source, target = source.expanduser(), target.expanduser()
    if not source.exists():  # known before torch is imported, which takes seconds
        raise UsageError(
            f"{source}: no such file or folder",
            hint="give a .gguf file, or the folder with config.json and pytorch_model*.bin",
        )
    from dakrun.weights import convert_checkpoint, convert_gguf

    note = eprint if sys.stderr.isatty() else lambda _: None
    if source.suffix.lower() == ".gguf":
        converted = convert_gguf(
            source, target, dtype=dtype or "bfloat16", shard_bytes=shard_size, note=note
        )
        eprint(converted.summary())
        if converted.unread:
            eprint(
                f"warning: not translated, and may change the output: {', '.join(converted.unread)}"
            )
        return
    if dtype is not None:
        raise UsageError("--dtype is for GGUF files", hint="leave it out: .bin files keep theirs")
    eprint(convert_checkpoint(source, target, shard_bytes=shard_size, note=note).summary())


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list.")
@limits_option
def doctor(*, as_json: bool) -> int:
    """Check this machine's hardware and packages, with a remedy for everything missing.

    Exits with 3 if generate cannot run at all.
    """
    from dakrun.cli.doctor import can_generate, examine, render

    checks = examine()
    if as_json:
        click.echo(json.dumps([vars(check) for check in checks]))
    else:
        render(checks, stdout_console())
    return 0 if can_generate(checks) else EXIT_CANNOT_RUN


@main.command()
@threads_option()
def demo(*, threads: int | None) -> int:
    """Answer 200 sums with a tiny bundled model, half of it in the remote tier."""
    from dakrun.demo import run
    from dakrun.terminal.summary import render

    console = stdout_console()
    result = run(console if sys.stdout.isatty() else None, threads=threads)
    for prompt, answer, right in result.answers[:12]:
        console.print(f"{prompt} -> {answer}  [{'right' if right else 'wrong'}]", markup=False)
    console.print("...")
    console.print(f"{result.right} of {len(result.answers)} sums are right\n")
    render(result.report, console, verbose=True)
    return 0 if result.right >= 0.95 * len(result.answers) else EXIT_FAILED
