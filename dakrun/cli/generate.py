"""The command `dakrun generate`: the prompts of a file completed, on this machine or on Ray's."""

import gc
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dakrun.cli.console import eprint, quiet_stderr, stderr_console
from dakrun.cli.limits import limits_option
from dakrun.cli.lookups import resolve_run_profile
from dakrun.cli.options import (
    chat_template_option,
    device_option,
    format_option,
    load_format_option,
    model_options,
    policy_options,
    popularity_option,
    profile_option,
    ray_options,
    reasoning_option,
    run_options,
    sampling_options,
    speculate_option,
    threads_option,
    workload_options,
)
from dakrun.cli.suggested import say_suggested, with_suggested
from dakrun.errors import EXIT_FAILED, UsageError
from dakrun.interrupt import Interrupted

if TYPE_CHECKING:
    from dakrun.generate import Counts
    from dakrun.plan import RunOptions


@click.command()
@model_options
@click.option("-i", "--input", "source", required=True, metavar="FILE|-", help="Prompts.")
@click.option(
    "-o",
    "--output",
    required=True,
    metavar="FILE.jsonl|FILE.parquet|-",
    help="Results; with --ray a folder.",
)
@sampling_options
@click.option(
    "--generation-config", default="none", metavar="auto|none|DIR", show_default=True,
    help="Take the sampling that generation_config.json suggests, of the model or of a folder; "
    "options that are given come first.",
)  # fmt: skip
@workload_options
@device_option("Where to compute.")
@profile_option
@limits_option
@policy_options
@popularity_option
@load_format_option()
@format_option("With dummy weights: ")
@chat_template_option
@reasoning_option
@speculate_option
@threads_option()
@click.option("--report", "report_path", metavar="FILE.json", help="Write the run's report.")
@click.option("--resume", is_flag=True, help="Skip rows that the output already has.")
@click.option("--force", is_flag=True, help="With --resume: even if the model or options differ.")
@click.option("--changed", is_flag=True, help="With --resume: run rows that changed again.")
@click.option("--retry-failed", is_flag=True, help="With --resume: run failed rows again.")
@click.option("--overwrite", is_flag=True, help="Replace an output that exists.")
@click.option("--ordered", is_flag=True, help="At the end, put the rows in the input's order.")
@click.option("--verbose", is_flag=True, help="At the end, show all figures, ops and tiers.")
@click.option("--quiet", is_flag=True, help="Show nothing but errors.")
@ray_options
@run_options
def generate(
    *,
    model: str,
    source: str,
    output: str,
    run: "RunOptions",
    report_path: str | None,
    resume: bool,
    force: bool,
    changed: bool,
    retry_failed: bool,
    overwrite: bool,
    ordered: bool,
    verbose: bool,
    quiet: bool,
    ray: str | None,
    generation_config: str,
    workers: int | None,
    part_format: Any,
    **sampling: Any,
) -> int:
    """Complete the prompts of a file; each result is on disk as soon as it is finished.

    Prompts are lines of text (.txt), or JSON or OpenAI Batch rows (.jsonl, .parquet). A row that
    cannot be run becomes an error row. With --ray the workers of a Ray cluster complete them: the
    input may also be a folder, a glob, or a URL such as s3://..., the output is a folder.
    """
    from dataclasses import replace

    from dakrun.config import SamplingParams

    if verbose and quiet:
        raise UsageError("--verbose and --quiet exclude each other", hint="give one of them")
    say = _say_nothing if quiet else eprint
    params = SamplingParams(**sampling)
    if generation_config != "none":
        params = with_suggested(params, generation_config, model, sampling)
    run, profile = replace(run, expected_tokens=sampling["max_tokens"]), str(run.profile)
    if ray is not None:
        from dakrun.cli.ray import refuse_options, run_on_ray

        refuse_options(ordered=ordered, verbose=verbose, changed=changed, retry_failed=retry_failed)
        return run_on_ray(
            address=ray,
            workers=workers,
            part_format=part_format or "jsonl",
            model=model,
            source=source,
            output=output,
            params=params,
            run=run,
            report_path=report_path,
            resume=resume,
            force=force,
            overwrite=overwrite,
            quiet=quiet,
        )
    if workers is not None or part_format is not None:
        given = "--workers" if workers is not None else "--part-format"
        raise UsageError(f"{given} needs --ray", hint="add --ray local, or drop it")

    from dakrun.models.hub import check_name, find_model

    check_name(model, run.load_format)  # before the imports of torch, which take seconds
    from dakrun.config import model_len
    from dakrun.generate import BatchJob, Counts, check_report, is_report_of, write_report
    from dakrun.hardware import describe_profile
    from dakrun.llm import LLM
    from dakrun.plan.lossy import quantization_note
    from dakrun.requests import (
        ParquetOutput,
        RequestReader,
        ResultWriter,
        check_sentencepiece,
        is_parquet,
        make_fingerprint,
    )
    from dakrun.terminal.progress import load_bar
    from dakrun.terminal.summary import render

    parquet: ParquetOutput | None = None
    if is_parquet(output):
        parquet = ParquetOutput(output, source=source, overwrite=overwrite, resume=resume)
    rows_output = output if parquet is None else parquet.rows
    writer = ResultWriter(
        rows_output,
        source=source,
        overwrite=overwrite,
        resume=resume,
        force=force,
        ordered=ordered or parquet is not None,
        changed=changed,
        retry_failed=retry_failed,
    )
    if report_path is not None:
        for name in (output, rows_output):
            check_report(report_path, source=source, output=name, profile=profile)
    with RequestReader(source, defaults=params) as reader:
        if parquet is not None:
            parquet.begin(reader.row_format())
        config, folder = find_model(model, run.dtype, run.load_format, run.format)
        if folder is not None:
            check_sentencepiece(folder)
            if generation_config == "none" and not params.temperature:
                say_suggested(folder, say)
        weights = None if run.load_format == "dummy" else folder
        max_len = model_len(config, run.max_model_len)
        fingerprint = make_fingerprint(
            config,
            weights,
            reader.row_format(),
            params,
            max_model_len=max_len,
            tokenizer_directory=folder,
            chat_template=run.chat_template,
            reasoning=run.reasoning,
        )
        if note := writer.identify(fingerprint):
            say(note)
        if resume and (rows := reader.input_rows()) is not None:
            notes, finished = writer.compare(rows)
            for note in notes:
                say(note)
            if finished and (report_path is None or is_report_of(report_path, finished)):
                kept = f", and {report_path} stays as it is" if report_path else ""
                say(f"nothing is left to do, so the model is not loaded{kept}")
                with writer:
                    return _ended(Counts(writer.failed_before, skipped=finished), say)
        expected = reader.expected_run(max_len)
        hardware = resolve_run_profile(profile, run.device, [config], say)
        console = stderr_console()
        progress = console if sys.stderr.isatty() and not quiet else None
        with _nothing_begun(), load_bar(progress) as (on_allocate, on_load):
            llm = LLM(
                model,
                run=replace(
                    run,
                    profile=hardware,
                    expected_run=expected,
                    needs_tokenizer=reader.needs_tokenizer(),
                    started=writer.started,
                ),
                on_rules=reader.prepare,
                on_allocate=on_allocate,
                on_load=on_load,
            )
        if note := quantization_note(llm.plan):
            say(note)
        if llm.fallback:
            say(f"runs on plain torch, slower than the kernels: {llm.fallback}")
        forecast = None
        if expected is not None and llm.profile.comparable and llm.fallback is None:
            forecast = expected.forecast(llm.plan)  # of kernels
        # With --resume the rows that are left are not known yet.
        foretold = None if resume else forecast
        if foretold is not None:
            without = ", without drafts" if run.speculation.most else ""
            say(f"{foretold} (with as many tokens as rows may take{without})")
        with llm:
            with (
                writer,
                BatchJob(
                    llm, reader, writer, progress, expected=expected, forecast=forecast
                ) as job,
                _kept_from_collection(),
            ):
                start = time.perf_counter()
                job.run()
                writer.finish()
                if parquet is not None:
                    parquet.convert()
            report = llm.report(time.perf_counter() - start)
    report["rows"] = vars(job.counts)
    report["time"]["predicted_s"] = foretold and foretold.seconds
    if report_path is not None:
        write_report(report, Path(report_path))
    if llm.replanned:
        say(llm.replanned)
    if llm.rules.tokenizer is not None and (own := llm.rules.tokenizer.own_begin):
        say(f"prompts that begin with a begin token of their own got no second one: {own}")
    if not quiet:
        with quiet_stderr():
            render(report, console, verbose=verbose)
    if profile == "auto":
        say(describe_profile(llm.profile))
    return _ended(job.counts, say, retried=retry_failed)


def _ended(counts: "Counts", say: Callable[[str], None], *, retried: bool = False) -> int:
    """Say how many rows there are of each kind, errors even where `say` is quiet; the exit code."""
    failed = counts.failed or counts.failed_before
    (eprint if failed else say)(counts.summary(retried=retried))
    return EXIT_FAILED if failed else 0


@contextmanager
def _nothing_begun() -> Iterator[None]:
    """Let an interrupt in the block say that no row has begun."""
    try:
        yield
    except KeyboardInterrupt as stop:
        raise Interrupted(
            "no row has begun", hint="to go on, run the same command again", cause=stop
        ) from None


@contextmanager
def _kept_from_collection() -> Iterator[None]:
    """In the block, let the garbage collector skip all objects that existed before it.

    The imported modules have hundreds of thousands of objects. Scanning them takes as long as
    several steps, and nothing is launched meanwhile. Do nothing if the process, such as a program
    that calls this command, has frozen objects already: unfreezing would include those.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _say_nothing(text: str) -> None:
    """Replace eprint under --quiet."""
