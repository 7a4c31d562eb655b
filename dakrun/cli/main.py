"""The commands of `dakrun`: options in, results and exit codes out.

Each command imports its modules when it runs, so that --help and plan start at once.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dakrun import __version__
from dakrun.cli.bench import bench
from dakrun.cli.console import eprint, quiet_stderr, stderr_console, stdout_console
from dakrun.cli.errors import ErrorLines
from dakrun.cli.evaluate import evaluate
from dakrun.cli.options import (
    Size,
    device_option,
    length_options,
    load_format_option,
    model_options,
    policy_options,
    profile_option,
    ray_options,
    resolve_model,
    resolve_profile,
    resolve_run_profile,
    sampling_options,
    threads_option,
    wide_option,
    workload_options,
)
from dakrun.config import DTYPE_BYTES
from dakrun.errors import EXIT_CANNOT_RUN, EXIT_FAILED, UsageError

if TYPE_CHECKING:
    from dakrun.config import Dtype, ModelConfig, SamplingParams
    from dakrun.plan import Plan, Policy
    from dakrun.plan.nodes import ClusterForecast
    from dakrun.requests import RowLengths


@click.group("dakrun", cls=ErrorLines, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="dakrun", message="%(prog)s %(version)s")
def main() -> None:
    """Offline batch inference for language models in several memory tiers."""
    # libgomp reads these when torch is imported. Threads that wait for each other sleep after some
    # microseconds: longer spinning slows a step down many times where other programs run on the
    # same cores, and waking up for every op takes a third of a small model's step.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")


main.add_command(bench)
main.add_command(evaluate)


@main.command()
@model_options
@click.option("-i", "--input", "source", required=True, metavar="FILE|-", help="Prompts.")
@click.option(
    "-o", "--output", required=True, metavar="FILE.jsonl|-", help="Results; with --ray a folder."
)
@sampling_options
@workload_options
@device_option("Where to compute.")
@profile_option
@policy_options
@load_format_option()
@threads_option()
@click.option("--report", "report_path", metavar="FILE.json", help="Write the run's report.")
@click.option("--resume", is_flag=True, help="Skip rows that the output already has.")
@click.option("--force", is_flag=True, help="With --resume: even if the model or options differ.")
@click.option("--overwrite", is_flag=True, help="Replace an output that exists.")
@click.option("--ordered", is_flag=True, help="At the end, put the rows in the input's order.")
@ray_options
def generate(
    *,
    model: str,
    source: str,
    output: str,
    batch_size: int | None,
    max_decode_step: float | None,
    max_model_len: int | None,
    dtype: Any,
    device: Any,
    profile: str,
    policy: Any,
    load_format: Any,
    threads: int | None,
    report_path: str | None,
    resume: bool,
    force: bool,
    overwrite: bool,
    ordered: bool,
    ray: str | None,
    workers: int | None,
    part_format: Any,
    **sampling: Any,
) -> int:
    """Complete the prompts of a file; each result is on disk as soon as it is finished.

    Prompts are lines of text (.txt), or JSON or OpenAI Batch rows (.jsonl). A row that cannot be
    run becomes an error row. With --ray the workers of a Ray cluster complete them: the input may
    also be .parquet, a folder, a glob, or a URL such as s3://..., the output is a folder.
    """
    from dakrun.config import SamplingParams

    params = SamplingParams(**sampling)
    if ray is not None:
        if ordered:
            raise UsageError("--ordered does not go with --ray", hint="drop it: parts have ids")
        from dakrun.cli.ray import run_on_ray

        return run_on_ray(
            address=ray,
            workers=workers,
            part_format=part_format or "jsonl",
            model=model,
            source=source,
            output=output,
            params=params,
            llm_options={
                "dtype": dtype,
                "device": device,
                "batch_size": batch_size or "auto",
                "max_decode_step": max_decode_step,
                "max_model_len": max_model_len,
                "policy": policy,
                "load_format": load_format,
                "threads": threads,
            },
            profile=profile,
            report_path=report_path,
            resume=resume,
            force=force,
            overwrite=overwrite,
        )
    if workers is not None or part_format is not None:
        given = "--workers" if workers is not None else "--part-format"
        raise UsageError(f"{given} needs --ray", hint="add --ray local, or drop it")

    from dakrun.config import model_len
    from dakrun.generate import BatchJob, check_report, expectations, load_bar, write_report
    from dakrun.llm import LLM
    from dakrun.models.hub import find_model
    from dakrun.plan import foretell_file
    from dakrun.probe import describe_profile
    from dakrun.report import render
    from dakrun.requests import RequestReader, ResultWriter, make_fingerprint

    writer = ResultWriter(
        output, source=source, overwrite=overwrite, resume=resume, force=force, ordered=ordered
    )
    if report_path is not None:
        check_report(report_path, source=source, output=output, profile=profile)
    with RequestReader(source, defaults=params) as reader:
        config, folder = find_model(model, dtype, load_format)
        weights = None if load_format == "dummy" else folder
        run = make_fingerprint(config, weights, reader.row_format(), params)
        if note := writer.identify(run):
            eprint(note)
        lengths = reader.lengths(model_len(config, max_model_len))
        hardware = resolve_run_profile(profile, device, eprint)
        console = stderr_console()
        progress = console if sys.stderr.isatty() else None
        with load_bar(progress) as on_load:
            llm = LLM(
                model,
                dtype=dtype,
                device=device,
                profile=hardware,
                batch_size=batch_size or "auto",
                max_decode_step=max_decode_step,
                max_model_len=max_model_len,
                **expectations(lengths, params),
                policy=policy,
                needs_tokenizer=reader.needs_tokenizer(),
                load_format=load_format,
                threads=threads,
                on_load=on_load,
            )
        foretold = None
        if llm.profile.comparable and not resume:  # the rows that are left are not known yet
            rows = reader.row_lengths(llm.plan.workload.max_model_len)
            if foretold := foretell_file(llm.plan, rows, params):
                eprint(f"{foretold} (with as many tokens as rows may take)")
        with llm:
            start = time.perf_counter()
            with writer, BatchJob(llm, reader, writer, progress) as job:
                for result in llm.stream(job.requests()):
                    job.finish(result)
                writer.put_in_order()
            report = llm.report(time.perf_counter() - start)
    report["rows"] = vars(job.counts)
    report["time"]["predicted_s"] = foretold and foretold.seconds
    if report_path is not None:
        write_report(report, Path(report_path))
    with quiet_stderr():
        render(report, console)
    if profile == "auto":
        eprint(describe_profile(llm.profile))
    if llm.replanned:
        eprint(llm.replanned)
    eprint(str(job.counts))
    return EXIT_FAILED if job.counts.failed or job.counts.failed_before else 0


@main.command()
@model_options
@workload_options
@length_options
@click.option(
    "-i", "--input", "source", metavar="FILE", help="Plan for this file's prompts; predict its run."
)
@profile_option
@click.option(
    "--nodes",
    metavar="PROFILE:N,...",
    help="Predict a run of generate --ray on so many machines of each profile; needs -i.",
)
@policy_options
@wide_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with units in the key names.")
@click.option("--plot", metavar="FILE.png", help="Draw the roofline and the speed by ratio.")
def plan(
    *,
    model: str,
    dtype: str,
    batch_size: int | None,
    max_decode_step: float | None,
    max_model_len: int | None,
    prompt_len: int,
    max_tokens: int,
    source: str | None,
    profile: str,
    nodes: str | None,
    policy: Any,
    wide: bool,
    as_json: bool,
    plot: str | None,
) -> None:
    """Plan a model's memory and speed; needs no GPU or weights.

    Shows the tiers of each op's bytes, the memory map, the bound and predicted time to first token
    (TTFT), decode step and effective bandwidth (EB), the same with one offload ratio for all ops,
    the limit of the speed, and the changes that would raise it most. With -i, lengths are those of
    the file's rows (4 characters of text count as a token; --max-tokens is for rows without their
    own), and the time of its run is predicted.
    """
    from dakrun.config import SamplingParams, Workload, model_len
    from dakrun.plan import MAX_BATCH_SIZE, choose_batch_size, foretell_file, make_plan
    from dakrun.plan.show import Overview, overview_dict, plot_plan
    from dakrun.probe import describe_profile

    params, rows, limit = SamplingParams(max_tokens=max_tokens), None, MAX_BATCH_SIZE
    if nodes is not None:
        if source is None or profile != "auto" or plot:
            raise UsageError(
                "--nodes predicts the run of a file",
                hint="give -i, and neither --profile nor --plot",
            )
        config = resolve_model(model, dtype)
        most = model_len(config, max_model_len)
        lengths_of = _rows_of(source, params, most)
        forecast = _plan_nodes(
            nodes, config, policy, batch_size, max_decode_step, most, lengths_of, params
        )
        if as_json:
            click.echo(json.dumps(forecast.as_dict()))
            return
        from dakrun.plan.show.nodes import render_nodes

        render_nodes(forecast, source, stdout_console())
        return
    config, hardware = resolve_model(model, dtype), resolve_profile(profile)
    if source is None:
        max_model_len = _plan_model_len(config, prompt_len, max_tokens, max_model_len)
    else:
        max_model_len = model_len(config, max_model_len)
        from dakrun.requests import WorkloadLengths

        rows = _rows_of(source, params, max_model_len)
        lengths = WorkloadLengths.of(*rows)
        prompt_len, max_tokens = round(lengths.mean_prompt), round(lengths.mean_new)
        limit = min(lengths.requests, limit)
    workload = Workload(
        batch_size=batch_size or 1,
        prompt_len=prompt_len,
        new_tokens=max_tokens,
        max_model_len=max_model_len,
    )
    if batch_size is None:
        workload = choose_batch_size(
            config, workload, hardware, policy, limit=limit, max_decode_step=max_decode_step
        )
    decision = make_plan(config, workload, hardware, policy)
    if plot:
        plot_plan(decision, Path(plot))
    shown = Overview.of(decision, max_decode_step)
    if profile == "auto":
        eprint(describe_profile(hardware))
    foretold = foretell_file(decision, rows, params)
    if as_json:
        run = {} if foretold is None else {"run": vars(foretold)}
        click.echo(json.dumps(overview_dict(shown) | run))
        return
    from dakrun.plan.show import render

    render(shown, stdout_console(), wide=wide)
    if foretold is not None:
        click.echo(f"{source}: {foretold}")


def _plan_nodes(
    nodes: str,
    config: "ModelConfig",
    policy: "Policy",
    batch_size: int | None,
    max_decode_step: float | None,
    max_model_len: int,
    rows: "tuple[list[RowLengths], float]",
    params: "SamplingParams",
) -> "ClusterForecast":
    """The run of the rows on --nodes; machines that cannot run the model are left out."""
    from dakrun.config import Workload
    from dakrun.plan import MAX_BATCH_SIZE, choose_batch_size, make_plan
    from dakrun.plan.nodes import foretell_cluster, parse_nodes
    from dakrun.requests import WorkloadLengths

    lengths = WorkloadLengths.of(*rows)

    def plan_of(name: str, requests: int) -> "Plan":
        hardware = resolve_profile(name)
        workload = Workload(
            batch_size=batch_size or 1,
            prompt_len=round(lengths.mean_prompt),
            new_tokens=round(lengths.mean_new),
            max_model_len=max_model_len,
        )
        if batch_size is None:
            limit = min(max(1, requests), MAX_BATCH_SIZE)
            workload = choose_batch_size(
                config, workload, hardware, policy, limit=limit, max_decode_step=max_decode_step
            )
        return make_plan(config, workload, hardware, policy)

    return foretell_cluster(parse_nodes(nodes), plan_of, rows, params, eprint)


def _rows_of(
    source: str, params: "SamplingParams", max_model_len: int
) -> "tuple[list[RowLengths], float]":
    """Lengths of the rows of a file, and their share of it. Raises UsageError if there are none."""
    from dakrun.requests import RequestReader

    with RequestReader(source, defaults=params) as reader:
        found = reader.row_lengths(max_model_len)
    if found is None:
        raise UsageError(
            f"{source}: a plan needs a file that it can read to its end",
            hint="write the prompts to a file, and give that to -i",
        )
    if not any(row.choices for row in found[0]):
        raise UsageError(
            f"{source}: no row can be run", hint="dakrun generate says what is wrong with each row"
        )
    return found


def _plan_model_len(
    config: "ModelConfig", prompt_len: int, max_tokens: int, max_model_len: int | None
) -> int:
    """--max-model-len, or by default the tokens of a prompt and its completion.

    Raises UsageError if these do not fit in it, or in the model's positions.
    """
    length, positions = prompt_len + max_tokens, config.max_positions
    if length <= min(max_model_len or positions, positions):
        return max_model_len or length
    tokens = f"{prompt_len} prompt and {max_tokens} new tokens"
    if length <= positions:
        raise UsageError(
            f"{tokens} do not fit in --max-model-len {max_model_len}",
            hint=f"raise it to {length}, or lower --prompt-len or --max-tokens",
        )
    room = positions - max_tokens
    shorter = f"--prompt-len to {room}" if room > 0 else f"--max-tokens to {positions - 1}"
    raise UsageError(
        f"{tokens} do not fit in the {positions} positions of {config.name}",
        hint=f"lower {shorter} or less",
    )


@main.command()
@click.option("-o", "--output", metavar="FILE.toml", help="File to write; default: in the cache.")
@click.option(
    "--quick", is_flag=True, help="Measure for seconds; otherwise a minute, more with peer GPUs."
)
@click.option("--name", help="Name of the profile; default: that of the file or device.")
@device_option("What to measure.")
@click.option("--plot", metavar="FILE.png", help="Draw the measurements and the roofline.")
def profile(
    *, output: str | None, quick: bool, name: str | None, device: Any, plot: str | None
) -> None:
    """Measure this machine for the planner.

    Writes a hardware profile for --profile: of torch's current GPU, the host memory and the peer
    GPUs that it can read, or of the CPU. Without -o it goes to the cache folder, where --profile
    auto finds it.
    """
    from dakrun import probe
    from dakrun.plan.show import picture

    kind = probe.measured_device(device)
    path = probe.target(output, name, kind)
    if plot:
        picture.check_target(Path(plot))
    eprint(f"measuring {probe.device_name(kind)} for {probe.duration(quick=quick)}")
    result = probe.measure(name or path.stem, kind, quick=quick)
    probe.save(result.profile, path)
    probe.render(result, stdout_console())
    eprint(f"written to {path}" + ("" if output else "; --profile auto uses it"))
    if plot:
        probe.draw(result.profile, Path(plot))


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
    from dakrun.weights import convert_checkpoint, convert_gguf

    note = eprint if sys.stderr.isatty() else lambda _: None
    source, target = source.expanduser(), target.expanduser()
    if source.suffix.lower() == ".gguf":
        found = convert_gguf(
            source, target, dtype=dtype or "bfloat16", shard_bytes=shard_size, note=note
        )
        eprint(found.summary())
        return
    if dtype is not None:
        raise UsageError("--dtype is for GGUF files", hint="leave it out: .bin files keep theirs")
    eprint(convert_checkpoint(source, target, shard_bytes=shard_size, note=note).summary())


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list.")
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
    from dakrun.report import render

    console = stdout_console()
    result = run(console if sys.stdout.isatty() else None, threads=threads)
    for prompt, answer, right in result.answers[:12]:
        console.print(f"{prompt} -> {answer}  [{'right' if right else 'wrong'}]", markup=False)
    console.print("...")
    console.print(f"{result.right} of {len(result.answers)} sums are right\n")
    render(result.report, console)
    return 0 if result.right >= 0.95 * len(result.answers) else EXIT_FAILED
