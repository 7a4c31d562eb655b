"""The command `dakrun validate`: every row of a prompt file checked, and its run predicted."""

import json
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dakrun.cli.console import eprint
from dakrun.cli.lookups import resolve_model, resolve_profile
from dakrun.cli.options import (
    chat_template_option,
    dtype_option,
    policy_options,
    profile_option,
    run_options,
    sampling_options,
    workload_options,
)
from dakrun.cli.rows import check_source, model_rules
from dakrun.errors import EXIT_FAILED, CannotRun, UsageError
from dakrun.units import counted

if TYPE_CHECKING:
    from dakrun.plan import RunForecast, RunOptions
    from dakrun.requests import PromptRules, RowCheck


@click.command()
@click.option("-i", "--input", "source", required=True, metavar="FILE|-", help="Prompts.")
@click.option("--model", metavar="DIR|HUB_ID|NAME", help="Check the rows for this model, too.")
@dtype_option
@sampling_options
@workload_options
@profile_option
@policy_options
@chat_template_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@run_options
def validate(
    *, source: str, model: str | None, run: "RunOptions", as_json: bool, **sampling: Any
) -> int:
    """Check every row of a prompt file; needs no GPU or weights.

    Counts the rows that cannot run by the code of their errors, shows the first ten errors, counts
    the tokens of the other rows and, with --model, predicts their run. With the model's tokenizer
    (a hub id's is downloaded) rows are checked as generate checks them. Without it, 4 characters of
    text count as a token, and chat templates are not checked; without --model, neither are token
    ids, nor lengths unless --max-model-len is given. A folder of which some weight files are
    missing is an error, as for generate; where all are, a line says so. Exits with 1 if some rows
    cannot run.
    """
    from dakrun.config import MAX_SIZE, SamplingParams, model_len
    from dakrun.models import check_shards, decoder_of, tokenizer_directory
    from dakrun.requests import EstimatedRules

    params = SamplingParams(**sampling)
    forecast: RunForecast | None = None
    if model is None:
        _refuse_without_model({"source", "as_json", "max_model_len", *sampling})
        rules: PromptRules = EstimatedRules(max_model_len=run.max_model_len or MAX_SIZE)
        _, rows = check_source(source, params, rules, whole=True)
    else:
        config, hardware = resolve_model(model, run.dtype), resolve_profile(str(run.profile))
        decoder_of(config)  # raises CannotRun if a matrix cannot be stored in its format
        folder, named = tokenizer_directory(model), Path(model).expanduser()
        if folder == named and (missing := check_shards(named)):  # no hub id
            files = counted(missing, "weight file")
            eprint(f"{folder}: weights are missing ({files}), and were not looked at")
        longest = model_len(config, run.max_model_len)
        rules = model_rules(config, folder, longest, run.chat_template)
        expected, rows = check_source(source, params, rules, whole=True)
        run = replace(run, max_model_len=longest, expected_run=expected)
        try:
            if expected.requests:
                forecast = expected.forecast(run.plan(config, hardware))
        except CannotRun as problem:
            eprint(f"the run is not predicted: {problem}; {problem.hint}")
    estimated = rules.tokenizer is None
    if as_json:
        found = {"rows": rows.as_dict(), "estimated": estimated, "run": forecast and vars(forecast)}
        click.echo(json.dumps(found))
    else:
        _show(rows, estimated=estimated)
        if forecast is not None:
            click.echo(forecast)
    return EXIT_FAILED if rows.lines else 0


def _refuse_without_model(others: Collection[str]) -> None:
    """Raise UsageError if an option is given that needs --model: one that is not in `others`."""
    context = click.get_current_context()
    default = click.core.ParameterSource.DEFAULT
    for option in context.command.params:
        name = str(option.name)
        if name not in others and context.get_parameter_source(name) is not default:
            raise UsageError(f"{option.opts[-1]} needs --model", hint="add --model, or drop it")


def _show(rows: "RowCheck", *, estimated: bool) -> None:
    """Print the errors, counted and the first of them, and the tokens."""
    from dakrun.requests import error_row

    if rows.lines:
        click.echo(f"{len(rows.lines):,} of {counted(rows.rows, 'row')} cannot run:")
        for reason in rows.reasons:
            click.echo(f"  {reason.rows:,} {reason.code}")
        for error in rows.errors:
            shown_id = json.dumps(error_row(error)["id"])
            click.echo(f"line {error.line}, id {shown_id}: {error.code}: {error.message}")
        if more := len(rows.lines) - len(rows.errors):
            click.echo(f"and {more:,} more")
    else:
        click.echo(rows)
    about = ", estimated" if estimated else ""
    click.echo(
        f"{rows.prompt_tokens:,} tokens in prompts{about}; at most {rows.new_tokens:,} new tokens"
    )
