"""Command line options that several commands share.

Knows click; the commands, and the decorators that one of them alone has, are in their own files.
"""

import functools
import math
from pathlib import Path
from typing import Any

import click

from dakrun.cli.option_kinds import (
    COUNT,
    RATIO,
    Command,
    Decorator,
    Size,
    auto_option,
    choice_option,
    count_option,
    option,
    together,
)
from dakrun.errors import UsageError

TRANSPORTS = ("auto", "direct", "staged")
STRATEGIES = ("auto", "greedy", "uniform")
NEW_TOKENS, FILE_TOKENS = 32, 128  # of a completion: in a plan without a file; of a file's row


def budget_options(prefix: str = "") -> Decorator:
    """The memory budgets by tier; `prefix` begins their help."""
    unset = "default: what is free, or for plans all that the profile has"
    return together(
        option(
            "--hbm-budget", type=Size(), help=f"{prefix}GPU memory to use, like 20GiB; {unset}."
        ),
        option(
            "--host-budget", type=Size(), help=f"{prefix}Host memory to use, like 100GiB; {unset}."
        ),
        option(
            "--peer-budget", type=Size(), help=f"{prefix}Memory to use on each peer GPU; {unset}."
        ),
    )


def device_option(help: str) -> Decorator:
    """The option --device."""
    return choice_option("--device", choices=("auto", "cuda", "cpu"), help=help)


def threads_option() -> Decorator:
    """The option --threads."""
    return count_option(
        "--threads",
        callback=_threads,
        help="CPU threads to compute with; default: the cores that may be used.",
    )


def _threads(ctx: click.Context, param: click.Parameter, threads: int | None) -> int | None:
    """--threads, if the machine can start as many."""
    from dakrun.memory.limits import check_threads

    if threads is not None:
        check_threads(threads)
    return threads


def load_format_option(prefix: str = "") -> Decorator:
    """The option --load-format; `prefix` begins its help."""
    return choice_option(
        "--load-format",
        choices=("auto", "dummy"),
        help=f"{prefix}Weights of the checkpoint (auto), or random ones (dummy), for which a "
        "config.json or a known name is enough.",
    )


def format_option(prefix: str = "") -> Decorator:
    """The option --format; `prefix` begins its help."""
    from dakrun.formats.named import NAMES

    return choice_option(
        "--format",
        choices=("auto", *NAMES),
        help=f"{prefix}Format of the weights of a 16-bit model, as if it were quantized; auto: as "
        "they are stored.",
    )


popularity_option = option(
    "--popularity",
    default="auto",
    metavar="auto|uniform|zipf:S|FILE",
    help="How often tokens choose each expert of a mixture: what earlier runs counted (auto), all "
    "alike, Zipf's law, or a file's counts. Experts of most use lie in HBM.",
)


def _template(ctx: click.Context, param: click.Parameter, name: str | None) -> str | None:
    """The text of --chat-template."""
    if name is None:
        return None
    try:
        return Path(name).read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as problem:
        reason = problem.strerror if isinstance(problem, OSError) else "not UTF-8"
        raise UsageError(
            f"--chat-template {name}: cannot be read ({reason})", hint="give a file with a template"
        ) from None


chat_template_option = click.option(
    "--chat-template",
    metavar="FILE",
    callback=_template,
    help="A Jinja template for chats; default: the tokenizer's own.",
)


def _reasoning(ctx: click.Context, param: click.Parameter, reasoning: str) -> str:
    """--reasoning, if it is auto, off or two markers."""
    from dakrun.requests import given_markers

    given_markers(reasoning)
    return reasoning


reasoning_option = click.option(
    "--reasoning",
    metavar="auto|off|OPEN,CLOSE",
    default="auto",
    show_default=True,
    callback=_reasoning,
    help="Markers of the thoughts that answers to chats begin with, such as <think>,</think>; "
    "auto: those that the chat template is written for. Off: thoughts are a part of the answer.",
)


def _speculate(ctx: click.Context, param: click.Parameter, speculate: str) -> str:
    """--speculate, if it names a choice."""
    from dakrun.config import Speculation

    Speculation.of(speculate)
    return speculate


speculate_option = click.option(
    "--speculate",
    metavar="auto|off|suffix[:K]",
    default="off",
    show_default=True,
    callback=_speculate,
    help="Let steps carry drafts: tokens that may come next, taken from prompts and answers; those "
    "that the model chooses are kept. suffix: up to 31 a row, as many as the plan finds fastest; "
    "suffix:K: up to K (1 to 31); auto: only where drafts save time.",
)


def _seconds(
    ctx: click.Context, param: click.Parameter, milliseconds: float | None
) -> float | None:
    """--max-decode-step in seconds; click.UsageError unless --batch-size is auto."""
    if milliseconds is None:
        return None
    if not math.isfinite(milliseconds):
        raise click.BadParameter("it is not a finite number", ctx=ctx, param=param)
    if (given := ctx.params.get("batch_size")) is not None:
        raise click.UsageError(f"--max-decode-step needs --batch-size auto, not {given}", ctx=ctx)
    return milliseconds / 1e3


dtype_option = choice_option(
    "--dtype",
    choices=("auto", "float16", "bfloat16", "float32"),
    help="Type of weights, KV cache and activations; auto: the checkpoint's.",
)

model_options = together(
    option("--model", required=True, metavar="DIR|HUB_ID|NAME", help="The model to run."),
    dtype_option,
)

workload_options = together(
    auto_option(
        "--batch-size",
        COUNT,
        "auto|N",
        "Requests decoded together at most; auto: the number with the most predicted tokens per "
        "second, over the whole file if there is one.",
        is_eager=True,  # the callback of --max-decode-step reads it
    ),
    option(
        "--max-decode-step",
        type=click.FloatRange(min=0, min_open=True),
        metavar="MS",
        callback=_seconds,
        help="Limit of the predicted time of a decode step, for --batch-size auto; default: none.",
    ),
    count_option(
        "--max-model-len",
        help="Maximum tokens of a prompt and its completion together; default: the model's "
        "positions, at most 4,096 (plan without -i: --prompt-len and --max-tokens).",
    ),
)

length_options = together(
    count_option("--prompt-len", default=32, help="Tokens of a prompt."),
    count_option(
        "--max-tokens",
        help=f"Tokens of a completion; default: {NEW_TOKENS}, of a file's rows {FILE_TOKENS}.",
    ),
)

profile_option = option(
    "--profile",
    default="auto",
    metavar="auto|NAME|FILE",
    help="Hardware to plan for: a shipped profile, a .toml file, or (auto) this machine; generate, "
    "bench and evaluate first measure the costs that its cached profile lacks for their models.",
)

ray_options = together(
    click.option(
        "--ray",
        is_flag=False,
        flag_value="auto",
        metavar="[auto|local|ADDRESS]",
        help="Run on a Ray cluster: the one of this machine (auto), one started for this run "
        "(local), or the one at an address.",
    ),
    count_option("--workers", help="With --ray: models at work; default: one for each GPU."),
    click.option(
        "--part-format",
        type=click.Choice(("jsonl", "parquet")),
        help="With --ray: the format of the output's part files.  [default: jsonl]",
    ),
)

wide_option = click.option(
    "--wide",
    is_flag=True,
    help="Print all columns of tables; otherwise those that fit the terminal.",
)

sampling_options = together(
    count_option(
        "--max-tokens", default=FILE_TOKENS, help="Maximum tokens to generate for a prompt."
    ),
    option("--temperature", type=float, default=0.0, help="0 takes the most likely token."),
    option("--top-k", type=int, default=0, help="0 keeps all tokens."),
    option("--top-p", type=float, default=1.0, help="1 keeps all tokens."),
    option("--seed", type=int, default=0, help="Seed of sampling, for temperatures above 0."),
    option("--stop", multiple=True, metavar="TEXT", help="End before this text; repeatable."),
    option("--ignore-eos", is_flag=True, help="Go on after the end-of-sequence token."),
)

_policy_options = together(
    budget_options(),
    auto_option("--offload-ratio", RATIO, "auto|0..1", "Ratio of weight and KV bytes outside HBM."),
    auto_option(
        "--kv-offload-ratio",
        RATIO,
        "auto|0..1",
        "Ratio of the KV cache outside HBM; --offload-ratio is then that of the weights alone.",
    ),
    choice_option(
        "--strategy",
        choices=STRATEGIES,
        help="An offload ratio for each op (greedy), one for all ops (uniform), or what is "
        "predicted to be fastest (auto).",
    ),
    choice_option(
        "--transport",
        choices=TRANSPORTS,
        help="Read remote tiers in place (direct), or copy them to HBM ahead of use (staged); a "
        "step copies experts only if it reads nearly all of them.",
    ),
    option(
        "--remote",
        default="auto",
        metavar="auto|TIER,...",
        help="Remote tiers to offload to, by their names in the profile; auto: host, or none where "
        "the profile has none.",
    ),
)


# Options that are fields of a Policy as they are.
_POLICY_FIELDS = (
    *("hbm_budget", "host_budget", "peer_budget"),
    *("offload_ratio", "kv_offload_ratio", "strategy"),
)


def policy_options(command: Command) -> Command:
    """Add the placement options; the command gets them as one argument `policy` (a Policy)."""

    @functools.wraps(command)
    def with_policy(*, transport: Any, remote: str, **options: Any) -> int | None:
        from dakrun.plan import Policy, parse_remote

        policy = Policy(
            transport=None if transport == "auto" else transport,
            remote=None if remote == "auto" else parse_remote(remote),
            **{name: options.pop(name) for name in _POLICY_FIELDS},
        )
        return command(policy=policy, **options)

    decorated: Command = _policy_options(with_policy)
    return decorated


def run_options(command: Command) -> Command:
    """Give the command its options that are fields of RunOptions as one argument `run`."""

    @functools.wraps(command)
    def with_run(*, batch_size: int | None, **options: Any) -> int | None:
        from dataclasses import fields

        from dakrun.plan import RunOptions

        given = {f.name: options.pop(f.name) for f in fields(RunOptions) if f.name in options}
        return command(run=RunOptions(batch_size=batch_size or "auto", **given), **options)

    return with_run
