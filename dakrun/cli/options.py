"""Command line options that several commands share, and lookups of models and profiles by name.

Knows click; the commands, and the decorators that one of them alone has, are in their own files.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from dakrun.cli.console import eprint
from dakrun.errors import UsageError
from dakrun.units import parse_bytes

if TYPE_CHECKING:
    from dakrun.config import ModelConfig
    from dakrun.hardware import HardwareProfile

Command = Callable[..., int | None]
Decorator = Callable[[Any], Any]

MAX_COUNT = 10**9
TRANSPORTS = ("auto", "direct", "staged")
STRATEGIES = ("auto", "greedy", "uniform")


class Auto(click.ParamType):
    """`auto` (None), or the result of `convert_value`, which raises ValueError for other texts.

    `expected` completes the error message "... is not".
    """

    def __init__(self, name: str, expected: str, convert_value: Callable[[str], Any]) -> None:
        self.name, self.expected, self.convert_value = name, expected, convert_value

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        if value == "auto":
            return None
        try:
            return self.convert_value(value)
        except ValueError:
            self.fail(f"{value!r} is not {self.expected}.", param, ctx)


class Size(click.ParamType):
    """Bytes, written like 20GiB."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return parse_bytes(value)
        except UsageError as problem:
            self.fail(f"{problem}; {problem.hint}.", param, ctx)


def _count(text: str) -> int:
    if not 1 <= (number := int(text)) <= MAX_COUNT:
        raise ValueError
    return number


def _ratio(text: str) -> float:
    if not 0 <= (number := float(text)) <= 1:
        raise ValueError
    return number


COUNT = Auto("count", f"auto or an integer from 1 to {MAX_COUNT:,}", _count)
RATIO = Auto("ratio", "auto or a number from 0 to 1", _ratio)


def together(*options: Decorator) -> Decorator:
    """A decorator that adds all `options` to a command, in this order."""

    def decorate(command: Any) -> Any:
        return functools.reduce(lambda decorated, add: add(decorated), reversed(options), command)

    return decorate


def option(*names: str, help: str, **settings: Any) -> Decorator:
    """An option whose help shows its default."""
    return click.option(*names, help=help, show_default=True, **settings)


def count_option(*names: str, help: str, minimum: int = 1, **settings: Any) -> Decorator:
    """An option that takes an integer of at least `minimum`."""
    return option(*names, help=help, type=click.IntRange(min=minimum), metavar="N", **settings)


def choice_option(*names: str, choices: Sequence[str], help: str, **settings: Any) -> Decorator:
    """An option that takes one of `choices`; the default is the first of them."""
    settings = {"default": choices[0], **settings}
    return option(*names, help=help, type=click.Choice(choices), **settings)


def auto_option(name: str, kind: Auto, metavar: str, help: str, **settings: Any) -> Decorator:
    """An option that takes auto, its default, or a value of `kind`."""
    return option(name, help=help, type=kind, metavar=metavar, default="auto", **settings)


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


model_options = together(
    option("--model", required=True, metavar="DIR|HUB_ID|NAME", help="The model to run."),
    choice_option(
        "--dtype",
        choices=("auto", "float16", "bfloat16", "float32"),
        help="Type of weights, KV cache and activations; auto: the checkpoint's.",
    ),
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
        "positions (plan without -i: --prompt-len and --max-tokens).",
    ),
)

length_options = together(
    count_option("--prompt-len", default=32, help="Tokens of a prompt."),
    count_option("--max-tokens", default=32, help="Tokens of a completion."),
)

profile_option = option(
    "--profile",
    default="auto",
    metavar="auto|NAME|FILE",
    help="Hardware to plan for: a shipped profile, a .toml file, or (auto) this machine; generate "
    "and bench measure a GPU that has no profile in the cache.",
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
    count_option("--max-tokens", default=128, help="Maximum tokens to generate for a prompt."),
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
        help="Read remote tiers in place (direct), or copy them to HBM ahead of use (staged).",
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
        from dakrun.plan import RunOptions

        given = {f.name: options.pop(f.name) for f in fields(RunOptions) if f.name in options}
        return command(run=RunOptions(batch_size=batch_size or "auto", **given), **options)

    return with_run


def resolve_model(name: str, dtype: Any) -> "ModelConfig":
    """The architecture that --model and --dtype name."""
    from dakrun.models import model_config

    model = model_config(name)
    return model if dtype == "auto" else model.with_dtype(dtype)


def resolve_profile(name: str) -> "HardwareProfile":
    """The profile that --profile names; auto is that of this machine's GPU, or else of its CPU."""
    from dakrun.hardware import find_profile, gpu_names, load_profile

    if name != "auto":
        return load_profile(name)
    return _warned(find_profile(device="cuda" if gpu_names() else "cpu"), eprint)


def note_no_kernels(profile: "HardwareProfile") -> None:
    """Say on stderr if the kernels that plans assume do not run on the profile's card."""
    from dakrun.hardware import why_no_kernels

    if (why := why_no_kernels(profile)) is not None:
        eprint(f"note: {why}")


def resolve_run_profile(
    name: str, device: Literal["auto", "cuda", "cpu"], note: Callable[[str], None]
) -> "HardwareProfile":
    """The profile that --profile names, for a run on --device.

    auto measures a GPU that has no profile in the cache, and calls `note` with messages about it.
    """
    from dakrun import probe
    from dakrun.hardware import load_profile

    if name != "auto":
        return load_profile(name)
    return _warned(probe.kept_or_measured(probe.measured_device(device), note), note)


def _warned(profile: "HardwareProfile", note: Callable[[str], None]) -> "HardwareProfile":
    """`profile`, which auto chose; `note` gets a warning if its figures spread."""
    from dakrun.probe import spread_warning

    if (warning := spread_warning(profile)) is not None:
        note(warning)
    return profile
