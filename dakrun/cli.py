"""The `dakrun` command: options in, texts and exit codes out; the one place that prints or exits.

Everything but click is imported when a command needs it, so that --help and plan start at once.
"""

import functools
import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from dakrun import __version__
from dakrun.errors import DakrunError, UsageError
from dakrun.units import parse_bytes

if TYPE_CHECKING:
    from rich.console import Console

    from dakrun.config import ModelConfig
    from dakrun.hardware import HardwareProfile

Command = Callable[..., int | None]

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
WIDTH = 120  # columns of tables that do not go to a terminal


class ErrorLines(click.Group):
    """A group that turns every failure into an `error:` and a `hint:` line and an exit code.

    A command returns its exit code, or None for 0. DAKRUN_DEBUG=1 shows tracebacks, too.
    """

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run the command line and exit."""
        try:
            kwargs["standalone_mode"] = False
            code = super().main(*args, **kwargs)
            sys.stdout.flush()
        except click.exceptions.NoArgsIsHelpError as no_command:
            no_command.show()
            code = EXIT_USAGE
        except click.ClickException as problem:
            code = problem.exit_code
            _report(problem, _one_line(problem.format_message()), _help_hint(problem))
        except click.Abort:
            click.echo("interrupted", err=True)
            code = EXIT_INTERRUPTED
        except DakrunError as problem:
            code = problem.exit_code
            _report(problem, _one_line(str(problem)), _one_line(problem.hint))
        except BrokenPipeError:  # whoever read our output has enough of it
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            code = EXIT_FAILED
        except Exception as problem:
            code = EXIT_FAILED
            what = _one_line(f"internal: {type(problem).__name__}: {problem}")
            _report(problem, what, "set DAKRUN_DEBUG=1 to see where, and report it as a bug")
        sys.exit(code)


def _report(problem: Exception, message: str, hint: str) -> None:
    if os.environ.get("DAKRUN_DEBUG") == "1":
        traceback.print_exception(problem)
    click.echo(f"error: {message}\nhint: {hint}", err=True)


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _help_hint(problem: click.ClickException) -> str:
    context = getattr(problem, "ctx", None)
    return f"see: {context.command_path if context else 'dakrun'} --help"


class Auto(click.ParamType):
    """`auto` (None) or what `convert_value` makes of the text; it raises ValueError for the rest.

    `expected` completes "is not ..." in the message.
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


def _at_least_one(text: str) -> int:
    if (number := int(text)) < 1:
        raise ValueError
    return number


def _share(text: str) -> float:
    if not 0 <= (number := float(text)) <= 1:
        raise ValueError
    return number


COUNT = Auto("auto|N", "auto or an integer of at least 1", _at_least_one)
RATIO = Auto("auto|0..1", "auto or a number from 0 to 1", _share)


def _together(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def decorate(command: Any) -> Any:
        return functools.reduce(lambda decorated, add: add(decorated), reversed(options), command)

    return decorate


model_options = _together(
    click.option("--model", required=True, metavar="DIR|HUB_ID|NAME", help="The model to run."),
    click.option(
        "--dtype",
        type=click.Choice(["auto", "float16", "bfloat16", "float32"]),
        default="auto",
        show_default=True,
        help="Store and compute in this type; auto: the checkpoint's.",
    ),
)

workload_options = _together(
    click.option(
        "--batch-size",
        type=COUNT,
        default="auto",
        show_default=True,
        help="Requests decoded together; auto: the most predicted tokens per second.",
    ),
    click.option(
        "--max-model-len",
        type=click.IntRange(min=1),
        metavar="N",
        help="Tokens of a prompt and its completion that the KV cache has room for.",
    ),
)

profile_option = click.option(
    "--profile",
    default="auto",
    show_default=True,
    metavar="auto|NAME|FILE",
    help="Hardware to plan for: a shipped profile, a .toml file, or this machine.",
)

_policy_options = _together(
    click.option("--hbm-budget", type=Size(), help="GPU memory to use, like 20GiB."),
    click.option("--host-budget", type=Size(), help="Remote memory to use, like 100GiB."),
    click.option(
        "--offload-ratio",
        type=RATIO,
        default="auto",
        show_default=True,
        help="Share of weight and KV bytes outside HBM.",
    ),
    click.option(
        "--kv-offload-ratio",
        type=RATIO,
        default="auto",
        show_default=True,
        help="Share of KV slots outside HBM; --offload-ratio then means the weights alone.",
    ),
    click.option(
        "--strategy",
        type=click.Choice(["greedy", "uniform"]),
        default="greedy",
        show_default=True,
        help="A ratio for each op, or the same for all.",
    ),
    click.option(
        "--remote",
        default="host",
        show_default=True,
        metavar="TIER",
        help="Remote tier to offload to, as the profile names it.",
    ),
)


def policy_options(command: Command) -> Command:
    """Adds the placement options; the command gets them as one `policy` argument (a Policy)."""

    @functools.wraps(command)
    def with_policy(
        *,
        hbm_budget: int | None,
        host_budget: int | None,
        offload_ratio: float | None,
        kv_offload_ratio: float | None,
        strategy: Any,
        remote: str,
        **rest: Any,
    ) -> int | None:
        from dakrun.plan.planner import Policy

        policy = Policy(
            hbm_budget=hbm_budget,
            host_budget=host_budget,
            offload_ratio=offload_ratio,
            kv_offload_ratio=kv_offload_ratio,
            strategy=strategy,
            remote=tuple(tier.strip() for tier in remote.split(",")),
        )
        return command(policy=policy, **rest)

    decorated: Command = _policy_options(with_policy)
    return decorated


def resolve_model(name: str, dtype: Any) -> "ModelConfig":
    """The architecture that --model and --dtype ask for."""
    from dakrun.hub import model_config

    model = model_config(name)
    return model if dtype == "auto" else model.with_dtype(dtype)


def resolve_profile(name: str) -> "HardwareProfile":
    """The profile that --profile asks for; auto is this machine's GPU, or else its CPU."""
    from dakrun.hardware import find_profile, gpu_names, load_profile

    if name != "auto":
        return load_profile(name)
    return find_profile(device="cuda" if gpu_names() else "cpu")


def stdout_console() -> "Console":
    """A console on stdout: as wide as the terminal, or of a fixed width in pipes and files."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else WIDTH)


@click.group(cls=ErrorLines, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="dakrun", message="%(prog)s %(version)s")
def main() -> None:
    """Offline batch inference for OPT and Llama models in several memory tiers."""


@main.command()
@model_options
@workload_options
@click.option(
    "--prompt-len", type=click.IntRange(min=1), default=32, show_default=True, metavar="N",
    help="Tokens of a prompt.",
)  # fmt: skip
@click.option(
    "--max-tokens", type=click.IntRange(min=1), default=32, show_default=True, metavar="N",
    help="Tokens of a completion.",
)  # fmt: skip
@profile_option
@policy_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with units in the key names.")
def plan(
    *,
    model: str,
    dtype: str,
    batch_size: int | None,
    max_model_len: int | None,
    prompt_len: int,
    max_tokens: int,
    profile: str,
    policy: Any,
    as_json: bool,
) -> None:
    """Show where a model's bytes would lie and how fast it would decode; needs no GPU.

    Offload ratios per op, what limits each, bound and predicted TPOT and EB, memory map.
    """
    from dakrun.config import Workload
    from dakrun.plan.batch_size import choose_batch_size
    from dakrun.plan.planner import make_plan
    from dakrun.plan.present import plan_dict

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
        workload = choose_batch_size(config, workload, hardware, policy)
    decision = make_plan(config, workload, hardware, policy)
    if as_json:
        click.echo(json.dumps(plan_dict(decision)))
        return
    from dakrun.plan.table import render

    render(decision, stdout_console())
