"""The `dakrun` command: options in, texts and exit codes out.

Everything but click is imported when a command needs it, so that --help and plan start at once.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import click

from dakrun import __version__
from dakrun.cli.console import WIDTH, eprint, quiet_stderr, stdout_console
from dakrun.cli.errors import ErrorLines
from dakrun.cli.machine import bench, doctor, profile
from dakrun.cli.options import (
    Size,
    device_option,
    length_options,
    load_format_option,
    model_options,
    policy_options,
    profile_option,
    resolve_model,
    resolve_profile,
    resolve_run_profile,
    sampling_options,
    workload_options,
)
from dakrun.errors import EXIT_FAILED, UsageError


@click.group("dakrun", cls=ErrorLines, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="dakrun", message="%(prog)s %(version)s")
def main() -> None:
    """Offline batch inference for OPT and Llama models in several memory tiers."""


for command in (bench, doctor, profile):
    main.add_command(command)


@main.command()
@model_options
@workload_options
@length_options
@profile_option
@policy_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with units in the key names.")
@click.option("--plot", metavar="FILE.png", help="Draw the roofline and the speed by ratio.")
def plan(
    *,
    model: str,
    dtype: str,
    batch_size: int | None,
    max_tpot: float | None,
    max_model_len: int | None,
    prompt_len: int,
    max_tokens: int,
    profile: str,
    policy: Any,
    as_json: bool,
    plot: str | None,
) -> None:
    """Plan a model's memory and speed; needs no GPU or weights.

    Shows what each op needs and where its bytes would lie, the memory map, the bound and
    predicted time to first token (TTFT), time per output token (TPOT) and effective bandwidth
    (EB), the same for a uniform ratio, and what limits the run and would help most.
    """
    from dakrun.config import Workload
    from dakrun.plan.batch_size import choose_batch_size
    from dakrun.plan.planner import make_plan
    from dakrun.plan.show.overview import overview
    from dakrun.probe import describe_profile

    room = max_model_len or prompt_len + max_tokens
    if room < prompt_len + max_tokens:
        raise UsageError(
            f"{prompt_len} prompt and {max_tokens} new tokens do not fit in --max-model-len {room}",
            hint=f"raise it to {prompt_len + max_tokens}, or lower --prompt-len or --max-tokens",
        )
    config, hardware = resolve_model(model, dtype), resolve_profile(profile)
    workload = Workload(
        batch_size=batch_size or 1,
        prompt_len=prompt_len,
        new_tokens=max_tokens,
        max_model_len=room,
    )
    if batch_size is None:
        workload = choose_batch_size(config, workload, hardware, policy, max_tpot=max_tpot)
    decision = make_plan(config, workload, hardware, policy)
    if plot:
        from dakrun.plan.show.plot import plot_plan

        plot_plan(decision, Path(plot))
    shown = overview(decision, max_tpot)
    if profile == "auto":
        eprint(describe_profile(hardware))
    if as_json:
        from dakrun.plan.show.json import overview_dict

        click.echo(json.dumps(overview_dict(shown)))
        return
    from dakrun.plan.show.table import render

    render(shown, stdout_console())


@main.command()
@model_options
@click.option("-i", "--input", "source", required=True, metavar="FILE|-", help="Prompts.")
@click.option("-o", "--output", required=True, metavar="FILE.jsonl|-", help="Results.")
@sampling_options
@workload_options
@device_option("Where to compute.")
@profile_option
@policy_options
@load_format_option
@click.option("--report", "report_path", metavar="FILE.json", help="Write the run's report.")
@click.option("--resume", is_flag=True, help="Skip rows that the output already has.")
@click.option("--overwrite", is_flag=True, help="Replace an output that exists.")
def generate(
    *,
    model: str,
    dtype: Any,
    source: str,
    output: str,
    batch_size: int | None,
    max_tpot: float | None,
    max_model_len: int | None,
    device: Any,
    profile: str,
    policy: Any,
    load_format: Any,
    report_path: str | None,
    resume: bool,
    overwrite: bool,
    **sampling: Any,
) -> int:
    """Complete the prompts of a file; results are written as they finish.

    Prompts are lines of text (.txt), or JSON or OpenAI Batch rows (.jsonl); a bad row becomes an
    error row.
    """
    from dakrun.config import SamplingParams

    params = SamplingParams(**sampling)

    from rich.console import Console

    from dakrun.generate import check_report, count_rows, write_report
    from dakrun.generate import generate as run
    from dakrun.llm import LLM
    from dakrun.plan.batch_size import MAX_BATCH_SIZE
    from dakrun.probe import describe_profile
    from dakrun.report import render as render_report
    from dakrun.requests import RequestReader, ResultWriter

    writer = ResultWriter(output, source=source, overwrite=overwrite, resume=resume)
    if report_path is not None:
        check_report(report_path, source=source, output=output, profile=profile)
    with (
        RequestReader(source, defaults=params) as reader,
        LLM(
            model,
            dtype=dtype,
            device=device,
            profile=resolve_run_profile(profile, device, eprint),
            batch_size=batch_size or "auto",
            max_batch_size=count_rows(source, MAX_BATCH_SIZE),
            max_tpot=max_tpot,
            max_model_len=max_model_len,
            expected_tokens=params.max_tokens,
            policy=policy,
            needs_tokenizer=reader.needs_tokenizer(),
            load_format=load_format,
        ) as llm,
    ):
        stderr = Console(stderr=True, width=None if sys.stderr.isatty() else WIDTH)
        start = time.perf_counter()
        with writer:
            counts = run(llm, reader, writer, stderr if sys.stderr.isatty() else None)
        report = llm.report(time.perf_counter() - start)
    report["rows"] = vars(counts)
    if report_path is not None:
        write_report(report, Path(report_path))
    with quiet_stderr():
        render_report(report, stderr)
    if profile == "auto":
        eprint(describe_profile(llm.profile))
    eprint(str(counts))
    return EXIT_FAILED if counts.failed or counts.failed_before else 0


@main.command()
@click.argument("source", metavar="SRC", type=click.Path(path_type=Path))
@click.argument("target", metavar="DST", type=click.Path(path_type=Path))
@click.option(
    "--shard-size", type=Size(), default="4GiB", show_default=True,
    help="Bytes of an output file, at most.",
)  # fmt: skip
def convert(*, source: Path, target: Path, shard_size: int) -> None:
    """Write a folder's pytorch_model*.bin as safetensors into a new folder.

    Runs no code from the files, and copies config.json and the tokenizer.
    """
    from dakrun.weights.convert import convert_checkpoint

    note = eprint if sys.stderr.isatty() else lambda _: None
    source, target = source.expanduser(), target.expanduser()
    result = convert_checkpoint(source, target, shard_bytes=shard_size, note=note)
    eprint(result.summary())


@main.command()
def demo() -> int:
    """Answer 200 sums with a tiny bundled model, half of it in the remote tier."""
    from dakrun.demo import run
    from dakrun.report import render as render_report

    console = stdout_console()
    result = run(console if sys.stdout.isatty() else None)
    for prompt, answer, right in result.answers[:12]:
        console.print(f"{prompt} -> {answer}  [{'right' if right else 'wrong'}]", markup=False)
    console.print("...")
    console.print(f"{result.right} of {len(result.answers)} sums are right\n")
    render_report(result.report, console)
    return 0 if result.right >= 0.95 * len(result.answers) else EXIT_FAILED
