"""The command `dakrun plan`: where a model's bytes would lie, and how fast it would run.

Of this machine or a profile's, or with --nodes of the machines of a cluster.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dakrun.cli.console import eprint, stdout_console
from dakrun.cli.lookups import (
    note_larger_budgets,
    note_no_kernels,
    resolve_model,
    resolve_profile,
)
from dakrun.cli.options import (
    FILE_TOKENS,
    NEW_TOKENS,
    format_option,
    length_options,
    model_options,
    policy_options,
    popularity_option,
    profile_option,
    run_options,
    speculate_option,
    wide_option,
    workload_options,
)
from dakrun.cli.rows import check_source, model_rules
from dakrun.errors import UsageError

if TYPE_CHECKING:
    from dakrun.config import ModelConfig, SamplingParams
    from dakrun.plan import ExpectedRun, Plan, RunOptions
    from dakrun.plan.nodes import ClusterForecast
    from dakrun.requests import RowCheck


NO_GPU = "no GPU was found: name one to plan for, as --profile h200-pcie5"
NO_DRAFTS = (
    "the time is that of a run without drafts: how many of a file's drafts are right is not known "
    "before it runs"
)


@click.command()
@model_options
@format_option()
@workload_options
@length_options
@click.option(
    "-i",
    "--input",
    "source",
    metavar="FILE",
    help="Plan for this file's prompts (- is standard input); predict its run.",
)
@profile_option
@click.option(
    "--nodes",
    metavar="PROFILE:N,...",
    help="Predict a run of generate --ray on so many machines of each profile; needs -i.",
)
@policy_options
@popularity_option
@speculate_option
@wide_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with units in the key names.")
@click.option("--plot", metavar="FILE.png", help="Draw the roofline and the speed by ratio.")
@run_options
def plan(
    *,
    model: str,
    run: "RunOptions",
    prompt_len: int,
    max_tokens: int | None,
    source: str | None,
    nodes: str | None,
    wide: bool,
    as_json: bool,
    plot: str | None,
) -> None:
    """Plan a model's memory and speed; needs no GPU or weights.

    Begins with the answer: where the model fits, how fast it runs, what it waits for. Then come the
    tiers of each op's bytes, the memory map, the bound and predicted time to first token (TTFT),
    decode step and effective bandwidth (EB), the same with one offload ratio for all ops, the limit
    of the speed, and the changes that would raise it most. With -i, lengths are those of the file's
    rows (4 characters of text count as a token; --max-tokens is for rows without their own), and
    the time of its run, without drafts, is predicted; rows that cannot run are counted by reason.
    With a file that has no rows, the plan is as without -i; with --nodes that is an error.
    With --speculate, the time of steps with drafts is predicted, too.
    """
    from dataclasses import replace

    from dakrun.config import SamplingParams, model_len
    from dakrun.hardware import describe_profile
    from dakrun.plan.batch_size import MAX_BATCH_SIZE
    from dakrun.plan.show.json import overview_dict
    from dakrun.plan.show.overview import Overview
    from dakrun.plan.show.plot import plot_plan

    params = SamplingParams(max_tokens=max_tokens or FILE_TOKENS)
    expected: ExpectedRun | None = None
    rows: RowCheck | None = None
    if nodes is not None:
        if source is None or run.profile != "auto" or plot:
            raise UsageError(
                "--nodes predicts the run of a file",
                hint="give -i, and neither --profile nor --plot",
            )
        config = resolve_model(model, run.dtype, run.format)
        longest = model_len(config, run.max_model_len)
        expected, rows = _expected_run(source, params, config, model, longest)
        if expected is None:
            raise UsageError(f"{source}: has no rows", hint="give -i a file with prompts")
        forecast = _plan_nodes(nodes, config, run, expected)
        if as_json:
            click.echo(json.dumps(forecast.as_dict() | {"rows": rows.as_dict()}))
            return
        from dakrun.plan.show.nodes import render_nodes

        render_nodes(forecast, source, stdout_console())
        click.echo(f"{source}: {rows}")
        if run.speculation.most:
            click.echo(NO_DRAFTS)
        return
    config = resolve_model(model, run.dtype, run.format)
    hardware = resolve_profile(str(run.profile))
    note_larger_budgets(run.policy, hardware)
    if run.profile == "auto":
        eprint(describe_profile(hardware))
        if hardware.device == "cpu":
            eprint(f"{NO_GPU}; this is a plan for the CPU")
    if source is not None:
        longest = model_len(config, run.max_model_len)
        expected, rows = _expected_run(source, params, config, model, longest)
    if expected is None:
        max_tokens = max_tokens or NEW_TOKENS
        longest = _plan_model_len(config, prompt_len, max_tokens, run.max_model_len)
    decision = replace(
        run,
        max_model_len=longest,
        expected_prompt=prompt_len,
        expected_tokens=max_tokens or FILE_TOKENS,
        expected_run=expected,
    ).plan(config, hardware)
    if plot:
        plot_plan(decision, Path(plot))
    requests = expected.requests if expected else MAX_BATCH_SIZE
    shown = Overview.of(decision, run.max_decode_step, requests=requests)
    foretold = None if expected is None else expected.forecast(decision)
    if as_json:
        note_no_kernels(hardware)
        data = overview_dict(shown)
        if rows is not None:
            data |= {"run": foretold and vars(foretold), "rows": rows.as_dict()}
        click.echo(json.dumps(data))
        return
    from dakrun.plan.show.table import render

    render(shown, stdout_console(), wide=wide, run=foretold, rows=str(rows or ""))
    if foretold is not None:
        click.echo(f"{source}: {foretold}")
        if run.speculation.most:
            click.echo(NO_DRAFTS)


def _plan_nodes(
    nodes: str, config: "ModelConfig", run: "RunOptions", expected: "ExpectedRun"
) -> "ClusterForecast":
    """The run on --nodes; machines that cannot run the model are left out."""
    from dataclasses import replace

    from dakrun.plan.nodes import foretell_cluster, parse_nodes

    noted: set[str] = set()

    def plan_of(name: str, part: "ExpectedRun") -> "Plan":
        hardware = resolve_profile(name)
        decision = replace(run, expected_run=part).plan(config, hardware)
        if name not in noted:
            noted.add(name)
            note_no_kernels(hardware)
            note_larger_budgets(run.policy, hardware)
        return decision

    return foretell_cluster(parse_nodes(nodes), plan_of, expected, eprint)


def _expected_run(
    source: str, params: "SamplingParams", config: "ModelConfig", model: str, max_model_len: int
) -> "tuple[ExpectedRun | None, RowCheck]":
    """The run of the rows that can run, None if the file has no rows; and the check of all rows.

    Raises UsageError if the file has rows and none of them can run. The tokenizer is read from
    `model` if that is a folder; else the lengths of texts are estimated.
    """
    rules = model_rules(config, Path(model).expanduser(), max_model_len)
    expected, rows = check_source(source, params, rules)
    if not rows.rows:
        return None, rows
    if not expected.requests:
        raise UsageError(
            f"{source}: no row can be run: {rows}",
            hint="dakrun validate says what is wrong with each row",
        )
    return expected, rows


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
