"""Command line options that several commands share, and what they stand for.

Knows click and the options' types; the commands are in cli.py.
"""

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import click

from dakrun.cli.option_types import COUNT, RATIO, Size

if TYPE_CHECKING:
    from dakrun.config import ModelConfig
    from dakrun.hardware.profile import HardwareProfile

Command = Callable[..., int | None]


def _together(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def decorate(command: Any) -> Any:
        return functools.reduce(lambda decorated, add: add(decorated), reversed(options), command)

    return decorate


def _only_for_auto(
    ctx: click.Context, param: click.Parameter, milliseconds: float | None
) -> float | None:
    """Seconds; refuses a limit where the batch size is given."""
    if milliseconds is None:
        return None
    if not math.isfinite(milliseconds):
        raise click.BadParameter("it is not a finite number", ctx=ctx, param=param)
    if (given := ctx.params.get("batch_size")) is not None:
        raise click.BadParameter(
            f"it chooses a batch size, and --batch-size is {given}", ctx=ctx, param=param
        )
    return milliseconds / 1e3


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
        metavar="auto|N",
        default="auto",
        show_default=True,
        is_eager=True,  # known where --max-tpot is looked at
        help="Requests decoded together; auto: the most predicted tokens per second.",
    ),
    click.option(
        "--max-tpot",
        type=click.FloatRange(min=0, min_open=True),
        metavar="MS",
        callback=_only_for_auto,
        help="With --batch-size auto: batches with at most this predicted time per output token.",
    ),
    click.option(
        "--max-model-len",
        type=click.IntRange(min=1),
        metavar="N",
        help="Tokens of a prompt and its completion that the KV cache has room for.",
    ),
)

length_options = _together(
    click.option(
        "--prompt-len",
        type=click.IntRange(min=1),
        default=32,
        show_default=True,
        metavar="N",
        help="Tokens of a prompt.",
    ),
    click.option(
        "--max-tokens",
        type=click.IntRange(min=1),
        default=32,
        show_default=True,
        metavar="N",
        help="Tokens of a completion.",
    ),
)


def device_option(what: str) -> Callable[[Any], Any]:
    """The option --device, with `what` as its help."""
    devices = click.Choice(["auto", "cuda", "cpu"])
    return click.option("--device", type=devices, default="auto", show_default=True, help=what)


profile_option = click.option(
    "--profile",
    default="auto",
    show_default=True,
    metavar="auto|NAME|FILE",
    help="Hardware to plan for: a shipped profile, a .toml file, or this machine, which generate "
    "measures where no profile of its GPU is kept.",
)

load_format_option = click.option(
    "--load-format",
    type=click.Choice(["auto", "dummy"]),
    default="auto",
    show_default=True,
    help="dummy: random weights, for which a config.json will do, or a known name.",
)

_policy_options = _together(
    click.option("--hbm-budget", type=Size(), help="GPU memory to use, like 20GiB."),
    click.option("--host-budget", type=Size(), help="Host memory to use, like 100GiB."),
    click.option("--peer-budget", type=Size(), help="Memory to use of each peer GPU."),
    click.option(
        "--offload-ratio",
        type=RATIO,
        metavar="auto|0..1",
        default="auto",
        show_default=True,
        help="Share of weight and KV bytes outside HBM.",
    ),
    click.option(
        "--kv-offload-ratio",
        type=RATIO,
        metavar="auto|0..1",
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
        "--transport",
        type=click.Choice(["auto", "direct", "staged"]),
        default="auto",
        show_default=True,
        help="Read remote bytes where they lie, or copy them ahead.",
    ),
    click.option(
        "--remote",
        default="host",
        show_default=True,
        metavar="TIER,...",
        help="Remote tiers to offload to, as the profile names them.",
    ),
)


def policy_options(command: Command) -> Command:
    """Adds the placement options; the command gets them as one `policy` argument (a Policy)."""

    @functools.wraps(command)
    def with_policy(
        *,
        hbm_budget: int | None,
        host_budget: int | None,
        peer_budget: int | None,
        offload_ratio: float | None,
        kv_offload_ratio: float | None,
        strategy: Any,
        transport: str,
        remote: str,
        **rest: Any,
    ) -> int | None:
        from dakrun.plan.policy import Policy, parse_remote

        policy = Policy(
            hbm_budget=hbm_budget,
            host_budget=host_budget,
            peer_budget=peer_budget,
            offload_ratio=offload_ratio,
            kv_offload_ratio=kv_offload_ratio,
            strategy=strategy,
            transport=None if transport == "auto" else transport,  # type: ignore[arg-type]
            remote=parse_remote(remote),
        )
        return command(policy=policy, **rest)

    decorated: Command = _policy_options(with_policy)
    return decorated


def resolve_model(name: str, dtype: Any) -> "ModelConfig":
    """The architecture that --model and --dtype ask for."""
    from dakrun.models.hub import model_config

    model = model_config(name)
    return model if dtype == "auto" else model.with_dtype(dtype)


def resolve_profile(name: str) -> "HardwareProfile":
    """The profile that --profile asks for; auto is this machine's GPU, or else its CPU."""
    from dakrun.hardware.files import find_profile, gpu_names, load_profile

    if name != "auto":
        return load_profile(name)
    return find_profile(device="cuda" if gpu_names() else "cpu")


def resolve_run_profile(
    name: str, device: Literal["auto", "cuda", "cpu"], note: Callable[[str], None]
) -> "HardwareProfile":
    """The profile that --profile asks for on --device; auto may measure, and tells `note` so."""
    from dakrun import probe
    from dakrun.hardware.files import load_profile

    if name != "auto":
        return load_profile(name)
    return probe.kept_or_measured(probe.measured_device(device), note)


sampling_options = _together(
    click.option(
        "--max-tokens",
        type=click.IntRange(min=1),
        default=128,
        show_default=True,
        metavar="N",
        help="Tokens to generate for a prompt, at most.",
    ),
    click.option(
        "--temperature",
        type=float,
        default=0.0,
        show_default=True,
        help="0 takes the likeliest token.",
    ),
    click.option("--top-k", type=int, default=0, show_default=True, help="0 keeps all tokens."),
    click.option("--top-p", type=float, default=1.0, show_default=True, help="1 keeps all tokens."),
    click.option("--seed", type=int, default=0, show_default=True, help="For temperature above 0."),
    click.option("--stop", multiple=True, metavar="TEXT", help="End before this text; repeatable."),
    click.option("--ignore-eos", is_flag=True, help="Go on after the end-of-sequence token."),
)
